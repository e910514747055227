"""Sums and broadcasts over the workers of a stage, or of several stages.

What is small is summed without Gloo (:mod:`~lightning_recycle.runtime.comm.small_allreduce`), over connections of its
own; what the transport takes goes from device to device; the rest is Gloo's, by way of the host's memory.

A collective of Gloo's, which sends and receives inside, does not notice that its sockets are shut down while something
is under way. So it is checked every 0.1 s, and a group with a collective that does not end is abandoned with its
thread, which ends at the timeout; its tensor then belongs to that thread.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.distributed_c10d import AllreduceOptions, BroadcastOptions, ReduceOp

from lightning_recycle.runtime.comm.connections import LAST_LOOK, Connections, keep_for_ever, tie_name
from lightning_recycle.runtime.comm.groups import Group

_CHUNK_BYTES = 32 * 1024 * 1024  # of a reduction: a network of 100 Mbit/s takes seconds for it
_DEVICE_CHUNK_BYTES = 128 * 1024 * 1024  # the same from device to device, where each part costs notes to and fro
_OF_THIS_MACHINE = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)


@dataclass(frozen=True, eq=False)
class Reduction:
    """A sum over one stage or several, or a broadcast, that is under way.

    Args:
        parts: each a view of the tensor, what Gloo exchanges, and its work.
        carried: what the transport has begun instead.
    """

    group: Any = None
    parts: tuple[tuple[Tensor, Tensor, Any], ...] = ()
    carried: tuple[Any, ...] = ()


class GroupSums:
    """The sums and broadcasts that one worker takes part in."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections

    def all_reduce(self, tensor: Tensor) -> None:
        """Sums ``tensor`` in place over the live workers of this stage; the same bits on all of them."""
        small = self._connections.small_allreduce
        if small is None or not small.takes(tensor):
            self.end_all_reduce(self.begin_all_reduce(tensor))
            return
        with self._connections.translated:
            staged = tensor.cpu()
            try:
                small.sum(staged)
            except OSError as error:
                if error.errno in _OF_THIS_MACHINE:
                    raise
                raise ConnectionError(f"a sum over the stage: {error}") from error
            if staged is not tensor:
                tensor.copy_(staged)
        self._connections.on_progress()

    def sums_at_once(self, tensor: Tensor) -> bool:
        """Whether :meth:`all_reduce` sums ``tensor`` without Gloo; the same on all workers of the stage."""
        small = self._connections.small_allreduce
        return small is not None and small.takes(tensor)

    @property
    def sums_in_one_order(self) -> bool:
        """Whether sums of one group may wait for those of another that were begun before."""
        return self._connections.transport.in_one_order

    @property
    def has_peers(self) -> bool:
        """Whether the stage has other live workers."""
        return self._stage.whole is not None

    @property
    def _stage(self) -> Group:
        return self._connections.rosters.get(self._connections.stage_name, Group())

    def begin_all_reduce(self, tensor: Tensor, stages: tuple[int, ...] = ()) -> Reduction:
        """Begins a sum as that of :meth:`all_reduce`, in the background; over the workers of ``stages``, which hold a
        tie, if they are given. Until :meth:`end_all_reduce` ``tensor``, which is contiguous, must not be touched.

        All workers of a group begin the same sums and broadcasts in the same order; with :attr:`sums_in_one_order` also
        those of several groups, in orders that agree.
        """
        return self._begin(tie_name(stages) if stages else self._connections.stage_name, tensor)

    def begin_broadcast(self, tensor: Tensor, stages: tuple[int, ...], source: int) -> Reduction:
        """The same, but ``tensor`` is overwritten with that of rank ``source``."""
        return self._begin(tie_name(stages) if stages else self._connections.stage_name, tensor, source)

    def _begin(self, roster: str, tensor: Tensor, source: int | None = None) -> Reduction:
        self._connections.check()
        group = self._connections.rosters.get(roster, Group())
        whole = group.whole
        if whole is None:
            return Reduction()
        if self._connections.transport.takes(roster, tensor):
            with self._connections.translated:
                begin, parts = self._connections.transport.begin_collective, _parts(tensor, _DEVICE_CHUNK_BYTES)
                return Reduction(carried=tuple(begin(roster, part, source) for part in parts))
        options: Any = AllreduceOptions() if source is None else BroadcastOptions()
        if source is None:
            start, options.reduceOp = whole.allreduce, ReduceOp.SUM
        else:
            start, options.rootRank = whole.broadcast, group.places[source]
        with self._connections.translated:
            staged = ((part, self._connections.memory.staged(part)) for part in _parts(tensor))
            return Reduction(whole, tuple((part, copy, start([copy], options)) for part, copy in staged))

    def end_all_reduce(self, reduction: Reduction) -> None:
        """Waits until the tensor holds the sum, or what was broadcast."""
        for begun in reduction.carried:
            self._end_carried(begun)
        for part, staged, work in reduction.parts:
            self._end_part(reduction.group, part, staged, work)

    def abandon(self, reduction: Reduction) -> bool:
        """Gives up a reduction of an earlier generation, whose connections are closed. Returns whether its tensor's
        memory is free again: not if the sum goes on there, as one of Gloo's may.
        """
        for part, staged, work in reduction.parts:
            try:
                work.wait(LAST_LOOK)
            except RuntimeError:  # its own error, or it goes on
                if not work.is_completed():
                    keep_for_ever(reduction.group)
                    if staged is part:
                        return False
        return True

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Overwrites ``tensor`` in place with that of rank ``source`` of the same stage."""
        self.end_all_reduce(self.begin_broadcast(tensor, (), source))

    def _end_carried(self, begun: Any) -> None:
        with self._connections.translated:
            self._connections.transport.end_collective(begun)
        self._connections.on_progress()

    def _end_part(self, group: Any, part: Tensor, staged: Tensor, work: Any) -> None:
        self._connections.await_collective(group, work)
        if staged is not part:
            part.copy_(staged)
        self._connections.on_progress()


def _parts(tensor: Tensor, most_bytes: int = _CHUNK_BYTES) -> tuple[Tensor, ...]:
    """A contiguous ``tensor`` in parts that collectives take at once."""
    parts: tuple[Tensor, ...] = tensor.view(-1).split(most_bytes // tensor.element_size())
    return parts
