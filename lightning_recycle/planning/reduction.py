"""A stage's reduction in buckets: when each is summed, and what of it is left after the last W.

Concept: the last W of a stage completes the gradients of its n buckets at equal distances, the last one at its end, and
each bucket takes the n-th part of the whole reduction, one after the other. The sums before the end of that W cost
nobody anything, so the operation REDUCE is what is left. Its duration depends on the stage alone: whichever workers
end last, all orders of operations are compared by the same constant, and bounds and exact models stay what they are.

Contract: pure arithmetic in the unit of the costs. A fused backward counts as its last part, W. The pace is that of a
worker without a factor.

Must not know: schedules, and what a bucket holds.
"""

from __future__ import annotations

__all__ = ["bucket_times", "remaining"]


def remaining(reduction: float, weight: float, buckets: int) -> float:
    """What is left of a reduction after the last W.

    Args:
        reduction: duration of the whole reduction.
        weight: duration of W.
        buckets: the number of buckets.
    """
    # Buckets are as far apart when they are complete as when they are summed: the first or the last decides.
    share = 1 / buckets
    return max(reduction * share, reduction - weight * (1 - share))


def bucket_times(reduction: float, weight: float, buckets: int) -> list[tuple[float, float]]:
    """From when to when each bucket is summed, from the end of the last W; arguments as for :func:`remaining`."""
    times: list[tuple[float, float]] = []
    end = -weight
    for index in range(buckets):
        complete = -weight * (buckets - 1 - index) / buckets
        begin = max(complete, end)
        end = begin + reduction / buckets
        times.append((begin, end))
    return times
