"""``recycle-report``: results of ``recycle-simulate`` as one HTML page.

    recycle-report results -o report.html

Reads every ``result.json`` below the folder. ``page.html.j2`` writes the sections one below the other, and has the
style sheet and the script; sections without results are left out. The page begins with its conclusion, sentences from
results where everything but the policy is the same (model, batch, cluster, failures, duration and schedule): the
fastest policy, the gain of re-routing, and the gain of the schedule alone. The same results give the same page except
for the date in its footer.
"""

from __future__ import annotations

import datetime
import json
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path

from jinja2 import Environment

from lightning_recycle.arguments import command_parser
from lightning_recycle.commands import Output, bad_input_ends
from lightning_recycle.files import refusing, write_atomically
from lightning_recycle.visualize.charts import swatch
from lightning_recycle.visualize.records import POLICIES, Record, load_results, missing_results, number
from lightning_recycle.visualize.sections import sections_of

_NARROW = 0.005

Scenes = Mapping[str, Mapping[tuple[str, str], Record]]
"""By everything but the policy: results by (policy, schedule)."""

_RE_ROUTING = ("Recycle", "Elastic", "Auto")
"""Policies that re-route; their own schedule is planned."""

_COMPARE = "To compare policies, run several with the same schedule: recycle-simulate experiment=quick does."
"""Where no comparison can be made."""
_USE = (
    "Re-routing keeps the batch and leaves every layer in its place; the policy auto also moves layers where that is"
    " faster."
)


def render_report(records: Sequence[Record], title: str = "ReCycle simulation report", missing: int = 0) -> str:
    """The page of ``records`` as HTML.

    ``missing``: number of results that an interrupted experiment lacks.
    """
    template = resources.files("lightning_recycle.visualize").joinpath("page.html.j2").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(template).render(
        title=title,
        summary=_summary(records, missing),
        conclusion=_conclusion(records),
        sections=sections_of(records),
        swatch=swatch,
        date=datetime.date.today().isoformat(),
    )


def _summary(records: Sequence[Record], missing: int) -> str:
    runs = sum(len(record["runs"]) for record in records)
    hours = sum(len(record["runs"]) * record["duration"] for record in records) / 3600
    models = len({record["model"]["name"] for record in records})
    policies = len({record["policy"]["name"] for record in records})
    results = _count(len(records), "result")
    if missing:
        results = f"{len(records):,} of {len(records) + missing:,} results (the experiment was interrupted)"
    parts = [results, f"{_count(runs, 'simulated run')}, {hours:,.0f} hours of training"]
    parts += [_count(models, "model"), f"{policies} {'policy' if policies == 1 else 'policies'}"]
    return " \N{MIDDLE DOT} ".join(parts)


def _count(count: int, one: str) -> str:
    return f"{count:,} {one}{'' if count == 1 else 's'}"


# -- the conclusion ----------------------------------------------------------------------------------------------------


def _conclusion(records: Sequence[Record]) -> str:
    """A few sentences; empty where nothing was trained."""
    scenes = _scenes(records)
    found = [_leaders(scenes), _re_routing(scenes), _schedule(scenes)]
    return (" ".join(filter(None, found)) or _COMPARE) if scenes else ""


def _scenes(records: Sequence[Record]) -> Scenes:
    found: dict[str, dict[tuple[str, str], Record]] = {}
    for record in records:
        policy = record["policy"]
        switches = ("adaptive", "split_backward", "staggered", "normalization")
        usual = all(policy["settings"].get(name, True) for name in switches)
        mixed = policy["settings"].get("fault_free", "planned") != "planned"
        if not usual or mixed or policy["name"] in ("FaultFree", "Spares") or "schedule" not in policy["settings"]:
            continue
        key = json.dumps([record[part] for part in ("model", "cluster", "failures", "duration")], sort_keys=True)
        found.setdefault(key, {}).setdefault((policy["name"], policy["settings"]["schedule"]), record)
    return found


def _leaders(scenes: Scenes) -> str:
    """The fastest of at least three policies with the same schedule."""
    leads: Counter[str] = Counter()
    entered: Counter[str] = Counter()
    narrow = 0
    for found in scenes.values():
        for schedule in sorted({schedule for _, schedule in found}):
            ratios = {name: record["ratio"] for (name, kind), record in found.items() if kind == schedule}
            if len(ratios) >= 3:
                entered.update(ratios.keys())
                leads[max(ratios, key=lambda name: ratios[name])] += 1
                first, second = sorted(ratios.values(), reverse=True)[:2]
                narrow += first - second < _NARROW
    if not leads:
        return ""
    total = sum(leads.values())
    parts: list[str] = []
    for name, count in leads.most_common():
        part = f"in {count}" if parts else f"is fastest in {count} of {_count(total, 'comparison')}"
        part += f" (of the {entered[name]} in which it ran)" if entered[name] < total else ""
        parts.append(f"{POLICIES.get(name, name)} {part}")
    close = f"; {narrow} of these leads {'is' if narrow == 1 else 'are'} below half a point" if narrow else ""
    point = " (a point is 1 % of the throughput of fault-free 1F1B)" if narrow else ""
    text = f"With the same schedule for all, {', '.join(parts)}{close}{point}."
    return text if leads.most_common()[0][0] in _RE_ROUTING else f"{text} {_USE}"


def _re_routing(scenes: Scenes) -> str:
    """ReCycle less merge, in points, by schedule; empty where not both have run."""
    gains: dict[str, list[float]] = {}
    for found in scenes.values():
        for (name, schedule), record in found.items():
            if name == "Recycle" and ("Merge", schedule) in found:
                gains.setdefault(schedule, []).append(100 * (record["ratio"] - found["Merge", schedule]["ratio"]))
    if not gains:
        return ""
    parts = [
        f"{_signed(statistics.fmean(values))} points on average ({_signed(min(values))} to {_signed(max(values))}) "
        f"with {'1F1B' if schedule == '1f1b' else 'the planned schedule'}"
        for schedule, values in sorted(gains.items())
    ]
    return f"Compared with merging broken pipelines into whole ones, re-routing gains {' and '.join(parts)}."


def _schedule(scenes: Scenes) -> str:
    """The planned schedule less 1F1B, in points, for policies other than ReCycle."""
    gains = [
        100 * (record["ratio"] - found[name, "1f1b"]["ratio"])
        for found in scenes.values()
        for (name, schedule), record in found.items()
        if schedule == "planned" and (name, "1f1b") in found and name not in _RE_ROUTING
        if record["throughput"]
    ]
    if not gains:
        return ""
    return (
        f"The planned schedule alone is worth {_signed(statistics.fmean(gains))} points to the other policies "
        f"({_signed(min(gains))} to {_signed(max(gains))})."
    )


def _signed(value: float) -> str:
    text = number(value, 1)
    return f"+{text}" if value > 0 and float(text) else text


_NAME = "recycle-report"


def main(arguments: Sequence[str] | None = None) -> None:
    """The console script."""
    parser = command_parser(
        _NAME,
        "Render the results of recycle-simulate as one HTML page.",
        "recycle-simulate experiment=quick output=results && recycle-report results",
        "recycle-report results -o report.html",
        "recycle-report results --title 'Spot instances, July'",
    )
    parser.add_argument("folder", type=Path, help="output folder of a run, a sweep or an experiment")
    parser.add_argument("-o", "--output", type=Path, default=Path("report.html"), help="default: %(default)s")
    parser.add_argument("--title", default="ReCycle simulation report", help="default: %(default)s")
    chosen = parser.parse_args(arguments)
    with bad_input_ends(_NAME):
        results = load_results(chosen.folder)
        missing = missing_results(chosen.folder)
        page = render_report(results, chosen.title, missing)
        with refusing(f"write {chosen.output}"):
            write_atomically(chosen.output, page)
        size = len(page.encode()) / 1e3
        count = f"{len(results)} of {len(results) + missing}" if missing else f"{len(results)}"
        noun = "result" if len(results) + missing == 1 else "results"
        Output(soft_wrap=True).print(f"wrote {chosen.output}: {count} {noun}, {size:,.0f} kB", highlight=False)


if __name__ == "__main__":
    main()
