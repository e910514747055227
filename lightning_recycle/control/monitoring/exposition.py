"""A status as metrics for Prometheus, with ``prometheus-client`` (the extra ``metrics``).

Contract: a function of the status; names begin with ``recycle_``, counters count from the coordinator's start. What is
not known has no sample.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from lightning_recycle.control.status import PositionState, Status

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

__all__ = ["metrics"]

_REMEDY = "Metrics need the package prometheus-client: pip install 'lightning-recycle[metrics]'."
_PHASES = ("starting", "training", "recovering", "joining", "over")
_SERVING = (PositionState.LIVE, PositionState.SUSPECTED)

_COUNTERS = {
    "steps": "Steps that were committed",
    "failures": "Workers that were lost",
    "redone_steps": "Steps that ran again",
    "rejoined_workers": "Replacements that joined",
    "disturbances": "Times that connections broke although no worker died",
    "replans": "Changes of the plan within a generation",
    "checkpoints": "Checkpoints that were completed",
}


def metrics(status: Status | None, accept: str) -> tuple[bytes, str]:
    """The metrics in the format that ``accept`` asks for, and its content type.

    Args:
        status: the status of the run; None for no run.
        accept: the header of the request.

    Raises:
        ModuleNotFoundError: without prometheus-client, with the remedy.
    """
    try:
        from prometheus_client import CollectorRegistry
        from prometheus_client.exposition import choose_encoder
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(_REMEDY, name=error.name) from error
    registry = CollectorRegistry()
    registry.register(_Collector(status))
    encode, kind = choose_encoder(accept)
    return encode(registry), kind


class _Collector:
    def __init__(self, status: Status | None) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily

        def gauge(name: str, text: str, value: float | None) -> Iterator[Any]:
            if value is not None:
                yield GaugeMetricFamily(f"recycle_{name}", text, value=value)

        status = self._status
        yield from gauge("up", "Whether there is a run at the moment", status is not None and status.outcome is None)
        if status is None:
            return
        speed, grid = status.throughput, status.grid
        about = {"name": status.name, "version": status.version, **{key: str(value) for key, value in grid.items()}}
        yield InfoMetricFamily("recycle_run", "The run", value=about)
        yield from gauge("start_time_seconds", "When the coordinator was made, since the epoch", status.began)
        phases = GaugeMetricFamily("recycle_phase", "Whether the run is in this phase", labels=["phase"])
        for phase in _PHASES:
            phases.add_metric([phase], phase == status.phase)
        yield phases

        states = GaugeMetricFamily("recycle_workers", "Positions of the grid by state", labels=["state"])
        for state in PositionState:
            states.add_metric([state.value], sum(position.state is state for position in status.positions))
        yield states
        lives = GaugeMetricFamily("recycle_worker_live", "Whether a position is held", labels=["pipeline", "stage"])
        newest = GaugeMetricFamily("recycle_worker_step", "Steps that a position applied", labels=["pipeline", "stage"])
        text = "The most memory that a worker's process has held"
        peaks = GaugeMetricFamily("recycle_worker_peak_bytes", text, labels=["pipeline", "stage"])
        for position in status.positions:
            labels = [str(position.pipeline), str(position.stage)]
            lives.add_metric(labels, position.state in _SERVING)
            newest.add_metric(labels, position.step + 1)
            if position.peak_bytes is not None:
                peaks.add_metric(labels, position.peak_bytes)
        yield lives
        yield newest
        yield peaks
        yield from gauge("spares", "Workers that wait for a position", len(status.spares))
        yield from gauge("generation", "The number of the current generation", status.generation)

        yield from gauge("step", "Steps that the training has made, also in earlier runs", status.step + 1)
        yield from gauge("loss", "Mean loss of the newest step", status.loss)
        yield from gauge("step_seconds", "Mean seconds of a step under the present plan", speed.step_seconds)
        text = "Seconds of a step that follow from the plan and the times of its operations"
        yield from gauge("predicted_step_seconds", text, speed.predicted_step_seconds)
        yield from gauge("samples_per_second", "Samples per second, if a step's are known", speed.samples_per_second)

        for name, text in _COUNTERS.items():
            yield CounterMetricFamily(f"recycle_{name}", text, value=status.counts[name])
        text = "Seconds from failures to the next commit"
        yield CounterMetricFamily("recycle_recovery_seconds", text, value=status.recovery_seconds)
        failed = status.failures[-1].time if status.failures else None
        yield from gauge("last_failure_time_seconds", "When a worker was last lost, since the epoch", failed)

        text = "Where the workers' time went, by the simulator's causes"
        spent = CounterMetricFamily("recycle_worker_seconds", text, labels=["cause", "phase"])
        for cause, by_phase in status.worker_seconds.items():
            for phase, seconds in by_phase.items():
                spent.add_metric([cause, phase], seconds)
        yield spent
