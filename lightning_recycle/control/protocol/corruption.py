"""Workers of a stage that hold different bits: who is wrong, and what follows. Pure.

Concept: after some steps every worker tells checksums of what it holds (:class:`~.messages.Checked`). The workers of a
stage hold the same bits, so those whose checksums differ hold wrong ones. Independent errors do not agree: the largest
group is right if it has at least two workers and no other group is as large (:func:`judge`). Otherwise, as in a stage
of two, nothing says who is right, and nobody's state can be trusted.

Contract: workers are compared only by what they told of one step, so it does not matter how far apart they are.
Whoever is found wrong counts as no holder of its stage from then on, until it has a peer's state.

Must not know: how checksums are made, what a device is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from lightning_recycle.control.protocol.messages import Checked

__all__ = ["MAX_HEALS", "POLICIES", "Checks", "Culprit", "Undecided", "judge"]

POLICIES = ("evict", "heal", "raise")
"""What follows for a worker that holds wrong bits."""

MAX_HEALS = 2
"""How often a position takes over a peer's state because its own was wrong; a device that errs again is not well."""


@dataclass(frozen=True, slots=True)
class Culprit:
    """A worker whose bits are wrong.

    Args:
        rank: the worker.
        kinds: what of it is wrong, by the names of its checksums.
        right: the ranks whose checksums agree.
        device: its device.
    """

    rank: int
    kinds: tuple[str, ...]
    right: tuple[int, ...]
    device: str


@dataclass(frozen=True, slots=True)
class Undecided:
    """Workers differ, and nothing says which of them are right: ``groups`` of ranks with equal checksums."""

    groups: tuple[tuple[int, ...], ...]
    kinds: tuple[str, ...]


Verdict: TypeAlias = Undecided | tuple[Culprit, ...]


def judge(told: Mapping[int, Checked]) -> Verdict:
    """Who is wrong of the workers of one stage, nobody if it is empty.

    Args:
        told: what they told of one step, by rank.
    """
    groups: dict[tuple[tuple[str, bytes], ...], list[int]] = defaultdict(list)
    for rank, one in sorted(told.items()):
        groups[tuple(sorted(one.sums.items()))].append(rank)
    if len(groups) < 2:
        return ()
    largest, second = sorted(groups.values(), key=len, reverse=True)[:2]
    if len(largest) == len(second):
        names = sorted({name for one in told.values() for name in one.sums})
        kinds = tuple(name for name in names if len({one.sums.get(name) for one in told.values()}) > 1)
        return Undecided(tuple(sorted(map(tuple, groups.values()))), kinds)
    right = told[largest[0]].sums
    return tuple(
        Culprit(rank, _differing(one.sums, right), tuple(largest), one.device)
        for rank, one in sorted(told.items())
        if rank not in largest
    )


def _differing(mine: Mapping[str, bytes], right: Mapping[str, bytes]) -> tuple[str, ...]:
    return tuple(sorted(name for name in mine.keys() | right.keys() if mine.get(name) != right.get(name)))


@dataclass(frozen=True, slots=True)
class Checks:
    """What the coordinator knows of the checks of a run.

    Args:
        policy: what follows for a culprit, one of :data:`POLICIES`.
        every: steps between two checks; 0 for as many as the workers ask for.
        told: checksums that were not compared yet: step -> rank -> what it told.
        planned: the step after which workers check next, as far as it was decided; -1 if it was not.
        agreed: the newest step after which all workers that told of it held the same bits as their peers; -1 for none.
        healing: live ranks that hold wrong bits and are to take over a peer's state.
        heals: how often each rank has been found wrong and healed.
    """

    policy: str = "evict"
    every: int = 0
    told: Mapping[int, Mapping[int, Checked]] = field(default_factory=dict)
    planned: int = -1
    agreed: int = -1
    healing: frozenset[int] = frozenset()
    heals: Mapping[int, int] = field(default_factory=dict)

    def add(self, rank: int, step: int, checked: Checked) -> Checks:
        """With what ``rank`` told of ``step``."""
        return replace(self, told={**self.told, step: {**self.told.get(step, {}), rank: checked}})

    def due(self, version: int) -> bool:
        """Whether a check is over that all who take part have told of, if all have applied ``version`` steps."""
        return bool(self.told) and min(self.told) < version

    def plan(self, step: int, summed: int, told: Mapping[int, Checked]) -> Checks:
        """With the next check after that of ``step``. The first step that can be announced to all before any of them
        is in it is the one after the next whose loss is complete, ``summed``.
        """
        asked = max((one.interval for one in told.values()), default=1)
        return replace(self, planned=max(step + (self.every or asked), summed + 1))

    def is_announced_by(self, step: int) -> bool:
        """Whether the loss of ``step`` tells all that the next step ends with a check."""
        return self.planned == step + 1

    def may_heal(self, rank: int) -> bool:
        """Whether ``rank`` may take over a peer's state once more."""
        return self.policy == "heal" and self.heals.get(rank, 0) < MAX_HEALS

    def heal(self, rank: int) -> Checks:
        """With ``rank`` to be healed at the next step boundary."""
        if rank in self.healing:
            return self
        return replace(self, healing=self.healing | {rank}, heals={**self.heals, rank: self.heals.get(rank, 0) + 1})

    def without(self, ranks: Collection[int]) -> Checks:
        """Without ``ranks``, which are lost or have the right state."""
        return replace(self, healing=self.healing.difference(ranks)) if not self.healing.isdisjoint(ranks) else self
