"""Results of ``recycle-simulate`` for the report: loaded, grouped, and as series of charts.

Concept: the folder of a sweep holds any number of ``result.json``, one for each training run and its repetitions.
Where runs of one policy within a group differ in some settings, those settings define *variants*, each a series of its
own, named by what differs: a policy has the same name, colour and marker everywhere.

Contract: the dictionaries are checked for the parts that are read here, then passed on unchanged.

Must not know: sections, pages.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from lightning_recycle.errors import ConfigurationError
from lightning_recycle.visualize.report.charts import Series
from lightning_recycle.visualize.report.wording import POLICIES, duration_text, policy_text

__all__ = [
    "LEAST_RUNS",
    "RESULT_SCHEMA",
    "Record",
    "Variants",
    "by",
    "error",
    "load_results",
    "models_of",
    "protocol_text",
]

Record = Mapping[str, Any]
_Key = TypeVar("_Key", bound=Hashable)

RESULT_SCHEMA = 3
_PARTS = (
    "command", "model", "cluster", "policy", "failures", "duration", "throughput", "fault_free_throughput", "ratio",
    "ratio_per_gpu", "deviation", "fraction_of_ideal", "goodput", "ettr", "mfu", "node_failures", "note",
    "losses", "fractions", "gpu_seconds", "runs", "timeline",
)  # fmt: skip
_MARKERS = {
    "Recycle": "circle",
    "Auto": "down",
    "ElasticLayers": "diamond",
    "Oobleck": "square",
    "Bamboo": "triangle",
    "Merge": "square",
    "Spares": "down",
    "DropReplica": "cross",
    "Varuna": "triangle",
    "Restart": "square",
    "FaultFree": "diamond",
}
LEAST_RUNS = 10
"""Fewer runs give an interval of the mean that is wider than what it is to show."""
_QUANTILES = dict(
    enumerate(
        (2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13, 2.12, 2.11, 2.10, 2.09, 2.09, 2.08, 2.07, 2.07, 2.06, 2.06, 2.06,
         2.05, 2.05, 2.05), LEAST_RUNS,
    )
)  # fmt: skip
"""By the number of runs: Student's 97.5 % quantile with one degree of freedom less."""


def load_results(folder: str | Path) -> list[Record]:
    """All ``result.json`` below ``folder``, in the order of their paths.

    Raises:
        ConfigurationError: when there are none, or one cannot be parsed.
    """
    root = Path(folder)
    if not root.is_dir():
        raise ConfigurationError(f"there is no folder {root}: give the folder of recycle-simulate output=FOLDER.")
    files = sorted(root.rglob("result.json"), key=_in_order)
    if not files:
        raise ConfigurationError(f"there is no result.json in {root}: make some with recycle-simulate output=FOLDER.")
    return list(map(_load, files))


def _in_order(file: Path) -> list[tuple[int, int, str]]:
    """Numbered folders are sorted as numbers: 2 before 10."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in file.parts]


def _load(file: Path) -> Record:
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"cannot read {file}: {error}.") from error
    if not isinstance(record, dict) or record.get("schema") != RESULT_SCHEMA:
        raise ConfigurationError(f"{file} is not a result of this version's recycle-simulate (schema {RESULT_SCHEMA}).")
    if missing := [part for part in _PARTS if part not in record]:
        raise ConfigurationError(f"{file} is incomplete ({', '.join(missing)} missing): run recycle-simulate again.")
    return record


def by(records: Iterable[Record], key: Callable[[Record], _Key]) -> dict[_Key, list[Record]]:
    """Records by ``key``, in the order in which the keys appear."""
    found: dict[_Key, list[Record]] = {}
    for record in records:
        found.setdefault(key(record), []).append(record)
    return found


def models_of(records: Iterable[Record]) -> list[str]:
    """Names of the models, by size."""
    sizes = {record["model"]["name"]: record["model"]["parameters"] for record in records}
    return sorted(sizes, key=lambda name: sizes[name])


def error(record: Record) -> float:
    """Half of the 95 % interval of the mean ratio, by Student's distribution; 0 for fewer than ``LEAST_RUNS`` runs."""
    runs = len(record["runs"])
    return _QUANTILES.get(runs, 1.96) * float(record["deviation"]) / math.sqrt(runs) if runs >= LEAST_RUNS else 0.0


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


class Variants:
    """The policies of a group of results, each with its series of charts, without points.

    Args:
        records: the training runs.
        with_schedule: whether the schedule defines variants; otherwise it is shown in another way.
    """

    def __init__(self, records: Iterable[Record], *, with_schedule: bool = True) -> None:
        found = list(records)
        self._with_schedule = with_schedule
        present = {record["policy"]["name"] for record in found}
        names = [name for name in POLICIES if name in present] + sorted(present.difference(POLICIES))
        self._differ = {name: self._differing(found, name) for name in names}
        self.all: list[Series] = []
        self._series: dict[str, Series] = {}
        for name in names:
            for record in found:
                identity = self._identity(record)
                if record["policy"]["name"] == name and identity not in self._series:
                    self._series[identity] = self._new(record)
                    self.all.append(self._series[identity])

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
        place = sum(series.color == f"p-{name.lower()}" for series in self.all)
        return Series(
            name=policy_text(record, self._differ[name], with_schedule=self._with_schedule),
            key=f"{name.lower()}{place}" if place else name.lower(),
            color=f"p-{name.lower()}",
            marker=_MARKERS.get(name, "circle"),
            dashed=place % 2 == 1,
        )
