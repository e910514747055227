"""Groups of results, and the look of each policy: the same name, colour and marker everywhere.

Concept: where runs of one policy within a group of results differ in some settings, those settings define *variants*,
each a separate series named by what differs.

Must not know: charts, tables.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import TypeVar

from lightning_recycle.visualize.report.charts import Series
from lightning_recycle.visualize.report.names import POLICIES, duration_text, model_text, policy_text
from lightning_recycle.visualize.report.records import Record

__all__ = ["Variants", "by", "models_of", "protocol_text", "short_model"]

_Key = TypeVar("_Key", bound=Hashable)

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
_ALWAYS = {"Spares": "spares"}
"""Settings always shown with a policy's name."""


class Variants:
    """The policies of a group of results.

    Args:
        records: the training runs.
        ignore: settings that define no variant, because they are shown in another way.
    """

    def __init__(self, records: Iterable[Record], ignore: Collection[str] = ()) -> None:
        found = list(records)
        self._with_schedule = "schedule" not in ignore
        self._differ = {name: _differing(found, name, frozenset(ignore)) for name in _policies(found)}
        self.all: list[Series] = []
        self._series: dict[str, Series] = {}
        for name in self._differ:
            for record in found:
                identity = self._identity(record)
                if record["policy"]["name"] == name and identity not in self._series:
                    self._series[identity] = self._new(record)
                    self.all.append(self._series[identity])

    def of(self, record: Record) -> Series:
        """The series, without points, to which a run belongs."""
        return self._series[self._identity(record)]

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
            hollow=place % 2 == 1,
        )


def _policies(records: Sequence[Record]) -> list[str]:
    present = {record["policy"]["name"] for record in records}
    return [name for name in POLICIES if name in present] + sorted(present.difference(POLICIES))


def _differing(records: Sequence[Record], policy: str, ignore: frozenset[str]) -> list[str]:
    settings = [record["policy"]["settings"] for record in records if record["policy"]["name"] == policy]
    names = [name for name in settings[0] if name not in ignore]
    always = _ALWAYS.get(policy)
    return [name for name in names if name == always or len({json.dumps(each.get(name)) for each in settings}) > 1]


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


def short_model(name: str) -> str:
    """For the axis: ``6.7B``."""
    return model_text(name).removeprefix("GPT-3 ").removeprefix("Megatron ")


def protocol_text(records: Sequence[Record]) -> str:
    """Duration, number of runs, and whether nodes come back."""
    first = records[0]
    runs = sorted({len(record["runs"]) for record in records if record["policy"]["name"] != "FaultFree"} or {1})
    repair = first["failures"]["settings"].get("repair", ...)
    back = "nobody comes back" if repair is None else ""
    if isinstance(repair, (int, float)):
        back = f"nodes are back after {duration_text(repair)}"
    many = "one run each" if runs == [1] else f"means of {' or '.join(map(str, runs))} runs"
    return ", ".join(filter(None, (f"runs of {duration_text(first['duration'])}", back, many)))
