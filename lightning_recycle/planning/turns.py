"""What differs between micro-batches where neighbouring stages take turns in running a layer that they share.

Concept: a problem has the mean costs of all micro-batches. Where stages share layers
(:mod:`~lightning_recycle.planning.fractional_cuts`), each micro-batch has costs of its own, and the gradients of a
shared layer are summed over the workers of both stages: neither steps its optimizer before the last micro-batch that
runs the layer on the other one has its weight gradients. A plan that is made with both in view is faster than one made
for the mean.

Contract: frozen; pure. All is relative to the mean, so it stays true when operations turn out to take another time.

Must not know: cuts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

__all__ = ["SharedLayer", "Turns"]


ByStage: TypeAlias = tuple[float, ...]


@dataclass(frozen=True)
class SharedLayer:
    """A layer that two stages hold.

    Args:
        stage: the earlier of the two; the other one is the next.
        reduce: its part of the REDUCE of that stage.
        earlier: the micro-batches that run it on the earlier stage, as numbers d * M + m.
        later: those that run it on the later one.
    """

    stage: int
    reduce: float
    earlier: tuple[int, ...]
    later: tuple[int, ...]


@dataclass(frozen=True)
class Turns:
    """How micro-batches differ. Where there is one value per micro-batch, these are in the order of d * M + m.

    Args:
        forward: what its F takes at each stage, relative to the mean.
        backward_input, backward_weight: the same for its B and its W; of a fused backward, the first of them.
        held: what it holds from F to B, relative to the mean.
        waiting: the same from B to W.
        layers: those that stages share.
        reserved: bytes by stage that a problem for the mean micro-batch keeps free because of these differences.
    """

    forward: tuple[ByStage, ...]
    backward_input: tuple[ByStage, ...]
    backward_weight: tuple[ByStage, ...]
    held: tuple[ByStage, ...]
    waiting: tuple[ByStage, ...]
    layers: tuple[SharedLayer, ...]
    reserved: ByStage

    def alike_in_memory(self) -> Turns:
        """The same for micro-batches of which each holds what they hold in the mean."""
        ones = tuple((1.0,) * len(ratios) for ratios in self.held)
        return replace(self, held=ones, waiting=ones, reserved=(0.0,) * len(self.reserved))
