"""A kill at any operation of any worker's program: the weights are exact."""

import functools
import itertools
import random
from collections import Counter
from typing import Any

import pytest
from support.models import GLOBAL_BATCH, Regression, dataset
from support.training import TOLERANCE, committed_steps, difference, failures, fit, plain_loop
from torch import Tensor

from lightning_recycle.callbacks import Fault
from lightning_recycle.planning import Costs, Grid, Problem, Technique, Worker, plan
from lightning_recycle.planning.grid import Op, OpKind

STEPS = 4
MICROBATCHES = 2  # per pipeline
GRIDS = [Grid(pipelines, 2, MICROBATCHES) for pipelines in (2, 3)]
IN_FLIGHT = 3  # given, so that the plan does not change with what the run measures
DATA = dataset(GLOBAL_BATCH * STEPS)
POINTS = {
    OpKind.FORWARD: "forward",
    OpKind.BACKWARD_INPUT: "backward_input",
    OpKind.BACKWARD_WEIGHT: "backward_weight",
    OpKind.BACKWARD: "backward_input",
    OpKind.REDUCE: "reduce",
    OpKind.STEP: "optimizer",
}
TECHNIQUES: dict[str, dict[str, bool]] = {
    "staggered": {"split_backward": True, "staggered": True},
    "together": {"split_backward": True, "staggered": False},
    "fused": {"split_backward": False, "staggered": True},
}


def operations(worker: Worker, grid: Grid, technique: str) -> tuple[Op, ...]:
    """The program of ``worker`` while nothing has failed, as the run's planner makes it."""
    limit = (IN_FLIGHT,) * grid.stages
    costs, how = Costs.uniform(grid.stages), Technique(**TECHNIQUES[technique])
    return plan(Problem(grid, costs, frozenset(), how, in_flight_limit=limit), "heuristic").program(worker)


def kills(grid: Grid, technique: str) -> list[Any]:
    """Every kill, with a name that tells it."""
    found = []
    for worker, step, when in itertools.product(grid.workers(), range(STEPS), ("before", "after")):
        for op in operations(worker, grid, technique):
            microbatch = None if op.microbatch is None else op.microbatch.index
            at = POINTS[op.kind]
            fault = Fault("kill", worker.pipeline, worker.stage, step, at, microbatch, when=when)
            point = at if microbatch is None else f"{at}{microbatch}"
            name = f"{technique}-{grid.pipelines}-{worker.pipeline}{worker.stage}-step{step}-{when}-{point}"
            found.append(pytest.param(grid, technique, fault, id=name))
    return found


ALL = [case for grid, technique in itertools.product(GRIDS, TECHNIQUES) for case in kills(grid, technique)]
SAMPLE = random.Random(20261120).sample(ALL, 20)


@functools.cache
def expected() -> dict[str, Tensor]:
    return plain_loop(Regression().double(), DATA, STEPS)


def check(grid: Grid, technique: str, fault: Fault) -> None:
    model = Regression().double()
    strategy = {**TECHNIQUES[technique], "num_microbatches": MICROBATCHES, "memory": f"{IN_FLIGHT} micro-batches"}
    run = fit(model, grid.pipelines, 2, [fault], data=DATA, max_steps=STEPS, strategy=strategy)
    assert difference(model.state_dict(), expected()) < TOLERANCE
    assert failures(run) == [(fault.pipeline, fault.stage)]
    assert committed_steps(run) == list(range(STEPS))


def test_the_matrix_holds_every_operation_of_every_worker():
    programs = [
        operations(worker, grid, technique) for grid in GRIDS for worker in grid.workers() for technique in TECHNIQUES
    ]
    for program in programs:
        kinds = Counter(op.kind for op in program)
        assert kinds[OpKind.FORWARD] == kinds[OpKind.BACKWARD_INPUT] + kinds[OpKind.BACKWARD] == MICROBATCHES
        assert kinds[OpKind.BACKWARD_WEIGHT] == kinds[OpKind.BACKWARD_INPUT]
        assert kinds[OpKind.REDUCE] == kinds[OpKind.STEP] == 1
    assert {OpKind.BACKWARD_INPUT, OpKind.BACKWARD} <= {op.kind for program in programs for op in program}
    assert len(ALL) == len({case.id for case in ALL}) == STEPS * 2 * sum(map(len, programs))


@pytest.mark.parametrize(
    ("grid", "technique", "fault"),
    [*SAMPLE[:3], *(pytest.param(*case.values, id=case.id, marks=pytest.mark.long) for case in SAMPLE[3:])],
)
def test_a_kill_at_an_operation_changes_nothing(grid, technique, fault):
    check(grid, technique, fault)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("grid", "technique", "fault"), ALL)
def test_a_kill_at_every_operation_changes_nothing(grid, technique, fault):
    check(grid, technique, fault)
