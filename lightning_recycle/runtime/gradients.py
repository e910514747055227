"""Gradients of a stage: those of parameters, and flat buffers that a step adds up.

Outside of the operations of a step ``parameter.grad`` is the truth, as on one device. At a step's begin it is *put
aside*, and backward accumulates into a buffer, of which each ``parameter.grad`` is a view; nothing is copied. After the
sum over all workers the value that was put aside is restored, the user's zeroing runs, and the sum is added as autograd
adds: so gradients accumulate over batches, and an override of ``optimizer_zero_grad`` counts. The user's hooks after
an accumulation are put aside, too, and run once, on that.

A bucket is a part of a buffer, with whole gradients, those of the last layers first, as a backward completes them
first. Weights of several stages have buckets of their own, laid out alike in all of them. Behind its gradients a bucket
counts for each of them in how many workers a backward wrote it: an unused parameter has no gradient (None), as on one
device. *Statistics* are floating-point tensors summed as gradients are. DTensors count by this process's shard.

Even and odd steps have separate buffers: the reduced gradient of a step is kept until the step after the next begins,
for peers that lost their part of an all-reduce. That is so with a single stage, too: its workers do not wait for each
other between REDUCE and the next step. Parameters may change between two steps, so each step lays out its buffers.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from operator import add
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_recycle.errors import UnsupportedFeatureError
from lightning_recycle.planning.program import COMPLETING, Task
from lightning_recycle.runtime.communicator import Communicator, Reduction
from lightning_recycle.runtime.stage import Stage
from lightning_recycle.tensor_memory import local_part, sharded_like
from lightning_recycle.torch_internals import (
    foreach_add_,
    foreach_norm,
    hooks_after_accumulation,
    set_hooks_after_accumulation,
    take_hooks_after_accumulation,
    versions_of,
)

log = logging.getLogger(__name__)

_ALIGNMENT = 16  # elements; keeps every view as aligned as a separate tensor


@dataclass(frozen=True)
class AccumulationPart:
    """A batch's part in an optimizer step, with gradient accumulation.

    ``batches``: the number by which the sum of gradients is divided. ``begins``, ``ends``: whether the batch is the
    first, the last one of that step.
    """

    batches: int = 1
    begins: bool = True
    ends: bool = True


class Bucket:
    """The gradients of some parameters: a part of a flat buffer, and views into it.

    Of sharded ones ``views`` have this process's part, ``grads`` DTensors; views count their writes. ``stages``: those
    that hold the parameters, over whose workers the sum is, if not this one alone.
    """

    def __init__(
        self, buffer: Tensor, parameters: Sequence[nn.Parameter], views: Sequence[Tensor], stages: tuple[int, ...]
    ) -> None:
        self.buffer, self.parameters, self.views, self.stages = buffer, tuple(parameters), tuple(views), stages
        self.grads = tuple(sharded_like(p, view) for p, view in zip(parameters, views, strict=True))
        begin = sum(_aligned(view.numel()) for view in views)
        self._counts = buffer[begin : begin + len(views)]
        self._clean: list[int] = []
        self._has_shards = any(grad is not view for grad, view in zip(self.grads, self.views, strict=True))

    @property
    def is_in_place(self) -> bool:
        """Whether the parameters' gradients are still these."""
        return all(p.grad is grad for p, grad in zip(self.parameters, self.grads, strict=True))

    @property
    def version(self) -> int:
        return sum(self._versions())

    def _versions(self) -> list[int]:
        # An operation of a DTensor counts as a write of that alone, others write to the shard.
        versions = versions_of(self.grads)
        return [*map(add, versions, versions_of(self.views))] if self._has_shards else versions

    def clear(self) -> None:
        """Zeroes the buffer; from then on no gradient counts as written."""
        self.buffer.zero_()
        self._clean = self._versions()

    def count(self) -> None:
        """Records behind the gradients which were written, before they are summed."""
        written = [version > clean for version, clean in zip(self._versions(), self._clean, strict=True)]
        self._counts.copy_(torch.tensor(written, dtype=self._counts.dtype))

    def written(self) -> list[bool]:
        """Which gradients some worker's backward has written, after the sum."""
        return (self._counts != 0).tolist()


class _StepBuffers:
    """Gradients in one flat buffer per dtype, and per set of stages that hold them.

    A bucket has up to ``bucket_bytes``, or one gradient. Statistics lie in the bucket that is complete last.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        device: torch.device,
        bucket_bytes: float,
        tie_stages: Mapping[nn.Parameter, tuple[int, ...]],
        statistics: Sequence[Tensor] = (),
    ) -> None:
        self.made_of, self.holds = (parameters, statistics), _layout_key(parameters, statistics)
        ids = set(map(id, parameters))
        ordered = [p for p in parameters if p not in tie_stages] + [p for p in tie_stages if id(p) in ids]
        kinds = dict.fromkeys((tie_stages.get(p, ()), p.dtype) for p in ordered)
        kinds.update(dict.fromkeys(((), tensor.dtype) for tensor in statistics))
        self.buffers: list[Tensor] = []
        self.statistics: list[Tensor] = [torch.empty(0)] * len(statistics)
        buckets: list[Bucket] = []
        for stages, dtype in kinds:
            members = [p for p in ordered if p.dtype == dtype and tie_stages.get(p, ()) == stages]
            indices = [i for i, tensor in enumerate(statistics) if tensor.dtype == dtype and not stages]
            local_parts = [local_part(p) for p in members]
            sizes = [_aligned(local.numel()) for local in local_parts]
            # (0, 0): statistics alone
            ranges = [*_bucket_ranges([size * dtype.itemsize for size in sizes], bucket_bytes)] or [(0, 0)]
            lengths = [sum(sizes[first:end]) + _aligned(end - first) for first, end in ranges]
            statistics_size = sum(_aligned(statistics[i].numel()) for i in indices)
            lengths[-1] += statistics_size
            buffer = torch.empty(sum(lengths), dtype=dtype, device=device)  # filled when a step begins in it
            self.buffers.append(buffer)
            for (first, end), chunk in zip(ranges, buffer.split(lengths), strict=True):
                views = _views(chunk, [local.shape for local in local_parts[first:end]])
                # Each counts its own writes: a view of its own would count those of all.
                buckets.append(Bucket(chunk, members[first:end], [view.data for view in views], stages))
            statistics_views = _views(buffer[len(buffer) - statistics_size :], [statistics[i].shape for i in indices])
            for i, view in zip(indices, statistics_views, strict=True):
                self.statistics[i] = view
        # Each is complete once its first parameter is, which a backward reaches last.
        order = {id(parameter): number for number, parameter in enumerate(ordered)}
        self.buckets = sorted(buckets, key=lambda b: (b.stages, -order[id(b.parameters[0])] if b.parameters else 1))
        # Each parameter with its gradient, and this process's part of that.
        self.pairs = [pair for b in self.buckets for pair in zip(b.parameters, b.grads, b.views, strict=True)]

    def written(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Each parameter that some micro-batch used, with its summed gradient."""
        found: list[tuple[nn.Parameter, Tensor]] = []
        for bucket in self.buckets:
            found += itertools.compress(zip(bucket.parameters, bucket.grads, strict=True), bucket.written())
        return found


def _layout_key(parameters: Sequence[nn.Parameter], statistics: Sequence[Tensor]) -> tuple[Any, ...]:
    """Key of a layout of buffers: equal for the same parameters and statistics."""
    return (*map(id, parameters), *((tensor.shape, tensor.dtype) for tensor in statistics))


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _views(buffer: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """The first parts of ``buffer``, of these shapes."""
    offsets = itertools.accumulate((_aligned(shape.numel()) for shape in shapes), initial=0)
    return [buffer[at : at + shape.numel()].view(shape) for shape, at in zip(shapes, offsets, strict=False)]


def _bucket_ranges(sizes: Sequence[int], most: float) -> Iterator[tuple[int, int]]:
    """Cuts ``sizes`` from the end into ranges (first, end) of at most ``most``."""
    end, total = len(sizes), 0
    for index in range(len(sizes) - 1, -1, -1):
        if total and total + sizes[index] > most:
            yield index + 1, end
            end, total = index + 1, 0
        total += sizes[index]
    if end:
        yield 0, end


class GradientBuffers:
    """Gradients of the parameters that require one when a step begins, in buckets.

    Other workers may need the reduced gradient of an applied step, so where hooks or the optimizer change gradients in
    place, they get copies.

    Args:
        lends_copies: whether gradients may be changed in place; a seen change sets it.
        tie_stages: for each parameter of several stages, all of them, in the same order everywhere.
        statistics: tensors of the shapes and dtypes of the statistics, the same on all workers of the stage.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        device: torch.device,
        bucket_bytes: float = math.inf,
        lends_copies: bool = False,
        tie_stages: Mapping[nn.Parameter, tuple[int, ...]] = MappingProxyType({}),
        statistics: Callable[[], Sequence[Tensor]] = tuple,
    ) -> None:
        self.parameters = list(parameters)
        self._device, self._bucket_bytes, self._tie_stages = device, bucket_bytes, tie_stages
        self._statistics = statistics
        self._sets = [self._empty(self._trained()) for _ in range(2)]
        self._lends_copies = lends_copies
        self._lent: _StepBuffers | None = None
        self._versions: list[int] = []  # of the gradients that are lent
        self._set_aside: dict[nn.Parameter, Tensor | None] | None = None  # what was put aside
        self._hooks: dict[nn.Parameter, dict[Any, Any]] = {}  # those after an accumulation, in a step

    def _empty(self, parameters: Sequence[nn.Parameter], statistics: Sequence[Tensor] = ()) -> _StepBuffers:
        return _StepBuffers(parameters, self._device, self._bucket_bytes, self._tie_stages, statistics)

    def _trained(self) -> list[nn.Parameter]:
        return [p for p in self.parameters if p.requires_grad]

    def of_step(self, step: int) -> list[Tensor]:
        """The flat buffers of ``step``; none if nothing is trained."""
        return self._sets[step % 2].buffers

    def buckets(self, step: int) -> list[Bucket]:
        """The buckets of ``step``; those of this stage alone first, as completed."""
        return self._sets[step % 2].buckets

    def statistics(self, step: int) -> list[Tensor]:
        """The statistics of ``step``: of this worker's micro-batches, once reduced of all."""
        return self._sets[step % 2].statistics

    def renew(self, step: int) -> None:
        """Takes other memory for ``step``, as a sum may still write to the old."""
        self._sets[step % 2] = self._empty(*self._sets[step % 2].made_of)

    def tensors(self) -> list[Tensor]:
        """All buffers, and the gradients beside them that parameters hold."""
        lent = [] if self._lent is None else [self._lent]
        own = self._ids_in_buffers()
        beside = [local_part(grad) for grad in self.held().values() if id(grad) not in own]
        return [*(buffer for each in (*self._sets, *lent) for buffer in each.buffers), *beside]

    def _ids_in_buffers(self) -> set[int]:
        sets = self._sets if self._lent is None else [*self._sets, self._lent]
        return {id(grad) for each in sets for _, grad, _ in each.pairs}

    # ------------------------------------------------------------------ in a step

    def begin(self, step: int) -> None:
        """Puts gradients aside, and makes ``parameter.grad`` views of empty buffers."""
        if self._set_aside is None:
            for parameter, grad, _ in self._sets[step % 2].pairs:
                if parameter.grad is grad:  # since the step before the last; it is emptied now
                    parameter.grad = grad.clone()
            self._set_aside = {parameter: parameter.grad for parameter in self.parameters}
        for parameter, hooks in take_hooks_after_accumulation(self.parameters).items():
            self._hooks.setdefault(parameter, hooks).update(hooks)
        trained, statistics = self._trained(), self._statistics()
        if self._sets[step % 2].holds != _layout_key(trained, statistics):
            self._sets[step % 2] = self._empty(trained, statistics)
        for parameter in self._set_aside:
            parameter.grad = None
        chosen = self._sets[step % 2]
        for bucket in chosen.buckets:
            bucket.clear()
        for parameter, grad, _ in chosen.pairs:
            parameter.grad = grad

    def check(self, step: int) -> None:
        """Raises UnsupportedFeatureError if a gradient has left its buffer."""
        for parameter, grad, _ in self._sets[step % 2].pairs:
            if parameter.grad is not grad:
                kind = "None" if parameter.grad is None else f"a separate {parameter.grad.layout} tensor"
                raise UnsupportedFeatureError(
                    f"The gradient of a parameter of shape {tuple(parameter.shape)} became {kind} in a backward; the"
                    " strategy needs dense gradients accumulated in place. Use sparse=False in embeddings and"
                    " backward() without create_graph, and replace .grad in on_after_backward() or later."
                )

    # ------------------------------------------------------------------ between steps

    def give_back(self) -> None:
        """Restores the parameters' gradients and hooks from before the step."""
        left, self._set_aside = self._set_aside, None
        for parameter, grad in (left or {}).items():
            parameter.grad = grad
        hooks, self._hooks = self._hooks, {}
        for parameter, of_one in hooks.items():
            of_one.update(dict(hooks_after_accumulation([parameter])).get(parameter, {}))  # registered in the step
            set_hooks_after_accumulation(parameter, of_one)

    def held(self) -> dict[nn.Parameter, Tensor]:
        """Gradients of parameters between steps."""
        found = {p: p.grad for p in self.parameters} if self._set_aside is None else self._set_aside
        return {parameter: grad for parameter, grad in found.items() if grad is not None}

    @torch.no_grad()
    def add(self, step: int, accumulation: AccumulationPart) -> bool:
        """Adds the sum of ``step`` to ``parameter.grad``, as a backward; False for none."""
        held = [(parameter, grad) for parameter in self.parameters if (grad := parameter.grad) is not None]
        own = self._ids_in_buffers() if held else set()
        for parameter, grad in held:
            if id(grad) in own:  # the next steps write to its memory
                parameter.grad = grad.clone()
        chosen = self._handed_over(step)
        found = chosen.written()
        known = [(p.grad, grad) for p, grad in found if p.grad is not None]
        if known:
            sums, parts = ([local_part(each) for each in column] for column in zip(*known, strict=True))
            foreach_add_(sums, parts, alpha=1 / accumulation.batches)
        for parameter, grad in found:
            if parameter.grad is None:
                parameter.grad = grad if accumulation.batches == 1 else grad / accumulation.batches
        self._versions = [bucket.version for bucket in chosen.buckets]
        for parameter, hooks in list(hooks_after_accumulation([parameter for parameter, _ in found])):
            for hook in list(hooks.values()):
                hook(parameter)
        return bool(found)

    def _handed_over(self, step: int) -> _StepBuffers:
        """The gradients of ``step`` for the optimizer; copies if they are changed."""
        chosen = self._sets[step % 2]
        if not self._lends_copies:
            return chosen
        if self._lent is None or self._lent.holds != chosen.holds:
            self._lent = self._empty(*chosen.made_of)
        for buffer, copy in zip(chosen.buffers, self._lent.buffers, strict=True):
            copy.copy_(buffer)
        return self._lent

    def hand_over_again(self, step: int) -> None:
        """Gives the gradients of ``step`` once more to parameters that had none."""
        chosen = self._lent if self._lends_copies and self._lent is not None else self._sets[step % 2]
        for parameter in self.parameters:
            parameter.grad = None
        for parameter, grad in chosen.written():
            parameter.grad = grad

    def protect_lent(self, step: int) -> None:
        """Hands over copies from now on, if gradients of ``step`` were changed in place."""
        if self._lends_copies or not self._versions:
            return
        if self._versions != [bucket.version for bucket in self.buckets(step)]:
            self._lends_copies = True
            log.info("Hooks or the optimizer change gradients in place; from now on they get copies.")

    # ------------------------------------------------------------------ sums of a step

    def by_parameter(self, step: int) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Each parameter, with its gradient in ``step``, or this process's part of it."""
        return ((parameter, view) for parameter, _, view in self._sets[step % 2].pairs)

    @torch.no_grad()
    def squared_norm(
        self, step: int, accumulation: AccumulationPart = AccumulationPart(), without: Collection[nn.Parameter] = ()
    ) -> float:
        """The squared norm of the optimizer's gradients, but of ``without``.

        The rest after an overridden ``optimizer_zero_grad`` does not count.
        """
        counted = self._after(step, accumulation, without)
        return float(sum(float(norm) ** 2 for norm in foreach_norm(counted))) if counted else 0.0

    @torch.no_grad()
    def is_finite(self, step: int, accumulation: AccumulationPart, without: Collection[nn.Parameter] = ()) -> bool:
        """Whether the gradients that an optimizer gets after ``step`` are finite."""
        counted = self._after(step, accumulation, without)
        return not counted or bool(torch.stack([torch.isfinite(grad).all() for grad in counted]).all())

    def _after(self, step: int, accumulation: AccumulationPart, without: Collection[nn.Parameter]) -> list[Tensor]:
        left_out = {id(parameter) for parameter in without}
        batches = accumulation.batches
        found = {p: view if batches == 1 else view / batches for p, view in self.by_parameter(step)}
        for parameter, grad in {} if accumulation.begins else self.held().items():
            part = local_part(grad)
            found[parameter] = part + found[parameter] if parameter in found else part
        return [value for parameter, value in found.items() if id(parameter) not in left_out]


class BucketedReduction:
    """A worker's sum of gradients over its stage, bucket by bucket, in each step.

    A worker's last W (or BW) completes the gradients one by one. A complete bucket is summed over its *group* (the
    workers of the stage, or of all stages with those weights) in the background; REDUCE begins the rest and waits for
    all. In a W the queue of weight gradients knows its contents. In a BW autograd reports each gradient that it has
    added, perhaps several to one parameter (reentrant activation checkpointing): only parameters that got exactly one
    in each backward before count as complete early, and none where the user's code runs the backward. Weights of
    several stages are complete after the last operation that adds to them; the first step shows which, as a loss may
    use the parameters of a layer that its micro-batch was not run through here.

    There is no circle of waits: the buckets and their order follow from the parameters alone, so all workers of a group
    begin the same ones in the same order, and no worker waits before it has begun all of its own. Buckets of several
    stages follow the numbers of the stages; where groups wait for each other (NCCL), they come last. An attempt that
    ended before :meth:`BucketedReduction.finish` is dropped: its sums are computed again, in other memory if a sum may
    still write to it. Where some of several stages have finished an attempt before, nothing is summed: one of them
    gives the sum.
    """

    def __init__(
        self, communicator: Communicator, gradients: GradientBuffers, stage: Stage, may_begin: Callable[[], bool]
    ) -> None:
        self._communicator, self._gradients, self._stage, self._may_begin = communicator, gradients, stage, may_begin
        self._step = 0
        self._givers: Mapping[tuple[int, ...], int] = {}
        self._queues: list[deque[Bucket]] = []  # what is left to be begun in the background, each in its order
        self._summed_in_reduce: Tensor | None = None
        self._buckets_to_count: list[Bucket] = []  # in no sum of their own
        self._last_task: Task | None = None  # the operation that completes the gradients
        self._completing_tasks: dict[Bucket, Task | None] = {}  # and those that complete each bucket
        self._expected: dict[tuple[int, ...], Task | None] = {}  # by stages: the last one that runs what they hold
        self._begun_reductions: list[Reduction] = []
        self._missing: dict[Bucket, set[int]] = {}  # not begun: the ids of parameters without their complete gradient
        self._bucket_of: dict[int, Bucket] = {}
        self._versions: dict[Bucket, int] = {}  # of what was begun although operations were left that do not add to it
        self._versions_seen: dict[Bucket, int] = {}  # the same of what could have begun, where it is not known yet
        self._grows_later: dict[tuple[int, ...], bool] = {}  # by stages: whether others added to it after all
        self._gradient_counts: dict[nn.Parameter, int] = {}  # the most that each got in one backward

    def begin(
        self,
        step: int,
        program: Sequence[Task],
        givers: Mapping[tuple[int, ...], int] = MappingProxyType({}),
        adds_to_all: Task | None = None,
    ) -> None:
        """Empties the gradients of ``step``, at which an attempt begins.

        ``program``: this worker's tasks; empty if nothing may leave before REDUCE. ``givers``: by the stages with
        common weights, the rank that gives an earlier attempt's sum. ``adds_to_all``: an operation that adds to all
        gradients.
        """
        self._gradients.begin(step)
        self._step, self._givers, self._last_task = step, givers, None
        self._completing_tasks, self._versions, self._bucket_of = {}, {}, {}
        self._versions_seen, self._expected = {}, {}
        has_peers, buckets = self._communicator.has_peers, self._gradients.buckets(step)
        of_stage = [bucket for bucket in buckets if not bucket.stages]
        of_ties = [bucket for bucket in buckets if bucket.stages]
        self._summed_in_reduce = torch.zeros(1) if not of_stage else None
        if len(of_stage) == 1 and self._communicator.sums_at_once(of_stage[0].buffer):
            self._summed_in_reduce = of_stage[0].buffer
        early = of_stage if has_peers and self._summed_in_reduce is None else []
        self._buckets_to_count = [] if early else of_stage
        in_one_order = self._communicator.transport.in_one_order
        self._queues = [deque(early + of_ties)] if in_one_order else [deque(early), deque(of_ties)]
        # Statistics alone are complete when the last operation begins: no forward comes after it.
        self._missing = {bucket: set(map(id, bucket.parameters)) or {0} for bucket in early + of_ties}
        adding = [task for task in reversed(program) if task.op.kind in COMPLETING]
        if adding and (of_ties or len(early) > 1):
            self._last_task = adding[0]
            self._completing_tasks = dict.fromkeys(early, self._last_task)
            for stages in {bucket.stages for bucket in of_ties}:
                unfinished = set().union(*(self._missing[bucket] for bucket in of_ties if bucket.stages == stages))
                end = next((t for t in adding if t is adds_to_all or unfinished - self._stage.untouched(t.index)), None)
                self._expected[stages] = end
                end = self._last_task if self._grows_later.get(stages, True) else end
                self._completing_tasks.update((bucket, end) for bucket in of_ties if bucket.stages == stages)

    def during_weights(self, task: Task) -> Callable[[nn.Parameter], None] | None:
        """The callback of the W of ``task``, for each complete parameter, or None."""
        if task is not self._last_task:
            return None
        self._await_gradients(self._stage.waiting_parameters(task.index))
        return self._complete_parameter

    def during_backward(self, task: Task) -> AbstractContextManager[None]:
        is_last = task is self._last_task and self._stage.differentiates_itself
        return self._sum_during_backward() if is_last else nullcontext()

    @contextmanager
    def _sum_during_backward(self) -> Iterator[None]:
        """Sums buckets within the last backward, each once its gradients are complete.

        A parameter counts as complete at its first gradient if no earlier backward gave it several. Raises
        UnsupportedFeatureError if it gets another one then.
        """
        last = self._last_task
        trained = [p for bucket in self._missing if self._completing_tasks[bucket] is last for p in bucket.parameters]
        self._await_gradients(trained)
        times: Counter[nn.Parameter] = Counter()

        def added(parameter: nn.Parameter) -> None:
            times[parameter] += 1
            if self._bucket_of[id(parameter)] not in self._missing:
                raise UnsupportedFeatureError(
                    f"A parameter of shape {tuple(parameter.shape)} got several gradients in a backward, and one in"
                    " those of earlier steps, so its bucket was reduced too early. Use activation checkpointing with"
                    " use_reentrant=False, or a bucket_cap_mb that is larger than the stage."
                )
            if self._gradient_counts.get(parameter) == 1:
                self._complete_parameter(parameter)

        hooks = [parameter.register_post_accumulate_grad_hook(added) for parameter in trained]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        self._gradient_counts.update({p: max(count, self._gradient_counts.get(p, 0)) for p, count in times.items()})

    def _await_gradients(self, parameters: Collection[nn.Parameter]) -> None:
        """Marks the gradients of ``parameters`` as incomplete, all others as complete."""
        waiting = set(map(id, parameters))
        for bucket, missing in self._missing.items():
            missing &= waiting if self._completing_tasks[bucket] is self._last_task else set()
        self._bucket_of = {key: bucket for bucket, missing in self._missing.items() for key in missing}
        self._begin_complete()

    def _complete_parameter(self, parameter: nn.Parameter) -> None:
        bucket = self._bucket_of.get(id(parameter))
        if bucket is not None:
            self._missing[bucket].discard(id(parameter))
            self._begin_complete()

    def end_task(self, task: Task) -> None:
        """``task``, a W or BW, has ended, and its gradients are in their places."""
        if self._last_task is None:
            return
        for bucket in self._missing:
            if bucket.stages and self._expected[bucket.stages] in (task, None):
                self._versions_seen.setdefault(bucket, bucket.version)
        for bucket, missing in self._missing.items():
            if self._completing_tasks[bucket] in (task, None):
                missing.clear()
        self._begin_complete()

    def _begin_complete(self) -> None:
        for queue in self._queues:
            while queue and not self._missing[queue[0]] and self._may_begin():
                if not queue[0].is_in_place:
                    return  # an error, which REDUCE raises
                if self._completing_tasks[queue[0]] is not self._last_task:
                    self._versions[queue[0]] = queue[0].version
                self._begin(queue.popleft())

    def _begin(self, bucket: Bucket) -> None:
        self._missing.pop(bucket, None)
        giver = self._givers.get(bucket.stages)
        if giver is None:
            bucket.count()
        self._begun_reductions.append(self._communicator.begin_collective(bucket.buffer, bucket.stages, giver))

    def finish(self) -> None:
        """Returns when all gradients are summed over their groups.

        A stage that trains nothing waits for its peers, too: no worker gets further ahead of them. Raises
        UnsupportedFeatureError if a gradient has left its buffer, or grew after it seemed complete.
        """
        self._gradients.check(self._step)
        if any(bucket.version != version for bucket, version in self._versions.items()):
            raise UnsupportedFeatureError(
                "A layer that two stages share got a gradient from a micro-batch that runs it on the other one, which"
                " in the first step of this layout none did: the loss, or another layer, uses its parameters now. Use"
                " RecoveryOptions(rebalance='never'), or a layout in which no stage shares that layer."
            )
        for bucket, version in self._versions_seen.items():
            grows = bucket.version != version
            self._grows_later[bucket.stages] = grows or self._grows_later.get(bucket.stages, False)
        for bucket in chain(*self._queues):
            self._begin(bucket)
        for bucket in self._buckets_to_count:
            bucket.count()
        if self._summed_in_reduce is not None:
            self._communicator.all_reduce(self._summed_in_reduce)
        self._end()

    def send_sums(self, step: int) -> None:
        """Sends sums of a finished attempt at ``step`` to stages that lack them; waits."""
        for bucket in self._gradients.buckets(step):
            if bucket.stages in self._givers:
                self._begin(bucket)
        self._end()

    def _end(self) -> None:
        for reduction in self._begun_reductions:
            self._communicator.end_collective(reduction)
        self._begun_reductions = []

    def drop(self) -> None:
        """Forgets begun sums, once the connections of their generation are closed."""
        begun, self._begun_reductions = self._begun_reductions, []
        are_free = [self._communicator.abandon(reduction) for reduction in begun]
        if not all(are_free):
            self._gradients.renew(self._step)
