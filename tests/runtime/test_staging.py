"""Which memory of the host tensors of a device go through. What it is like to be pinned shows with a device only."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_recycle.runtime.wire import HostMemory

CUDA = torch.device("cuda")
CPU = torch.device("cpu")


@pytest.fixture
def pinned(monkeypatch) -> list[bool]:
    """Whether each new tensor was to be pinned."""
    asked: list[bool] = []
    real = torch.empty

    def empty(*size: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        asked.append(pin_memory)
        return real(*size, **kwargs)

    monkeypatch.setattr(torch, "empty", empty)
    return asked


def test_memory_is_pinned_for_a_device_and_not_for_a_cpu(pinned):
    for device in (CUDA, CPU):
        tensor = HostMemory(device).empty((3, 2), torch.float64)
        assert (tensor.shape, tensor.dtype) == ((3, 2), torch.float64)
    assert pinned == [True, False]


def test_a_copy_to_the_device_is_waited_for_only_if_its_memory_is_written_again(monkeypatch):
    waited: list[bool] = []

    def to(tensor: Tensor, device: torch.device, non_blocking: bool) -> Tensor:
        waited.append(not non_blocking)
        return tensor

    monkeypatch.setattr(Tensor, "to", to)
    for is_reused in (True, False):
        HostMemory(CUDA).on_device(torch.zeros(1), is_reused)
    assert waited == [True, False]
