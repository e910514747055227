"""Sends any object from one worker to another: tensors as they are, the rest pickled around them.

Large tensors of a device go from device to device where the transport can do that; they all arrive on the CPU, a part
after the other, so neither side needs room for them on its device.
"""

from __future__ import annotations

import pickle
from typing import Any

import torch
from torch import Tensor

from lightning_recycle.model.apart import put_together, take_apart
from lightning_recycle.runtime.byte_streams import ByteReceiver, ByteSender
from lightning_recycle.runtime.communicator import Communicator
from lightning_recycle.runtime.message_sums import sum_of_tensors

__all__ = ["receive_object", "send_object"]


def send_object(communicator: Communicator, value: Any, destination: int) -> None:
    """Sends ``value`` to rank ``destination``; returns when it has arrived.

    Raises:
        CommunicationError: if the generation is aborted.
    """
    # Parameters are pickled whole: they arrive as what they are.
    skeleton, tensors = take_apart(value, lambda tensor: type(tensor) is Tensor and tensor.layout is torch.strided)
    carried = [communicator.carries(tensor, destination) for tensor in tensors]
    layouts = [(t.dtype, tuple(t.shape), by_device) for t, by_device in zip(tensors, carried, strict=True)]
    head = torch.frombuffer(bytearray(pickle.dumps((skeleton, layouts))), dtype=torch.uint8)
    stream = ByteSender(communicator, destination)
    stream.put(torch.tensor([len(head), ~len(head), sum_of_tensors([head])], dtype=torch.int64))
    stream.put(head)
    for tensor, by_device in zip(tensors, carried, strict=True):
        stream.put(tensor, by_device)
    stream.end()


def receive_object(communicator: Communicator, source: int) -> Any:
    """Receives an object that rank ``source`` sends with :func:`send_object`; tensors arrive on the CPU.

    Raises:
        CommunicationError: if the generation is aborted, or something arrives otherwise than it was sent.
    """
    stream = ByteReceiver(communicator, source)
    size = torch.empty(3, dtype=torch.int64)
    stream.take(size)
    stream.wait()
    length, inverted, total = size.tolist()
    if length != ~inverted:
        raise communicator.damaged(source)
    head = torch.empty(length, dtype=torch.uint8)
    stream.take(head)
    stream.wait()
    if sum_of_tensors([head]) != total:
        raise communicator.damaged(source)
    skeleton, layouts = pickle.loads(head.numpy().tobytes())
    tensors = []
    for dtype, shape, by_device in layouts:
        tensors.append(torch.empty(shape, dtype=dtype))
        stream.take(tensors[-1], by_device)
    stream.end()
    return put_together(skeleton, tensors)
