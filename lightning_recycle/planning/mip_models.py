"""python-mip: an empty model of a solver by name, and solving it for the answer yes, no or unknown.

Contract: every call of a solver is reported, its time as well, so that a plan can say what the solver did.

Must not know: what a model means.
"""

from __future__ import annotations

import gc
import time
from typing import Any

import mip

from lightning_recycle.planning.solver_process import Report, SolverTask, SolverUnavailableError

__all__ = ["new_model", "optimize"]

_NAMES = {"cbc": mip.CBC, "highs": mip.HIGHS, "gurobi": mip.GUROBI}


def new_model(task: SolverTask) -> Any:
    """An empty model of the solver that the task names.

    Raises:
        SolverUnavailableError: when python-mip cannot load the solver.
    """
    # A model that is collected while cffi parses a declaration waits forever for cffi's lock, which this thread
    # holds: so the automatic collector is off while models are built and solved, and old ones are collected here.
    gc.disable()
    gc.collect()
    try:
        model = mip.Model(solver_name=_NAMES[task.backend])
    except (ImportError, OSError, mip.exceptions.MipBaseException) as error:
        reason = " ".join(str(error).split()).partition(". ")[0]
        raise SolverUnavailableError(f"python-mip cannot load it ({reason.rstrip('.')})") from error
    model.verbose = int(task.log)
    model.threads = task.threads
    model.seed = task.seed
    return model


def optimize(model: Any, seconds: float, report: Report) -> bool | None:
    """Whether the model has a solution, which its variables then hold; None when time is up.

    Args:
        model: a model without objective.
        seconds: time limit.
        report: is told ("call", 1), then ("seconds", time that the solver took).
    """
    report("call", 1)
    started = time.monotonic()
    status = model.optimize(max_seconds=seconds)
    report("seconds", time.monotonic() - started)
    if status in (mip.OptimizationStatus.OPTIMAL, mip.OptimizationStatus.FEASIBLE):
        return True
    if status in (mip.OptimizationStatus.INFEASIBLE, mip.OptimizationStatus.INT_INFEASIBLE):
        return False
    return None
