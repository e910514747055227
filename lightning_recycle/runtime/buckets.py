"""The reduction of gradients in buckets, each as soon as it is complete.

Concept: a worker's last W (or BW) of a step completes one gradient after the other, those of the last layers first. A
bucket whose gradients are all complete is summed over its *group* in the background, while the next ones are computed;
REDUCE begins what is left and waits for all. The group is the workers of the stage, or of all stages that hold those
weights (:mod:`~lightning_recycle.runtime.ties`).

Why nobody waits in a circle: the buckets and their order follow from the parameters alone, so all workers of a group
begin the same ones in the same order, whichever completes when. Those of several stages come after those of one, by the
numbers of the stages: the orders of all workers agree with one order of all sums, and nobody waits for one before he
has begun what is before it.

Contract: nothing counts before :meth:`BucketedReduction.finish` has returned. What an attempt that ended before has
begun is dropped: its sums are computed again, in other memory if somebody may still write to it. Where some of several
stages have finished an attempt before, and others have not, nothing is summed: one that has it gives the sum.

When a gradient is complete: in a W the queue of weight gradients says what it holds; everything else is. In a BW
autograd says when it has added a gradient, and it may add several to one parameter: with reentrant activation
checkpointing, parts of the backward are backward passes of their own. So only those parameters count as complete before
the end that got exactly one in each of those watched before, and none does where the user's code runs the backward.

Must not know: why an attempt ends, and what is done with the sums.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MappingProxyType

import torch
from torch import Tensor, nn

from lightning_recycle.errors import UnsupportedFeatureError
from lightning_recycle.planning.ops import OpKind
from lightning_recycle.planning.program import Task
from lightning_recycle.runtime.communicator import Communicator, Reduction
from lightning_recycle.runtime.gradients import Bucket, GradientBuffers
from lightning_recycle.runtime.stage import Stage

__all__ = ["BucketedReduction"]

_COMPLETING = (OpKind.BACKWARD_WEIGHT, OpKind.BACKWARD)


class BucketedReduction:
    """The reduction of one worker, step after step. With one bucket, or without peers, all of it is in REDUCE.

    Args:
        communicator: the connection to the other workers.
        gradients: the gradients of the stage.
        stage: its layers.
        may_begin: whether a bucket may leave before REDUCE.
    """

    def __init__(
        self, communicator: Communicator, gradients: GradientBuffers, stage: Stage, may_begin: Callable[[], bool]
    ) -> None:
        self._communicator, self._gradients, self._stage, self._may_begin = communicator, gradients, stage, may_begin
        self._step = 0
        self._givers: Mapping[tuple[int, ...], int] = {}
        self._buckets: list[Bucket] = []  # that are summed in the background
        self._at_once: Tensor | None = None  # what is summed otherwise
        self._last: Task | None = None  # the operation that completes the gradients
        self._begun: list[Reduction] = []
        self._missing: list[set[int]] = []  # by bucket, the ids of parameters without their complete gradient
        self._bucket_of: dict[int, int] = {}
        self._times: dict[nn.Parameter, int] = {}  # the most gradients that each got in one of the backwards watched

    def begin(
        self, step: int, program: Sequence[Task], givers: Mapping[tuple[int, ...], int] = MappingProxyType({})
    ) -> None:
        """Empties the gradients of ``step``, at which an attempt begins.

        Args:
            step: its number.
            program: what this worker runs in it; nothing if nothing may leave before REDUCE.
            givers: by the stages that hold weights in common, the rank that gives the sum of an attempt before.
        """
        self._gradients.begin(step)
        self._step, self._givers, self._last = step, givers, None
        has_peers, buckets = self._communicator.has_peers, self._gradients.buckets(step)
        own = [bucket.buffer for bucket in buckets if not bucket.stages]
        self._at_once = torch.zeros(1) if not own else None
        if len(own) == 1 and self._communicator.sums_at_once(own[0]):
            self._at_once = own[0]
        self._buckets = [bucket for bucket in buckets if bucket.stages or (has_peers and self._at_once is None)]
        if program and len(self._buckets) > 1:
            self._last = next((task for task in reversed(program) if task.op.kind in _COMPLETING), None)

    def during_weights(self, task: Task) -> Callable[[nn.Parameter], None] | None:
        """What the W of ``task`` calls with each parameter that has its gradient; None if nobody wants to know."""
        if task is not self._last:
            return None
        self._expect(self._stage.waiting_parameters(task.index))
        return self._complete

    def during_backward(self, task: Task) -> AbstractContextManager[None]:
        """The context of the BW of ``task``."""
        return self._watched() if task is self._last and self._stage.differentiates_itself else nullcontext()

    @contextmanager
    def _watched(self) -> Iterator[None]:
        trained = [p for bucket in self._buckets for p in bucket.parameters]
        self._expect(trained)
        times: Counter[nn.Parameter] = Counter()

        def added(parameter: nn.Parameter) -> None:
            times[parameter] += 1
            if self._bucket_of[id(parameter)] < len(self._begun):
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
        self._missing = [waiting.intersection(map(id, bucket.parameters)) for bucket in self._buckets]
        self._bucket_of = {key: index for index, keys in enumerate(self._missing) for key in keys}
        self._begin_complete()

    def _complete(self, parameter: nn.Parameter) -> None:
        bucket = self._bucket_of.get(id(parameter))
        if bucket is not None:
            self._missing[bucket].discard(id(parameter))
            self._begin_complete()

    def _begin_complete(self) -> None:
        buckets = self._buckets
        while (index := len(self._begun)) < len(buckets) and not self._missing[index] and self._may_begin():
            if not buckets[index].is_in_place:
                return  # an error, of which REDUCE tells
            self._begin(buckets[index])

    def _begin(self, bucket: Bucket) -> None:
        giver = self._givers.get(bucket.stages)
        if giver is None:
            self._begun.append(self._communicator.begin_all_reduce(bucket.buffer, bucket.stages))
        else:
            self._begun.append(self._communicator.begin_broadcast(bucket.buffer, bucket.stages, giver))

    def finish(self) -> None:
        """Returns when all gradients are summed over their groups.

        A stage that trains nothing waits for its peers all the same: no worker gets further ahead of them.

        Raises:
            UnsupportedFeatureError: if a gradient has left its buffer.
        """
        self._gradients.check(self._step)
        for bucket in self._buckets[len(self._begun) :]:
            self._begin(bucket)
        if self._at_once is not None:
            self._communicator.all_reduce(self._at_once)
        self._end()

    def give(self, step: int) -> None:
        """Gives the sums of an attempt at ``step`` that this stage has finished before to stages that have not."""
        for bucket in self._gradients.buckets(step):
            if bucket.stages in self._givers:
                self._begin(bucket)
        self._end()

    def _end(self) -> None:
        for reduction in self._begun:
            self._communicator.end_all_reduce(reduction)
        self._begun = []

    def drop(self) -> None:
        """Forgets what was begun. To be called once the connections of its generation are closed."""
        begun, self._begun = self._begun, []
        are_free = [self._communicator.abandon(reduction) for reduction in begun]
        if not all(are_free):
            self._gradients.renew(self._step)
