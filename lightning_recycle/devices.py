"""Streams, generators, memory and names of a device, whatever its kind.

``torch.accelerator`` answers for any kind; for what it lacks, the kind's own module (``torch.cuda``, ``torch.xpu``,
``torch.npu``), whose functions have the same names. No other module outside of ``runtime/nccl`` names a kind of
accelerator. A device means the one with its index; its current stream is that of the calling thread. CPU memory is the
machine's, or less where a control group (cgroup v1 or v2) allows less.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import resource
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_recycle.torch_internals import (
    hooks_outside_of_transforms,
    is_registered_from_outside,
    is_transforming,
    is_zero_tensor,
    moved_by_swaps,
    tree_leaves,
)

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

    def __init__(self, target: Callable[[], object], name: str) -> None:
        super().__init__(target=target, name=name, daemon=True)
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


@contextmanager
def saved_tensors() -> Iterator[list[Tensor]]:
    """Tensors that autograd saves within the block, as they are saved."""
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        if is_transforming():
            return tensor
        # Not the tensor itself: where it is the node's own output, that would be a cycle that is never collected if the
        # graph is dropped without a backward. Autograd attaches what it unpacks to the graph again.
        saved.append(tensor.detach())
        return saved[-1]

    with hooks_outside_of_transforms(torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)):
        yield saved


def storage_bytes(values: Iterable[Any], without: Iterable[int] = ()) -> int:
    """Bytes of the tensors' storages, each once, but for addresses ``without``."""
    excluded = frozenset(without)
    sizes: dict[int, int] = {}
    for tensor in values:
        # Other layouts have several storages; dense ones are what networks save.
        if isinstance(tensor, Tensor) and tensor.layout is torch.strided and not is_zero_tensor(tensor):
            storage = _with_memory(tensor).untyped_storage()
            if storage.data_ptr() not in excluded:
                sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def _with_memory(tensor: Tensor) -> Tensor:
    """The tensor with memory in a wrapper, such as the part of a DTensor."""
    while hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        tensor = getattr(tensor, names[0])
    return tensor


def tensor_bytes(value: Any) -> int:
    """Bytes of the tensors in ``value``."""
    return sum(leaf.nbytes for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


_CGROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")
_peaks: dict[torch.device, int] = {}  # of devices, before they were reset


def device_place(device: torch.device) -> str:
    """The name of the memory of ``device``: the machine, or one of its accelerators."""
    if device.type == "cpu":
        return socket.gethostname()
    return f"{socket.gethostname()}/{device.type}:{device.index or 0}"


def device_bytes(device: torch.device) -> int:
    """Bytes of memory that ``device`` has."""
    return free_and_total(device)[1] if is_accelerator(device) else machine_bytes()


def machine_bytes(cgroups: Path = _CGROUPS, membership: Path = _MEMBERSHIP) -> int:
    """Bytes of memory available to this machine, container or job."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([total, *(limit for limit, _ in _cgroup_limits(cgroups, membership))])


def free_bytes(peers: int, cgroups: Path = _CGROUPS, membership: Path = _MEMBERSHIP) -> float:
    """Bytes that processes of this machine or container may still take.

    Assumes that ``peers`` of them grow to this one's peak; infinite where that is unknown.
    """
    try:
        (available,) = _bytes_in("/proc/meminfo", "MemAvailable")
        resident, most = _bytes_in("/proc/self/status", "VmRSS", "VmHWM")
    except (OSError, KeyError):  # not on Linux
        return float("inf")
    free = [limit - used for limit, used in _cgroup_limits(cgroups, membership)]
    return min([available, *free]) - peers * (most - resident)


def _bytes_in(path: str, *names: str) -> list[int]:
    with open(path, encoding="ascii") as file:
        found = {name: value for name, _, value in (line.partition(":") for line in file)}
    return [int(found[name].split()[0]) * 1024 for name in names]


def _cgroup_limits(cgroups: Path, membership: Path) -> Iterator[tuple[int, int]]:
    """Limits and use of this process's control groups and their parents.

    Without files that the kernel keeps in memory only as long as no process needs it.
    """
    lines = []
    with contextlib.suppress(OSError):  # not on Linux, or without /proc
        lines = membership.read_text().splitlines()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, name, used, kept = cgroups, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            root, name = cgroups / "memory", "memory.limit_in_bytes"
            used, kept = "memory.usage_in_bytes", "total_inactive_file"
        else:
            continue
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder == root.parent:
                break
            # A container often sees its own group as the root, so the path of the outside does not exist.
            with contextlib.suppress(OSError, ValueError):  # also "max": no limit
                limit, uses = int((folder / name).read_text()), 0
                with contextlib.suppress(OSError, KeyError, ValueError):
                    files = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                    uses = int((folder / used).read_text()) - int(files[kept])
                yield limit, uses


def peak_bytes(device: torch.device) -> int:
    """The most memory of ``device`` that this process has held.

    On an accelerator bytes of tensors by torch's allocator; on a CPU resident memory, with libraries.
    """
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return max(_peaks.get(device, 0), peak_allocated_bytes(device) if is_accelerator(device) else resident)


def reset_peak(device: torch.device) -> None:
    """Begins a new peak of allocator or kernel; :func:`peak_bytes` keeps the old one."""
    _peaks[device] = peak_bytes(device)
    if is_accelerator(device):
        reset_peak_allocated(device)
        return
    with contextlib.suppress(OSError):  # not on Linux, or /proc cannot be written
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def process_bytes(device: torch.device) -> int:
    """Bytes of ``device``'s memory that this process uses now, tensors included."""
    if is_accelerator(device):
        # What others use of the device is not known: the context is about what is missing from the free memory.
        free, total = free_and_total(device)
        return max(0, total - free)
    with contextlib.suppress(OSError), open("/proc/self/statm", encoding="ascii") as file:  # elsewhere: unknown
        _, resident, shared, *_ = map(int, file.read().split())
        return (resident - shared) * os.sysconf("SC_PAGE_SIZE")
    return 0
