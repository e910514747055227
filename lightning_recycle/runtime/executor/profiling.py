"""Seconds of operations, the cost of a split backward, and the profile of a stage.

:class:`Timings` has the durations of a worker's operations by kind: smoothed, and in the newest step alone. On a CUDA
device an operation lasts from one event to another on the stream that computes, and the host does not wait for it: it
prepares the next operation meanwhile. Such measurements count as soon as the device has come that far.

:class:`SplitTrials` tries what splitting a backward costs: of the micro-batches whose backward the plan fuses, every
other one is split, B and W one after the other. The result is the same, and neither holds memory for longer. So both
are measured side by side, under the same load. The first step warms up and the second one measures memory, so the trial
begins with the third, and lasts four. On a CPU an operation's seconds are those of the clock without those in which its
thread waited for a core (``/proc/thread-self/schedstat`` of Linux; where there is none, waiting counts), and at least
its own processor time. It keeps the machine busy for the processor time of its process, all threads included. On
another device both are the time between two events.

:class:`StageProfiler` measures the rest of a profile: the memory that a micro-batch holds between F and W, the size of
its messages, and the time of a message to the next stage.

Must not know: schedules, peers.
"""

from __future__ import annotations

import os
import socket
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from lightning_recycle.planning.grid import OpKind
from lightning_recycle.planning.profile import StageProfile
from lightning_recycle.planning.program import Task
from lightning_recycle.planning.splitting import SplitTrial
from lightning_recycle.runtime.executor.memory_meter import device_place, message_bytes, saved_tensors, storage_bytes

__all__ = ["SplitTrials", "StageProfiler", "Timings"]

_SMALL, _LARGE = 1, 1 << 20  # bytes
_ROUNDS = 5


class StageProfiler:
    """Collects the measurements of one worker's first steps.

    Args:
        parameters: parameters of the stage; autograd saves them too, but they cost a micro-batch nothing.
        first_step: first measured step; those before are warm-up.
        last_step: last measured step, after which :meth:`profile` is complete.

    Attributes:
        waiting_bytes: what one micro-batch holds from B to W, once the memory meter knows it.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], first_step: int = 3, last_step: int = 8) -> None:
        self.first_step, self.last_step = first_step, last_step
        self.latency = self.bandwidth = 0.0
        self.waiting_bytes: int | None = None
        self._own = {p.untyped_storage().data_ptr() for p in parameters}
        self._activation_bytes = 0
        self._output_bytes = 0

    @contextmanager
    def forward(self, step: int) -> Iterator[None]:
        """Wraps the F of one micro-batch and counts what autograd saves, each storage once."""
        if step != self.first_step:
            yield
            return
        with saved_tensors() as saved:
            yield
        self._activation_bytes = max(self._activation_bytes, storage_bytes(saved, self._own))

    def measure_links(self, stage: int, is_last: bool, exchange: Callable[[int, int, bool], None]) -> None:
        """Measures the link to the next stage of the pipeline: even stages begin, then odd ones.

        Args:
            stage: of this worker.
            is_last: whether no stage follows.
            exchange: called with a number of stages further, a number of bytes, and whether to send first.
        """
        for parity in (0, 1):
            if stage % 2 == parity and not is_last:
                self.latency, self.bandwidth = _link(lambda size: exchange(1, size, True))
            elif stage % 2 != parity and stage > 0:
                _link(lambda size: exchange(-1, size, False))

    def sent(self, value: Any) -> None:
        """Counts the bytes of what one micro-batch sends to the next stage."""
        self._output_bytes = max(self._output_bytes, message_bytes(value))

    def profile(self, seconds: Mapping[str, float]) -> StageProfile:
        """The stage's profile; ``seconds`` by name of the operation (a fused backward counts as half B, half W)."""
        fused = seconds.get("BW", 0.0) / 2
        return StageProfile(
            forward=seconds.get("F", 0.0),
            backward_input=seconds.get("B", fused),
            backward_weight=seconds.get("W", fused),
            reduce=seconds.get("REDUCE", 0.0),
            optimizer=seconds.get("STEP", 0.0),
            activation_bytes=self._activation_bytes,
            output_bytes=self._output_bytes,
            waiting_bytes=self.waiting_bytes,
        )


def _link(exchange: Callable[[int], None]) -> tuple[float, float]:
    """Latency in seconds and bandwidth in bytes per second of a link.

    Args:
        exchange: sends a message of the given number of bytes and waits until as many have come back.
    """

    def one_way(size: int) -> float:
        exchange(size)  # the first one pays for buffers
        best = float("inf")
        for _ in range(_ROUNDS):
            started = time.perf_counter()
            exchange(size)
            best = min(best, (time.perf_counter() - started) / 2)
        return best

    latency, large = one_way(_SMALL), one_way(_LARGE)
    return latency, _LARGE / max(large - latency, 1e-9)


_SMOOTHING = 0.2  # weight of the newest measurement in the operation times


@dataclass
class Timings:
    """Smoothed seconds by kind of operation. REDUCE keeps its minimum, since the rest is waiting for peers."""

    seconds: dict[str, float] = field(default_factory=dict)
    _step: dict[str, list[float]] = field(default_factory=dict)
    _on_device: deque[tuple[OpKind, Any, Any]] = field(default_factory=deque)  # events before and after it
    _events: list[Any] = field(default_factory=list)  # that can be used again

    def take_step(self) -> dict[str, float]:
        """Mean seconds of the measurements since the previous call, as far as the device has done them."""
        self._collect()
        measured, self._step = self._step, {}
        return {name: sum(values) / len(values) for name, values in measured.items()}

    def add(self, kind: OpKind, seconds: float) -> None:
        """Takes a measurement into account."""
        name = kind.value  # takes longer than all that follows
        self._step.setdefault(name, []).append(seconds)
        old = self.seconds.get(name)
        if old is None:
            self.seconds[name] = seconds
        elif kind is OpKind.REDUCE:
            self.seconds[name] = min(old, seconds)
        else:
            self.seconds[name] = (1 - _SMOOTHING) * old + _SMOOTHING * seconds

    def measure(
        self, kind: OpKind, device: torch.device, stretch: Callable[[float], None] | None = None
    ) -> AbstractContextManager[None]:
        """A context whose duration is recorded unless it raises, device work included.

        ``stretch`` is called with the seconds at its end and may prolong it; then the host waits for the device.
        """
        if device.type == "cuda" and stretch is None:
            return _DeviceStopwatch(self, kind)
        return _Stopwatch(self, kind, device, stretch)

    def await_device(self, progressed: Callable[[], None]) -> None:
        """Waits until the device has done all that was measured: who then waits for others has no work of its own left
        that may be stuck.

        Args:
            progressed: called after each operation that it has waited for.

        Raises:
            RuntimeError: if the device is lost.
        """
        while self._on_device:
            self._on_device[0][2].synchronize()
            self._take()
            progressed()

    def _collect(self) -> None:
        while self._on_device and self._on_device[0][2].query():
            self._take()

    def _take(self) -> None:
        kind, before, after = self._on_device.popleft()
        self.add(kind, before.elapsed_time(after) / 1e3)
        self._events += (before, after)

    def _record(self) -> Any:
        """An event behind all that the current stream was asked to do."""
        event = self._events.pop() if self._events else torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class _Stopwatch:
    """By the clock of the host."""

    __slots__ = ("_cuda", "_kind", "_started", "_stretch", "_timings")

    def __init__(
        self, timings: Timings, kind: OpKind, device: torch.device, stretch: Callable[[float], None] | None
    ) -> None:
        self._timings, self._kind, self._cuda = timings, kind, device.type == "cuda"
        self._stretch = stretch

    def __enter__(self) -> None:
        if self._cuda:
            torch.cuda.current_stream().synchronize()
        self._started = time.perf_counter()

    def __exit__(self, exception_type: Any, *_: Any) -> None:
        if self._cuda:
            torch.cuda.current_stream().synchronize()
        if exception_type is None:
            if self._stretch is not None:
                self._stretch(time.perf_counter() - self._started)
            self._timings.add(self._kind, time.perf_counter() - self._started)


class _DeviceStopwatch:
    """By events of the device."""

    __slots__ = ("_before", "_kind", "_timings")

    def __init__(self, timings: Timings, kind: OpKind) -> None:
        self._timings, self._kind = timings, kind

    def __enter__(self) -> None:
        self._before = self._timings._record()

    def __exit__(self, exception_type: Any, *_: Any) -> None:
        if exception_type is None:
            self._timings._on_device.append((self._kind, self._before, self._timings._record()))


_WARM_UP = 2  # steps before the trial
_STEPS = 4  # of the trial, in each of which both kinds are measured if a worker has two micro-batches
_NOTHING = nullcontext()
_NEEDED = (
    ((False, OpKind.FORWARD), (False, OpKind.BACKWARD)),
    (
        (True, OpKind.FORWARD),
        (True, OpKind.BACKWARD_INPUT),
        (True, OpKind.BACKWARD_WEIGHT),
    ),
)


class SplitTrials:
    """The trial of one worker, whose tensors are on ``device``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._steps: set[int] = set()
        self._tried = 0
        self._split: dict[
            int, bool
        ] = {}  # the micro-batches of this step that are measured, and whether they are split
        self._seconds: dict[tuple[bool, OpKind], list[float]] = defaultdict(list)
        self._busy: dict[tuple[bool, OpKind], list[float]] = defaultdict(list)
        self._waited = self._passed = 0.0
        self._on_device = {True: Timings(), False: Timings()}

    def begin(self, step: int | None, program: Sequence[Task]) -> None:
        """A step begins.

        Args:
            step: the step; one that runs again counts once. None: only a part of a step, in which nothing is tried.
            program: the tasks of the step.
        """
        self._split = {}
        if step is None:
            return
        self._steps.add(step)
        forwards = [task for task in program if task.op.kind is OpKind.FORWARD]
        fused = [task.index for task in forwards if not task.decoupled and not task.recomputed]
        if len(self._steps) <= _WARM_UP or not fused:
            return
        self._tried += 1
        self._split = {index: (place + self._tried) % 2 == 1 for place, index in enumerate(fused)}

    def splits(self, index: int) -> bool:
        """Whether the micro-batch with this index is split because of the trial."""
        return self._split.get(index, False)

    def operation(self, kind: OpKind, index: int) -> AbstractContextManager[None]:
        """Wraps an operation of the micro-batch."""
        if index not in self._split:
            return _NOTHING
        if self._device.type == "cuda":
            return self._on_device[self._split[index]].measure(kind, self._device)
        return self._by_the_clock((self._split[index], kind))

    @contextmanager
    def _by_the_clock(self, name: tuple[bool, OpKind]) -> Iterator[None]:
        waited, busy = _seconds_waited(), time.process_time()
        computed, began = time.thread_time(), time.perf_counter()
        yield
        passed, computed = time.perf_counter() - began, time.thread_time() - computed
        busy = time.process_time() - busy
        # Of waits between two of the clocks nothing has passed: what the thread itself computed is the least.
        waited = min(max(passed - computed, 0.0), _seconds_waited() - waited)
        self._seconds[name].append(passed - waited)
        self._busy[name].append(busy)
        self._waited += waited
        self._passed += passed

    def result(self) -> SplitTrial | None:
        """The measurements, once a step after which the trial is over has been applied."""
        if self._tried < _STEPS or not self._split:
            return None
        if self._device.type == "cuda":
            self._collect()
        if not all(self._seconds.get(name) for names in _NEEDED for name in names):
            return None  # with one micro-batch a step, one kind more may be missing
        seconds, busy = (
            [[median(of[name]) for name in names] for names in _NEEDED] for of in (self._seconds, self._busy)
        )
        place, processors = processors_of(self._device)
        return SplitTrial(
            fused=(seconds[0][0], seconds[0][1]),
            split=(seconds[1][0], seconds[1][1], seconds[1][2]),
            busy_fused=sum(busy[0]),
            busy_split=sum(busy[1]),
            place=place,
            processors=processors,
            waited=self._waited / self._passed if self._passed else 0.0,
        )

    def _collect(self) -> None:
        for split, timings in self._on_device.items():
            for name, mean in timings.take_step().items():
                self._seconds[split, OpKind(name)].append(mean)
                self._busy[split, OpKind(name)].append(mean)


def processors_of(device: torch.device, quota: Path = Path("/sys/fs/cgroup/cpu.max")) -> tuple[str, float]:
    """The processors of this process on ``device``, by a name, and their number: the cores that it may
    use, as many of them as its control group (v2) pays for; or the accelerator.
    """
    if device.type != "cpu":
        return device_place(device), 1.0
    if not hasattr(os, "sched_getaffinity"):  # not Linux
        return socket.gethostname(), float(os.cpu_count() or 1)
    cores = sorted(os.sched_getaffinity(0))
    count = float(len(cores))
    try:
        most, period = quota.read_text().split()
        if most != "max":
            count = min(count, int(most) / int(period))
    except (OSError, ValueError):
        pass  # without a limit
    return f"{socket.gethostname()}/{','.join(map(str, cores))}", count


def _seconds_waited() -> float:
    """For how long this thread has waited for a core since it began."""
    try:
        with open("/proc/thread-self/schedstat", "rb", buffering=0) as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):  # not Linux, or a kernel that does not count
        return 0.0
