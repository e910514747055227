"""Each micro-batch can be compared, whatever the order of a worker's operations, and nothing changes by that."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_recycle.planning.grid import Grid, Microbatch, Op, OpKind
from lightning_recycle.planning.program import Program, Task, WorkerChecks
from lightning_recycle.runtime import verification
from lightning_recycle.runtime.stage import Stage
from lightning_recycle.runtime.verification import MicrobatchRecord, Recomputation, Verifier, _is_finite, is_sound

KINDS = {"F": OpKind.FORWARD, "B": OpKind.BACKWARD_INPUT, "W": OpKind.BACKWARD_WEIGHT, "X": OpKind.BACKWARD}
ORDERS = [
    "F0 X0 F1 X1 F2 X2", "F0 B0 W0 F1 B1 W1 F2 B2 W2", "F0 F1 B0 W0 B1 W1 F2 X2", "F0 F1 F2 B0 B1 W0 B2 W1 W2",
    "F0 F1 F2 B0 B1 B2 W2 W1 W0", "F0 X0",
]  # fmt: skip


def tasks_of(order: str) -> tuple[Task, ...]:
    split = {word[1] for word in order.split() if word[0] == "B"}
    return (
        *(
            Task(
                Op(KINDS[word[0]], 0, Microbatch(0, int(word[1]))), word, int(word[1]), split_backward=word[1] in split
            )
            for word in order.split()
        ),
        Task(Op(OpKind.REDUCE, 0), "REDUCE@0"),
    )


def stage() -> tuple[Stage, list[nn.Parameter]]:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 8), nn.LayerNorm(8), nn.Dropout(0.3), nn.Linear(8, 1)]
    parameters = [parameter for layer in layers for parameter in layer.parameters()]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, -0.0)
    loss = nn.functional.mse_loss
    return Stage(layers, 0, 0, torch.device("cpu"), loss), parameters


def values(index: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(index)
    return torch.randn(2, 4, generator=draw), torch.randn(2, 1, generator=draw)


class Worker:
    """A worker that runs its tasks as the executor does, and keeps the record that a peer would get."""

    def __init__(self, tasks: Sequence[Task], checked: int | None) -> None:
        self.stage, self.parameters = stage()
        self.recompute = Recomputation(self.stage, self.parameters, 3)
        client = SimpleNamespace(rank=0, generation=0, knows_loss=lambda step: False, send=lambda message: None)
        communicator = SimpleNamespace(post_receive=lambda *where: None, send=self._sent)
        self.verifier = Verifier(client, communicator, self.stage, self.recompute, Grid(2, 1, 3), "cpu:0", True)
        count = sum(task.op.kind in (OpKind.BACKWARD, OpKind.BACKWARD_WEIGHT) for task in tasks)
        checks = None if checked is None else WorkerChecks((0, 1), 1, (checked,), (len(tasks) - 1,) * count)
        self.verifier.follow(Program(tuple(tasks), checks=checks, all_checks=(1,)))
        self.record: MicrobatchRecord | None = None

    def _sent(self, channel: Any, message: Any, *where: Any) -> None:
        self.record = verification._from_message(message)

    def run(self, step: int) -> list[Tensor]:
        self.verifier.begin(step, is_first_attempt=True)
        for task in self.verifier.tasks:
            x, y = values(task.index)
            match task.op.kind:
                case OpKind.FORWARD:
                    self.verifier.record_inputs(step, task, x, y)
                    output = self.stage.forward(step, task.index, x, y, split_backward=task.split_backward)
                    loss = self.stage.loss(step, task.index, output, y, 3)
                    self.verifier.record_output(task, output, float(loss))
                case OpKind.BACKWARD | OpKind.BACKWARD_INPUT:
                    self.verifier.begin_gradients(task)
                    split = task.op.kind is OpKind.BACKWARD_INPUT
                    backward = self.stage.backward_input if split else self.stage.backward
                    self.verifier.record_backward(task, None, backward(task.index, None))
                case OpKind.BACKWARD_WEIGHT:
                    self.verifier.begin_gradients(task)
                    self.stage.backward_weight(task.index)
                case _:
                    continue
            if task.op.kind in (OpKind.BACKWARD, OpKind.BACKWARD_WEIGHT):
                self.verifier.complete_record(task)
        return [parameter.grad for parameter in self.parameters if parameter.grad is not None]


@pytest.mark.parametrize("order", ORDERS)
def test_a_micro_batch_that_is_checked_has_the_bits_that_a_peer_gets_and_the_sums_are_the_same(order):
    tasks = tasks_of(order)
    usual = Worker(tasks, None).run(0)
    completing = [task for task in tasks if task.op.kind in (OpKind.BACKWARD, OpKind.BACKWARD_WEIGHT)]
    seen = set()
    for step in range(12):
        worker, peer = Worker(tasks, 0), Worker((), None)
        before = [parameter.grad for parameter in worker.parameters]
        gradients = worker.run(step)
        assert all(mine is its for mine, its in zip(gradients, before, strict=True))
        seen.add(worker.record.microbatch)
        assert worker.record.sums.keys() == {"output", "input gradient", "weight gradient"}
        assert peer.recompute(worker.record) == worker.record.sums
        if step == 0:
            assert all(torch.equal(mine, other) for mine, other in zip(gradients, usual, strict=True))
        last = completing[-1].index == worker.record.microbatch
        assert worker.verifier.needs_last_gradients == last
    assert seen == {task.index for task in completing}


def test_a_wrong_weight_gradient_of_any_micro_batch_differs():
    tasks = tasks_of("F0 F1 F2 B0 B1 W0 B2 W1 W2")
    for step in range(12):
        worker = Worker(tasks, 0)
        compute = worker.stage.backward_weight

        def wrong(index: int, *more: Any, compute: Any = compute, worker: Worker = worker) -> None:
            compute(index, *more)
            gradient = worker.parameters[-1].grad
            assert gradient is not None
            gradient += 1e-3

        worker.stage.backward_weight = wrong
        worker.run(step)
        sums = Worker((), None).recompute(worker.record)
        assert [name for name in sums if sums[name] != worker.record.sums[name]] == ["weight gradient"]


DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sum_that_is_large_is_finite_and_one_wrong_number_is_found(dtype):
    values = torch.full((100,), 1000.0, dtype=dtype)
    assert _is_finite(values)
    assert is_sound([values])
    for wrong in (float("nan"), float("inf")):
        values[7] = wrong
        assert not _is_finite(values)
        assert not is_sound([values])
