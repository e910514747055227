"""Transfers of any object between workers, as a pickle and tensors beside it.

The bytes of all tensors travel as values of some megabytes, each checked and acknowledged, several under way at a time.
They arrive on the CPU, so neither side needs room on its device.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_recycle.runtime.comm.communicator import EXCHANGE_TAG, Communicator
from lightning_recycle.runtime.comm.wire import MAX_TENSORS, Channel
from lightning_recycle.tensor_memory import memory_of, put_together, take_apart

_PART_BYTES = 4 * 1024 * 1024  # on a network of 100 Mbit/s less than a second
_PARTS_AT_ONCE = 16
_TAGS = range(EXCHANGE_TAG + 1, EXCHANGE_TAG + 1 + _PARTS_AT_ONCE)
_DONE = torch.empty(0, dtype=torch.uint8)


def send_object(communicator: Communicator, value: Any, destination: int) -> None:
    """Sends ``value`` to rank ``destination``; returns when it has arrived."""
    # Parameters are pickled whole: they arrive as what they are.
    skeleton, tensors = take_apart(value, lambda tensor: type(tensor) is Tensor and tensor.layout is torch.strided)
    layouts = [(tensor.dtype, tuple(tensor.shape)) for tensor in tensors]
    head = torch.frombuffer(bytearray(pickle.dumps((skeleton, layouts))), dtype=torch.uint8)
    _send(communicator, [torch.tensor([len(head)])], destination)
    _send(communicator, [head], destination)
    _send(communicator, [t.detach().resolve_conj().resolve_neg().contiguous() for t in tensors], destination)


def receive_object(communicator: Communicator, source: int) -> Any:
    """Receives an object from rank ``source``; tensors arrive on the CPU."""
    size = torch.empty(1, dtype=torch.int64)
    _receive(communicator, [size], source)
    head = torch.empty(int(size), dtype=torch.uint8)
    _receive(communicator, [head], source)
    skeleton, layouts = pickle.loads(head.numpy().tobytes())
    tensors = [torch.empty(shape, dtype=dtype) for dtype, shape in layouts]
    _receive(communicator, tensors, source)
    return put_together(skeleton, tensors)


def _send(communicator: Communicator, tensors: Sequence[Tensor], destination: int) -> None:
    """Sends the bytes of contiguous ``tensors``; returns when they have arrived."""
    by_device = communicator.transport.carries(destination)
    answers: deque[Any] = deque()
    for number, part in enumerate(_parts(tensors)):
        if number >= _PARTS_AT_ONCE:
            communicator.receive(answers.popleft())
        with communicator.translated:
            value = tuple(t.to(communicator.device) if by_device else communicator.memory.staged(t) for t in part)
        tag = _TAGS[number % _PARTS_AT_ONCE]
        answers.append(communicator.post_receive(Channel.GRADIENTS, destination, tag))
        communicator.send(Channel.ACTIVATIONS, value, destination, tag)
        communicator.on_progress()
    for answer in answers:
        communicator.receive(answer)
        communicator.on_progress()
    communicator.release_buffers(destination, _TAGS)


def _receive(communicator: Communicator, tensors: Sequence[Tensor], source: int) -> None:
    """Fills contiguous ``tensors`` of the CPU with the bytes of :func:`_send`."""
    parts = _parts(tensors)
    posted = deque(communicator.post_receive(Channel.ACTIVATIONS, source, tag) for tag in _TAGS[: len(parts)])
    for number, part in enumerate(parts):
        tag = _TAGS[number % _PARTS_AT_ONCE]
        for place, found in zip(part, communicator.receive(posted.popleft(), to_device=False), strict=True):
            place.copy_(found)
        if number + _PARTS_AT_ONCE < len(parts):
            posted.append(communicator.post_receive(Channel.ACTIVATIONS, source, tag))
        communicator.send(Channel.GRADIENTS, _DONE, source, tag)
        communicator.on_progress()
    communicator.release_buffers(source, _TAGS)


def _parts(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """The bytes of contiguous ``tensors`` in pieces, grouped into messages."""
    found: list[list[Tensor]] = []
    room = 0
    for tensor in tensors:
        for piece in memory_of(tensor).split(_PART_BYTES) if tensor.numel() else ():
            if piece.nbytes > room or len(found[-1]) == MAX_TENSORS:
                found.append([])
                room = _PART_BYTES
            found[-1].append(piece)
            room -= piece.nbytes
    return found
