"""What of a run is seen in Ray's dashboard, and by whatever reads Ray's metrics: gauges, with the run as their tag."""

from __future__ import annotations

import importlib
import time
from collections.abc import Mapping

__all__ = ["RunGauges"]

_GAUGES = {
    "live_workers": "Workers that take part in the training",
    "steps": "Optimizer steps that are committed",
    "failures": "Workers that were lost so far",
    "recovery_seconds": "Seconds from failures to the next commit, so far",
    "redone_steps": "Steps that were run again, so far",
    "rejoined_workers": "Replacements that joined, so far",
}
_GOODPUT = "Share of the time since the first step that no recovery took"


class RunGauges:
    """The gauges ``recycle_...`` of the run ``name``."""

    def __init__(self, name: str) -> None:
        gauge = importlib.import_module("ray.util.metrics").Gauge
        described = {**_GAUGES, "goodput": _GOODPUT}
        self._gauges = {key: gauge(f"recycle_{key}", text, ("run",)) for key, text in described.items()}
        for shown in self._gauges.values():
            shown.set_default_tags({"run": name})
        self._began: float | None = None

    def show(self, counters: Mapping[str, float]) -> None:
        """Takes the coordinator's counters."""
        for key in _GAUGES:
            self._gauges[key].set(counters[key])
        if self._began is None and counters.get("steps"):
            self._began = time.monotonic()
        lasted = 0.0 if self._began is None else time.monotonic() - self._began
        lost = counters.get("recovery_seconds", 0.0)
        self._gauges["goodput"].set(1.0 - min(1.0, lost / lasted) if lasted else 1.0)
