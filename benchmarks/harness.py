"""What the benchmarks share: a quiet ``Trainer.fit``, spreads of measurements, the machine in words.

A benchmark measures through the front door: it reads ``trainer.strategy.history`` and ``trainer.strategy.schedules``
after a fit and never looks inside the package. All times are seconds.
"""

from __future__ import annotations

import logging
import os
import platform
import statistics
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import Strategy
from rich.console import Console
from torch.utils.data import DataLoader

from lightning_recycle import PipelineModule, ReCycleStrategy
from lightning_recycle.option_table import OptionGroup
from lightning_recycle.session.configuration import Options

__all__ = ["Spread", "console", "describe_machine", "fit", "quieten", "recycle_strategy", "step_seconds"]

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


def recycle_strategy(*sizes: int, **options: Any) -> ReCycleStrategy:
    """``ReCycleStrategy(*sizes, **options)``, where options of groups are given without them."""
    for item in fields(Options):
        if isinstance(item.default, OptionGroup):
            names = {option.name for option in fields(item.default)} & options.keys()
            if names:
                options[item.name] = type(item.default)(**{name: options.pop(name) for name in names})
    return ReCycleStrategy(*sizes, **options)


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
        enable_checkpointing=False,
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
