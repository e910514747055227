"""Measurements of a worker's operations, and their reports.

Every operation is timed. :class:`FirstSteps` measures the rest in the first steps with the worker's layers, without
changing a result:

- *Memory*, in the second step, on every micro-batch: after F the tensors that autograd saves (on a device, its
  allocator's growth, and the input); after B the queued weight gradients; after a repeated F the stage's input. Every
  backward of that step is split, so that both kinds are known.
- *The cost of splitting a backward*, in four steps from the third on: every other fused backward is split, with B and W
  in a row, so both are measured under the same load. On a CPU an operation's seconds exclude waiting for a core
  (``/proc/thread-self/schedstat``, if any), and it keeps the machine busy for its process's processor time. On another
  device both are the time between two events.
- *The profile of the stage*, if the run is profiled, after the ninth step, and its link to the next stage before the
  first one.
"""

from __future__ import annotations

import math
import os
import socket
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from lightning_recycle import devices
from lightning_recycle.control.client import ControlClient
from lightning_recycle.control.protocol import messages
from lightning_recycle.devices import allocated_bytes, await_stream, is_accelerator, new_event, peak_allocated_bytes
from lightning_recycle.planning.costs import Footprint, StageProfile
from lightning_recycle.planning.grid import OpKind
from lightning_recycle.planning.program import Task
from lightning_recycle.planning.split_backward import SplitTrial
from lightning_recycle.runtime.stage import Stage, tensors_in
from lightning_recycle.tensor_memory import local_part

_SMOOTHING = 0.2  # weight of the newest measurement in the operation times


_COMPUTING = (
    OpKind.FORWARD, OpKind.RECOMPUTE, OpKind.BACKWARD, OpKind.BACKWARD_INPUT, OpKind.BACKWARD_WEIGHT
)  # fmt: skip


class Timings:
    """Seconds by kind of operation, smoothed over steps; of REDUCE the minimum.

    REDUCE is mostly waiting. On an accelerator an operation lasts from one event to another on the computing stream,
    and the host does not wait for it; a measurement counts once the device has come that far.

    Attributes:
        of: for each kind the context whose duration, device work included, is recorded unless it raises.
        stretch: for fault injection: called with the computed seconds of an F, R, B, W or BW, after waiting for the
            device; the call counts as computing.
    """

    def __init__(self, device: torch.device) -> None:
        self.seconds: dict[str, float] = {}
        self.stretch: Callable[[float], None] | None = None
        self._step: dict[OpKind, list[float]] = {kind: [] for kind in OpKind}
        stopwatch = _DeviceStopwatch if is_accelerator(device) else _Stopwatch
        self.of: dict[OpKind, AbstractContextManager[None]] = {kind: stopwatch(self, kind) for kind in OpKind}
        self._device = device
        self._on_device: deque[tuple[OpKind, Any, Any]] = deque()  # events before and after it
        self._events: list[Any] = []  # that can be used again

    def take_step(self) -> dict[str, float]:
        while self._on_device and self._on_device[0][2].query():
            self._take()
        means = {}
        for kind, measured in self._step.items():
            if not measured:
                continue
            name, smoothed = kind.value, self.seconds.get(kind.value, measured[0])
            for seconds in measured:
                smoothed = (1 - _SMOOTHING) * smoothed + _SMOOTHING * seconds
            self.seconds[name] = min(self.seconds.get(name, math.inf), *measured) if kind is OpKind.REDUCE else smoothed
            means[name] = sum(measured) / len(measured)
            measured.clear()
        return means

    def add(self, kind: OpKind, seconds: float) -> None:
        self._step[kind].append(seconds)

    def await_device(self, progressed: Callable[[], None]) -> None:
        """Waits until the device has done all measured operations.

        A worker that then waits for others has no stuck work of its own. ``progressed`` is called after each operation.
        """
        while self._on_device:
            self._on_device[0][2].synchronize()
            self._take()
            progressed()

    def _take(self) -> None:
        kind, before, after = self._on_device.popleft()
        self.add(kind, before.elapsed_time(after) / 1e3)
        self._events += (before, after)

    def _record(self) -> Any:
        """An event behind all requests to the current stream."""
        event = self._events.pop() if self._events else new_event(self._device)
        event.record()
        return event


class _Stopwatch:
    """The context of operations of one kind, by the host's clock."""

    def __init__(self, timings: Timings, kind: OpKind) -> None:
        self._timings, self._kind, self._may_stretch = timings, kind, kind in _COMPUTING
        self._measured = timings._step[kind]

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, exception_type: Any, *_: Any) -> None:
        if exception_type is None:
            if self._may_stretch and self._timings.stretch is not None:
                self._timings.stretch(time.perf_counter() - self._began)
            self._measured.append(time.perf_counter() - self._began)


class _DeviceStopwatch(_Stopwatch):
    """A stopwatch by events of the device, unless the operation may be stretched."""

    def __enter__(self) -> None:
        self._before = None
        if self._may_stretch and self._timings.stretch is not None:
            await_stream(self._timings._device)
            super().__enter__()
        else:
            self._before = self._timings._record()

    def __exit__(self, exception_type: Any, *_: Any) -> None:
        if self._before is None:
            await_stream(self._timings._device)
            super().__exit__(exception_type)
        elif exception_type is None:
            self._timings._on_device.append((self._kind, self._before, self._timings._record()))


_MEMORY = 2  # the step in which memory is measured: the first one compiles, warms up, and creates the optimizer's state
_TRIAL_STEPS = 4  # in each of which both kinds are measured if a worker has two micro-batches
_PROFILED = 9  # steps before the profile, of which the first three are no measure
_PROFILE_WARM_UP = 3
_SMALL, _LARGE = 1, 1 << 20  # bytes of messages by which a link is measured
_ROUNDS = 5
_NOTHING = nullcontext()
_FUSED = ((False, OpKind.FORWARD), (False, OpKind.BACKWARD))
_SPLIT = ((True, OpKind.FORWARD), (True, OpKind.BACKWARD_INPUT), (True, OpKind.BACKWARD_WEIGHT))


class FirstSteps:
    """The measurements of one worker in its first steps with its layers.

    ``held``: the worker's tensors between two steps; None to skip memory.
    """

    def __init__(
        self, device: torch.device, held: Callable[[], Iterable[Tensor]] | None, tries_splitting: bool = False
    ) -> None:
        self.tries_splitting = tries_splitting
        self.output_bytes = 0
        self._device, self._held = device, held
        self._steps: set[int] = set()
        self._measures = self._may_split = False
        self._overhead = 0 if held is None else max(0, devices.process_bytes(device) - devices.storage_bytes(held()))
        self._own: set[int] = set()  # storages of parameters and gradients
        self._after_forward = self._after_backward = self._checkpoint = self._temporary = self._received = 0
        self._tried = 0
        self._split: dict[int, bool] = {}  # the micro-batches of this step that are timed, and whether they are split
        self._seconds: dict[tuple[bool, OpKind], list[float]] = defaultdict(list)
        self._busy: dict[tuple[bool, OpKind], list[float]] = defaultdict(list)
        self._waited_seconds = self._total_seconds = 0.0
        self._by_device = {True: Timings(device), False: Timings(device)}

    @property
    def count(self) -> int:
        """The number of steps that were begun, each once."""
        return len(self._steps)

    def begin(
        self, step: int | None, program: Sequence[Task], split_backward: bool = False, buffers: Iterable[Tensor] = ()
    ) -> None:
        """Begins a step, which counts once if it runs again.

        ``step`` None: only a part of a step, without measurements. ``buffers``, for messages, are counted by the
        messages' size.
        """
        self._split, self._measures = {}, False
        if step is None:
            return
        self._steps.add(step)
        if self._held is not None and self.count == _MEMORY:
            self._measures, self._may_split = True, split_backward or self.tries_splitting
            self._own = {local_part(tensor).untyped_storage().data_ptr() for tensor in chain(self._held(), buffers)}
        if not self.tries_splitting or self.count <= _MEMORY:
            return
        forwards = [task for task in program if task.op.kind is OpKind.FORWARD]
        fused = [task.index for task in forwards if not task.split_backward and not task.recomputed]
        if fused:
            self._tried += 1
            self._split = {index: (place + self._tried) % 2 == 1 for place, index in enumerate(fused)}

    def is_split(self, index: int) -> bool:
        """Whether the backward of micro-batch ``index`` is split for a measurement."""
        return (self._measures and self._may_split) or self._split.get(index, False)

    def part(self, kind: OpKind, index: int, stage: Stage, inputs: Any = None) -> AbstractContextManager[None]:
        """The context of an F, R, BW, B or W; ``inputs``: of the F."""
        if self._measures:
            return self._memory(kind, index, stage, inputs)
        if index not in self._split:
            return _NOTHING
        if is_accelerator(self._device):
            return self._by_device[self._split[index]].of[kind]
        return self._by_the_clock((self._split[index], kind))

    # ------------------------------------------------------------------ memory

    @contextmanager
    def _memory(self, kind: OpKind, index: int, stage: Stage, inputs: Any) -> Iterator[None]:
        checkpoint = devices.storage_bytes(tensors_in(inputs), self._own)  # before a layer writes into it
        makes_graph, graph = kind in (OpKind.FORWARD, OpKind.RECOMPUTE), 0
        if is_accelerator(self._device):
            before = allocated_bytes(self._device)
            devices.reset_peak(self._device)
            yield
            after = allocated_bytes(self._device)
            peak, graph = peak_allocated_bytes(self._device), after - before
            self._temporary = max(self._temporary, peak - max(before, after))
        elif makes_graph:
            with devices.saved_tensors() as saved:
                yield
            graph = devices.storage_bytes(saved, self._own)
        else:
            yield
        if makes_graph:
            self._after_forward = max(self._after_forward, graph)
        if kind is OpKind.BACKWARD_INPUT:
            self._after_backward = max(self._after_backward, devices.storage_bytes(stage.waiting(index), self._own))
        self._checkpoint = max(self._checkpoint, checkpoint)

    def received(self, value: Any) -> None:
        if self._measures:
            self._received = max(self._received, devices.tensor_bytes(value))

    def sent(self, value: Any) -> None:
        self.output_bytes = max(self.output_bytes, devices.tensor_bytes(value))

    def footprint(self) -> Footprint | None:
        """The memory, once its step has been applied."""
        if not self._measures or self._held is None:
            return None
        # Activations and gradients have the same size; each message has a buffer at both ends, in host memory. On a
        # device its tensors are the stage's input, which is there before the F that is measured.
        on_host = not is_accelerator(self._device)
        staged, received = (2 * (self._received + self.output_bytes), 0) if on_host else (0, self._received)
        return Footprint(
            place=devices.device_place(self._device),
            capacity=devices.device_bytes(self._device),
            overhead=self._overhead,
            fixed=devices.storage_bytes(self._held()),
            messages=staged,
            after_forward=self._after_forward + received,
            after_backward=self._after_backward,
            checkpoint=self._checkpoint,
            temporary=self._temporary,
        )

    def profile(self, seconds: dict[str, float]) -> StageProfile:
        """The stage's profile; in ``seconds`` a fused backward is half B, half W."""
        fused = seconds.get("BW", 0.0) / 2
        return StageProfile(
            forward=seconds.get("F", 0.0),
            backward_input=seconds.get("B", fused),
            backward_weight=seconds.get("W", fused),
            reduce=seconds.get("REDUCE", 0.0),
            optimizer=seconds.get("STEP", 0.0),
            activation_bytes=self._after_forward,
            output_bytes=self.output_bytes,
            waiting_bytes=self._after_backward if self._may_split else None,
        )

    # ------------------------------------------------------------------ the trial

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
        self._waited_seconds += waited
        self._total_seconds += passed

    def trial(self) -> SplitTrial | None:
        """Cost of splitting, once the trial's last step has been applied."""
        if self._tried < _TRIAL_STEPS or not self._split:
            return None
        for split, timings in self._by_device.items():
            for name, mean in timings.take_step().items():
                self._seconds[split, OpKind(name)].append(mean)
                self._busy[split, OpKind(name)].append(mean)
        if not all(self._seconds.get(name) for name in (*_FUSED, *_SPLIT)):
            return None  # with one micro-batch a step, one kind more may be missing
        forward, fused = (median(self._seconds[name]) for name in _FUSED)
        split_forward, backward, weight = (median(self._seconds[name]) for name in _SPLIT)
        place, processors = processors_of(self._device)
        return SplitTrial(
            fused=(forward, fused),
            split=(split_forward, backward, weight),
            busy_fused=sum(median(self._busy[name]) for name in _FUSED),
            busy_split=sum(median(self._busy[name]) for name in _SPLIT),
            place=place,
            processors=processors,
            waited=self._waited_seconds / self._total_seconds if self._total_seconds else 0.0,
        )


class StepMeasurements:
    """A worker's measurements: times of operations, memory, links, split backwards.

    ``held``: this process's tensors between two steps besides those of the stage; None to skip memory.
    """

    def __init__(
        self,
        client: ControlClient,
        device: torch.device,
        profiles: bool = False,
        held: Callable[[], Iterable[Tensor]] | None = None,
        tries_splitting: bool = False,
    ) -> None:
        self.timings = Timings(device)
        self.first_steps: FirstSteps | None = None
        self._client, self._device, self._profiles, self._held = client, device, profiles, held
        self._tries_splitting, self._awaits_memory = tries_splitting, False
        self._tried: SplitTrial | None = None
        self._latency = self._bandwidth = 0.0

    def begin_layers(self, of_stage: Callable[[], Iterable[Tensor]]) -> None:
        """Begins the first steps anew with other layers, which hold ``of_stage``."""
        held = self._held
        of_all = None if held is None else lambda: chain(of_stage(), held())
        self.first_steps = FirstSteps(self._device, of_all, self._tries_splitting)
        self._awaits_memory = held is not None
        self._end_if_known()

    def measure_links(self, stage: int, is_last: bool, exchange: Callable[[int, int, bool], None]) -> None:
        """Measures the link to the next stage, if the run is profiled; even stages begin.

        ``exchange`` takes a number of stages further, a number of bytes, and whether to send first.
        """
        for parity in (0, 1) if self._profiles else ():
            with self._client.waiting("its neighbours"):
                if stage % 2 == parity and not is_last:
                    self._latency, self._bandwidth = _link(lambda size: exchange(1, size, True))
                elif stage % 2 != parity and stage > 0:
                    _link(lambda size: exchange(-1, size, False))

    def applied(self, step: int, facts: messages.Facts) -> messages.Applied:
        measured = self.timings.take_step()
        seconds, peak = dict(self.timings.seconds), devices.peak_bytes(self._device)
        return messages.Applied(self._client.rank, step, seconds, measured, facts, peak)

    def report(self) -> None:
        first_steps, rank = self.first_steps, self._client.rank
        if first_steps is None:
            return
        if first_steps.tries_splitting and (tried := first_steps.trial()) is not None:
            self._client.send(messages.Measured(rank, trial=tried))
            self._tried, self._tries_splitting, first_steps.tries_splitting = tried, False, False
        if self._profiles and first_steps.count == _PROFILED:
            seconds = dict(self.timings.seconds)
            profile = first_steps.profile(seconds if self._tried is None else self._tried.divided(seconds))
            steps = _PROFILED - _PROFILE_WARM_UP
            profiled = messages.Profiled(profile, self._latency, self._bandwidth, steps)
            self._client.send(messages.Measured(rank, profiled))
            self._profiles = False
        if (footprint := first_steps.footprint()) is not None:
            self._client.send(messages.Measured(rank, footprint=footprint))
            self._awaits_memory = False
        self._end_if_known()

    def _end_if_known(self) -> None:
        if not (self._awaits_memory or self._tries_splitting or self._profiles):
            self.first_steps = None


def _link(exchange: Callable[[int], None]) -> tuple[float, float]:
    """Latency in seconds and bandwidth in bytes per second of a link.

    ``exchange`` sends so many bytes and waits for their return.
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


def processors_of(device: torch.device, quota: Path = Path("/sys/fs/cgroup/cpu.max")) -> tuple[str, float]:
    """The name and number of this process's processors on ``device``.

    The cores that it may use, up to its control group's quota (v2); or the accelerator.
    """
    if is_accelerator(device):
        return devices.device_place(device), 1.0
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
    """Seconds that this thread has waited for a core."""
    try:
        with open("/proc/thread-self/schedstat", "rb", buffering=0) as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):  # a kernel that does not count
        return 0.0
