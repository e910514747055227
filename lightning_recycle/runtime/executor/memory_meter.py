"""Bytes that a worker holds for a micro-batch, and the memory of its device.

All is measured once, in the second step that a worker runs, on every micro-batch of that step. What a micro-batch holds
after F is what autograd saves (or, on CUDA, what the allocator gave out meanwhile, and the input of the stage); after B
it is what the queued weight gradients hold; after an F that is computed again it would be the stage's input. On CUDA
the allocator also knows what an operation takes while it runs, by its peak; that is reset for each operation of
the step that is measured (``torch.cuda.reset_peak_memory_stats``). In that step every backward is split, also where the
plan fuses it, so that both are known. The values are the same, and one step is a little slower. A step with forwards
that are computed again is not measured: others have measured the stage before.

The memory of a CPU is the machine's, or less where a control group (cgroup v1 or v2, as containers and batch systems
set them) allows less.

Must not know: schedules, peers.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_recycle.planning.profile import Footprint
from lightning_recycle.runtime.stage.stage import Kept

__all__ = [
    "MemoryMeter",
    "device_bytes",
    "device_place",
    "machine_bytes",
    "message_bytes",
    "peak_bytes",
    "process_bytes",
    "reset_peak",
    "saved_tensors",
    "storage_bytes",
]

_MEASURED = 2  # the step that is measured: the first one compiles, warms up, and creates the optimizer's state


class MemoryMeter:
    """Measures one worker.

    Args:
        device: where the tensors are.
        held: returns the tensors that the worker holds between two steps.

    Attributes:
        may_split: whether backwards may be split.
        recomputes: whether forwards are computed again.
    """

    def __init__(self, device: torch.device, held: Callable[[], Iterable[Tensor]]) -> None:
        self.may_split = True
        self.recomputes = False
        self._device = device
        self._held = held
        self._steps: set[int] = set()
        self._measures = False
        self._overhead = max(0, process_bytes(device) - storage_bytes(held()))
        self._own: set[int] = set()
        self._after_forward = self._after_backward = self._checkpoint = self._received = self._sent = 0
        self._temporary = 0

    @property
    def splits(self) -> bool:
        """Whether every backward of this step is to be split."""
        return self._measures and self.may_split

    def begin(self, step: int | None, buffers: Iterable[Tensor] = ()) -> None:
        """A step begins.

        Args:
            step: the step; one that runs again counts once. None: only a part of a step, which is not measured.
            buffers: those for messages, which are counted by the size of the messages.
        """
        if self.recomputes:
            step = None
        if step is not None:
            self._steps.add(step)
        self._measures = step is not None and len(self._steps) == _MEASURED
        if self._measures:
            self._own = {tensor.untyped_storage().data_ptr() for tensor in chain(self._held(), buffers)}

    @contextmanager
    def operation(self, timed: AbstractContextManager[None]) -> Iterator[None]:
        """Wraps each operation, which is ``timed``; measures what it takes while it runs besides what was there before,
        or is afterwards.
        """
        with timed:
            if self._measures and self._device.type == "cuda":
                with self._peak():
                    yield
            else:
                yield

    @contextmanager
    def _peak(self) -> Iterator[None]:
        before = torch.cuda.memory_allocated(self._device)
        reset_peak(self._device)
        yield
        peak, after = torch.cuda.max_memory_allocated(self._device), torch.cuda.memory_allocated(self._device)
        self._temporary = max(self._temporary, peak - max(before, after))

    @contextmanager
    def forward(self, keep: Callable[[], Kept]) -> Iterator[None]:
        """Wraps the F of one micro-batch; ``keep`` returns what would be kept of it if it were computed again."""
        if not self._measures:
            yield
            return
        kept = keep()
        with self._graph():
            yield
        kept.ran()
        self._checkpoint = max(self._checkpoint, storage_bytes(kept.tensors(), self._own))

    @contextmanager
    def _graph(self) -> Iterator[None]:
        """Measures the graph that is made within the block."""
        if self._device.type == "cuda":
            before = torch.cuda.memory_allocated(self._device)
            yield
            self._after_forward = max(self._after_forward, torch.cuda.memory_allocated(self._device) - before)
            return
        with saved_tensors() as saved:
            yield
        self._after_forward = max(self._after_forward, storage_bytes(saved, self._own))

    @contextmanager
    def backward(self, waiting: Callable[[], Iterable[Tensor]]) -> Iterator[None]:
        """Wraps the B of one micro-batch; ``waiting`` returns the tensors that its W needs."""
        yield
        if self._measures:
            self._after_backward = max(self._after_backward, storage_bytes(waiting(), self._own))

    def received(self, value: Any) -> None:
        """``value`` has come from another stage for one micro-batch."""
        if self._measures:
            self._received = max(self._received, message_bytes(value))

    def sent(self, value: Any) -> None:
        """``value`` goes to another stage for one micro-batch."""
        if self._measures:
            self._sent = max(self._sent, message_bytes(value))

    def footprint(self) -> Footprint | None:
        """The measurements, once the step that is measured has been applied."""
        if not self._measures:
            return None
        # Activations and gradients have the same size; each message has a buffer at both ends, in host memory. On a
        # device its tensors are the stage's input, which is there before the F that is measured.
        on_host = self._device.type == "cpu"
        staged, received = (2 * (self._received + self._sent), 0) if on_host else (0, self._received)
        return Footprint(
            place=device_place(self._device),
            capacity=device_bytes(self._device),
            overhead=self._overhead,
            fixed=storage_bytes(self._held()),
            messages=staged,
            after_forward=self._after_forward + received,
            after_backward=self._after_backward,
            checkpoint=self._checkpoint,
            temporary=self._temporary,
        )


@contextmanager
def saved_tensors() -> Iterator[list[Tensor]]:
    """The tensors that autograd saves within the block, as they are saved."""
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        # Not the tensor itself: where it is the node's own output, that would be a cycle that is never collected if the
        # graph is dropped without a backward. Autograd attaches what it unpacks to the graph again.
        saved.append(tensor.detach())
        return saved[-1]

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield saved


def storage_bytes(tensors: Iterable[Tensor], without: Iterable[int] = ()) -> int:
    """Bytes of the storages of ``tensors``, each once; those at the addresses ``without`` do not count."""
    excluded = frozenset(without)
    sizes: dict[int, int] = {}
    for tensor in tensors:
        if tensor.layout is torch.strided:  # others have several storages; dense ones are what networks save
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in excluded:
                sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def message_bytes(value: Any) -> int:
    """Bytes of the tensors that are sent as ``value``."""
    tensors = value if isinstance(value, tuple) else (value,)
    return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, Tensor))


_CGROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")
_peaks: dict[torch.device, int] = {}  # of devices, before they were reset


def device_place(device: torch.device) -> str:
    """The name of the memory that tensors on ``device`` take: that of the machine, or of one of its accelerators."""
    if device.type == "cpu":
        return socket.gethostname()
    return f"{socket.gethostname()}/{device.type}:{device.index or 0}"


def device_bytes(device: torch.device) -> int:
    """Bytes of memory that ``device`` has."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return machine_bytes()


def machine_bytes(cgroups: Path = _CGROUPS, membership: Path = _MEMBERSHIP) -> int:
    """Bytes of memory that the processes of this machine, container or job may use."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([total, *_cgroup_limits(cgroups, membership)])


def _cgroup_limits(cgroups: Path, membership: Path) -> Iterator[int]:
    """The limits of the control groups that this process is in, and of those that contain them."""
    lines = []
    with contextlib.suppress(OSError):  # not on Linux, or without /proc
        lines = membership.read_text().splitlines()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, name = cgroups, "memory.max"
        elif "memory" in controllers.split(","):
            root, name = cgroups / "memory", "memory.limit_in_bytes"
        else:
            continue
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder == root.parent:
                break
            # A container often sees its own group as the root, so the path of the outside does not exist.
            with contextlib.suppress(OSError, ValueError):  # also "max": no limit
                yield int((folder / name).read_text())


def peak_bytes(device: torch.device) -> int:
    """The most that this process has held of the memory of ``device``: on CUDA bytes of tensors, as torch's allocator
    counts them; on a CPU its resident memory, with libraries.
    """
    if device.type == "cuda":
        return max(_peaks.get(device, 0), int(torch.cuda.max_memory_allocated(device)))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def reset_peak(device: torch.device) -> None:
    """Lets the allocator of a CUDA device find a new peak; :func:`peak_bytes` remembers the old one."""
    _peaks[device] = peak_bytes(device)
    torch.cuda.reset_peak_memory_stats(device)


def process_bytes(device: torch.device) -> int:
    """Bytes of ``device``'s memory that this process uses now, its tensors included."""
    if device.type == "cuda":
        # What others use of the device is not known: the context is about what is missing from the free memory.
        free, total = torch.cuda.mem_get_info(device)
        return max(0, total - free)
    with contextlib.suppress(OSError), open("/proc/self/statm", encoding="ascii") as file:  # elsewhere: unknown
        _, resident, shared, *_ = map(int, file.read().split())
        return (resident - shared) * os.sysconf("SC_PAGE_SIZE")
    return 0
