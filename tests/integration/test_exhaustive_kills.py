"""A kill at every operation of every worker's program, on a 2x2 grid: the weights are always those of no failure.

All of them: ``python -m pytest -m exhaustive tests/integration/test_exhaustive_kills.py`` (about 450 runs, half a
second to a second each).
"""

import functools
import itertools
import random
from collections import Counter
from typing import Any

import pytest
from support.models import GLOBAL_BATCH, Regression, dataset
from support.training import committed_steps, difference, failures, fit, plain_loop
from torch import Tensor

from lightning_recycle.callbacks import Fault
from lightning_recycle.planning import Grid, Problem, Technique, Worker, plan
from lightning_recycle.planning.grid import Op, OpKind

TOLERANCE = 1e-10
STEPS = 4
MICROBATCHES = 2  # per pipeline
GRID = Grid(2, 2, MICROBATCHES)
IN_FLIGHT = 3  # given, so that the plan does not change with what the run measures
DATA = dataset(GLOBAL_BATCH * STEPS)
POINTS = {
    OpKind.FORWARD: ["forward"],
    OpKind.BACKWARD_INPUT: ["backward_input"],
    OpKind.BACKWARD_WEIGHT: ["backward_weight"],
    OpKind.BACKWARD: ["backward_input"],
    OpKind.REDUCE: ["reduce"],
    OpKind.STEP: ["optimizer"],
}


def operations(worker: Worker, staggered: bool) -> tuple[Op, ...]:
    """The program of ``worker`` while nothing has failed, as the run's planner makes it."""
    technique = Technique(split_backward=True, staggered=staggered)
    problem = Problem(GRID, _uniform(), frozenset(), technique, in_flight_limit=(IN_FLIGHT,) * GRID.stages)
    return plan(problem, "heuristic").program(worker)


def _uniform() -> Any:
    from lightning_recycle.planning import Costs

    return Costs.uniform(GRID.stages)


def kills(staggered: bool) -> list[Any]:
    """Every kill, with a name that tells it."""
    found = []
    for worker, step, when in itertools.product(GRID.workers(), range(STEPS), ("before", "after")):
        for op in operations(worker, staggered):
            microbatch = None if op.microbatch is None else op.microbatch.index
            for at in POINTS[op.kind]:
                fault = Fault("kill", worker.pipeline, worker.stage, step, at, microbatch, when=when)
                mode = "staggered" if staggered else "together"
                point = at if microbatch is None else f"{at}{microbatch}"
                name = f"{mode}-{worker.pipeline}{worker.stage}-step{step}-{when}-{point}"
                found.append(pytest.param(staggered, fault, id=name))
    return found


ALL = kills(staggered=True) + kills(staggered=False)
SAMPLE = random.Random(20261120).sample(ALL, 10)


@functools.cache
def expected() -> dict[str, Tensor]:
    return plain_loop(Regression().double(), DATA, STEPS)


def check(staggered: bool, fault: Fault) -> None:
    model = Regression().double()
    strategy = {"split_backward": True, "staggered": staggered}
    strategy |= {"num_microbatches": MICROBATCHES, "memory": f"{IN_FLIGHT} micro-batches"}
    run = fit(model, 2, 2, [fault], data=DATA, max_steps=STEPS, strategy=strategy)
    assert difference(model.state_dict(), expected()) < TOLERANCE
    assert failures(run) == [(fault.pipeline, fault.stage)]
    assert committed_steps(run) == list(range(STEPS))


def test_the_matrix_holds_every_operation_of_every_worker() -> None:
    programs = [operations(worker, staggered) for worker in GRID.workers() for staggered in (True, False)]
    for program in programs:
        kinds = Counter(op.kind for op in program)
        assert kinds[OpKind.FORWARD] == kinds[OpKind.BACKWARD_INPUT] + kinds[OpKind.BACKWARD] == MICROBATCHES
        assert kinds[OpKind.BACKWARD_WEIGHT] == kinds[OpKind.BACKWARD_INPUT]
        assert kinds[OpKind.REDUCE] == kinds[OpKind.STEP] == 1
    assert {OpKind.BACKWARD_INPUT, OpKind.BACKWARD} <= {op.kind for program in programs for op in program}
    assert len(ALL) == len({case.id for case in ALL}) == STEPS * 2 * sum(map(len, programs))


@pytest.mark.parametrize(
    ("staggered", "fault"),
    [*SAMPLE[:6], *(pytest.param(*case.values, id=case.id, marks=pytest.mark.long) for case in SAMPLE[6:])],
)
def test_a_kill_at_an_operation_changes_nothing(staggered: bool, fault: Fault) -> None:
    check(staggered, fault)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("staggered", "fault"), ALL)
def test_a_kill_at_every_operation_changes_nothing(staggered: bool, fault: Fault) -> None:
    check(staggered, fault)
