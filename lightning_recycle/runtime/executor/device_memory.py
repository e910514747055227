"""Bytes of tensors, and the memory of devices.

CPU memory is the machine's, or less where a control group (cgroup v1 or v2) allows less.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_recycle.devices import free_and_total, is_accelerator, peak_allocated_bytes, reset_peak_allocated
from lightning_recycle.torch_internals import tree_leaves


@contextmanager
def saved_tensors() -> Iterator[list[Tensor]]:
    """Tensors that autograd saves within the block, as they are saved."""
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        # Not the tensor itself: where it is the node's own output, that would be a cycle that is never collected if the
        # graph is dropped without a backward. Autograd attaches what it unpacks to the graph again.
        saved.append(tensor.detach())
        return saved[-1]

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield saved


def storage_bytes(values: Iterable[Any], without: Iterable[int] = ()) -> int:
    """Bytes of the tensors' storages, each once, but for addresses ``without``."""
    excluded = frozenset(without)
    sizes: dict[int, int] = {}
    for tensor in values:
        # Other layouts have several storages; dense ones are what networks save.
        if isinstance(tensor, Tensor) and tensor.layout is torch.strided:
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
