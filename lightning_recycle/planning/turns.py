"""What differs between micro-batches where neighbouring stages take turns in running a layer that they share.

Concept: a problem has the mean costs of all micro-batches. Where stages share layers
(:mod:`~lightning_recycle.planning.fractional_cuts`), each micro-batch has costs of its own, and the gradients of a
shared layer are summed over the workers of both stages: neither steps its optimizer before the last micro-batch that
runs the layer on the other one has its weight gradients. A plan that is made with both in view is faster than one made
for the mean.

Contract: frozen; pure.

Must not know: cuts.

Units: seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_recycle.planning.costs import Costs

__all__ = ["SharedLayer", "Turns"]


@dataclass(frozen=True)
class SharedLayer:
    """A layer that two stages hold.

    Args:
        stage: the earlier of the two; the other one is the next.
        reduce: seconds until its gradients are summed.
        earlier: the micro-batches that run it on the earlier stage, as numbers d * M + m.
        later: those that run it on the later one.
    """

    stage: int
    reduce: float
    earlier: tuple[int, ...]
    later: tuple[int, ...]


@dataclass(frozen=True)
class Turns:
    """How micro-batches differ. One value per micro-batch, pipeline after pipeline, with one number per stage.

    Args:
        costs: what each one takes.
        layers: those that stages share.
        held: what each one holds from F to B, relative to the mean.
        waiting: the same from B to W.
        reserved: bytes by stage that a problem for the mean micro-batch keeps free because of these differences.
    """

    costs: tuple[Costs, ...]
    layers: tuple[SharedLayer, ...]
    held: tuple[tuple[float, ...], ...]
    waiting: tuple[tuple[float, ...], ...]
    reserved: tuple[float, ...]
