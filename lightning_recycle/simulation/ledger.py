"""Turns the timeline into GPU time by cause, in whole GPU-nanoseconds. Internal to ``simulation``.

Contract: each span's GPU time is divided without remainder: useful, repeated and slow time is rounded down, the rest
of the participants' time is bubble.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_recycle.errors import PlanningError
from lightning_recycle.simulation.policies.policy import Configuration
from lightning_recycle.simulation.run_result import Accounting, State
from lightning_recycle.simulation.units import as_ticks

__all__ = ["Span", "account", "samples_of"]


@dataclass(frozen=True, slots=True)
class Span:
    """Ticks ``begin`` to ``end`` without a change. ``configuration`` is in force, or follows the pause."""

    begin: int
    end: int
    state: State
    label: str
    configuration: Configuration
    live_gpus: int

    @property
    def gpus(self) -> int:
        """Number of GPUs that take part."""
        return min(self.configuration.gpus, self.live_gpus)

    def part(self, begin: int, end: int, state: State) -> Span:
        """The same configuration from ``begin`` to ``end``, in another state."""
        return replace(self, begin=begin, end=end, state=state)


def account(spans: Sequence[Span], gpus: int) -> Accounting:
    """Where the time of the cluster's ``gpus`` GPUs went.

    Raises:
        PlanningError: when a configuration claims more work than its GPUs have time, or more GPUs than are live.
    """
    useful = bubble = slow = idle = redone = reconfiguring = failed = 0
    for span in spans:
        ticks, taking_part = span.end - span.begin, span.gpus
        failed += (gpus - span.live_gpus) * ticks
        idle += (span.live_gpus - taking_part) * ticks
        if span.state is State.TRAINING:
            work, again, longer = _training(span, ticks)
            useful += work
            redone += again
            slow += longer
            bubble += taking_part * ticks - work - again - longer
        elif span.state is State.LOST:
            redone += taking_part * ticks
        else:  # nothing takes part while training is stopped
            reconfiguring += taking_part * ticks
    return Accounting(useful, bubble, idle, redone, reconfiguring, failed, slow)


def _training(span: Span, ticks: int) -> tuple[int, int, int]:
    """Useful and repeated GPU time, and what slow nodes cost."""
    configuration = span.configuration
    step = max(1, as_ticks(configuration.step_seconds))
    work, again = as_ticks(configuration.useful_gpu_seconds), as_ticks(configuration.repeated_gpu_seconds)
    if configuration.gpus > span.live_gpus or work + again > configuration.gpus * step * (1 + 1e-6):
        raise PlanningError(
            f"the policy's configuration {configuration.label!r} is impossible: {configuration.gpus} GPUs of "
            f"{span.live_gpus} live ones do {(work + again) / 1e9:g} GPU-seconds of work in {step / 1e9:g} s."
        )
    useful = work * ticks // step
    again = min(again * ticks // step, configuration.gpus * ticks - useful)
    longer = as_ticks(configuration.slow_gpu_seconds) * ticks // step
    return useful, again, min(longer, configuration.gpus * ticks - useful - again)


def samples_of(spans: Sequence[Span], since: int = 0) -> float:
    """Samples that were trained after ``since`` (ticks) and never undone."""
    return sum(
        span.configuration.samples
        * (span.end - max(span.begin, since))
        / max(1, as_ticks(span.configuration.step_seconds))
        for span in spans
        if span.state is State.TRAINING and span.end > since
    )
