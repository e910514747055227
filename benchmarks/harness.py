"""What the benchmarks share: a quiet ``Trainer.fit``, spreads of measurements, sides that take turns, the machine.

A benchmark measures through the front door: it reads ``trainer.strategy.history`` and ``trainer.strategy.schedules``
after a fit and never looks inside the package. All times are seconds.

Sides of a comparison take turns within seconds, so that both meet the same load of a shared machine: all run at the
same time in processes of their own; a worker that reaches the end of its turn says so and blocks, and
:meth:`Turns.play` lets one side go at a time. Named pipes carry both, since their paths can be passed to any process.
"""

from __future__ import annotations

import logging
import os
import platform
import select
import statistics
import struct
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import Strategy
from rich.console import Console
from torch.utils.data import DataLoader

from lightning_recycle import PipelineModule

console = Console(width=120)


@dataclass(frozen=True)
class Spread:
    """Median, minimum and maximum of ``count`` measurements."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """The spread of at least one value."""
        values = list(values)
        return cls(statistics.median(values), min(values), max(values), len(values))

    def milliseconds(self, digits: int = 1) -> str:
        """``median (low to high)``, in milliseconds."""
        return f"{1e3 * self.median:.{digits}f} ({1e3 * self.low:.{digits}f} to {1e3 * self.high:.{digits}f})"


def quieten() -> None:
    """Silences what Lightning tells its users about hardware and progress."""
    for name in ("lightning.pytorch", "lightning.fabric", "lightning_recycle"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")


class _Quiet(L.Callback):
    """Silences the worker processes, too."""

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        quieten()


def fit(
    module: PipelineModule,
    loader: DataLoader,
    strategy: Strategy | str,
    *,
    devices: int,
    steps: int,
    callbacks: Sequence[L.Callback] = (),
    **options: Any,
) -> L.Trainer:
    """Trains ``module`` for ``steps`` steps on ``devices`` CPU workers with nothing extra switched on but what the
    Trainer's ``options`` say.
    """
    quieten()
    os.environ.setdefault("PYTHONWARNINGS", "ignore")  # of the workers, before _Quiet is there
    # Workers inherit this; more threads than cores would measure the scheduler of the operating system.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    trainer = L.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        max_steps=steps,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=any(isinstance(callback, ModelCheckpoint) for callback in callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[_Quiet(), *callbacks],
        **options,
    )
    trainer.fit(module, loader)
    return trainer


def step_seconds(trainer: L.Trainer, first: int, stop: int | None = None) -> list[float]:
    """Seconds of the steps ``first`` to ``stop`` (exclusive), each from the commit before to its own."""
    return [
        event.seconds
        for event in trainer.strategy.history
        if event.kind == "step"
        and event.seconds is not None
        and event.step >= first
        and (stop is None or event.step < stop)
    ]


def describe_machine() -> str:
    """Processor, cores, load and versions, for RESULTS.md."""
    model = platform.processor() or "unknown processor"
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    load = ", ".join(f"{value:.2f}" for value in os.getloadavg())
    return (
        f"{model}, {cores} cores, load averages {load} (1, 5, 15 minutes); {platform.system()} {platform.release()},"
        f" Python {platform.python_version()}, torch {torch.__version__}, lightning {L.__version__}"
    )


# ---------------------------------------------------------------------- sides that take turns

_ARRIVAL = struct.Struct("<d")


@dataclass(frozen=True)
class Turn:
    """What a side took for one turn.

    Args:
        seconds: from the start until the last of its workers was through.
        processor_seconds: of all its workers together.
    """

    seconds: float
    processor_seconds: float


@dataclass
class Gate:
    """A side's end of the pipes, for its workers; can be pickled."""

    directory: str
    side: str
    _processor_seconds: float = 0.0  # of this worker when its turn began

    def wait(self, rank: int) -> None:
        """Worker ``rank`` has ended its turn, and waits for the next one.

        Raises:
            OSError: if the referee is gone, as another side has failed.
        """
        # In this order: the referee closes the pipe of arrivals first, so whoever finds it open will see the other end.
        start = os.open(Path(self.directory) / f"{self.side}.{rank}", os.O_RDONLY | os.O_NONBLOCK)
        arrivals = os.open(Path(self.directory) / f"{self.side}.arrivals", os.O_WRONLY | os.O_NONBLOCK)
        try:
            os.write(arrivals, _ARRIVAL.pack(time.process_time() - self._processor_seconds))
            select.select([start], [], [])
            self._processor_seconds = time.process_time()  # heartbeats during the turns of others do not count
            if not os.read(start, 1):
                raise BrokenPipeError("The comparison is over: another side has failed.")
        finally:
            os.close(arrivals)
            os.close(start)


class Turns:
    """The referee.

    Args:
        directory: where the pipes are made.
        sides: names of those that take turns, and the number of workers of each.
        check: called about once a second while waiting; raises if a side has failed.
    """

    def __init__(self, directory: str, sides: Mapping[str, int], check: Callable[[], None]) -> None:
        self._sides, self._check = tuple(sides), check
        self._arrivals: dict[str, int] = {}
        self._starts: dict[str, list[int]] = {}
        for side, workers in sides.items():
            self._arrivals[side] = _open_pipe(Path(directory) / f"{side}.arrivals")
            self._starts[side] = [_open_pipe(Path(directory) / f"{side}.{rank}") for rank in range(workers)]

    def play(self, count: int) -> dict[str, list[Turn]]:
        """Waits until all sides are at their gates, then gives each ``count`` turns, one side after the other."""
        for side in self._sides:
            self._await(side)
        turns: dict[str, list[Turn]] = {side: [] for side in self._sides}
        for number in range(count):
            for side in self._sides if number % 2 == 0 else reversed(self._sides):
                began = time.perf_counter()
                self._start(side)
                processor_seconds = self._await(side)
                turns[side].append(Turn(time.perf_counter() - began, processor_seconds))
        for side in self._sides:
            self._start(side)
        return turns

    def close(self) -> None:
        for fd in (*self._arrivals.values(), *(fd for fds in self._starts.values() for fd in fds)):
            os.close(fd)

    def _start(self, side: str) -> None:
        for fd in self._starts[side]:
            os.write(fd, b"x")

    def _await(self, side: str) -> float:
        """Waits for all workers of ``side``; returns the processor time of their turns, together."""
        fd, total = self._arrivals[side], 0.0
        for _ in self._starts[side]:
            while not select.select([fd], [], [], 1.0)[0]:
                self._check()
            total += _ARRIVAL.unpack(os.read(fd, _ARRIVAL.size))[0]
        return total


def _open_pipe(path: Path) -> int:
    """Makes a named pipe; opened for both directions, so that neither end ever blocks in ``open``."""
    os.mkfifo(path)
    return os.open(path, os.O_RDWR)
