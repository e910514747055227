"""The simulated device sees: what is left out of the package in the workers makes a training fail or come out wrong."""

import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from support.models import Regression
from support.training import exact_fit
from torch import Tensor

from lightning_recycle import devices, randomness, strategy, tensor_memory
from lightning_recycle.runtime import stage
from lightning_recycle.runtime.wire import HostMemory
from simulated_device.test_training import drawn, monitored, sent_apart, written_without_copies


def _a_wait_left_out() -> None:
    """What is sent is read before it has come to the host."""

    def staged(self: HostMemory, tensor: Tensor) -> Tensor:
        return self.empty(tensor.shape, tensor.dtype).copy_(tensor, non_blocking=True)

    HostMemory.staged = staged


def _a_buffer_given_back_early() -> None:
    """What has come is still being copied to the device when the next value arrives in the same memory."""
    buffers: dict[Any, Tensor] = {}
    empty = HostMemory.empty

    def reused(self: HostMemory, shape: Any, dtype: torch.dtype = torch.uint8) -> Tensor:
        key = (tuple(shape), dtype)
        if key not in buffers:
            buffers[key] = empty(self, shape, dtype)
        return buffers[key]

    HostMemory.empty = reused


def _a_tensor_sent_with_its_device() -> None:
    tensor_memory._BytesPickler.reducer_override = lambda self, value: NotImplemented


def _a_generator_not_seeded() -> None:
    randomness.default_generator = stage.default_generator = lambda device: torch.default_generator


def _a_thread_on_the_first_device() -> None:
    devices.DeviceThread.run = threading.Thread.run


def _parameters_replaced_when_moved() -> None:
    strategy.moved_in_place = lambda device: nullcontext()


class Mutant(L.Callback):
    """Leaves something out of the package, in workers alone."""

    def __init__(self, change: Callable[[], None]) -> None:
        self._change = change

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._change()


def trained(folder: Path, callbacks: Any) -> None:
    exact_fit(Regression().double(), 2, 2, callbacks=callbacks)


MUTANTS: list[tuple[Callable[[], None], Callable[[Path, Any], None]]] = [
    (_a_wait_left_out, sent_apart),
    (_a_buffer_given_back_early, sent_apart),
    (_a_tensor_sent_with_its_device, lambda folder, callbacks: monitored("undisturbed", folder, callbacks)),
    (_a_generator_not_seeded, lambda folder, callbacks: drawn("killed", callbacks)),
    (_a_thread_on_the_first_device, written_without_copies),
    (_parameters_replaced_when_moved, trained),
]


@pytest.mark.parametrize(("change", "train"), MUTANTS, ids=[change.__name__ for change, _ in MUTANTS])
def test_what_is_left_out_shows(change, train, tmp_path):
    with pytest.raises(Exception) as caught:  # noqa: PT011
        train(tmp_path, [Mutant(change)])
    print(type(caught.value), str(caught.value)[:500])
