"""Results of ``recycle-simulate``: loaded, grouped, in words, and as series.

The folder of a sweep holds any number of ``result.json``, one for each training run and its repetitions. Where runs of
one policy within a group differ in some settings, those settings define *variants*, each a series of its own, named by
the difference: a policy has the same name, colour and marker everywhere.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from lightning_recycle.errors import ConfigurationError, counted
from lightning_recycle.files import read_json
from lightning_recycle.visualize.charts import Series

Record = Mapping[str, Any]
_Key = TypeVar("_Key", bound=Hashable)

RESULT_SCHEMA = 1
POLICIES = {
    "Recycle": ("ReCycle", "circle"),
    "Auto": ("Auto", "down"),
    "Elastic": ("Elastic", "triangle"),
    "Oobleck": ("Oobleck", "square"),
    "Bamboo": ("Bamboo", "plus"),
    "Spares": ("Spares", "left"),
    "Merge": ("Merge", "hexagon"),
    "DropReplica": ("Drop replica", "cross"),
    "Varuna": ("Varuna", "right"),
    "Restart": ("Restart", "star"),
    "FaultFree": ("Fault-free", "diamond"),
}
"""Names and markers by class name, in display order."""
LEAST_RUNS = 10
"""Fewer runs give an interval of the mean that is wider than what it is to show."""

_CAUTION = (
    "The schedules differ between policies, and a schedule alone changes the throughput: compare policies with the "
    "same one, or simulate all with schedule=planned, or schedule=1f1b."
)


# -- in words ----------------------------------------------------------------------------------------------------------

_VALUES = {
    ("fault_free", "1f1b"): "1F1B first",
    ("fault_free", "planned"): "planned",
    ("schedule", "1f1b"): "1F1B",
    ("schedule", "planned"): "planned",
    ("schedule", "zero_bubble"): "zero-bubble",
}


def duration_text(seconds: float) -> str:
    """A duration in the largest unit that gives a short number: ``30 min``, ``1.5 d``."""
    for unit, length in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        # Two days and more in days, but 24 h in hours, as mean times between failures are usually given.
        if seconds >= length * (2 if unit == "d" else 1):
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds:.3g} s"


def number(value: float, digits: int = 3) -> str:
    """``value`` with that many decimal places, thousands separated; a real minus sign."""
    text = f"{value:,.{digits}f}"
    return text.replace("-", "\N{MINUS SIGN}") if float(text.replace(",", "")) else text.lstrip("-")


def setting_text(name: str, value: Any, durations: Sequence[str] = ()) -> str:
    """A policy's setting, e.g. ``restart 1 min``; ``durations``: those in seconds."""
    if (name, value) in _VALUES:
        return _VALUES[name, value]
    shown = str(value)
    if name == "effort":
        return f"planner effort {value:,}" if value else "plans without a search"
    if isinstance(value, bool):
        return f"{'with' if value else 'without'} {name.replace('_', ' ')}"
    if name in durations and isinstance(value, (int, float)):
        shown = duration_text(value)
    elif isinstance(value, float):
        shown = f"{value:g}"
    return f"{name.replace('_', ' ')} {shown}"


def policy_text(result: Record, settings: Iterable[str] | None = None, *, with_schedule: bool = True) -> str:
    """A policy with its relevant settings.

    ``settings``: names of settings to show, by default those that differ from the policy's defaults; ``with_schedule``:
    whether to show the schedule, also where it is the default.
    """
    policy = result["policy"]
    shown = policy["changed"] if settings is None else [name for name in settings if name in policy["settings"]]
    if with_schedule and "schedule" in policy["settings"]:
        first = ["schedule"]
        if policy["settings"].get("fault_free") == "1f1b" and policy["settings"]["schedule"] == "planned":
            first.append("fault_free")
        shown = [*first, *(name for name in shown if name not in first)]
    own = policy["name"].lower()  # "Restart (1 min)", not "Restart (restart 1 min)"
    details = ", ".join(
        setting_text(name, policy["settings"][name], policy["durations"]).removeprefix(f"{own} ") for name in shown
    )
    name, _ = POLICIES.get(policy["name"], (policy["name"], ""))
    return f"{name} ({details})" if details else name


def failures_text(result: Record) -> str:
    """The source of a result's failures."""
    source, settings = result["failures"]["name"], result["failures"]["settings"]
    back = f", back after {duration_text(settings['repair'])}" if settings.get("repair") else ""
    if source == "Poisson":
        return f"failure every {duration_text(settings['mtbf'])}{back}"
    if source == "Regular":
        return f"one failure after each {duration_text(settings['interval'])}{back}"
    if source == "FailureRate":
        return f"{settings['rate']:.3g} failures per GPU and day{back}"
    if source == "TraceReplay":
        return f"trace {settings['trace']}"
    if source == "FailedFraction":
        return f"{100 * settings['part']:.5g} % failed{_num_failed_text(result)}"
    if source == "Scripted":
        return counted(len(settings["outages"]), "outage")
    return str(source)


def _num_failed_text(result: Record) -> str:
    """The number of failed nodes in brackets; empty where it is unknown."""
    nodes, part = result.get("cluster", {}).get("nodes"), result["failures"]["settings"]["part"]
    if nodes is None:
        return ""
    count = max(round(part * nodes), int(part > 0))
    return f" ({count} of {counted(nodes, 'node')})"


def assumptions_text(result: Record) -> str:
    """Assumptions besides policy and failures: batch, utilization, network."""
    model = result["model"]
    mfu = f"{100 * model['efficiency']:.1f} % of the peak of an {model['gpu']} while computing"
    network = f"{model['network_bandwidth'] * 8e-9:.3g} Gb/s between workers"
    again = ", activations recomputed" if model["recompute"] else ""
    return f"global batch {model['global_batch']:,}, micro-batch {model['microbatch']}; {mfu}; {network}{again}"


def cost_of(result: Record) -> float | None:
    """Price of 1,000 samples; None if GPUs have no price or nothing was trained."""
    samples = result["throughput"] * result["duration"]
    return 1000 * float(result["cost"]) / samples if result["cost"] and samples else None


# -- loaded, grouped, drawn --------------------------------------------------------------------------------------------


def load_results(folder: str | Path) -> list[Record]:
    """All ``result.json`` below ``folder``, by policy, model and failures, then path.

    Policies in display order, models by size, fewer failures first.

    Raises:
        ConfigurationError: when there are none, or one cannot be parsed.
    """
    root = Path(folder)
    if not root.is_dir():
        raise ConfigurationError(f"there is no folder {root}: give the folder of recycle-simulate output=FOLDER.")
    files = sorted(root.rglob("result.json"), key=_in_order)
    if not files:
        raise ConfigurationError(f"there is no result.json in {root}: make some with recycle-simulate output=FOLDER.")
    places = {name: place for place, name in enumerate(POLICIES)}

    def order(record: Record) -> tuple[float, ...]:
        failures = record["failures"]["settings"]
        policy, size = places.get(record["policy"]["name"], len(places)), record["model"]["parameters"]
        return policy, size, failures.get("part", -failures.get("mtbf", 0.0))

    return sorted(map(_load, files), key=order)


def _in_order(file: Path) -> list[tuple[int, int, str]]:
    """Numbered folders are sorted as numbers: 2 before 10."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in file.parts]


def _load(file: Path) -> Record:
    record = read_json(file, "the result", "make it again with recycle-simulate")
    if not isinstance(record, dict) or record.get("schema") != RESULT_SCHEMA:
        raise ConfigurationError(
            f"{file} is not a result of this version's recycle-simulate (schema {RESULT_SCHEMA}): make it again with"
            " recycle-simulate."
        )
    return record


def group_by(records: Iterable[Record], key: Callable[[Record], _Key]) -> dict[_Key, list[Record]]:
    """Records by ``key``, in the order in which the keys appear."""
    found: dict[_Key, list[Record]] = {}
    for record in records:
        found.setdefault(key(record), []).append(record)
    return found


def models_of(records: Iterable[Record]) -> list[str]:
    """Names of the models, by size."""
    sizes = {record["model"]["name"]: record["model"]["parameters"] for record in records}
    return sorted(sizes, key=lambda name: sizes[name])


def half_interval(record: Record) -> float:
    """Half of the 95 % interval of the mean ratio; 0 for few runs."""
    runs = len(record["runs"])
    if runs < LEAST_RUNS:
        return 0.0
    quantile = 1.96 + 2.37 / (runs - 1) + 2.82 / (runs - 1) ** 2  # Student's 97.5 %, within 0.005
    return quantile * float(record["deviation"]) / math.sqrt(runs)


def protocol_text(records: Sequence[Record]) -> str:
    """Duration, number of runs, and whether nodes come back."""
    first = records[0]
    runs = sorted({len(record["runs"]) for record in records if record["policy"]["name"] != "FaultFree"} or {1})
    repair = first["failures"]["settings"].get("repair", ...)
    back = "failed nodes never return" if repair is None else ""
    if isinstance(repair, (int, float)):
        back = f"nodes are back after {duration_text(repair)}"
    many = "one run each" if runs == [1] else f"means of {' or '.join(map(str, runs))} runs"
    return ", ".join(filter(None, (f"runs of {duration_text(first['duration'])}", back, many)))


def schedule_of(record: Record) -> str:
    """The schedule of whole pipelines; "" for a policy without a choice."""
    return str(record["policy"]["settings"].get("schedule", ""))


def same_schedules(records: Sequence[Record]) -> bool:
    """Whether all policies ran with each of the schedules."""
    found = [{run["policy"]["name"] for run in runs} for runs in group_by(records, schedule_of).values()]
    return all(names == found[0] for names in found)


def caution(records: Sequence[Record]) -> list[str]:
    """A warning, if policies that are compared ran with different schedules."""
    failing = [record for record in records if record["policy"]["name"] != "FaultFree"]
    return [] if same_schedules(failing) else [_CAUTION]


class Variants:
    """The policies of a group of results, each with a series without points.

    ``with_schedule``: whether the schedule defines variants; otherwise it is shown in another way.
    """

    def __init__(self, records: Iterable[Record], *, with_schedule: bool = True) -> None:
        found = list(records)
        self._with_schedule = with_schedule
        present = {record["policy"]["name"] for record in found}
        names = [name for name in POLICIES if name in present] + sorted(present.difference(POLICIES))
        self._differ = {name: self._differing(found, name) for name in names}
        self._series: dict[str, Series] = {}
        for name in names:
            for record in found:
                identity = self._identity(record)
                if record["policy"]["name"] == name and identity not in self._series:
                    self._series[identity] = self._new(record)
        self.all = list(self._series.values())

    def of(self, record: Record) -> Series:
        """The series to which a run belongs."""
        return self._series[self._identity(record)]

    def _differing(self, records: Sequence[Record], policy: str) -> list[str]:
        """Settings that define variants, and those that are always shown."""
        settings = [record["policy"]["settings"] for record in records if record["policy"]["name"] == policy]
        always = {"Spares": "spares", "FaultFree": "schedule"}.get(policy)
        hidden = set() if self._with_schedule else {"schedule"}
        return [
            name
            for name in settings[0]
            if name == always or (name not in hidden and len({json.dumps(each.get(name)) for each in settings}) > 1)
        ]

    def _identity(self, record: Record) -> str:
        policy = record["policy"]
        settings = {name: policy["settings"].get(name) for name in self._differ[policy["name"]]}
        return json.dumps([policy["name"], settings])

    def _new(self, record: Record) -> Series:
        name = record["policy"]["name"]
        place = sum(series.color == f"p-{name.lower()}" for series in self._series.values())
        return Series(
            name=policy_text(record, self._differ[name], with_schedule=self._with_schedule),
            key=f"{name.lower()}{place}" if place else name.lower(),
            color=f"p-{name.lower()}",
            marker=POLICIES.get(name, ("", "circle"))[1],
            dashed=place % 2 == 1,
        )
