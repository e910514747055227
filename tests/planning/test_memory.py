"""Memory in bytes: no plan exceeds it, and each backward is split or fused as it allows."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest

from lightning_recycle import planning
from lightning_recycle.errors import ConfigurationError, PlanningError

GRID, UNIT = planning.Grid(3, 4, 6), planning.Costs.uniform(4)
FAILED = frozenset({planning.Worker(1, 2)})
B, W, BW = planning.OpKind.BACKWARD_INPUT, planning.OpKind.BACKWARD_WEIGHT, planning.OpKind.BACKWARD


def running(capacity: float, after_backward: float) -> planning.Problem:
    """The running example, with memory in activations: one after F, ``after_backward`` after B."""
    memory = planning.Memory((capacity,) * 4, (0.0,) * 4, (1.0,) * 4, (after_backward,) * 4)
    return planning.Problem(GRID, UNIT, FAILED, memory=memory)


def kinds(schedule: planning.Schedule, stage: int | None = None) -> Counter[planning.OpKind]:
    live = schedule.problem.live_workers(stage)
    return Counter(op.kind for worker in live for op in schedule.program(worker) if op.microbatch is not None)


@pytest.mark.parametrize(("capacity", "after_backward", "counted", "in_bytes"), [
    (4, 0.5, 29, 27),  # what B frees is room for another F
    (4, 1.0, 29, 29),  # the same as four micro-batches
    (4, 2.0, 34, 31),  # a W is waiting only where that brings more than the memory it takes
    (4, 3.0, 61, 31),
])  # fmt: skip
def test_the_price_of_memory_in_the_running_example(capacity, after_backward, counted, in_bytes):
    problem = running(capacity, after_backward)
    assert planning.plan(problem.counted()).period == counted
    schedule = planning.plan(problem)
    assert schedule.period == in_bytes
    assert max(map(schedule.peak_memory, schedule.live_workers)) <= capacity


@pytest.mark.parametrize(
    "technique", [planning.Technique(), planning.Technique(split_backward=False)], ids=["split", "fused"]
)
def test_a_worker_that_cannot_hold_what_w_needs_fuses_every_backward(technique):
    problem = replace(running(2, 2.5), technique=technique)
    assert kinds(planning.plan(problem)) == {planning.OpKind.FORWARD: 72, BW: 72}


def test_a_worker_without_room_for_one_microbatch_is_an_error_with_a_remedy():
    with pytest.raises(PlanningError, match=r"stage 0 has 0 bytes, needs 0 .* 1 more.*smaller micro-batches"):
        running(0.5, 0.0)
    with pytest.raises(ConfigurationError, match=r"memory is given for 1 stage, the grid .* has 4"):
        planning.Problem(GRID, UNIT, memory=planning.Memory((1,), (0,), (1,), (1,)))


def test_a_backward_for_which_nobody_waits_is_fused():
    """At stage 0 nobody ever does, unless an F that others wait for comes between B and W."""
    schedule = planning.plan(planning.Problem(GRID, UNIT, FAILED))
    assert kinds(schedule, 0)[BW] >= 15
    assert kinds(schedule, 2)[B] == 18
    programs = [schedule.program(worker) for worker in schedule.problem.live_workers(0)]
    assert not any(a.kind is B and b.kind is W for program in programs for a, b in pairwise(program))
    eager = planning.heuristic(planning.Problem(GRID, UNIT, FAILED), 0)  # holds all 6, so no F comes between
    assert kinds(eager, 0) == {planning.OpKind.FORWARD: 18, BW: 18}


def test_a_plan_whose_backwards_are_fused_begins_its_stages_as_late_as_its_order_allows():
    times: dict[str, tuple[float, ...]] = {
        "forward": (0.9, 0.3, 0.9, 0.0),
        "backward_input": (0.9, 0.9, 0.0, 0.0),
        "backward_weight": (0.9, 2.0, 0.0, 0.0),
        "reduce": (0.1, 0.0, 0.0, 0.0),
        "optimizer": (1.1, 0.0, 0.0, 0.0),
    }
    failed = frozenset({planning.Worker(0, 0), planning.Worker(0, 1)})
    schedule = planning.heuristic(planning.Problem(planning.Grid(4, 4, 4), planning.Costs(**times), failed), 10_000)
    assert planning.OpKind.BACKWARD in kinds(schedule)
    assert schedule.period <= planning.retime(schedule, schedule.problem.costs).period + 1e-9


@pytest.mark.parametrize(("change", "says"), [
    ({"capacity": (9.0, 9.0, 3.9, 9.0)}, r"memory: \(\d, 2\) holds 4 bytes in F"),
    ({"fixed": (0.0, 0.0, 0.1, 0.0)}, r"memory: \(\d, 2\) holds 4 bytes in F"),
    ({"after_backward": (0.5, 0.5, 3.9, 0.5)}, r"memory: \(\d, 2\) holds \d+ bytes in (B|F)"),
])  # fmt: skip
def test_the_validator_counts_bytes(change, says):
    schedule = planning.plan(running(4, 0.5))
    assert max(schedule.peak_memory(worker) for worker in schedule.problem.live_workers(2)) == 4
    memory = replace(schedule.problem.memory, **change)
    with pytest.raises(planning.InvalidScheduleError, match=says):
        planning.validate(replace(schedule, problem=replace(schedule.problem, memory=memory)))


def tight(seed: int) -> planning.Problem:
    draw = Random(seed)
    grid = planning.Grid(draw.choice([2, 3]), draw.choice([2, 3, 4]), draw.choice([3, 4, 6, 8]))
    failed = frozenset({planning.Worker(draw.randrange(grid.pipelines), draw.randrange(grid.stages))})
    costs = planning.Costs.uniform(grid.stages, 1.0, draw.choice([1.0, 1.1]), draw.choice([1.0, 0.9]), 0.0, 0.0, 0.1)
    capacity = tuple(draw.choice([2.0, 3.0, 4.0, 5.0]) for _ in range(grid.stages))
    share = draw.choice([0.0, 0.3, 0.6, 1.3, 1.8])
    nothing, one = (0.0,) * grid.stages, (1.0,) * grid.stages
    memory = planning.Memory(capacity, nothing, one, tuple(share * size for size in one))
    return planning.Problem(grid, costs, failed, planning.Technique(staggered=draw.random() < 0.7), memory=memory)


@pytest.mark.parametrize("part", range(4))
def test_a_plan_in_bytes_is_never_worse_than_one_in_microbatches(part):
    """Seeded: 24 instances with tight memory. Most gain; none loses."""
    gains = []
    for seed in range(part * 6, part * 6 + 6):
        problem = tight(seed)
        schedule = planning.plan(problem, planning.HeuristicPlanner(40_000))
        counted = planning.plan(problem.counted(), planning.HeuristicPlanner(40_000))
        assert schedule.period <= counted.period * (1 + 1e-9), seed
        gains.append(counted.period / schedule.period - 1)
    assert sum(gains) / len(gains) > 0.02
