"""Pipelines of different depth: any number of workers forms whole pipelines, each with its own cut.

Concept: with one cut for all pipelines, the barest stage sets the pace and whole layers are coarse: of 4 workers times
8 stages of 4 layers, one lost worker costs at least 17 % of the ideal. N workers can instead form pipelines of d1 + d2
+ ... <= N stages. A pipeline of d stages is as fast as its slowest stage, the best cut for d is exact
(:mod:`~lightning_recycle.planning.cuts`), and which depths are fastest together is a knapsack:

    value[n] = max over d of value[n - d] + 1 / (slowest stage of the best cut into d stages)

The micro-batches of a step are shared so that the slowest pipeline is done first; then the real schedules decide among
a few forms, and the shares follow what their schedules take.

The gradients of a layer are summed over all pipelines, so no stage steps before the stages of the others that hold any
of its layers. With the staggered optimizer, stages of pipelines that are cut at other places do not end at the same
time. How often a step can follow is then the largest mean of a cycle "a pipeline's stage begins ... another's stage has
its gradients ..."; pipelines may be shifted against each other.

Contract: pure, deterministic; a form never asks a worker for more memory than it has, if the judge does not.

Must not know: which worker goes where, torch.

Source: the idea is Oobleck's (Jang et al., SOSP'23, arXiv 2309.08125); there depths come from templates for consecutive
numbers of nodes.

Units: seconds, bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heapify, heapreplace
from itertools import pairwise
from typing import TypeAlias

from lightning_recycle.errors import PlanningError
from lightning_recycle.planning.cuts import Stages, fastest
from lightning_recycle.planning.layer_costs import LayerCosts
from lightning_recycle.planning.layout_judging import Judgement

__all__ = ["Form", "PipelineJudge", "best_cut", "form_of", "forms", "judged_form", "shared"]

PipelineJudge: TypeAlias = Callable[[tuple[int, ...], int, int], Judgement]
"""A step of one pipeline, given its cuts, its micro-batches, and the number of pipelines."""

_TRIED = 3  # forms that are planned
_PRECISION = 1e-9  # relative
_ALIKE = 1.02  # pipelines whose steps are this close need no other shares


@dataclass(frozen=True)
class Form:
    """Pipelines and what they do.

    Args:
        cuts: the bounds of each pipeline's stages, the deepest pipeline first.
        microbatches: micro-batches of each pipeline in a step.
        period: seconds of a step, that of the slowest pipeline; at first by the load, then by the schedules.
        fill: extra seconds of the first step, which begins with empty pipelines.
        lead: how long before the end of a step the first worker begins the next one.
    """

    cuts: tuple[tuple[int, ...], ...]
    microbatches: tuple[int, ...]
    period: float
    fill: float = 0.0
    lead: float = 0.0

    @property
    def depths(self) -> tuple[int, ...]:
        """Stages of each pipeline."""
        return tuple(len(cuts) - 1 for cuts in self.cuts)

    @property
    def workers(self) -> int:
        """Workers of all pipelines."""
        return sum(self.depths)

    def __str__(self) -> str:
        depths = self.depths
        return ", ".join(f"{depths.count(depth)} x {depth}" for depth in sorted(set(depths), reverse=True))


def best_cut(layers: LayerCosts, depth: int, *, decoupled: bool = True) -> tuple[tuple[int, ...], float] | None:
    """The best cut for a pipeline of ``depth`` stages, and the seconds of its slowest stage for one micro-batch.

    It leaves room for the micro-batches that 1F1B holds, or at least for one; None where not even that fits.
    """
    return _best_cut(layers, depth, decoupled)


@lru_cache(maxsize=4096)
def _best_cut(layers: LayerCosts, depth: int, decoupled: bool) -> tuple[tuple[int, ...], float] | None:
    if not 1 <= depth <= layers.layers:
        return None
    state, held, limit = layers.state_bytes, layers.held_bytes, layers.memory_limit
    for spare in (1.0, 0.0):

        def fits(stage: int, begin: int, end: int, spare: float = spare) -> bool:
            if limit is None:
                return True
            most = max(1.0, spare * (depth - stage))
            return sum(state[begin:end]) + most * sum(held[begin:end]) <= limit * (1 + 1e-9)

        overhead = layers.overhead * (3 if decoupled else 2)
        work = layers.work(decoupled=decoupled)
        stages = Stages(work, (0.0,) * layers.layers, [[(1, 1.0)]] * depth, depth, fits, overhead)
        found = fastest(stages)
        if found is not None:
            return found.cuts, found.bottleneck
    return None


def shared(total: int, seconds: Sequence[float]) -> tuple[int, ...]:
    """``total`` micro-batches over pipelines of so many seconds each, at least one for each, the slowest done first.

    Raises:
        PlanningError: when there are fewer micro-batches than pipelines.
    """
    if total < len(seconds):
        raise PlanningError(f"{total} micro-batches are too few for {len(seconds)} pipelines.")
    shares = [1] * len(seconds)
    queue = [(2 * each, number) for number, each in enumerate(seconds)]
    heapify(queue)
    for _ in range(total - len(seconds)):
        _, number = queue[0]
        shares[number] += 1
        heapreplace(queue, ((shares[number] + 1) * seconds[number], number))
    return tuple(shares)


def forms(
    layers: LayerCosts, workers: int, microbatches: int, *, usual: int, decoupled: bool = True
) -> tuple[Form, ...]:
    """The forms for that many workers, by their load, the fastest first.

    Args:
        layers: what layers cost.
        workers: live workers.
        microbatches: of a step, all pipelines together.
        usual: stages of a pipeline without failures.
        decoupled: whether backwards are split.
    """
    slowest = {}
    for depth in range(1, min(workers, layers.layers) + 1):
        cut = best_cut(layers, depth, decoupled=decoupled)
        if cut is not None and cut[1] > 0:
            slowest[depth] = cut[1]
    once = {tuple(sorted(depths, reverse=True)) for depths in _depths(slowest, workers, usual) if depths}
    found = [form_of(layers, depths, microbatches, decoupled=decoupled) for depths in once]
    return tuple(
        sorted(
            (form for form in found if form is not None),
            key=lambda form: (form.period, form.cuts),
        )
    )


def form_of(layers: LayerCosts, depths: Sequence[int], microbatches: int, *, decoupled: bool = True) -> Form | None:
    """The form of pipelines of these depths, by their load; None where a pipeline does not fit, or gets nothing."""
    found = [best_cut(layers, depth, decoupled=decoupled) for depth in depths]
    if not depths or None in found or len(depths) > microbatches:
        return None
    cuts, seconds = zip(*(each for each in found if each is not None), strict=True)
    shares = shared(microbatches, seconds)
    return Form(tuple(cuts), shares, max(share * each for share, each in zip(shares, seconds, strict=True)))


def _depths(slowest: dict[int, float], workers: int, usual: int) -> Iterator[tuple[int, ...]]:
    """Depths of pipelines to compare: the fastest of any depth, of depths near the usual one, and even ones."""
    if not slowest:
        return
    for most in (usual, usual + 1, usual + usual // 2, 2 * usual, max(slowest)):
        for least in (1, usual // 2, usual - 1):
            allowed = [depth for depth in slowest if least <= depth <= most]
            if allowed:
                yield _knapsack(slowest, allowed, workers)
    near = max(1, round(workers / usual))
    for count in range(max(1, near - 1), near + 2):
        size, larger = divmod(workers, count)
        if size in slowest and (not larger or size + 1 in slowest):
            yield (size + 1,) * larger + (size,) * (count - larger)
    full, rest = divmod(workers, usual)
    if usual in slowest and full:
        yield (usual,) * full + ((rest,) if rest in slowest else ())


def _knapsack(slowest: dict[int, float], allowed: Collection[int], workers: int) -> tuple[int, ...]:
    """The depths of the largest speed altogether; of equally fast ones, those with the fewest pipelines."""
    best: list[tuple[float, int, int]] = [(0.0, 0, 0)]  # speed, minus pipelines, the depth chosen last
    for count in range(1, workers + 1):
        speed, fewer, _ = best[count - 1]
        found = (speed, fewer, 0)
        for depth in allowed:
            if depth <= count:
                speed, fewer, _ = best[count - depth]
                found = max(found, (round(speed + 1 / slowest[depth], 12), fewer - 1, depth))
        best.append(found)
    depths, left = [], workers
    while left:
        depth = best[left][2]
        if depth:
            depths.append(depth)
        left -= depth or 1
    return tuple(depths)


def judged_form(form: Form, judge: PipelineJudge) -> Form:
    """The form with the period of its schedules; micro-batches go where their schedules have time for them.

    Raises:
        PlanningError: when a pipeline has no plan.
    """
    first = _judged(form, judge)
    steps = [judge(cuts, share, len(form.cuts)) for cuts, share in zip(form.cuts, form.microbatches, strict=True)]
    periods = [step.period for step in steps]
    if max(periods) <= _ALIKE * min(periods):
        return first
    seconds = [period / share for period, share in zip(periods, form.microbatches, strict=True)]
    again = _judged(Form(form.cuts, shared(sum(form.microbatches), seconds), math.inf), judge)
    return min(first, again, key=lambda each: each.period)


def _judged(form: Form, judge: PipelineJudge) -> Form:
    different = sorted(set(zip(form.cuts, form.microbatches, strict=True)))
    steps = [judge(cuts, share, len(form.cuts)) for cuts, share in different]
    period = _together([cuts for cuts, _ in different], steps)
    fill = max(step.period + step.fill for step in steps) - period
    return Form(form.cuts, form.microbatches, period, fill, max(step.lead for step in steps))


def _together(cuts: Sequence[tuple[int, ...]], steps: Sequence[Judgement]) -> float:
    """Seconds of a step of pipelines that wait for each other's gradients, as far as it is known when stages end."""
    low = max(step.period for step in steps)
    if not all(step.spans for step in steps):
        return low
    held = [
        [(*pair, *span) for pair, span in zip(pairwise(own), step.spans, strict=True)]
        for own, step in zip(cuts, steps, strict=True)
    ]
    # From when a stage of the first pipeline begins until one of the second that holds its layers has stepped.
    until = [
        [
            max(
                end - begin
                for first, last, begin, _ in one
                for other, behind, _, end in two
                if first < behind and other < last
            )
            for two in held
        ]
        for one in held
    ]
    high = max(low, *map(max, until))
    while high - low > _PRECISION * high:
        middle = (low + high) / 2
        low, high = (low, middle) if _can_follow(until, middle) else (middle, high)
    return high


def _can_follow(until: Sequence[Sequence[float]], period: float) -> bool:
    """Whether pipelines can be shifted so that all steps follow after ``period``: no cycle of waits is longer."""
    count = range(len(until))
    shifts = [0.0 for _ in count]
    for _ in range(len(until) + 1):
        later = [max(shifts[one], *(shifts[two] + until[one][two] - period for two in count)) for one in count]
        if all(new <= old + _PRECISION * period for new, old in zip(later, shifts, strict=True)):
            return True
        shifts = later
    return False
