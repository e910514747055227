"""How long a layout is expected to last, and how safe it is: failures, from a prior and the run's own record.

Concept: failures come at an unknown rate per worker and second. With a Gamma prior of shape a and exposure b, after k
failures in E worker-seconds the rate is Gamma(a + k, b + E) with mean (a + k) / (b + E): conjugate to the Poisson
process, so two numbers are the whole memory. The prior's mean a / b is Llama 3's rate; its shape says how many failures
it counts for, and it is small: spot instances fail four orders of magnitude more often, so a run's first failures
must outweigh it.

How many workers a failure takes at once is counted too, because a layer with few owners is soon lost with all of them.
By the prior, which counts for one failure, three of four take one worker, and each size is a quarter as likely as the
one below it.

Contract: frozen; pure.

Must not know: layouts, clocks.

Source: Llama 3 (arXiv 2407.21783, section 3.3.4): 419 unplanned interruptions in 54 days on 16,384 GPUs, one per 50,700
GPU-hours.

Units: seconds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from lightning_recycle.arguments import at_least, whole

__all__ = ["LLAMA3_WORKER_SECONDS", "FailureRecord"]

_LARGER_SIZE = 0.25  # by the prior, a failure of n + 1 workers at once is so much as likely as one of n
_LARGER = 8  # sizes of failures that are looked at beyond those that are needed or were seen

LLAMA3_WORKER_SECONDS = 54 * 86400 * 16384 / 419
"""Between two failures of one GPU."""


@dataclass(frozen=True, slots=True)
class FailureRecord:
    """What is known about the rate of changes.

    Args:
        sizes: failures so far that took 1, 2, 3, ... workers at once; each makes one change.
        exposure: seconds that live workers have worked, added up over the workers.
        prior_events: failures that the prior of the rate counts for.
        prior_seconds: worker-seconds between two failures by the prior.
    """

    sizes: tuple[int, ...] = ()
    exposure: float = 0.0
    prior_events: float = 0.001
    prior_seconds: float = LLAMA3_WORKER_SECONDS

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", tuple(whole("FailureRecord", "sizes", count) for count in self.sizes))
        at_least("FailureRecord", "exposure", self.exposure)
        at_least("FailureRecord", "prior_events", self.prior_events, above=True)
        at_least("FailureRecord", "prior_seconds", self.prior_seconds, above=True)

    def after(self, workers: int, seconds: float, lost: int = 0) -> FailureRecord:
        """The record after ``seconds`` with that many live workers, at the end of which ``lost`` failed at once."""
        sizes = [*self.sizes, *(0,) * (lost - len(self.sizes))]
        if lost:
            sizes[lost - 1] += 1
        return replace(self, sizes=tuple(sizes), exposure=self.exposure + workers * seconds)

    @property
    def rate(self) -> float:
        """The mean rate, in failures per worker and second."""
        return (self.prior_events + sum(self.sizes)) / (self.prior_events * self.prior_seconds + self.exposure)

    def next_change(self, workers: int) -> float:
        """Seconds expected until one of ``workers`` fails."""
        return 1.0 / (self.rate * workers) if workers else math.inf

    def loss_chance(self, owners: Iterable[int], workers: int) -> float:
        """How likely the next failure takes all owners of something, at most: the sum over all things.

        Args:
            owners: for each part of the model that has owners of its own, such as a stage, how many it has.
            workers: live workers, of which a failure takes any with the same chance.
        """
        alone = Counter(owners)
        return min(1.0, sum(count * self._takes_all(own, workers) for own, count in alone.items()))

    def _takes_all(self, own: int, workers: int) -> float:
        """How likely the next failure takes these ``own`` of all workers."""
        total = sum(self.sizes) + 1
        chance = 0.0
        for size in range(own, min(workers, max(len(self.sizes), own + _LARGER)) + 1):
            seen = self.sizes[size - 1] if size <= len(self.sizes) else 0
            likely = (seen + (1 - _LARGER_SIZE) * _LARGER_SIZE ** (size - 1)) / total
            chance += likely * math.prod((size - n) / (workers - n) for n in range(own))
        return chance
