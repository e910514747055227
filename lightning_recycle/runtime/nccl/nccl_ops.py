"""Operations by NCCL of one worker in one generation: transfers and sums.

Concept: one table of communicators (:mod:`~lightning_recycle.runtime.nccl.nccl_comms`), begun and aborted together, is
what both use. What the next generation may need is begun while this one runs; nothing is launched on it.

Contract: one thread calls everything here, and :meth:`NcclOps.advance` again and again while it returns True. What was
received or summed counts once it is *finished*, which happens after the device has said so, and never once
:meth:`NcclOps.abort` was called. Tensors live as long as the device may use them.
"""

from __future__ import annotations

from collections.abc import Iterable

from lightning_recycle.runtime.nccl.group_payloads import GroupPayloads
from lightning_recycle.runtime.nccl.nccl_comms import Comms, Kept, Place
from lightning_recycle.runtime.nccl.payloads import Payloads
from lightning_recycle.runtime.nccl.pending_op import Kind, Note

__all__ = ["NcclOps"]


class NcclOps:
    """The communicators of one worker in one generation, and what goes over them.

    Args:
        comms: the communicators.
        pairs: transfers between two workers.
        groups: what groups do together.
    """

    def __init__(self, comms: Comms, pairs: Payloads, groups: GroupPayloads) -> None:
        self._comms, self.pairs, self.groups = comms, pairs, groups
        self._aborted = False

    @property
    def connected(self) -> bool:
        """Whether something has gone over every communicator."""
        return self.pairs.connected and self.groups.connected

    @property
    def lost(self) -> set[int]:
        """Workers that can be told nothing any more."""
        return self.pairs.lost

    def lose(self, rank: int) -> None:
        """Nothing is launched with worker ``rank`` any more."""
        self.pairs.lost.add(rank)
        self.groups.lost.add(rank)

    def hear(self, peer: int, note: Note) -> None:
        """Takes a note of worker ``peer``.

        Raises:
            NcclError: if it makes no sense.
        """
        if note.kind is Kind.INVITE:
            self._comms.hear(note)
        else:
            (self.pairs if note.kind in (Kind.OFFER, Kind.GO) else self.groups).hear(peer, note)

    def advance(self) -> bool:
        """Does what can be done now. Returns whether to call it again soon, since the device does not call.

        Raises:
            NcclError: if something has failed.
            RuntimeError: if the device is lost.
        """
        self._comms.begin()
        pairs, groups = self.pairs.advance(), self.groups.advance()
        return pairs or groups

    def reserve(self, places: Iterable[Place]) -> None:
        """Begins communicators for the next generation, in the background. Called once.

        Raises:
            RuntimeError: if the device is lost.
        """
        self._comms.reserve(places)

    def abort(self) -> dict[Place, Kept]:
        """Ends everything; returns when the device uses none of the tensors any more. Everybody aborts: a worker's
        transfer with one that has aborted would otherwise never end. What it returns can be used in the next
        generation.
        """
        if self._aborted:
            return {}
        self._aborted = True
        kept = self._comms.abort()
        self.pairs.drop()
        self.groups.drop()
        return kept
