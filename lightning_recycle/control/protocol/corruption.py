"""Verdicts on workers of a stage that hold or compute different bits. Pure.

Concept: after some steps every worker tells checksums of what it holds (:class:`~.messages.Checked`). The workers of a
stage hold the same bits, so those whose checksums differ hold wrong ones. Independent errors do not agree: the largest
group is right if it has at least two workers and no other group is as large (:func:`judge`). Otherwise, as in a stage
of two, nothing says who is right, and nobody's state can be trusted.

A worker also computes a micro-batch of a peer once more now and then, and must get the same bits. If it does not, all
workers of the stage compute it, and vote (:func:`decide`).

Contract: workers are compared only by what they told of one step, so it does not matter how far apart they are.

Must not know: how checksums are made, what a device is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TypeAlias

from lightning_recycle.control.protocol.messages import Checked, Disputed

POLICIES = ("evict", "raise")
"""Consequence for a worker that holds wrong bits."""

FINITE = "finite"
"""The name under which a worker tells whether what it computed is finite, where that is the question."""

IS_FINITE, NOT_FINITE = b"finite", b"not finite"

MAX_EXCUSED = 3
"""Steps with such values of the model's, after which no others are inspected."""

EXCUSES_ALL = 1 << 62
"""A step that does not come."""


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
    """The wrong workers of one stage; none if it is empty.

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
        Culprit(rank, differing(one.sums, right), tuple(largest), one.device)
        for rank, one in sorted(told.items())
        if rank not in largest
    )


def differing(mine: Mapping[str, bytes], right: Mapping[str, bytes]) -> tuple[str, ...]:
    """The names of the checksums that are not the same."""
    return tuple(sorted(name for name in mine.keys() | right.keys() if mine.get(name) != right.get(name)))


Sums: TypeAlias = Mapping[str, bytes]
"""Checksums of what a computation gave, by name."""


@dataclass(frozen=True, slots=True)
class Dispute:
    """Two workers got different bits for one micro-batch; their peers compute it once more.

    Args:
        step, microbatch: what it is about.
        recorder: the worker that has the inputs, and got other bits than the one it checked.
        accused: the one it checked.
        claims: what both got at first, by rank.
        votes: what each worker of the stage got when it was asked, and whether it got that twice.
        devices: the devices of those that told them, by rank.
        varies: what had other bits the second time, as the newest vote of that kind says.
    """

    step: int
    microbatch: int
    recorder: int
    accused: int
    claims: Mapping[int, Sums]
    votes: Mapping[int, tuple[Sums, bool]] = field(default_factory=dict)
    devices: Mapping[int, str] = field(default_factory=dict)
    varies: str = ""


class Finding(Enum):
    """Result of a vote that finds no culprit."""

    UNDECIDED = "it is unknown who is right"
    INCOMPARABLE = "computations cannot be compared"


def own_error(told: Disputed) -> Culprit:
    """The worker that got other bits twice than at first."""
    return Culprit(told.rank, differing(told.theirs, told.mine), (told.rank,), told.device)


def decide(dispute: Dispute) -> tuple[Culprit, ...] | Finding:
    """Who was wrong, when all have voted; those without checksums have another kind of machine, and no say.

    The largest group of votes is right if it has at least two and no other is as large. Whoever claimed other bits at
    first was wrong then, whatever it gets now. If no group is, workers that repeat their own bits but not each other's
    may be different machines; of two nobody can say. If several do not repeat their own, the computation is not
    deterministic.
    """
    dispute = replace(dispute, votes={rank: vote for rank, vote in dispute.votes.items() if vote[0]})
    shaky = [rank for rank, (_, repeats) in dispute.votes.items() if not repeats]
    if len(shaky) > 1:
        return Finding.INCOMPARABLE
    groups: dict[tuple[tuple[str, bytes], ...], list[int]] = defaultdict(list)
    for rank, (sums, repeats) in sorted(dispute.votes.items()):
        if repeats:
            groups[tuple(sorted(sums.items()))].append(rank)
    sizes = sorted(map(len, groups.values()), reverse=True)
    if len(sizes) == 1 and sizes[0] == 1 and len(dispute.votes) == 2:  # the other one does not repeat its own
        return tuple(_claimant(dispute, rank, dispute.votes.keys() - {rank}) for rank in shaky)
    if not sizes or sizes[0] < 2 or sizes[1:2] == sizes[:1]:
        return Finding.UNDECIDED if len(dispute.votes) < 3 else Finding.INCOMPARABLE
    agreed = next(ranks for ranks in groups.values() if len(ranks) == sizes[0])
    right = dispute.votes[agreed[0]][0]
    wrong = [rank for rank, claim in sorted(dispute.claims.items()) if claim != right]
    return tuple(_claimant(dispute, rank, frozenset(agreed), right) for rank in wrong)


def _claimant(dispute: Dispute, rank: int, others: Collection[int], right: Sums | None = None) -> Culprit:
    claim = dispute.claims[rank]
    if right is None:
        right = next(claim for other, claim in dispute.claims.items() if other != rank)
    device = dispute.devices.get(rank, "")
    return Culprit(rank, differing(claim, right), tuple(sorted(set(others) - {rank})), device)


@dataclass(frozen=True, slots=True)
class Checks:
    """State of the checks of a run.

    Args:
        policy: what follows for a culprit, one of :data:`POLICIES`.
        every: steps between two checks; 0 for as many as the workers ask for.
        told: checksums that were not compared yet: step -> rank -> what it told.
        planned: the step after which workers check next, as far as it was decided; -1 if it was not.
        agreed: the newest step after which all workers that told of it held the same bits as their peers; -1 for none.
        dispute: the computation that two workers got different bits for, until it is decided who was wrong.
        comparable: whether computations can be compared bit by bit in this run.
        inspects: the step in which workers look where values begin that are not finite; -1 for none.
        excused: the step up to which such values are the model's.
        excuses: the number of such steps.
    """

    policy: str = "evict"
    every: int = 0
    told: Mapping[int, Mapping[int, Checked]] = field(default_factory=dict)
    planned: int = -1
    agreed: int = -1
    dispute: Dispute | None = None
    comparable: bool = True
    inspects: int = -1
    excused: int = -1
    excuses: int = 0

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
        """Whether the loss of ``step`` announces a check at the end of the next step."""
        return self.planned == step + 1
