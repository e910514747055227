"""What the chaos command prints: a row for each scenario, and a table of the families. Pure."""

from collections import Counter
from collections.abc import Sequence

from support.training import TOLERANCE

from chaos.draws import draw
from chaos.run import Result
from chaos.scenario import FAMILIES

HEADER = (
    f"{'seed':>7} {'grid':>4} {'':6} {'seconds':>7} {'difference':>10} {'lost':>4} {'back':>4}  {'family':17}  scenario"
)


def row(result: Result) -> str:
    """One scenario, with a line for each of its problems."""
    scenario, events = draw(result.seed), result.events
    verdict = "FAILED" if result.problems else "ok"
    difference = "-" if result.difference is None else f"{result.difference:.1e}"
    line = (
        f"{scenario.seed:>7} {scenario.pipelines}x{scenario.stages:<2} {verdict:<6} {result.seconds:>7.1f}"
        f" {difference:>10} {_lost(events):>4} {events.get('rejoined', 0):>4}  {scenario.family:17}  {scenario}"
    )
    return "\n".join([line, *(f"        {problem}" for problem in result.problems)])


def summary(results: Sequence[Result], seconds: float) -> str:
    """All of them: a table by family, then what the whole run says."""
    scenarios = {result.seed: draw(result.seed) for result in results}
    lines = ["", f"{'family':17} {'scenarios':>9} {'seconds':>8} {'each':>6} {'longest':>8} {'lost':>5} {'FAILED':>7}"]
    for family in FAMILIES:
        own = [result for result in results if scenarios[result.seed].family == family]
        if own:
            times = [result.seconds for result in own]
            lost, failed = sum(_lost(result.events) for result in own), sum(bool(result.problems) for result in own)
            lines.append(
                f"{family:17} {len(own):>9} {sum(times):>8.0f} {sum(times) / len(own):>6.1f} {max(times):>8.1f}"
                f" {lost:>5} {failed:>7}"
            )
    events: Counter[str] = sum((Counter(result.events) for result in results), Counter())
    drawn = list(scenarios.values())
    kinds = Counter(fault.kind for scenario in drawn for fault in (*scenario.faults, *scenario.flips))
    kinds += Counter(trouble.kind for scenario in drawn for trouble in scenario.troubles)
    worst = max((result.difference for result in results if result.difference is not None), default=0.0)
    lines += [
        "",
        f"{len(results)} scenarios in {seconds:.0f} s",
        f"drawn: {', '.join(f'{kind} {count}' for kind, count in sorted(kinds.items()))}",
        f"events: {', '.join(f'{kind} {count}' for kind, count in sorted(events.items()) if kind != 'step')}",
        f"largest difference of a weight: {worst:.1e} (allowed: {TOLERANCE:g})",
    ]
    failed = [str(result.seed) for result in results if result.problems]
    if failed:
        lines.append(f"FAILED: {len(failed)} of {len(results)}. Again: --only {' '.join(failed)}")
    else:
        lines.append("all exact in the whole state, each sample once per epoch, nothing hung, nothing left")
    return "\n".join(lines)


def _lost(events: dict[str, int]) -> int:
    return events.get("failure", 0) + events.get("left", 0)
