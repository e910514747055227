"""Results of ``recycle-simulate`` as the page reads them.

Concept: the folder of a sweep holds any number of ``result.json``, each of one task: training runs (throughput, GPU
time by cause, timeline), the planner's latency, or a step with the techniques one by one. A page is a function of
these.

Contract: the dictionaries are checked for the parts that are read here, then passed on unchanged.

Must not know: how they are shown.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_recycle.errors import ConfigurationError

__all__ = ["SECTION_NAMES", "Record", "Results", "load_results"]

Record = Mapping[str, Any]
_SCHEMA = 2
_PARTS = {
    "training": (
        "model", "cluster", "policy", "failures", "duration", "throughput", "fault_free_throughput", "ratio",
        "ratio_per_gpu", "deviation", "fraction_of_ideal", "goodput", "ettr", "mfu", "cost", "node_failures", "note",
        "losses", "fractions", "gpu_seconds", "runs", "timeline",
    ),
    "planner": (
        "grid", "workers", "failed", "failed_workers", "seconds", "processor_seconds", "period", "lower_bound", "gap",
    ),
    "techniques": ("grid", "workers", "failed", "effort", "slots"),
}  # fmt: skip

_SECTIONS = {"Poisson": "intervals", "TraceReplay": "traces", "FailedFraction": "fractions"}

SECTION_NAMES = (
    "same", "intervals", "traces", "choices", "fractions", "ablation", "planner", "spares", "restart", "layers",
    "others",
)  # fmt: skip
"""Possible values of a result's ``section``."""


@dataclass(frozen=True)
class Results:
    """All results of a folder.

    Args:
        source: the folder.
        training, planner, techniques: results by task, in the order of the files.
    """

    source: str
    training: list[Record] = field(default_factory=list)
    planner: list[Record] = field(default_factory=list)
    techniques: list[Record] = field(default_factory=list)

    def section(self, name: str, failures: str | None = None) -> list[Record]:
        """Training runs of a section: those that name it, or those with its kind of failures.

        Args:
            name: name of the section.
            failures: the only source of failures that the section can show.
        """
        found = [record for record in self.training if _section(record) == name]
        return [record for record in found if failures in (None, record["failures"]["name"])]

    @property
    def count(self) -> int:
        """Number of all results."""
        return len(self.training) + len(self.planner) + len(self.techniques)


def _section(record: Record) -> str:
    return str(record["section"] or _SECTIONS.get(record["failures"]["name"], "others"))


def load_results(folder: str | Path) -> Results:
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
    found = Results(str(root))
    for file in files:
        record = _load(file)
        {"training": found.training, "planner": found.planner, "techniques": found.techniques}[record["task"]].append(
            record
        )
    return found


def _in_order(file: Path) -> list[tuple[int, int, str]]:
    """Numbered folders are sorted as numbers: 2 before 10."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in file.parts]


def _load(file: Path) -> Record:
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"cannot read {file}: {error}.") from error
    if not isinstance(record, dict) or record.get("schema") != _SCHEMA or record.get("task") not in _PARTS:
        raise ConfigurationError(f"{file} is not a result of this version's recycle-simulate (schema {_SCHEMA}).")
    missing = [part for part in (*_PARTS[record["task"]], "section", "command") if part not in record]
    if missing:
        raise ConfigurationError(f"{file} is incomplete ({', '.join(missing)} missing): run recycle-simulate again.")
    return record
