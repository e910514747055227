"""Durations of a worker's operations by kind: smoothed, and in the newest step alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from lightning_recycle.planning.ops import OpKind

__all__ = ["Timings"]

_SMOOTHING = 0.2  # weight of the newest measurement in the operation times


@dataclass
class Timings:
    """Smoothed seconds by kind of operation. REDUCE keeps its minimum, since the rest is waiting for peers."""

    seconds: dict[str, float] = field(default_factory=dict)
    _step: dict[str, list[float]] = field(default_factory=dict)

    def take_step(self) -> dict[str, float]:
        """Mean seconds of the measurements since the previous call."""
        measured, self._step = self._step, {}
        return {name: sum(values) / len(values) for name, values in measured.items()}

    def add(self, kind: OpKind, seconds: float) -> None:
        """Takes a measurement into account."""
        name = kind.value  # takes longer than all that follows
        self._step.setdefault(name, []).append(seconds)
        old = self.seconds.get(name)
        if old is None:
            self.seconds[name] = seconds
        elif kind is OpKind.REDUCE:
            self.seconds[name] = min(old, seconds)
        else:
            self.seconds[name] = (1 - _SMOOTHING) * old + _SMOOTHING * seconds

    def measure(self, kind: OpKind, device: torch.device, stretch: Callable[[float], None] | None = None) -> _Stopwatch:
        """A context whose duration is recorded unless it raises, device work included.

        ``stretch`` is called with the seconds at its end and may prolong it.
        """
        return _Stopwatch(self, kind, device, stretch)


class _Stopwatch:
    def __init__(
        self, timings: Timings, kind: OpKind, device: torch.device, stretch: Callable[[float], None] | None
    ) -> None:
        self._timings, self._kind, self._cuda = timings, kind, device.type == "cuda"
        self._stretch = stretch

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, exception_type: Any, *_: Any) -> None:
        if self._cuda:
            torch.cuda.current_stream().synchronize()
        if exception_type is None:
            if self._stretch is not None:
                self._stretch(time.perf_counter() - self._started)
            self._timings.add(self._kind, time.perf_counter() - self._started)
