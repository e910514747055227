"""Coupling: fuse a B and its W wherever nothing waits for the B meanwhile.

Concept: a backward is split so that the stage before gets its gradient early. Where that stage is busy until after the
W anyway, or where there is no stage before, one BW does the same work in one pass over the graph: it is a little
cheaper than B + W, and holds less in between. So the search splits every backward that memory allows, and this pass
takes back what brought nothing:

- at stage 0, where nobody waits, B and W become BW at the place of B if no F comes in between, which others wait for;
- elsewhere if W directly follows B and the stage before does not begin its own backward until W has ended.

Contract: the period does not grow, nor does the makespan without the staggered optimizer; no worker holds more at any
time. One pass.

Must not know: how the order was found. Internal to ``planning``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from lightning_recycle.planning.timing import BACKWARD, FORWARD, FUSED, WEIGHT, Codes, Timing, best_timing

__all__ = ["coupled"]


def coupled(codes: Codes, sequence: list[int], timing: Timing) -> tuple[list[int], Timing]:
    """The sequence with such pairs fused, and its times.

    Args:
        codes: the operations.
        sequence: all operations in an order that respects their dependencies.
        timing: its times.
    """
    if codes.fused:
        return sequence, timing
    pairs = _idle_splits(codes, sequence, timing.starts)
    if not pairs:
        return sequence, timing
    to_fused, to_weight = (FUSED - BACKWARD) * codes.stages * codes.n, (WEIGHT - BACKWARD) * codes.stages * codes.n
    weights = {code + to_weight for code in pairs}
    fused = [code + to_fused if code in pairs else code for code in sequence if code not in weights]
    moved = _moved(codes, fused, timing, {code + to_fused: timing.starts[code] for code in pairs})
    again = best_timing(codes, fused)  # what ends earlier now may let a stage begin later
    lengths = [each.period if codes.problem.technique.staggered else each.makespan for each in (moved, again)]
    # Rounding must not decide between equally good schedules.
    return fused, again if round(lengths[1], 9) < round(lengths[0], 9) else moved


def _moved(codes: Codes, sequence: Sequence[int], timing: Timing, fused: Mapping[int, float]) -> Timing:
    """The times after coupling: the same, but for backwards of stage 0 that follow one; nobody waits for those."""
    n, stages, ranks, times = codes.n, codes.stages, codes.ranks, codes.times
    starts = timing.starts.copy()
    for code, start in fused.items():
        starts[code] = start
    free = dict.fromkeys((codes.problem.grid.rank(worker) for worker in codes.problem.live_workers(0)), 0.0)
    for code in sequence:
        key, number = divmod(code, n)
        if not key % stages:
            rank = ranks[key][number]
            starts[code] = max(starts[code], free[rank])
            free[rank] = starts[code] + times[key][number]
    end = max(free.values()) + codes.closing[0]
    return replace(timing, starts=starts, stage_end=[min(end, timing.stage_end[0]), *timing.stage_end[1:]])


def _idle_splits(codes: Codes, sequence: Sequence[int], starts: Sequence[float]) -> set[int]:
    """The codes of those B that may as well be BW."""
    n, stages, ranks, times = codes.n, codes.stages, codes.ranks, codes.times
    communication = codes.problem.costs.communication
    to_weight, to_fused = (WEIGHT - BACKWARD) * stages * n, (FUSED - BACKWARD) * stages * n
    previous = [-1] * codes.problem.grid.num_workers  # the last operation of each worker so far
    since_forward: list[set[int]] = [set() for _ in previous]  # at stage 0: the B since the last F
    found: set[int] = set()
    for code in sequence:
        key, number = divmod(code, n)
        kind, stage = divmod(key, stages)
        rank = ranks[key][number]
        if kind == WEIGHT:
            backward = code - to_weight
            if stage == 0:
                if backward in since_forward[rank]:
                    found.add(backward)
            elif previous[rank] == backward:
                # The operation of the stage before that waits, which is either B or BW; the other one has no start.
                waiting = max(starts[backward - n], starts[backward - n + to_fused])
                if starts[code] + times[key][number] + communication <= waiting:
                    found.add(backward)
        elif stage == 0:
            if kind == FORWARD:
                since_forward[rank].clear()
            else:
                since_forward[rank].add(code)
        previous[rank] = code
    return found
