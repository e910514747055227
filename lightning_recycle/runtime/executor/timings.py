"""Seconds of a worker's operations by kind: smoothed, and in the newest step."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from lightning_recycle.devices import await_stream, is_accelerator, new_event
from lightning_recycle.planning.grid import OpKind

_SMOOTHING = 0.2  # weight of the newest measurement in the operation times


@dataclass
class Timings:
    """Smoothed seconds by kind of operation; of REDUCE, mostly waiting, the minimum.

    On an accelerator an operation lasts from one event to another on the stream that computes, and the host does not
    wait for it. Such measurements count as soon as the device has come that far.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    _step: dict[str, list[float]] = field(default_factory=dict)
    _on_device: deque[tuple[OpKind, Any, Any]] = field(default_factory=deque)  # events before and after it
    _events: list[Any] = field(default_factory=list)  # that can be used again

    def take_step(self) -> dict[str, float]:
        """Mean seconds of the measurements since the previous call."""
        self._collect()
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

    def measure(
        self, kind: OpKind, device: torch.device, stretch: Callable[[float], None] | None = None
    ) -> AbstractContextManager[None]:
        """A context whose duration is recorded unless it raises, device work included.

        ``stretch`` is called with the seconds at its end and may prolong it; then the host waits for the device.
        """
        if is_accelerator(device) and stretch is None:
            return _DeviceStopwatch(self, kind, device)
        return _Stopwatch(self, kind, device, stretch)

    def await_device(self, progressed: Callable[[], None]) -> None:
        """Waits until the device has done all that was measured.

        A worker that then waits for others has no work of its own left that may be stuck. ``progressed`` is called
        after each operation.

        Raises:
            RuntimeError: if the device is lost.
        """
        while self._on_device:
            self._on_device[0][2].synchronize()
            self._take()
            progressed()

    def _collect(self) -> None:
        while self._on_device and self._on_device[0][2].query():
            self._take()

    def _take(self) -> None:
        kind, before, after = self._on_device.popleft()
        self.add(kind, before.elapsed_time(after) / 1e3)
        self._events += (before, after)

    def _record(self, device: torch.device) -> Any:
        """An event behind all that the current stream was asked to do."""
        event = self._events.pop() if self._events else new_event(device)
        event.record()
        return event


class _Stopwatch:
    """By the clock of the host."""

    __slots__ = ("_device", "_kind", "_started", "_stretch", "_timings")

    def __init__(
        self, timings: Timings, kind: OpKind, device: torch.device, stretch: Callable[[float], None] | None
    ) -> None:
        self._timings, self._kind, self._device = timings, kind, device
        self._stretch = stretch

    def __enter__(self) -> None:
        await_stream(self._device)
        self._started = time.perf_counter()

    def __exit__(self, exception_type: Any, *_: Any) -> None:
        await_stream(self._device)
        if exception_type is None:
            if self._stretch is not None:
                self._stretch(time.perf_counter() - self._started)
            self._timings.add(self._kind, time.perf_counter() - self._started)


class _DeviceStopwatch:
    """By events of the device."""

    __slots__ = ("_before", "_device", "_kind", "_timings")

    def __init__(self, timings: Timings, kind: OpKind, device: torch.device) -> None:
        self._timings, self._kind, self._device = timings, kind, device

    def __enter__(self) -> None:
        self._before = self._timings._record(self._device)

    def __exit__(self, exception_type: Any, *_: Any) -> None:
        if exception_type is None:
            self._timings._on_device.append((self._kind, self._before, self._timings._record(self._device)))
