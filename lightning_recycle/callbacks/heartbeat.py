"""The knobs of failure detection, and the number of live workers in logs and progress bar."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from typing_extensions import override

from lightning_recycle.errors import ConfigurationError

__all__ = ["HeartbeatCallback"]


class HeartbeatCallback(pl.Callback):
    """Sets how soon a silent worker is declared dead; added by the strategy when the user gives none.

    A process that exits is noticed at once; the heartbeat finds those that stopped without exiting. On a failure the
    coordinator evicts the worker and the survivors go on with its micro-batches.

    Args:
        interval: seconds between two heartbeats of a worker.
        timeout: seconds of silence after which it is declared dead.

    Raises:
        ConfigurationError: unless ``0 < 2 * interval <= timeout``.
    """

    def __init__(self, interval: float = 0.5, timeout: float = 5.0) -> None:
        if interval <= 0 or timeout < 2 * interval:
            raise ConfigurationError(
                f"HeartbeatCallback(interval={interval!r}, timeout={timeout!r}): interval must be positive and"
                " timeout at"
                " least twice the interval, or one late heartbeat evicts a healthy worker."
            )
        self.interval = interval
        self.timeout = timeout
        self._logged = 0

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        live = len(getattr(trainer.strategy, "live_workers", ()))
        if live and (batch_idx == 0 or live != self._logged):  # Lightning repeats the last value in between
            pl_module.log("recycle/live_workers", float(live), prog_bar=True)
            self._logged = live
