"""What checkpoints cost: how long training stands still, when one is complete, how long it takes to load, how often.

Concept: one model for all policies. A checkpoint is the state at the end of a step. Training stands still for
``stall``; the checkpoint can be loaded ``writing`` seconds after that, and a failure before then falls back on the one
before.

=============  =====================================  ======================================  ======================
kind           stall                                  writing                                 loading
=============  =====================================  ======================================  ======================
synchronous    all state to the shared storage        none                                    from the shared storage
background     a copy to the host's memory            all state to the shared storage         from the shared storage
sharded        each worker's part to storage that     none                                    each worker's state, the
               grows with the cluster                                                         same way
memory         none                                   each worker's part to a peer            from a peer
=============  =====================================  ======================================  ======================

Workers with the same stage share its state, each copies or writes an equal part.

Contract: pure functions, seconds and bytes.

Assumption: a copy in memory survives; that the worker and the peer that has its copy fail at the same moment is
neglected.

Must not know: policies, failures, the engine.

Sources: background copies by CheckFreq (Mohan et al., FAST'21), copies at peers by Gemini (Wang et al., SOSP'23); the
interval by Young (1974) and Daly (2006), first order.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, get_args

from lightning_recycle.simulation.training_model import TrainingModel

__all__ = ["CHECKPOINTS", "CheckpointCosts", "CheckpointKind", "best_interval", "checkpoint_costs"]

CheckpointKind = Literal["synchronous", "background", "sharded", "memory"]

CHECKPOINTS: tuple[str, ...] = get_args(CheckpointKind)


class CheckpointCosts(NamedTuple):
    """Seconds of a checkpoint.

    Args:
        stall: training stands still.
        writing: from then until the checkpoint can be loaded.
        loading: all workers load their state.
    """

    stall: float
    writing: float
    loading: float


def checkpoint_costs(
    kind: str, model: TrainingModel, *, storage: float, worker_storage: float, host: float
) -> CheckpointCosts:
    """The costs of one checkpoint.

    Args:
        kind: one of ``CHECKPOINTS``.
        model: the model; its fault-free grid sets how many workers share the writing.
        storage: bytes/s of the shared storage, per GPU of the fault-free grid.
        worker_storage: bytes/s at which one worker reads and writes storage that grows with the cluster.
        host: bytes/s from a GPU to its host's memory.
    """
    shared = model.transformer.state_bytes() / (storage * model.gpus)
    stage = model.state_bytes(1 / model.stages)  # of one GPU
    part = stage / model.pipelines
    if kind == "synchronous":
        return CheckpointCosts(shared, 0.0, shared)
    if kind == "background":
        return CheckpointCosts(part / host, shared, shared)
    if kind == "sharded":
        return CheckpointCosts(part / worker_storage, 0.0, stage / worker_storage)
    return CheckpointCosts(0.0, part / model.network_bandwidth, model.transfer_seconds(1 / model.stages))


def best_interval(rule: str, costs: CheckpointCosts, mtbf: float | None, usual: float = 1800.0) -> float:
    """Seconds from a checkpoint to the next by the formula of ``rule``, at least as many as one takes.

    Args:
        rule: "young", sqrt(2 stall mtbf), or "daly", the same less the stall (the mtbf, if it is below stall / 2).
        costs: of a checkpoint.
        mtbf: mean seconds between failures of the whole cluster; None when nothing fails.
        usual: the answer when nothing fails.
    """
    if mtbf is None:
        return max(usual, costs.writing)
    found = math.sqrt(2 * costs.stall * mtbf)
    if rule == "daly":
        found = found - costs.stall if costs.stall < 2 * mtbf else mtbf
    return max(found, costs.writing, 1.0)
