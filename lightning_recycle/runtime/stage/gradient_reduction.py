"""The reduction of gradients in buckets, each as soon as it is complete.

A worker's last W (or BW) of a step completes one gradient after the other, those of the last layers first. A bucket
whose gradients are all complete is summed over its *group* in the background, while the next ones are computed; REDUCE
begins the rest and waits for all. The group is the workers of the stage, or of all stages that hold those weights. In a
W the queue of weight gradients knows what it holds; everything else is complete. In a BW autograd reports each gradient
that it has added, and it may add several to one parameter (reentrant activation checkpointing). So only those
parameters count as complete before the end that got exactly one in each backward before, and none does where the user's
code runs the backward. Weights of several stages are complete once the last operation has ended that adds to what these
stages hold in common; whether that holds is seen in the first step, as a loss may use the parameters of a layer that
its micro-batch was not run through here.

There is no circle of waits: the buckets and their order follow from the parameters alone, so all workers of a group
begin the same ones in the same order, and no worker waits before it has begun all of its own. Buckets of several stages
follow the numbers of the stages; where groups wait for each other (NCCL), they come last. An attempt that ended before
:meth:`BucketedReduction.finish` is dropped: its sums are computed again, in other memory if a sum may still write to
it. Where some of several stages have finished an attempt before, and others have not, nothing is summed: one that has
it gives the sum.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from types import MappingProxyType

import torch
from torch import Tensor, nn

from lightning_recycle.errors import UnsupportedFeatureError
from lightning_recycle.planning.grid import OpKind
from lightning_recycle.planning.program import Task
from lightning_recycle.runtime.comm.group_sums import GroupSums, Reduction
from lightning_recycle.runtime.stage.gradients import Bucket, GradientBuffers
from lightning_recycle.runtime.stage.stage import Stage

_COMPLETING = (OpKind.BACKWARD_WEIGHT, OpKind.BACKWARD)


class BucketedReduction:
    """The reduction of one worker, step after step.

    With one bucket, or without peers, all of it is in REDUCE.
    """

    def __init__(
        self, sums: GroupSums, gradients: GradientBuffers, stage: Stage, may_begin: Callable[[], bool]
    ) -> None:
        self._sums, self._gradients, self._stage, self._may_begin = sums, gradients, stage, may_begin
        self._step = 0
        self._givers: Mapping[tuple[int, ...], int] = {}
        self._queues: list[deque[Bucket]] = []  # what is left to be begun in the background, each in its order
        self._at_once: Tensor | None = None  # what is summed otherwise
        self._apart: list[Bucket] = []  # what is in none of these
        self._last: Task | None = None  # the operation that completes the gradients
        self._ends: dict[Bucket, Task | None] = {}  # and those that complete each bucket
        self._expected: dict[tuple[int, ...], Task | None] = {}  # by stages: the last one that runs what they hold
        self._begun: list[Reduction] = []
        self._missing: dict[Bucket, set[int]] = {}  # not begun: the ids of parameters without their complete gradient
        self._bucket_of: dict[int, Bucket] = {}
        self._versions: dict[Bucket, int] = {}  # of what was begun although operations were left that do not add to it
        self._seen: dict[Bucket, int] = {}  # the same of what could have begun, where it is not known yet
        self._grows_later: dict[tuple[int, ...], bool] = {}  # by stages: whether others added to it after all
        self._times: dict[nn.Parameter, int] = {}  # the most gradients that each got in one of the backwards watched

    def begin(
        self,
        step: int,
        program: Sequence[Task],
        givers: Mapping[tuple[int, ...], int] = MappingProxyType({}),
        adds_to_all: Task | None = None,
    ) -> None:
        """Empties the gradients of ``step``, at which an attempt begins.

        Args:
            program: what this worker runs in it; nothing if nothing may leave before REDUCE.
            givers: by the stages that hold weights in common, the rank that gives the sum of an attempt before.
            adds_to_all: an operation that adds to all gradients, whatever it runs.
        """
        self._gradients.begin(step)
        self._step, self._givers, self._last = step, givers, None
        self._ends, self._versions, self._bucket_of = {}, {}, {}
        self._seen, self._expected = {}, {}
        has_peers, buckets = self._sums.has_peers, self._gradients.buckets(step)
        own = [bucket.buffer for bucket in buckets if not bucket.stages]
        self._at_once = torch.zeros(1) if not own else None
        if len(own) == 1 and self._sums.sums_at_once(own[0]):
            self._at_once = own[0]
        alone = [bucket for bucket in buckets if not bucket.stages and has_peers and self._at_once is None]
        self._apart = [] if alone else [bucket for bucket in buckets if not bucket.stages]
        common = [bucket for bucket in buckets if bucket.stages]
        in_one_order = self._sums.sums_in_one_order
        self._queues = [deque(alone + common)] if in_one_order else [deque(alone), deque(common)]
        # Statistics alone are complete when the last operation begins: no forward comes after it.
        self._missing = {bucket: set(map(id, bucket.parameters)) or {0} for bucket in alone + common}
        adding = [task for task in reversed(program) if task.op.kind in _COMPLETING]
        if adding and (common or len(alone) > 1):
            self._last = adding[0]
            self._ends = dict.fromkeys(alone, self._last)
            for stages in {bucket.stages for bucket in common}:
                held = set().union(*(self._missing[bucket] for bucket in common if bucket.stages == stages))
                end = next((t for t in adding if t is adds_to_all or held - self._stage.untouched(t.index)), None)
                self._expected[stages] = end
                end = self._last if self._grows_later.get(stages, True) else end
                self._ends.update((bucket, end) for bucket in common if bucket.stages == stages)

    def during_weights(self, task: Task) -> Callable[[nn.Parameter], None] | None:
        """The callback of the W of ``task``, for each complete parameter, or None."""
        if task is not self._last:
            return None
        self._expect(self._stage.waiting_parameters(task.index))
        return self._complete

    def during_backward(self, task: Task) -> AbstractContextManager[None]:
        """The context of the BW of ``task``."""
        return self._watched() if task is self._last and self._stage.differentiates_itself else nullcontext()

    @contextmanager
    def _watched(self) -> Iterator[None]:
        trained = [p for bucket in self._missing if self._ends[bucket] is self._last for p in bucket.parameters]
        self._expect(trained)
        times: Counter[nn.Parameter] = Counter()

        def added(parameter: nn.Parameter) -> None:
            times[parameter] += 1
            if self._bucket_of[id(parameter)] not in self._missing:
                raise UnsupportedFeatureError(
                    f"A parameter of shape {tuple(parameter.shape)} got several gradients in a backward, and one in"
                    " those of earlier steps, so its bucket was reduced too early. Use activation checkpointing with"
                    " use_reentrant=False, or a bucket_cap_mb that is larger than the stage."
                )
            if self._times.get(parameter) == 1:
                self._complete(parameter)

        hooks = [parameter.register_post_accumulate_grad_hook(added) for parameter in trained]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        self._times.update({p: max(count, self._times.get(p, 0)) for p, count in times.items()})

    def _expect(self, parameters: Collection[nn.Parameter]) -> None:
        """The gradients of ``parameters`` are not complete; all others are."""
        waiting = set(map(id, parameters))
        for bucket, missing in self._missing.items():
            missing &= waiting if self._ends[bucket] is self._last else set()
        self._bucket_of = {key: bucket for bucket, missing in self._missing.items() for key in missing}
        self._begin_complete()

    def _complete(self, parameter: nn.Parameter) -> None:
        bucket = self._bucket_of.get(id(parameter))
        if bucket is not None:
            self._missing[bucket].discard(id(parameter))
            self._begin_complete()

    def completed(self, task: Task) -> None:
        """``task``, a W or BW, has ended, and its gradients are where they belong."""
        if self._last is None:
            return
        for bucket in self._missing:
            if bucket.stages and self._expected[bucket.stages] in (task, None):
                self._seen.setdefault(bucket, bucket.version)
        for bucket, missing in self._missing.items():
            if self._ends[bucket] in (task, None):
                missing.clear()
        self._begin_complete()

    def _begin_complete(self) -> None:
        for queue in self._queues:
            while queue and not self._missing[queue[0]] and self._may_begin():
                if not queue[0].is_in_place:
                    return  # an error, which REDUCE raises
                if self._ends[queue[0]] is not self._last:
                    self._versions[queue[0]] = queue[0].version
                self._begin(queue.popleft())

    def _begin(self, bucket: Bucket) -> None:
        self._missing.pop(bucket, None)
        giver = self._givers.get(bucket.stages)
        if giver is None:
            bucket.count()
            self._begun.append(self._sums.begin_all_reduce(bucket.buffer, bucket.stages))
        else:
            self._begun.append(self._sums.begin_broadcast(bucket.buffer, bucket.stages, giver))

    def finish(self) -> None:
        """Returns when all gradients are summed over their groups.

        A stage that trains nothing waits for its peers, too: no worker gets further ahead of them.

        Raises:
            UnsupportedFeatureError: if a gradient has left its buffer, or was added to when it seemed to be complete.
        """
        self._gradients.check(self._step)
        if any(bucket.version != version for bucket, version in self._versions.items()):
            raise UnsupportedFeatureError(
                "A layer that two stages share got a gradient from a micro-batch that runs it on the other one, which"
                " in the first step of this layout none did: the loss, or another layer, uses its parameters now. Use"
                " RecoveryOptions(rebalance='never'), or a layout in which no stage shares that layer."
            )
        for bucket, version in self._seen.items():
            grows = bucket.version != version
            self._grows_later[bucket.stages] = grows or self._grows_later.get(bucket.stages, False)
        for bucket in chain(*self._queues):
            self._begin(bucket)
        for bucket in self._apart:
            bucket.count()
        if self._at_once is not None:
            self._sums.all_reduce(self._at_once)
        self._end()

    def give(self, step: int) -> None:
        """Gives the sums of a finished attempt at ``step`` to stages that lack them."""
        for bucket in self._gradients.buckets(step):
            if bucket.stages in self._givers:
                self._begin(bucket)
        self._end()

    def _end(self) -> None:
        for reduction in self._begun:
            self._sums.end_all_reduce(reduction)
        self._begun = []

    def drop(self) -> None:
        """Forgets begun sums, once the connections of their generation are closed."""
        begun, self._begun = self._begun, []
        are_free = [self._sums.abandon(reduction) for reduction in begun]
        if not all(are_free):
            self._gradients.renew(self._step)
