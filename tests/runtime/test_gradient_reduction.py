"""When buckets leave, and what becomes of those that were under way when their generation ended."""

import types
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_recycle.errors import UnsupportedFeatureError
from lightning_recycle.planning.grid import Microbatch, Op, OpKind
from lightning_recycle.planning.program import Task
from lightning_recycle.runtime.gradients import BucketedReduction, GradientBuffers

CPU = torch.device("cpu")
F, B, W, BW = OpKind.FORWARD, OpKind.BACKWARD_INPUT, OpKind.BACKWARD_WEIGHT, OpKind.BACKWARD


def task(kind: OpKind, microbatch: int) -> Task:
    return Task(Op(kind, 0, Microbatch(0, microbatch)), str(kind), microbatch)


class Line:
    """Instead of the sums of a communicator: remembers what begins and ends."""

    def __init__(self) -> None:
        self.has_peers = self.has_mesh = True
        self.transport = SimpleNamespace(in_one_order=False)
        self.begun: list[int] = []
        self.groups: list[Any] = []  # of each: the stages, and who gives
        self.ended: list[int] = []
        self.given_up: list[int] = []
        self.sums: list[Tensor] = []
        self.stuck = False

    def sums_at_once(self, tensor: Tensor) -> bool:
        return self.has_mesh

    def all_reduce(self, tensor: Tensor) -> None:
        self.end_collective(self.begin_collective(tensor))

    def begin_collective(self, tensor: Tensor, stages: tuple[int, ...] = (), source: int | None = None) -> int:
        self.groups.append((stages, source))
        self.begun.append(max(tensor.numel() - 16, 1))  # without the numbers behind the gradients
        self.sums.append(tensor)
        return len(self.begun) - 1

    def end_collective(self, reduction: int) -> None:
        self.ended.append(self.begun[reduction])

    def abandon(self, reduction: int) -> bool:
        self.given_up.append(reduction)
        return not self.stuck


class Bench:
    """Three layers of 16, 32 and 48 numbers, a bucket for each.

    Args:
        waiting: the layers whose gradients W computes.
        tied: of layers that other stages hold as well, all stages that do.
    """

    def __init__(self, waiting: tuple[int, ...] = (2, 1, 0), tied: Mapping[int, tuple[int, ...]] = {}) -> None:
        self.parameters = [nn.Parameter(torch.ones(16 * n)) for n in (1, 2, 3)]
        tie_stages = {self.parameters[index]: stages for index, stages in tied.items()}
        self.gradients = GradientBuffers(self.parameters, CPU, bucket_bytes=1, tie_stages=tie_stages)
        self.line, self.is_confirmed = Line(), True
        self.line.has_mesh = not tied
        waits = [self.parameters[index] for index in waiting]
        self.stage: Any = types.SimpleNamespace(waiting_parameters=lambda _: waits, differentiates_itself=True)
        self.reduction = BucketedReduction(self.line, self.gradients, self.stage, lambda: self.is_confirmed)

    def reduce(self, step: int = 0, sums: Mapping[tuple[int, ...], int] = {}) -> None:
        self.reduction.begin(step, [], sums)
        self.reduction.finish()

    def backward(self, *uses: int, last: bool = True) -> list[list[int]]:
        """A BW of a step of its own; returns what had begun after each of the passes over the parameters ``uses``."""
        self.line.begun.clear()
        program = [task(BW, 0)] if last else [task(BW, 0), task(BW, 1)]
        self.reduction.begin(0, program)
        seen = []
        with self.reduction.during_backward(program[0]):
            for use in uses:
                self.parameters[use].sum().backward()
                seen.append(list(self.line.begun))
        self.reduction.finish()
        return seen


def test_buckets_leave_in_order_during_the_last_w_alone():
    bench = Bench()
    program = [task(F, 0), task(F, 1), task(B, 0), task(W, 0), task(B, 1), task(W, 1)]
    bench.reduction.begin(0, program)
    assert bench.reduction.during_weights(program[3]) is None
    done = bench.reduction.during_weights(program[5])
    assert not bench.line.begun
    done(bench.parameters[1])
    assert not bench.line.begun, "all workers begin the same buckets in the same order"
    done(bench.parameters[2])
    assert bench.line.begun == [48, 32]
    bench.reduction.finish()
    assert bench.line.begun == bench.line.ended == [48, 32, 16]


def test_what_w_does_not_compute_is_complete_before_it():
    bench = Bench(waiting=(1,))
    program = [task(W, 0)]
    bench.reduction.begin(0, program)
    done = bench.reduction.during_weights(program[0])
    assert bench.line.begun == [48]
    done(bench.parameters[1])
    assert bench.line.begun == [48, 32, 16]


def test_nothing_leaves_before_the_newest_step_is_confirmed():
    bench = Bench()
    bench.is_confirmed = False
    program = [task(W, 0)]
    bench.reduction.begin(0, program)
    done = bench.reduction.during_weights(program[0])
    for parameter in reversed(bench.parameters[1:]):
        done(parameter)
    assert not bench.line.begun
    bench.is_confirmed = True
    done(bench.parameters[0])
    assert bench.line.begun == [48, 32, 16]


def test_a_backward_is_watched_before_it_is_trusted():
    bench = Bench()
    assert bench.backward(2, 1, 0) == [[], [], []]
    assert bench.backward(2, 1, 0) == [[48], [48, 32], [48, 32, 16]]
    assert bench.backward(2, 1, last=False) == [[], []]


def test_a_gradient_in_several_parts_waits_for_the_end():
    bench = Bench()
    bench.backward(2, 1, 0, 1)
    assert bench.backward(2, 1, 0, 1) == [[48]] * 4
    assert bench.backward(2, 1, 0) == [[48]] * 3
    assert bench.line.ended[-3:] == [48, 32, 16]


def test_a_gradient_that_comes_after_its_bucket_has_left_is_an_error():
    bench = Bench()
    bench.backward(2, 1, 0)
    with pytest.raises(UnsupportedFeatureError, match="use_reentrant=False"):
        bench.backward(2, 1, 1, 0)
    assert not any(parameter._post_accumulate_grad_hooks for parameter in bench.parameters)


def test_nothing_is_watched_where_the_users_code_runs_the_backward_or_one_bucket_has_all():
    bench = Bench()
    bench.stage.differentiates_itself = False
    assert bench.backward(2, 1, 0) == bench.backward(2, 1, 0) == [[], [], []]
    line: Any = Line()
    whole = GradientBuffers(bench.parameters, CPU)
    reduction = BucketedReduction(line, whole, bench.stage, lambda: True)
    program = [task(W, 0)]
    reduction.begin(0, program)
    assert reduction.during_weights(program[0]) is None
    reduction.finish()
    assert line.begun == [96]


def test_what_several_stages_hold_is_summed_over_them_after_the_rest():
    bench = Bench(tied={2: (0, 1), 0: (1, 2)})
    bench.reduce()
    assert bench.line.groups == [((), None), ((0, 1), None), ((1, 2), None)]
    assert bench.line.begun == bench.line.ended == [32, 48, 16]


def test_without_peers_only_what_other_stages_hold_is_summed():
    bench = Bench(tied={1: (0, 1)})
    bench.line.has_peers = False
    bench.reduce()
    assert bench.line.groups == [((0, 1), None)]


def test_a_stage_all_of_whose_weights_others_hold_awaits_its_peers_all_the_same():
    bench = Bench(tied=dict.fromkeys(range(3), (0, 1)))
    bench.reduce(sums={(0, 1): 5})
    assert [bench.line.begun[number] for number, group in enumerate(bench.line.groups) if group == ((), None)] == [1]


def test_a_sum_that_a_stage_has_is_given_and_not_made_again():
    bench = Bench(tied={2: (0, 1), 0: (1, 2)})
    bench.reduce(sums={(1, 2): 7})
    assert bench.line.groups == [((), None), ((0, 1), None), ((1, 2), 7)]
    assert bench.line.begun == bench.line.ended == [32, 48, 16]


def test_a_stage_that_is_done_gives_what_others_lack_from_the_buffers_of_that_step():
    bench = Bench(tied={2: (0, 1), 0: (1, 2)})
    bench.reduce(step=4)
    sums = [bucket.buffer.data_ptr() for bucket in bench.gradients.buckets(4)]
    bench.reduction.begin(5, [], {(1, 2): 7})
    bench.reduction.send_sums(4)
    assert bench.line.groups[3:] == [((1, 2), 7)]
    assert bench.line.sums[3].data_ptr() == sums[2]
    assert bench.line.ended[3:] == [16]


class Halfway(Bench):
    """The last two layers are held by the next stage as well, and the last one is run here by micro-batch 0 alone.

    Args:
        together: whether these two are one group.
    """

    def __init__(self, together: bool = False) -> None:
        super().__init__(tied={2: (0, 1), 1: (0, 1) if together else (0, 3)})
        self.reduction._grows_later = {(0, 1): False, (0, 3): False}  # as a step before has shown
        last = id(self.parameters[2])
        self.stage.untouched = lambda index: set() if index == 0 else {last}
        self.program = [task(B, 0), task(W, 0), task(B, 1), task(W, 1)]

    def seen(self, **options: Any) -> list[list[int]]:
        """What has begun after each W, and in the end."""
        self.reduction.begin(0, self.program, **options)
        found = []
        for index in (1, 3):
            self.reduction.during_weights(self.program[index])
            self.reduction.end_task(self.program[index])
            found.append(list(self.line.begun))
        self.reduction.finish()
        return [*found, list(self.line.begun)]


def test_what_no_operation_adds_to_any_more_leaves_at_once():
    assert Halfway().seen() == [[48], [48, 16, 32], [48, 16, 32]]


def test_what_some_stages_hold_in_common_leaves_together():
    assert Halfway(together=True).seen() == [[], [16, 32, 48], [16, 32, 48]]


def test_where_one_sum_may_wait_for_another_those_of_several_stages_are_last():
    bench = Halfway()
    bench.line.transport.in_one_order = True
    assert bench.seen() == [[], [16, 48, 32], [16, 48, 32]]


def test_an_operation_that_may_add_to_all_gradients_is_awaited():
    bench = Halfway()
    assert bench.seen(adds_to_all=bench.program[3])[0] == []


def test_it_leaves_as_soon_as_the_newest_step_is_confirmed():
    bench = Halfway()
    bench.is_confirmed = False
    bench.reduction.begin(0, [*bench.program[:2], task(W, 7), *bench.program[2:]])
    bench.reduction.end_task(bench.program[1])
    assert bench.line.begun == []
    bench.is_confirmed = True
    bench.reduction.end_task(task(W, 7))
    assert bench.line.begun == [48]


def test_a_worker_that_does_not_run_it_at_all_does_not_hold_it_up():
    bench = Halfway()
    bench.program[1:2] = [task(W, 2)]
    assert bench.seen()[0] == [48]


def test_a_gradient_of_a_layer_that_another_stage_runs_is_an_error():
    bench = Halfway()
    bench.reduction.begin(0, bench.program)
    bench.reduction.end_task(bench.program[1])
    assert bench.line.begun == [48]
    bench.parameters[1].sum().backward()
    bench.parameters[2].sum().backward()
    with pytest.raises(UnsupportedFeatureError, match="that two stages share got a gradient"):
        bench.reduction.finish()


def test_what_a_loss_adds_to_after_all_is_awaited_from_the_first_step_on():
    for late in (False, True):
        bench = Halfway()
        bench.reduction._grows_later = {}
        for step in (0, 1):
            bench.line.begun.clear()
            bench.reduction.begin(step, bench.program)
            bench.reduction.end_task(bench.program[1])
            assert bench.line.begun == ([48] if step and not late else [])
            bench.parameters[1].sum().backward()
            if late:
                bench.parameters[2].sum().backward()
            bench.reduction.end_task(bench.program[3])
            bench.reduction.finish()


def test_each_sum_of_a_lost_generation_is_given_up_even_if_one_goes_on():
    bench = Bench(tied={2: (0, 1), 0: (1, 2)})
    bench.reduction.begin(0, [])
    bench.line.end_collective = lambda reduction: 1 / 0
    with pytest.raises(ZeroDivisionError):
        bench.reduction.finish()
    bench.line.stuck = True
    bench.reduction.drop()
    assert bench.line.given_up == [0, 1, 2]


@pytest.mark.parametrize("stuck", [False, True])
def test_memory_of_a_sum_that_goes_on_is_not_used_again(stuck):
    bench = Bench()
    bench.line.stuck = stuck
    bench.reduction.begin(1, [task(BW, 0)])
    bench.gradients.buckets(1)[0].buffer.fill_(7.0)
    bench.reduction._begun_reductions.append(bench.line.begin_collective(bench.gradients.buckets(1)[0].buffer))
    bench.reduction.drop()
    bench.reduction.begin(1, [task(BW, 0)])
    assert (bench.parameters[2].grad.data_ptr() == bench.line.sums[0].data_ptr()) is not stuck
    bench.line.sums[0].fill_(5.0)
    assert bool(bench.parameters[2].grad.any()) is not stuck
    bench.reduction.finish()
    assert len(bench.line.begun) == 4
