"""Forwards that are computed again: only where memory makes a plan slow, within memory, and as the definition says."""

import json
import pickle
from dataclasses import replace
from random import Random

import pytest

from lightning_recycle import planning
from lightning_recycle.errors import ConfigurationError

GRID, UNIT = planning.Grid(3, 4, 6), planning.Costs.uniform(4)
FAILED = frozenset({planning.Worker(1, 2)})
NOBODY: frozenset[planning.Worker] = frozenset()
F, R, B, BW = (
    planning.OpKind.FORWARD,
    planning.OpKind.RECOMPUTE,
    planning.OpKind.BACKWARD_INPUT,
    planning.OpKind.BACKWARD,
)


def running(capacity: float, checkpoint: float | None, failed: frozenset[planning.Worker] = FAILED) -> planning.Problem:
    """The running example, with memory in activations."""
    kept = None if checkpoint is None else (checkpoint,) * 4
    memory = planning.Memory((capacity,) * 4, (0.0,) * 4, (1.0,) * 4, (1.0,) * 4, kept)
    return planning.Problem(GRID, UNIT, failed, memory=memory)


def again(schedule: planning.Schedule) -> list[int]:
    """How many forwards each stage computes again."""
    workers = schedule.problem.live_workers
    return [sum(len(schedule.recomputed(worker)) for worker in workers(stage)) for stage in range(schedule.grid.stages)]


@pytest.mark.parametrize(("failed", "capacity", "without", "with_quarter", "with_tenth"), [
    pytest.param(NOBODY, 2.0, 31, 27, 27, marks=pytest.mark.exhaustive),
    (NOBODY, 1.5, 54, 33, 30),
    (FAILED, 2.0, 34, 34, 34),
    pytest.param(FAILED, 1.5, 61, 42, 42, marks=pytest.mark.exhaustive),
    (FAILED, 1.1, 61, 61, 47),
], ids=str)  # fmt: skip
def test_the_price_of_memory_with_recomputation(failed, capacity, without, with_quarter, with_tenth):
    """One micro-batch at a time where no more fit; with checkpoints many are under way."""
    for checkpoint, most in ((None, without), (0.25, with_quarter), (0.1, with_tenth)):
        schedule = planning.plan(running(capacity, checkpoint, failed))
        planning.validate(schedule)
        assert schedule.period == without if checkpoint is None else schedule.period <= most
        assert max(map(schedule.peak_memory, schedule.live_workers)) <= capacity * (1 + 1e-9)


def test_only_what_memory_requires_is_computed_again():
    """By stage, and within a stage by micro-batch; never at the last stage."""
    counts = again(planning.plan(running(1.5, 0.5, NOBODY)))
    assert counts[3] == 0
    assert 0 < counts[2] < counts[0] <= 18


def random_problem(seed: int) -> planning.Problem:
    draw = Random(seed)
    grid = planning.Grid(draw.choice([1, 2, 3]), draw.choice([2, 3, 4]), draw.choice([2, 4, 6]))
    costs = planning.Costs.uniform(grid.stages, 1.0, draw.choice([1.0, 1.2]), draw.choice([1.0, 0.8]), 0.0, 0.1, 0.1)
    failed = NOBODY
    if grid.pipelines > 1 and draw.random() < 0.7:
        failed = frozenset({planning.Worker(draw.randrange(grid.pipelines), draw.randrange(grid.stages))})
    capacity = tuple(draw.uniform(1.0, 4.0) for _ in range(grid.stages))
    after = tuple(draw.choice([0.0, 0.5, 1.0, 1.5]) for _ in capacity)
    kept = tuple(draw.choice([0.0, 0.05, 0.2, 0.6, 1.2]) for _ in capacity)
    technique = planning.Technique(draw.random() < 0.8, draw.random() < 0.7)
    memory = planning.Memory(capacity, (0.0,) * grid.stages, (1.0,) * grid.stages, after, kept)
    factors = ((planning.Worker(0, 0), 1.5),) if draw.random() < 0.2 and planning.Worker(0, 0) not in failed else ()
    return planning.Problem(grid, costs, failed, technique, worker_factors=factors, memory=memory)


@pytest.mark.parametrize("part", [0, 1, *(pytest.param(part, marks=pytest.mark.long) for part in (2, 3))])
def test_random_limits(part):
    """Every plan is valid, within memory, above the bound, and no longer than the one without; some are shorter."""
    shorter = 0
    for seed in range(part * 10, part * 10 + 10):
        problem = random_problem(seed)
        schedule = planning.plan(problem, planning.HeuristicPlanner(20_000))
        planning.validate(schedule)
        without = replace(problem, memory=replace(problem.memory, checkpoint=None))
        plain = planning.plan(without, planning.HeuristicPlanner(20_000))
        assert planning.lower_bound(problem) <= schedule.period * (1 + 1e-9), seed
        assert schedule.period <= plain.period * (1 + 1e-9), seed
        assert sum(again(schedule)) == 0 or schedule.period < plain.period, seed
        shorter += schedule.period < plain.period
    assert shorter


def with_program(
    schedule: planning.Schedule, worker: planning.Worker, ops: list[planning.ScheduledOp]
) -> planning.Schedule:
    return replace(schedule, workers={**schedule.workers, worker: tuple(ops)})


def test_the_validator_knows_what_a_recomputation_is():
    schedule = planning.plan(running(1.5, 0.25, NOBODY))
    planning.validate(schedule)
    worker = planning.Worker(0, 0)
    ops = list(schedule.workers[worker])
    at = next(i for i, scheduled in enumerate(ops) if scheduled.op.kind is R)
    with pytest.raises(planning.InvalidScheduleError, match=r"memory: \(0, 0\) holds"):  # its F keeps everything now
        planning.validate(with_program(schedule, worker, ops[:at] + ops[at + 1 :]))
    late = replace(ops[at], start=ops[at + 1].end, end=ops[at + 1].end + 1)
    with pytest.raises(
        planning.InvalidScheduleError, match=r"dependency: (B|BW)\(\d, \d\)@0 .* before the result of R"
    ):
        planning.validate(with_program(schedule, worker, [*ops[:at], ops[at + 1], late, *ops[at + 2 :]]))
    short = replace(ops[at], end=ops[at].start + 0.5)
    with pytest.raises(planning.InvalidScheduleError, match=r"takes 0\.5 instead of 1"):
        planning.validate(with_program(schedule, worker, [*ops[:at], short, *ops[at + 1 :]]))
    with pytest.raises(planning.InvalidScheduleError, match=r"once: R.* runs on"):
        planning.validate(with_program(schedule, worker, [*ops[: at + 1], *ops[at:]]))
    memory = schedule.problem.memory
    mute = replace(schedule.problem, memory=replace(memory, checkpoint=None))
    with pytest.raises(planning.InvalidScheduleError, match="has no size of a checkpoint"):
        planning.validate(replace(schedule, problem=mute))
    larger = replace(schedule.problem, memory=replace(memory, checkpoint=(0.45,) * 4))
    with pytest.raises(planning.InvalidScheduleError, match=r"memory: "):
        planning.validate(replace(schedule, problem=larger))
    last = planning.Worker(0, 3)
    ops = list(schedule.workers[last])
    first = ops[0]
    moment = planning.ScheduledOp(planning.Op(R, 3, first.op.microbatch), first.end, first.end + 1)
    with pytest.raises(planning.InvalidScheduleError, match="at the last stage"):
        planning.validate(with_program(schedule, last, [first, moment, *ops[1:]]))


def test_a_plan_survives_files_and_other_costs():
    schedule = planning.plan(running(1.5, 0.25))
    assert sum(again(schedule))
    assert planning.read_plan(json.loads(json.dumps(planning.plan_to_json(schedule)))).schedule == schedule
    assert pickle.loads(pickle.dumps(schedule)) == schedule
    slower = planning.retime(schedule, planning.Costs.uniform(4, 2.0, 2.0, 2.0))
    planning.validate(slower)
    assert slower.period == 2 * schedule.period


def test_an_exact_planner_is_not_asked_for_what_its_model_lacks():
    result = planning.solve(running(1.5, 0.25), planning.ExactPlanner("highs"))
    assert result.found_by == "heuristic"
    assert result.solver.calls == 0
    assert "computed again" in str(result.solver.reason)


def test_sizes_of_checkpoints_are_checked():
    with pytest.raises(ConfigurationError, match="checkpoint"):
        planning.Memory((1.0,), (0.0,), (1.0,), (1.0,), (-1.0,))
    with pytest.raises(ConfigurationError, match=r"checkpoint.* has 2 numbers"):
        planning.Memory((1.0,), (0.0,), (1.0,), (1.0,), (0.1, 0.1))
