"""What each search of the heuristic is worth: its plans with one of them switched off, over seeded random problems.

:func:`ablation_table` is ``benchmarks/planner.py --ablation``. Each row is a process of its own, so that nothing is
left of what a switch has changed. With revisions, the same problems are also planned by the package as it was there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterable
from io import BytesIO
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest import mock

from instances import planning_problem
from rich.table import Table

from lightning_recycle.planning import heuristic, validate

__all__ = ["ablation_table", "run_ablation_case"]

_HERE = Path(__file__).resolve()
_PLANNING = "lightning_recycle.planning."


def _skipped(codes: Any, solution: Any, effort: int) -> Any:
    return solution


def _unpatient(search: Any) -> None:
    search.patiences, search.keeps, search.expresses = search.patiences[:1], [None], search.expresses[:1]


def _without(kinds: str) -> Any:
    """A rule search that lacks some of its kinds of change."""
    from lightning_recycle.planning.heuristic import rule_search

    class Search(rule_search._Search):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            if kinds == "patience":
                _unpatient(self)

        def _climb(self, at: Any) -> None:
            if kinds != "climb":
                super()._climb(at)

        def _changed(self, rule: Any) -> Any:
            changed = super()._changed(rule)
            return rule_search.replace(changed, ages=rule.ages) if kinds == "ages" else changed

    return Search


SWITCHES: dict[str, tuple[str, Any]] = {
    "patience, keep and express": ("heuristic.rule_search._Search", lambda: _without("patience")),
    "the climb": ("heuristic.rule_search._Search", lambda: _without("climb")),
    "ages among the random changes": ("heuristic.rule_search._Search", lambda: _without("ages")),
    "the start ZB-H1": ("heuristic.heuristic_planner._zero_bubble_start", lambda: lambda codes: []),
    "the local search": ("heuristic.heuristic_planner._polished", lambda: _skipped),
    "the memory descent": ("heuristic.heuristic_planner.with_least_memory", lambda: _skipped),
    "recomputation": ("heuristic.heuristic_planner.with_recomputation", lambda: _never_again),
    "the other distribution": ("heuristic.heuristic_planner._LEANING", lambda: 1.0),
}
"""By the search that is switched off: the name that is replaced, and what makes the replacement."""


def _never_again(problem: Any, plan: Any) -> Any:
    from dataclasses import replace

    memory = problem.memory
    bare = problem if memory is None else replace(problem, memory=replace(memory, checkpoint=None))
    return plan(bare, 1.0).under(problem)


def run_ablation_case(case: dict[str, Any]) -> None:
    """In a process of its own: period, share of memory and seconds of each problem's plan, as JSON."""
    import importlib

    if case["off"]:
        target, make = SWITCHES[case["off"]]
        module, _, name = target.rpartition(".")
        mock.patch.object(importlib.import_module(_PLANNING + module), name, make()).start()
    found = []
    for seed in range(case["problems"]):
        problem = planning_problem(seed, slow=case["slow"])
        started = time.process_time()
        schedule = heuristic(problem)
        seconds = time.process_time() - started
        validate(schedule)
        peaks = [
            schedule.peak_in_flight(worker) if problem.memory is None else schedule.peak_memory(worker)
            for worker in schedule.live_workers
        ]
        found.append((schedule.period, max(peaks), sum(peaks), seconds))
    print(json.dumps(found))


def ablation_table(problems: int, revisions: Iterable[str] = ()) -> Table:
    """The loss of period without each search, with the processor seconds that all plans take.

    Args:
        problems: the number of problems; two in three of them again with a slow worker.
        revisions: of the package, to compare with.
    """
    table = Table(
        title=f"{problems} problems, then {2 * problems // 3} with a slow worker", title_justify="left", box=None
    )
    for name in ("off", "mean loss", "worst", "peak", "sum", "s", "slow: mean", "worst", "s"):
        table.add_column(name, justify="left" if name == "off" else "right", no_wrap=True)
    usual = [_plans(False, problems), _plans(True, 2 * problems // 3)]
    rows: dict[str, list[list[list[float]]]] = {"nothing": usual}
    for name in SWITCHES:
        rows[name] = [_plans(False, problems, name), _plans(True, 2 * problems // 3, name)]
    for revision in revisions:
        rows[f"(revision {revision})"] = [
            _plans(False, problems, revision=revision),
            _plans(True, 2 * problems // 3, revision=revision),
        ]
    for name, (plain, slow) in rows.items():
        cells = [*_losses(usual[0], plain), _ratio(usual[0], plain, 1), _ratio(usual[0], plain, 2), _seconds(plain)]
        table.add_row(name, *cells, *_losses(usual[1], slow), _seconds(slow))
    return table


def _losses(usual: list[list[float]], found: list[list[float]]) -> tuple[str, str]:
    losses = [other[0] / plan[0] - 1 for plan, other in zip(usual, found, strict=True)]
    return f"{100 * fmean(losses):.2f} %", f"{100 * max(losses):.1f} %"


def _ratio(usual: list[list[float]], found: list[list[float]], column: int) -> str:
    return f"{fmean(other[column] / plan[column] for plan, other in zip(usual, found, strict=True)):.2f}"


def _seconds(found: list[list[float]]) -> str:
    return f"{sum(plan[3] for plan in found):.1f}"


def _plans(slow: bool, problems: int, off: str = "", revision: str = "") -> list[list[float]]:
    case = json.dumps({"ablation": True, "slow": slow, "problems": problems, "off": off})
    command = [sys.executable, str(_HERE.with_name("planner.py")), "--case", case]
    if not revision:
        return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    with tempfile.TemporaryDirectory() as folder:
        archive = ["git", "-C", str(_HERE.parents[1]), "archive", revision, "lightning_recycle"]
        packed = subprocess.run(archive, capture_output=True, check=True)
        with tarfile.open(fileobj=BytesIO(packed.stdout)) as tar:
            tar.extractall(folder, filter="data")
        environment = {**os.environ, "PYTHONPATH": folder}
        return json.loads(subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout)
