"""The knobs of failure detection, and the state of the run as metrics, for who wants them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from typing_extensions import override

from lightning_recycle.errors import ConfigurationError

__all__ = ["HeartbeatCallback"]


class HeartbeatCallback(pl.Callback):
    """Sets how soon a silent worker is declared dead; added by the strategy if the user gives none.

    A process that exits is noticed at once. A missing heartbeat reveals one that stopped without exiting, and the
    contents of the heartbeat one that makes no progress. On a failure the coordinator evicts the worker, and the
    survivors take over its micro-batches.

    With ``ReCycleStrategy(run_metrics=True)`` logs, whenever they change, ``recycle/live_workers``,
    ``recycle/failures``, ``recycle/recovery_seconds`` (in total), ``recycle/redone_steps`` and
    ``recycle/rejoined_workers``.

    Silence is no proof of death. A silent or stuck worker is evicted only while a peer that holds the same stage is
    well; if there is none, because it is the last one or all peers are silent too, it is waited for. A silent worker
    whose process is seen to compute, on the machine of the launching process, has ten times the ``timeout``.

    Args:
        interval: seconds between heartbeats of a worker.
        timeout: seconds of silence after which it is declared dead if a peer is well; also the least time that an
            operation may take before its worker counts as stuck (ten times the operation's usual time if that is more).
        last_holder_timeout: seconds of silence after which it is declared dead whoever else there is. The loss of the
            last one that holds a stage ends the run, or restarts it from a checkpoint.

    Raises:
        ConfigurationError: unless ``0 < 2 * interval <= timeout <= last_holder_timeout``.
    """

    def __init__(self, interval: float = 0.5, timeout: float = 5.0, last_holder_timeout: float = 300.0) -> None:
        if interval <= 0 or timeout < 2 * interval:
            raise ConfigurationError(
                f"HeartbeatCallback(interval={interval!r}, timeout={timeout!r}): interval must be positive and timeout"
                " at least twice the interval, or one late heartbeat evicts a healthy worker."
            )
        if last_holder_timeout < timeout:
            raise ConfigurationError(
                f"HeartbeatCallback(timeout={timeout!r}, last_holder_timeout={last_holder_timeout!r}):"
                " last_holder_timeout must be at least the timeout, since it is for workers that nobody can replace."
            )
        self.interval = interval
        self.timeout = timeout
        self.last_holder_timeout = last_holder_timeout
        self._logged: Mapping[str, float] = {}

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not getattr(trainer.strategy, "run_metrics", False):
            return
        counters: Mapping[str, float] = getattr(trainer.strategy, "counters", {})
        if counters and (batch_idx == 0 or counters != self._logged):  # Lightning repeats the last value in between
            for name, value in counters.items():
                pl_module.log(f"recycle/{name}", value, prog_bar=name == "live_workers")
            self._logged = dict(counters)
