"""Callbacks that make replacements fail too, and give them time to arrive."""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from typing import Any

import lightning.pytorch as pl
from typing_extensions import override

from chaos.scenario import LateFault
from lightning_recycle.callbacks.faults import EFFECTS
from lightning_recycle.errors import InjectedFaultError
from lightning_recycle.planning.grid import Op, Worker


def _raise() -> None:
    raise InjectedFaultError("Injected into a replacement.")


_FAIL: dict[str, Callable[[], None]] = {**EFFECTS, "exception": _raise}


class LateFaults(pl.Callback):
    """Makes the first replacements of some positions fail."""

    def __init__(self, faults: Sequence[LateFault]) -> None:
        self._faults = tuple(faults)

    def _of(self, strategy: Any) -> list[LateFault]:
        """The faults of this process; an attribute would be that of the peer, of which a replacement is a copy."""
        if strategy.incarnation != 1:
            return []
        return [fault for fault in self._faults if Worker(fault.pipeline, fault.stage) == strategy.worker]

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if mine := self._of(trainer.strategy):
            trainer.strategy.at_point.append(partial(_at_point, mine))

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        strategy: Any = trainer.strategy
        if (mine := self._of(strategy)) and strategy.executor is not None:
            strategy.executor.before_operation.append(partial(_before, mine, count()))


def _at_point(faults: Sequence[LateFault], point: str, step: int) -> None:
    for fault in faults:
        if (point, fault.operations) in (("setup", -1), ("recovery", 0)):
            _FAIL[fault.kind]()


def _before(faults: Sequence[LateFault], preceding: Iterator[int], step: int, op: Op) -> None:
    operations = 1 + next(preceding)
    for fault in faults:
        if fault.operations == operations:
            _FAIL[fault.kind]()


class Pace(pl.Callback):
    """Slows the training down while a worker is missing, so that one may join."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if len(trainer.strategy.live_workers) < trainer.strategy.grid.num_workers:
            time.sleep(self._seconds)
