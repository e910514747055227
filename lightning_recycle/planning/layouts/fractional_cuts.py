"""Cuts at a part of a layer, which neighbouring stages share and run in turns.

Concept: with whole layers the work of a stage changes by a layer at least, which is a quarter of it where stages have
four. A bound may lie within a layer instead: behind 4.25 layers means that the stages on both sides hold layer 4, and
that a quarter of the micro-batches run it on the earlier one. Each micro-batch has whole bounds of its own, so nothing
within a layer is cut.

The last micro-batch of each pipeline runs it on the earlier stage: then the later one, which ends a step about an F
after the other, has the layer's gradients before its last W, and the other one does not wait for them. Each of the
others has a place in [0, 1), and runs it on the earlier stage if that is less than their part. Multiples of the golden
section spread the places evenly over the step, and shifts by 1 / D over the pipelines, so that every worker has its
part, whatever the routes are. A micro-batch has the same place at all bounds: where all stages have 4.25
layers, it meets 4 or 5 at each, never 3. Where the part is less than one micro-batch of each pipeline, the last ones of
some run the layer there.

A bound is a whole number, or one with two decimals. Each stage has at least one layer of its own, so a layer has two
holders at most.

Contract: pure; on all workers the same.

Must not know: what a layer is, who holds it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import TypeAlias

from lightning_recycle.arguments import is_number
from lightning_recycle.planning.grid import Grid

__all__ = [
    "PARTS",
    "Bounds",
    "are_bounds",
    "are_whole",
    "bounds_of",
    "held_ranges",
    "parts_of",
    "rounded",
    "shared_layers",
]

Bounds: TypeAlias = tuple[float, ...]
"""Stage s has the layers from ``bounds[s]`` up to ``bounds[s + 1]``; see the module."""

PARTS = 100
"""Into how many parts the micro-batches of a layer can be divided."""


def are_bounds(bounds: Sequence[float]) -> bool:
    """Whether these are the bounds of stages: from 0 to a whole number, with a layer of its own for each stage."""
    if len(bounds) < 2 or not all(is_number(bound, 0) and rounded(bound) == bound for bound in bounds):
        return False
    own = all(math.ceil(begin) < math.floor(end) for begin, end in pairwise(bounds))
    return own and bounds[0] == 0 and bounds[-1] == math.floor(bounds[-1])


def rounded(bound: float) -> float:
    """The nearest bound that can be; whole ones are integers."""
    hundredths = round(bound * PARTS)
    return hundredths // PARTS if hundredths % PARTS == 0 else hundredths / PARTS


def are_whole(bounds: Sequence[float]) -> bool:
    """Whether no layer is shared."""
    return all(bound == math.floor(bound) for bound in bounds)


def held_ranges(bounds: Sequence[float]) -> tuple[range, ...]:
    """The layers that each stage holds; those of neighbours overlap where they share one."""
    return tuple(range(math.floor(begin), math.ceil(end)) for begin, end in pairwise(bounds))


def shared_layers(bounds: Sequence[float]) -> dict[int, tuple[int, float]]:
    """Of each layer that two stages share the earlier one, and the part of the micro-batches that run it there."""
    return {
        math.floor(bound): (stage, bound - math.floor(bound))
        for stage, bound in enumerate(bounds[1:-1])
        if bound != math.floor(bound)
    }


def parts_of(bounds: Sequence[float]) -> tuple[dict[int, float], ...]:
    """For each stage, of each layer that it holds, the part of the micro-batches that run it there."""
    found = []
    for begin, end in pairwise(bounds):
        parts = dict.fromkeys(range(math.floor(begin), math.ceil(end)), 1.0)
        if begin != math.floor(begin):
            parts[math.floor(begin)] = math.ceil(begin) - begin
        if end != math.floor(end):
            parts[math.floor(end)] = end - math.floor(end)
        found.append(parts)
    return tuple(found)


def bounds_of(bounds: Sequence[float], microbatch: int, grid: Grid) -> tuple[int, ...]:
    """The whole bounds of one micro-batch.

    Args:
        bounds: of the stages.
        microbatch: its index in the global batch, m * D + d.
        grid: with D and M.
    """
    index, pipeline = divmod(microbatch, grid.pipelines)
    return tuple(
        math.floor(bound) + (bound != math.floor(bound) and _is_earlier(bound, index, pipeline, grid))
        for bound in bounds
    )


def _is_earlier(bound: float, index: int, pipeline: int, grid: Grid) -> bool:
    last, pipelines = grid.microbatches - 1, grid.pipelines
    # How many of the pipeline's micro-batches, and of all pipelines', in units of 1 / PARTS: whole numbers are exact.
    mine = round((bound - math.floor(bound)) * PARTS) * grid.microbatches
    if mine < PARTS:
        return index >= last and (pipeline + 1) * mine // PARTS > pipeline * mine // PARTS
    if index >= last:
        return True
    place = (index * _stride(last) + pipeline * last // pipelines) % last
    return place * pipelines + pipeline < (mine - PARTS) * pipelines // PARTS


@lru_cache(maxsize=64)
def _stride(count: int) -> int:
    """The number without a common divisor with ``count`` that is nearest to its golden section: its multiples are
    spread evenly over ``count`` places, however few of them are looked at.
    """
    golden = count * (math.sqrt(5) - 1) / 2
    candidates = (each for each in range(1, count + 1) if math.gcd(each, count) == 1)
    return min(candidates, key=lambda each: abs(each - golden))
