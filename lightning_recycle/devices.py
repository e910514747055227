"""Streams, generators, memory and names of a device, whatever its kind.

``torch.accelerator`` answers for any kind; for what it lacks, the kind's own module (``torch.cuda``, ``torch.xpu``,
``torch.npu``), whose functions have the same names. No other module outside of ``runtime/nccl`` names a kind of
accelerator. A device means the one with its index; its current stream is that of the calling thread.
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_recycle.torch_internals import is_registered_from_outside, moved_by_swaps

HARDWARE_ERRORS = re.compile(
    r"(CUDA|HIP|XPU|NPU|ACL|Level.?Zero) (driver )?error|CUDNN_STATUS_|cuDNN error|CUBLAS_STATUS_|CUSPARSE_STATUS_"
    r"|CUSOLVER_STATUS_|MIOPEN_STATUS_|UR_RESULT_ERROR_|UR error|EZ\d{4}:"
)
"""In messages of a RuntimeError: older versions of torch, and libraries of devices, have no class of their own."""

GRAPH_MAKER = "torch.cuda.make_graphed_callables"
"""It lets a layer run from a recorded graph, with one set of activations."""

UNSAFE_IN_GRAPHS = getattr(torch.Tag, "cudagraph_unsafe", None)
"""Tag of operators that are left out of recorded graphs; None if torch has none."""

CAPTURING: Any = Tensor.is_cuda.__get__  # type: ignore[attr-defined]
"""Asks a tensor for its kind of device, as torch does before it records a graph."""


@functools.cache  # torch makes a new string each time that it is asked for a kind
def is_accelerator(device: torch.device) -> bool:
    """Whether the host cannot touch tensors on ``device``."""
    return device.type not in ("cpu", "meta")


def _call(device: torch.device, *names: str) -> Any:
    for owner in (torch.get_device_module(device), torch.accelerator):
        for name in names:
            if hasattr(owner, name):
                return getattr(owner, name)
    raise NotImplementedError(f"torch {torch.__version__} has no {names[0]}() for {device.type}.")


# ---------------------------------------------------------------------- streams and threads


def enter_device(device: torch.device) -> None:
    """Makes ``device`` the current one of the calling thread."""
    if is_accelerator(device) and device.index is not None:
        torch.accelerator.set_device_index(device.index)


def await_stream(device: torch.device) -> None:
    """Waits for what the current stream was asked to do; a CPU has done it."""
    if is_accelerator(device):
        torch.accelerator.current_stream(device).synchronize()


def new_event(device: torch.device) -> Any:
    """An event that takes times, of the kind of ``device``."""
    return torch.get_device_module(device).Event(enable_timing=True)


class DeviceThread(threading.Thread):
    """A daemon thread whose current device is that of the thread that makes it."""

    def __init__(self, target: Callable[..., object], name: str, args: tuple[Any, ...] = ()) -> None:
        super().__init__(target=target, name=name, args=args, daemon=True)
        # A process that has not used its accelerator yet, such as the launching one, does not begin to by this.
        self._index = torch.accelerator.current_device_index() if torch.accelerator.is_available() else None

    def run(self) -> None:
        if self._index is not None:
            torch.accelerator.set_device_index(self._index)
        super().run()


# ---------------------------------------------------------------------- generators


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that layers on ``device`` draw from."""
    if not is_accelerator(device):
        return torch.default_generator
    index = torch.accelerator.current_device_index() if device.index is None else device.index
    generator: torch.Generator = torch.get_device_module(device).default_generators[index]
    return generator


# ---------------------------------------------------------------------- memory


def allocated_bytes(device: torch.device) -> int:
    """Bytes of this process's tensors on an accelerator."""
    return int(_call(device, "memory_allocated")(device))


def peak_allocated_bytes(device: torch.device) -> int:
    """The peak of :func:`allocated_bytes` since :func:`reset_peak_allocated`."""
    return int(_call(device, "max_memory_allocated")(device))


def reset_peak_allocated(device: torch.device) -> None:
    """Lets the allocator find a new peak."""
    _call(device, "reset_peak_memory_stats")(device)


def release_cache(device: torch.device) -> None:
    """Gives memory back that torch keeps for the next tensors."""
    if is_accelerator(device):
        _call(device, "empty_cache")()


def free_and_total(device: torch.device) -> tuple[int, int]:
    """Free bytes of an accelerator, and all of its bytes."""
    free, total = _call(device, "mem_get_info", "get_memory_info")(device)
    return int(free), int(total)


# ---------------------------------------------------------------------- names


def hardware_name(device: torch.device) -> str:
    """Of an accelerator: two of the same name compute the same bits."""
    module: Any = torch.get_device_module(device)
    return str(module.get_device_name(device)) if hasattr(module, "get_device_name") else device.type


def ray_resource(device: torch.device) -> str | None:
    """The name by which Ray counts devices of this kind; None for a CPU."""
    if not is_accelerator(device):
        return None
    return {"npu": "NPU", "hpu": "HPU", "xla": "TPU"}.get(device.type, "GPU")


# ---------------------------------------------------------------------- modules


@contextmanager
def moved_in_place(device: torch.device, module: nn.Module | None, shards: bool = False) -> Iterator[None]:
    """Within the block, moving a module to or from ``device`` keeps its parameters.

    Otherwise a kind of device that is registered from outside of torch would get other parameters than optimizers know.
    With ``shards``, FSDP2 may move them.
    """
    if not is_registered_from_outside(device) or module is None or any(map(is_lazy, module.parameters())):
        yield
        return
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with moved_by_swaps() if shards else nullcontext():
            yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
