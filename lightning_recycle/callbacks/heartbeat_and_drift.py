"""Callbacks for failure detection and for plans that follow measured times."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import lightning.pytorch as pl
from typing_extensions import override

from lightning_recycle.arguments import SECONDS, suggests_options
from lightning_recycle.control.options import HeartbeatTimeouts
from lightning_recycle.control.plans.drift import DriftOptions
from lightning_recycle.errors import ConfigurationError


@suggests_options
class HeartbeatCallback(pl.Callback):
    """Sets how soon a silent worker is declared dead; present by default.

    A process that exits is noticed at once. A missing heartbeat reveals one that stopped without exiting, and the
    contents of the heartbeat one that makes no progress. On a failure the coordinator evicts the worker, and the
    survivors take over its micro-batches.

    With ``MonitoringOptions(run_metrics=True)`` logs, whenever they change, ``recycle/live_workers``,
    ``recycle/failures``, ``recycle/recovery_seconds`` (in total), ``recycle/redone_steps`` and
    ``recycle/rejoined_workers``.

    Silence is no proof of death. A silent or stuck worker is evicted only while a peer that holds the same stage is
    well; if there is none, because it is the last one or all peers are silent too, it is waited for. A silent worker
    whose process is seen to compute, on the machine of the launching process, has ten times the ``timeout``.

    Args:
        interval: seconds between heartbeats of a worker.
        timeout: seconds of silence after which a worker is declared dead if a peer is well. Also the least time that an
            operation may take before its worker counts as stuck (ten times the operation's usual time if that is more).
        last_holder_timeout: seconds of silence after which a worker is declared dead even as the last holder of a
            stage. Its loss ends the run, or restarts it from a checkpoint.
        coordinator_timeout: seconds of silence after which workers give up on the coordinator. It hangs or is stopped,
            although its machine keeps the connections open. They end and free their devices, or first look for another
            ``recycle-coordinator``. One that speaks again earlier goes on with the run.

    Raises:
        ConfigurationError: unless ``0 < 2 * interval <= timeout <= last_holder_timeout`` and
            ``coordinator_timeout >= 1``.
    """

    other_names: ClassVar = {"heartbeat_timeout": "Write timeout={}", "heartbeat_interval": "Write interval={}"}

    def __init__(
        self,
        interval: float = 0.5,
        timeout: float = 5.0,
        last_holder_timeout: float = 300.0,
        coordinator_timeout: float = 60.0,
    ) -> None:
        SECONDS.checked(type(self).__name__, "interval", interval)
        self.timeouts = HeartbeatTimeouts(timeout, last_holder_timeout, coordinator_timeout)
        if timeout < 2 * interval:
            raise ConfigurationError(
                f"HeartbeatCallback(interval={interval!r}, timeout={timeout!r}): timeout must be at least twice the"
                " interval, or one late heartbeat evicts a healthy worker."
            )
        if last_holder_timeout < timeout:
            raise ConfigurationError(
                f"HeartbeatCallback(timeout={timeout!r}, last_holder_timeout={last_holder_timeout!r}):"
                " last_holder_timeout must be at least the timeout, since it is for workers that no peer can replace."
            )
        if coordinator_timeout < 1:
            raise ConfigurationError(
                f"HeartbeatCallback(coordinator_timeout={coordinator_timeout!r}): coordinator_timeout must be at least"
                " 1 second, or a busy coordinator loses all workers."
            )
        self.interval = interval
        self._logged: Mapping[str, float] = {}

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        monitoring = getattr(trainer.strategy, "monitoring", None)  # of this package's strategy only
        if monitoring is None or not monitoring.run_metrics:
            return
        counters: Mapping[str, float] = getattr(trainer.strategy, "counters", {})
        if counters and (batch_idx == 0 or counters != self._logged):  # Lightning repeats the last value in between
            for name, value in counters.items():
                pl_module.log(f"recycle/{name}", value, prog_bar=name == "live_workers")
            self._logged = dict(counters)


# ---------------------------------------------------------------------- plans


@suggests_options
class PlanMonitor(pl.Callback):
    """Compares measured operation times with the plan's, and changes it if that pays.

    A worker that has become slow gets fewer micro-batches, its peers more; if the times of whole stages have changed,
    the order of operations may change. A process of the lowest priority searches for a better plan, and all workers
    switch to it at the same step boundary, without stopping. The training result stays the same. Noise, and batches
    that take all workers longer, change nothing. See docs/layouts.md.

    Without this callback the plan does not follow such changes. Each change is an event "replanned" in
    ``strategy.history``; with ``MonitoringOptions(run_metrics=True)`` their number is logged as ``recycle/replans``.

    Args:
        threshold: fraction of the step time that another plan must save.
        window: number of steps measured before drawing conclusions; at least 3.
        horizon_steps: number of steps within which a change must pay for itself. After as many a worker so slow that it
            got nothing to do is tried again.

    Raises:
        ConfigurationError: for values that cannot work.
    """

    def __init__(self, threshold: float = 0.05, window: int = 20, horizon_steps: int = 1000) -> None:
        self.options = DriftOptions(threshold, window, horizon_steps)

    @staticmethod
    def options_of(trainer: pl.Trainer) -> DriftOptions | None:
        """The options of the first such callback of ``trainer``; None without one."""
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        return next((callback.options for callback in callbacks if isinstance(callback, PlanMonitor)), None)
