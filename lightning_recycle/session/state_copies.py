"""Copies of a worker's state at a step boundary, made while the training goes on.

Must not know: what they are for.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from lightning_recycle.devices import is_accelerator
from lightning_recycle.session.optimizer_states import copied, fits
from lightning_recycle.tensor_memory import has_plain_memory
from lightning_recycle.torch_internals import version_of

_PIECE = 1 << 20  # bytes that are copied at once
_LARGE = 1 << 18  # bytes of a tensor whose copy is worth an entry in a list


class StateCopies:
    """Copies of the tensors of one step boundary, on the CPU.

    Memory of copies that are not needed any more is used again. Large tensors that only STEP writes are copied after
    the boundary, piece by piece, by the thread that writes them, and at the latest by the training before its next
    STEP.

    Args:
        old: the copies of an earlier boundary, which are not read any more.

    Attributes:
        are_originals: whether there is no memory for copies: then they are the tensors themselves.
    """

    def __init__(self, old: StateCopies | None = None) -> None:
        self.are_originals = False
        self._memory: dict[Any, Tensor] = {} if old is None else old._by_place
        self._by_place: dict[Any, Tensor] = {}
        self._made: dict[Any, tuple[Tensor, Tensor]] = {}  # with the original, so that its address stays its own
        self._owed: deque[tuple[Tensor, Tensor, int]] = deque()  # pieces: original, copy, the original's version
        self._changed, self._under_way, self._is_torn = threading.Condition(), 0, False

    def limit(self, needed: int, free: float) -> bool:
        """Whether copies of ``needed`` bytes in all fit into ``free`` ones more."""
        there = sum(copy.nbytes for copy in (*self._memory.values(), *(copy for _, copy in self._made.values())))
        self.are_originals = needed - there > free
        if self.are_originals:
            self._memory.clear()
        return not self.are_originals

    def take(self, value: Any, place: tuple[Any, ...] = (), until_step: bool = False) -> Any:
        """A copy of ``value``.

        A tensor that was copied already, and not written since, has the same copy.

        Args:
            place: the place of ``value`` in the state, where its copy was at an earlier boundary.
            until_step: whether nothing writes large tensors before the next STEP, so that :meth:`finish` copies them.
        """
        if isinstance(value, Tensor):
            return self._copy(value, place, until_step)
        if isinstance(value, Mapping):
            return {key: self.take(item, (*place, key), until_step) for key, item in value.items()}
        if type(value) in (list, tuple):
            return type(value)(self.take(item, (*place, n), until_step) for n, item in enumerate(value))
        return deepcopy(value)

    def finish(self) -> bool:
        """Makes the copies that are left, together with the other thread.

        Returns when all are made, and whether they are of the boundary: whether no original was written before.
        """
        while True:
            with self._changed:
                if not self._owed:
                    self._changed.wait_for(lambda: not self._under_way)
                    return not self._is_torn
                original, copy, version = self._owed.popleft()
                self._under_way += 1
            is_whole = False
            try:
                with torch.no_grad():
                    copy.copy_(original)
                is_whole = version_of(original) == version
            finally:
                with self._changed:
                    self._is_torn = self._is_torn or not is_whole
                    self._under_way -= 1
                    self._changed.notify_all()

    def forget_originals(self) -> None:
        """The boundary is over: what is copied from now on is of another one."""
        self._made.clear()

    def _copy(self, tensor: Tensor, place: tuple[Any, ...], until_step: bool) -> Tensor:
        if self.are_originals:
            return tensor.detach()
        is_plain = has_plain_memory(tensor) and not is_accelerator(tensor.device)
        if not is_plain or tensor.is_inference():  # which has no version
            return tensor.detach().clone().cpu()
        key = (tensor.data_ptr(), version_of(tensor), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        known = self._made.get(key)
        if known is None:
            known = self._made[key] = (tensor, self._new_copy(tensor, self._memory.pop(place, None), until_step))
        self._by_place[place] = known[1]
        return known[1]

    @torch.no_grad()
    def _new_copy(self, tensor: Tensor, old: Tensor | None, until_step: bool) -> Tensor:
        if not (until_step and tensor.nbytes >= _LARGE and tensor.is_contiguous()):
            copy: Tensor = copied(tensor.detach(), old)
            return copy
        copy = old if old is not None and fits(old, tensor) and old.is_contiguous() else torch.empty_like(tensor)
        size = _PIECE // tensor.itemsize
        pieces = zip(tensor.detach().view(-1).split(size), copy.view(-1).split(size), strict=True)
        with self._changed:
            self._owed.extend((*piece, version_of(tensor)) for piece in pieces)
        return copy
