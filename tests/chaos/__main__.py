"""``make chaos``: many random scenarios, a table, and an exit code."""

import argparse
import contextlib
import itertools
import json
import logging
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from chaos.draws import draw
from chaos.report import HEADER, row, summary
from chaos.run import Result, run_scenario
from chaos.scenario import FAMILIES
from chaos.workplace import NEEDS_SMALL_DISKS, enter_namespace, has_small_disks, workplace

_SEEDS_PER_RUN = 10_000


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the scenarios; returns 1 if one broke a promise."""
    options = _parse(arguments)
    left_out = () if has_small_disks() else NEEDS_SMALL_DISKS
    seeds = options.only or list(_seeds(options.seed, options.scenarios, options.family, left_out))
    if options.lines:
        for result in _run(seeds, options.verbose):
            print(json.dumps(asdict(result)), flush=True)
        return 0
    started = time.monotonic()
    results = []
    print(HEADER, flush=True)
    for result in _run_in_parallel(seeds, options.jobs) if options.jobs > 1 else _run(seeds, options.verbose):
        results.append(result)
        print(row(result), flush=True)
    print(summary(results, time.monotonic() - started))
    for family in left_out:
        print(f"LEFT OUT: {family}, because this system allows no tmpfs in a mount namespace of its own")
    return 1 if any(result.problems for result in results) else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    families = "; ".join(f"{name}: {text}" for name, text in FAMILIES.items())
    parser = argparse.ArgumentParser(prog="make chaos", description=__doc__, epilog=families)
    parser.add_argument("--scenarios", type=int, default=100, help="how many for each seed (100)")
    parser.add_argument("--seed", type=int, nargs="+", default=[1], help="the seeds of all of them (1)")
    parser.add_argument("--family", nargs="+", choices=FAMILIES, metavar="NAME", help="the scenarios of these alone")
    parser.add_argument("--only", type=int, nargs="+", metavar="SEED", help="the scenarios of these seeds alone")
    parser.add_argument("--jobs", type=int, default=1, help="scenarios at the same time (1)")
    parser.add_argument("--verbose", action="store_true", help="show the log of the runs (with one job)")
    parser.add_argument("--lines", action="store_true", help="print each result as a line of JSON instead of a table")
    return parser.parse_args(arguments)


def _seeds(
    runs: Sequence[int], scenarios: int, families: Sequence[str] | None, left_out: Sequence[str]
) -> Iterator[int]:
    """The seeds of the scenarios: of each run the first ``scenarios`` that are of these families."""
    for run in runs:
        wanted = (
            seed
            for seed in range(run * _SEEDS_PER_RUN, (run + 1) * _SEEDS_PER_RUN)
            if (families is None or draw(seed).family in families) and draw(seed).family not in left_out
        )
        yield from itertools.islice(wanted, scenarios)


def _run(seeds: Sequence[int], verbose: bool) -> Iterator[Result]:
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.ERROR)
    if not verbose:
        logging.getLogger("lightning_recycle").setLevel(logging.ERROR)
    with workplace() as place:
        for seed in seeds:
            yield run_scenario(draw(seed), place)


def _run_in_parallel(seeds: Sequence[int], jobs: int) -> Iterator[Result]:
    """Divides the seeds among processes of this program; results come as they are ready, some from each in turn."""
    parts = [seeds[first::jobs] for first in range(min(jobs, len(seeds)))]
    command = [sys.executable, "-m", "chaos", "--lines", "--only"]
    with contextlib.ExitStack() as stack:
        children = [
            stack.enter_context(
                subprocess.Popen(
                    [*command, *map(str, part)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
                )
            )
            for part in parts
        ]
        streams = [child.stdout for child in children if child.stdout is not None]
        for lines in itertools.zip_longest(*streams):
            for line in filter(None, lines):
                found = json.loads(line)
                yield Result(**{**found, "problems": tuple(found["problems"])})
    if any(child.returncode for child in children):
        raise RuntimeError("A process of the command failed; run it with one job to see why.")


if __name__ == "__main__":
    enter_namespace(sys.argv[1:])
    with contextlib.suppress(BrokenPipeError):  # the reader has seen enough
        sys.exit(main())
