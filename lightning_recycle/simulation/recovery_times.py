"""How long the parts of a recovery take that grow with the number of workers.

Concept: after a failure all live workers agree on a new generation, look up the plan and whom they need, and connect.
The first two were measured with this package's coordinator, over real sockets with up to 2,000 workers.

Contract: pure functions; seconds. Between the measured sizes straight lines on logarithmic scales, beyond them the last
of these lines: what it gives above 2,000 workers is an extrapolation.

Must not know: policies.

Source: ``benchmarks/control_plane.py``, figures of 2026-11-22 in ``benchmarks/RESULTS.md`` (two cores for everything).
"""

from __future__ import annotations

import math

__all__ = ["MEASURED_AGREEMENT", "agreement_seconds"]

MEASURED_AGREEMENT = ((64, 0.018), (250, 0.059), (500, 0.167), (1000, 0.437), (2000, 1.489))
"""Workers, and seconds from a kill until all have agreed on a new generation."""


def agreement_seconds(workers: int) -> float:
    """Seconds until that many workers agree on a new generation."""
    if workers < 1:
        return 0.0
    points = MEASURED_AGREEMENT
    place = next((n for n in range(1, len(points)) if workers <= points[n][0]), len(points) - 1)
    (x0, y0), (x1, y1) = points[place - 1], points[place]
    slope = math.log(y1 / y0) / math.log(x1 / x0)
    return float(y0 * (workers / x0) ** slope)
