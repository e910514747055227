"""Tries what splitting a backward costs this worker: in a few of its first steps, on every other micro-batch.

Concept: of the micro-batches whose backward the plan fuses, every other one is split all the same, B and W one after
the other: the result is the same, and neither holds memory for longer. So both are measured side by side, under the
same load. The first step warms up and the second one measures memory, so the trial begins with the third.

On a CPU an operation's seconds are those of the clock without those in which its thread waited for a core
(``/proc/thread-self/schedstat`` of Linux; where there is none, waiting counts), and at least its own processor time. It
keeps the machine busy for the processor time of its process, all threads included. On another device both are the time
between two events.

Knows clocks, but neither schedules nor peers.
"""

from __future__ import annotations

import os
import socket
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from statistics import median

import torch

from lightning_recycle.planning.ops import OpKind
from lightning_recycle.planning.program import Task
from lightning_recycle.planning.split_costs import SplitTrial
from lightning_recycle.runtime.machine_memory import device_place
from lightning_recycle.runtime.timings import Timings

__all__ = ["SplitTrials"]

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
        """What was measured, once a step after which the trial is over has been applied."""
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
    """What this process computes with on ``device``, by a name, and how many processors that is: the cores that it may
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
