"""How long a layout is expected to last: the rate of failures, from a prior and the run's own record.

Concept: failures come at an unknown rate per worker and second. With a Gamma prior of shape a and exposure b, after k
failures in E worker-seconds the rate is Gamma(a + k, b + E) with mean (a + k) / (b + E): conjugate to the Poisson
process, so two numbers are the whole memory. The prior's mean a / b is Llama 3's rate; its shape says how many failures
it counts for, and it is small: spot instances fail four orders of magnitude more often, so a run's first failures
must outweigh it.

Contract: frozen; pure.

Must not know: layouts, clocks.

Source: Llama 3 (arXiv 2407.21783, section 3.3.4): 419 unplanned interruptions in 54 days on 16,384 GPUs, one per 50,700
GPU-hours.

Units: seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from lightning_recycle.arguments import at_least, whole

__all__ = ["LLAMA3_WORKER_SECONDS", "FailureRecord"]

LLAMA3_WORKER_SECONDS = 54 * 86400 * 16384 / 419
"""Between two failures of one GPU."""


@dataclass(frozen=True, slots=True)
class FailureRecord:
    """What is known about the rate of changes.

    Args:
        events: failures so far; workers that were lost together count once, since they make one change.
        exposure: seconds that live workers have worked, added up over the workers.
        prior_events: failures that the prior counts for.
        prior_seconds: worker-seconds between two failures by the prior.
    """

    events: int = 0
    exposure: float = 0.0
    prior_events: float = 0.001
    prior_seconds: float = LLAMA3_WORKER_SECONDS

    def __post_init__(self) -> None:
        whole("FailureRecord", "events", self.events)
        at_least("FailureRecord", "exposure", self.exposure)
        at_least("FailureRecord", "prior_events", self.prior_events, above=True)
        at_least("FailureRecord", "prior_seconds", self.prior_seconds, above=True)

    def after(self, workers: int, seconds: float, events: int = 0) -> FailureRecord:
        """The record after ``seconds`` with that many live workers, at the end of which ``events`` failures came."""
        return replace(self, events=self.events + events, exposure=self.exposure + workers * seconds)

    @property
    def rate(self) -> float:
        """The mean rate, in failures per worker and second."""
        return (self.prior_events + self.events) / (self.prior_events * self.prior_seconds + self.exposure)

    def next_change(self, workers: int) -> float:
        """Seconds expected until one of ``workers`` fails."""
        return 1.0 / (self.rate * workers) if workers else math.inf
