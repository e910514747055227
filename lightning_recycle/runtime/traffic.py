"""All that one worker does by NCCL in one generation: transfers between two, and what groups do together.

Concept: all communicators are begun before any is waited for, as others may begin them in another order, and all are
aborted together, as the end of one waits for the device, and so for the kernels of those that are not aborted yet.

Contract: one thread calls everything here, and :meth:`Traffic.advance` again and again while it returns True. What was
received or summed counts once it is *finished*, which happens after the device has said so, and never once
:meth:`Traffic.abort` was called. Tensors live as long as the device may use them.
"""

from __future__ import annotations

from lightning_recycle.runtime.group_payloads import GroupPayloads
from lightning_recycle.runtime.nccl import NcclLibrary
from lightning_recycle.runtime.payload_notes import Kind, Note
from lightning_recycle.runtime.payloads import Payloads

__all__ = ["Traffic"]


class Traffic:
    """The communicators of one worker in one generation, and what goes over them.

    Args:
        library: NCCL.
        pairs: transfers between two workers.
        groups: what groups do together.
    """

    def __init__(self, library: NcclLibrary, pairs: Payloads, groups: GroupPayloads) -> None:
        self._library, self.pairs, self.groups = library, pairs, groups
        self._begun = self._aborted = False

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
        (self.pairs if note.kind in (Kind.OFFER, Kind.GO) else self.groups).hear(peer, note)

    def advance(self) -> bool:
        """Does what can be done now. Returns whether to call it again soon, since the device does not call.

        Raises:
            NcclError: if something has failed.
            RuntimeError: if the device is lost.
        """
        if not self._begun:
            self._begun = True
            self.pairs.begin_communicators()
            self.groups.begin_communicators()
        pairs, groups = self.pairs.advance(), self.groups.advance()
        return pairs or groups

    def abort(self) -> None:
        """Ends everything; returns when the device uses none of the tensors any more. Everybody aborts: a worker's
        transfer with one that has aborted would otherwise never end.
        """
        if self._aborted:
            return
        self._aborted = True
        self._library.group_start()
        for comm in (*self.pairs.communicators, *self.groups.communicators):
            self._library.abort(comm)
        self._library.group_end()
        self.pairs.drop()
        self.groups.drop()
