"""``make chaos``: many random scenarios, a table, and an exit code."""

import argparse
import contextlib
import logging
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Sequence

from chaos.run import TOLERANCE, Result, run_scenario
from chaos.scenario import draw

_SEEDS_PER_RUN = 10_000


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the scenarios; returns 1 if one broke a promise."""
    options = _parse(arguments)
    seeds = options.only or [options.seed * _SEEDS_PER_RUN + index for index in range(options.scenarios)]
    if options.jobs > 1:
        return _run_in_parallel(seeds, options.jobs)
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.ERROR)
    if not options.verbose:
        logging.getLogger("lightning_recycle").setLevel(logging.ERROR)
    started = time.monotonic()
    results = []
    print(
        f"{'seed':>7} {'grid':>4} {'':6} {'seconds':>7} {'difference':>10} {'lost':>4} {'back':>4}  scenario",
        flush=True,
    )
    for seed in seeds:
        results.append(run_scenario(draw(seed)))
        _print_row(results[-1])
    return _summarize(results, time.monotonic() - started)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make chaos", description=__doc__)
    parser.add_argument("--scenarios", type=int, default=200, help="how many (200)")
    parser.add_argument("--seed", type=int, default=1, help="the seed of all of them (1)")
    parser.add_argument("--only", type=int, nargs="+", metavar="SEED", help="the scenarios of these seeds alone")
    parser.add_argument("--jobs", type=int, default=1, help="scenarios at the same time (1)")
    parser.add_argument("--verbose", action="store_true", help="show the log of the runs")
    return parser.parse_args(arguments)


def _print_row(result: Result) -> None:
    scenario, events = result.scenario, result.events
    verdict = "FAILED" if result.problems else "ok"
    difference = "-" if result.difference is None else f"{result.difference:.1e}"
    lost = events.get("failure", 0) + events.get("left", 0) + events.get("moved", 0)
    print(
        f"{scenario.seed:>7} {scenario.pipelines}x{scenario.stages:<2} {verdict:<6} {result.seconds:>7.1f}"
        f" {difference:>10} {lost:>4} {events.get('rejoined', 0):>4}  {scenario}"
    )
    for problem in result.problems:
        print(f"        {problem}")
    sys.stdout.flush()


def _summarize(results: Sequence[Result], seconds: float) -> int:
    failed = [result.scenario.seed for result in results if result.problems]
    events: Counter[str] = sum((Counter(result.events) for result in results), Counter())
    kinds = Counter(fault.kind for result in results for fault in result.scenario.faults)
    worst = max((result.difference for result in results if result.difference is not None), default=0.0)
    slowest = max(results, key=lambda result: result.seconds)
    print(
        f"\n{len(results)} scenarios in {seconds:.0f} s ({seconds / len(results):.1f} s each, the longest"
        f" {slowest.seconds:.0f} s, seed {slowest.scenario.seed})"
    )
    print(f"drawn faults: {', '.join(f'{kind} {count}' for kind, count in sorted(kinds.items()))}")
    print(f"events: {', '.join(f'{kind} {count}' for kind, count in sorted(events.items()) if kind != 'step')}")
    print(f"largest difference of a weight: {worst:.1e} (allowed: {TOLERANCE:g})")
    if failed:
        print(f"FAILED: {len(failed)} of {len(results)}. Again: --only {' '.join(map(str, failed))}")
        return 1
    print("all exact, each sample once per epoch, nothing hung, no process left")
    return 0


def _run_in_parallel(seeds: Sequence[int], jobs: int) -> int:
    """Divides the seeds among processes of this program; their tables follow one another."""
    parts = [seeds[first::jobs] for first in range(min(jobs, len(seeds)))]
    command = [sys.executable, "-m", "chaos", "--only"]
    children = [
        subprocess.Popen([*command, *map(str, part)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        for part in parts
    ]
    for child in children:
        print(child.communicate()[0])
    return max(child.returncode for child in children)


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):  # the reader has seen enough
        sys.exit(main())
