"""Steps in which some workers are slow, or all results are checked.

Concept: training is synchronous, so a slow worker makes all wait. Where its work is not dealt out anew, its
computation takes 1 / speed as long, and nothing else does: the step is longer by (1 / speed - 1) times what a worker
computes in it. For 1F1B with equal stages that is exact for the last stage and an upper bound for the others, whose
idle time hides some of it.

Contract: pure functions of configurations.

Must not know: policies, time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from lightning_recycle.simulation.policies.policy import Configuration

__all__ = ["checked", "prolonged", "waiting"]


def waiting(found: Configuration, speeds: Mapping[int, float]) -> Configuration:
    """All wait for the slowest of these nodes."""
    computing = (found.useful_gpu_seconds + found.repeated_gpu_seconds) / found.gpus
    return prolonged(found, found.step_seconds + (1 / min(speeds.values()) - 1) * computing)


def prolonged(found: Configuration, seconds: float) -> Configuration:
    """A step takes ``seconds`` because of slow nodes, at least as long as without."""
    longer = max(0.0, seconds - found.step_seconds)
    return replace(
        found, step_seconds=found.step_seconds + longer, slow_gpu_seconds=found.slow_gpu_seconds + longer * found.gpus
    )


def checked(found: Configuration, cost: float) -> Configuration:
    """Checking the results takes ``cost`` times a step, all of it computation done twice."""
    extra = cost * found.step_seconds
    repeated = found.repeated_gpu_seconds + extra * found.gpus
    return replace(found, step_seconds=found.step_seconds + extra, repeated_gpu_seconds=repeated)
