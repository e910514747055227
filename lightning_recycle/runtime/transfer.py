"""Sends any object from one worker to another: tensors as they are, the rest pickled around them."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch import Tensor

from lightning_recycle.runtime.communicator import Communicator

__all__ = ["receive_object", "send_object"]


class _Pickler(pickle.Pickler):
    """Sets tensors aside, each storage region once."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Tensor] = []

    def persistent_id(self, obj: Any) -> int | None:
        if type(obj) is not Tensor or obj.layout is not torch.strided:
            return None
        self.tensors.append(obj)
        return len(self.tensors) - 1


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: list[Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, pid: int) -> Tensor:
        return self._tensors[pid]


def send_object(communicator: Communicator, value: Any, destination: int) -> None:
    """Sends ``value`` to rank ``destination``; returns when it has left.

    Raises:
        CommunicationError: if the generation is aborted.
    """
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(value)
    layouts = [(t.dtype, tuple(t.shape)) for t in pickler.tensors]
    head = pickle.dumps((file.getvalue(), layouts))
    communicator.send_bytes(torch.tensor([len(head)], dtype=torch.int64), destination)
    communicator.send_bytes(torch.frombuffer(bytearray(head), dtype=torch.uint8), destination)
    for tensor in pickler.tensors:
        communicator.send_bytes(tensor, destination)


def receive_object(communicator: Communicator, source: int) -> Any:
    """Receives an object that rank ``source`` sends with :func:`send_object`; tensors arrive on the CPU.

    Raises:
        CommunicationError: if the generation is aborted.
    """
    size = torch.empty(1, dtype=torch.int64)
    communicator.receive_bytes(size, source)
    head = torch.empty(int(size), dtype=torch.uint8)
    communicator.receive_bytes(head, source)
    skeleton, layouts = pickle.loads(head.numpy().tobytes())
    tensors = []
    for dtype, shape in layouts:
        tensor = torch.empty(shape, dtype=dtype)
        communicator.receive_bytes(tensor, source)
        tensors.append(tensor)
    return _Unpickler(io.BytesIO(skeleton), tensors).load()
