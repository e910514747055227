"""Another plan in the middle of a training, as a worker became slow, is exact."""

import os
import signal
import time
from typing import Any

import lightning as L
import pytest
from support.models import GLOBAL_BATCH, Regression, dataset
from support.sampling import sampled
from support.training import committed_steps, exact_fit, failures

from lightning_recycle.callbacks import Fault, PlanMonitor
from lightning_recycle.planning import OpKind, Schedule, Worker, program

pytestmark = pytest.mark.long

SLOW = Worker(1, 1)
WINDOW = 3
CHANGE = 2 * WINDOW  # what the first window shows has been confirmed by the second
STEPS = 12
DATA = dataset(GLOBAL_BATCH * STEPS)
LONGEST_WAIT = 60.0  # seconds for a plan, on whatever machine


class AwaitChange(L.Callback):
    """Waits before step ``CHANGE`` until the change of plan is announced; then worker ``dies`` dies, if given."""

    def __init__(self, dies: int | None = None) -> None:
        self.dies = dies

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        client = trainer.strategy.session.client
        deadline = time.monotonic() + LONGEST_WAIT
        while (
            trainer.global_step == CHANGE
            and not (client.member.is_paused or client.member.plans)
            and time.monotonic() < deadline
        ):
            if client.is_interrupted or client.generation > 0:  # somebody died: there is no change for that generation
                return
            time.sleep(0.002)
        if trainer.global_step == CHANGE and trainer.strategy.grid_rank == self.dies:
            os.kill(os.getpid(), signal.SIGKILL)


def train(*faults: Fault, dies: int | None = None, clip: float | None = None, **strategy: Any) -> L.Trainer:
    """Trains to the weights of a plain loop, each step once."""
    slow = Fault("slow", SLOW.pipeline, SLOW.stage, 0, factor=20.0, steps=STEPS)
    callbacks = [PlanMonitor(window=WINDOW), AwaitChange(dies)]
    options: dict[str, Any] = {"max_steps": STEPS, "gradient_clip_val": clip, "callbacks": callbacks}
    strategy = {"split_backward": True, **strategy}  # or there is another change of plan
    run = exact_fit(Regression().double(), 2, 2, [slow, *faults], DATA, strategy=strategy, **options)
    assert committed_steps(run) == list(range(STEPS))
    return run


def forwards(schedule: Schedule, worker: Worker) -> int:
    return sum(op.kind is OpKind.FORWARD for op in schedule.program(worker))


def kinds(run: L.Trainer) -> list[str]:
    return [event.kind for event in run.strategy.history]


@pytest.mark.parametrize(
    ("options", "clip"),
    [({}, None), ({"staggered": False}, None), ({"split_backward": False}, 0.05)],
    ids=["staggered", "together", "clipped, fused backward"],
)
def test_weights_are_exact_across_a_change_of_plan(options, clip):
    run = train(clip=clip, **options)
    (change,) = [event for event in run.strategy.history if event.kind == "replanned"]
    assert (change.step, change.generation) == (CHANGE, 0)
    assert change.details["gain"] > 0.05
    slowest = max(change.details["worker_factors"], key=lambda entry: entry[2])
    assert slowest[:2] == (SLOW.pipeline, SLOW.stage)
    before, after = run.strategy.schedules
    assert forwards(before, SLOW) == 6
    assert forwards(after, SLOW) <= 1, "20 times as slow: the other one takes nearly all"
    assert kinds(run).count("resumed") == 1, "nobody had to regroup"
    assert run.callback_metrics["recycle/replans"] == 1


def test_a_plan_that_needs_other_connections_is_a_regroup_at_a_step_boundary(monkeypatch):
    monkeypatch.setattr(program, "_FEW_PIPELINES", 0)  # as if there were too many to connect them all
    run = train()
    (change,) = [event for event in run.strategy.history if event.kind == "replanned"]
    assert change.step == CHANGE
    assert kinds(run).count("resumed") == 2
    assert "redone" not in kinds(run)
    assert forwards(run.strategy.schedules[-1], SLOW) <= 1


@pytest.mark.parametrize("fault", sampled([
    Fault("kill", 0, 1, CHANGE),
    Fault("kill", 0, 1, CHANGE, "reduce"),
    Fault("kill", 1, 1, CHANGE, "optimizer"),
    Fault("kill", 1, 0, CHANGE - 1, "optimizer", when="after"),
], 2), ids=str)  # fmt: skip
def test_weights_are_exact_when_a_worker_dies_in_the_first_step_of_a_new_plan(fault):
    run = train(fault)
    assert failures(run) == [(fault.pipeline, fault.stage)]
    assert ("replanned" in kinds(run)) or fault.step < CHANGE
    last = run.strategy.schedules[-1]
    assert last.failed == {Worker(fault.pipeline, fault.stage)}
    if fault.stage == SLOW.stage and fault.pipeline != SLOW.pipeline:
        assert forwards(last, SLOW) == 12, "nobody else is left"


@pytest.mark.parametrize("dies", sampled([0, 3], 1))
def test_weights_are_exact_when_a_worker_dies_while_the_change_is_agreed_on(dies):
    assert failures(train(dies=dies)) == [divmod(dies, 2)]
