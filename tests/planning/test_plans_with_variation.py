"""Plans for micro-batches that differ: their times and their memory, by a second account of both."""

from collections import Counter
from collections.abc import Mapping

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lightning_recycle.planning import Grid, Problem, Technique, Worker, heuristic
from lightning_recycle.planning.grid import OpKind
from lightning_recycle.planning.heuristic_planner import heuristic_with_variation
from lightning_recycle.planning.layer_cuts import LayerCosts, bounds_of
from lightning_recycle.planning.schedule import EQUALLY_FAST, Schedule
from lightning_recycle.planning.timing import best_timing, operations_of

CUTS = (0, 2.25, 4.6, 7)


def layers(**more: object) -> LayerCosts:
    return LayerCosts(
        forward=(1.0, 1.2, 0.8, 1.0, 1.1, 0.9, 1.0), backward_input=(1.1,) * 7, backward_weight=(0.9,) * 7,
        reduce=(0.3,) * 7, optimizer=(0.1,) * 7, **more,
    )  # fmt: skip


def own_seconds(costs: LayerCosts, grid: Grid, kind: OpKind, stage: int, number: int) -> float:
    """Of one micro-batch d * M + m, from its whole bounds."""
    pipeline, index = divmod(number, grid.microbatches)
    bounds = bounds_of(CUTS, index * grid.pipelines + pipeline, grid)
    parts = {
        OpKind.FORWARD: (costs.forward,),
        OpKind.BACKWARD_INPUT: (costs.backward_input,),
        OpKind.BACKWARD_WEIGHT: (costs.backward_weight,),
        OpKind.BACKWARD: (costs.backward_input, costs.backward_weight),
    }[kind]
    return sum(sum(values[bounds[stage] : bounds[stage + 1]]) for values in parts)


def repeated(schedule: Schedule, costs: LayerCosts, steps: int) -> list[float]:
    """When the last stage has stepped in each of some steps that follow each other, operations in their order."""
    grid = schedule.grid
    stages, n = grid.stages, grid.global_microbatches
    begin, stepped = [0.0] * stages, []
    for _ in range(steps):
        programs = {
            worker: [op for op in schedule.program(worker) if op.microbatch is not None]
            for worker in schedule.live_workers
        }
        at: Counter[Worker] = Counter()
        free: dict[Worker, float] = {worker: begin[worker.stage] for worker in programs}
        done: dict[tuple[OpKind, int, int], float] = {}
        left = sum(map(len, programs.values()))
        while left:
            before = left
            for worker, program in programs.items():
                while at[worker] < len(program):
                    op = program[at[worker]]
                    number = op.microbatch.pipeline * grid.microbatches + op.microbatch.index
                    ready = input_of(done, op.kind, op.stage, number, stages)
                    if ready is None:
                        break
                    start = max(free[worker], ready)
                    end = free[worker] = start + own_seconds(costs, grid, op.kind, op.stage, number)
                    done[op.kind, op.stage, number] = end
                    at[worker] += 1
                    left -= 1
            assert left < before
        ended = [max(free[worker] for worker in programs if worker.stage == stage) for stage in range(stages)]
        held = [range(3), range(2, 5), range(4, 7)]
        stepping = []
        for stage in range(stages):
            ready = ended[stage] + sum(costs.reduce[layer] for layer in held[stage])
            for other in (stage - 1, stage + 1):
                if 0 <= other < stages:
                    (layer,) = set(held[stage]) & set(held[other])
                    for number in range(n):
                        bounds = bounds_of(
                            CUTS, number % grid.microbatches * grid.pipelines + number // grid.microbatches, grid
                        )
                        if bounds[other] <= layer < bounds[other + 1]:
                            last = [
                                done.get((kind, other, number), 0.0)
                                for kind in (OpKind.BACKWARD_WEIGHT, OpKind.BACKWARD)
                            ]
                            ready = max(ready, max(last) + costs.reduce[layer])
            stepping.append(ready + sum(costs.optimizer[layer] for layer in held[stage]))
        begin = stepping
        stepped.append(stepping[-1])
    return stepped


def input_of(
    done: Mapping[tuple[OpKind, int, int], float], kind: OpKind, stage: int, number: int, stages: int
) -> float | None:
    if kind is OpKind.FORWARD:
        return done.get((kind, stage - 1, number)) if stage else 0.0
    if kind is OpKind.BACKWARD_WEIGHT or stage == stages - 1:
        return 0.0  # behind its own F or B on the same worker
    found = [done.get((each, stage + 1, number)) for each in (OpKind.BACKWARD_INPUT, OpKind.BACKWARD)]
    return next((each for each in found if each is not None), None)


failures = st.sets(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=3).filter(
    lambda places: all(sum(stage == s for _, stage in places) < 3 for s in range(3))
)


@settings(max_examples=25, deadline=None)
@given(places=failures, split_backward=st.booleans())
@example(places={(0, 0), (0, 1), (1, 2)}, split_backward=True)  # faster than the bound of the mean micro-batch
def test_steps_follow_each_other_as_predicted(places, split_backward):
    grid, costs = Grid(3, 3, 5), layers()
    failed = frozenset(Worker(*place) for place in places)
    problem = Problem(grid, costs.costs(CUTS, split_backward=split_backward), failed, Technique(split_backward, True))
    variation = costs.variation(CUTS, grid, split_backward=split_backward)
    assert variation is not None
    usual = heuristic(problem, 20_000)
    schedule, timing = heuristic_with_variation(usual, variation, 20_000)
    codes, sequence = operations_of(usual, problem, variation)
    assert timing.period <= best_timing(codes, sequence).period * (1 + EQUALLY_FAST)
    stepped = repeated(schedule, costs, 24)
    assert (stepped[-1] - stepped[-13]) / 12 == pytest.approx(timing.period, rel=1e-6)


def test_nobody_waits_for_gradients_that_are_complete_before_the_last_operations():
    grid = Grid(2, 2, 8)
    costs = LayerCosts((1.0,) * 5, (1.0,) * 5, (1.0,) * 5)
    cuts = (0, 2.5, 5)
    problem = Problem(grid, costs.costs(cuts), frozenset(), Technique())
    variation = costs.variation(cuts, grid)
    assert variation is not None
    _, timing = heuristic_with_variation(heuristic(problem, 50_000), variation, 50_000)
    work = 8 * 3 * 2.5  # of a worker; the second stage begins at least two slots after the first one
    assert work <= timing.period < work + 2


@settings(max_examples=20, deadline=None)
@given(places=failures, room=st.floats(1.0, 6.0))
def test_no_worker_holds_more_than_it_has(places, room):
    grid, held = Grid(3, 3, 5), (2.0, 1.0, 3.0, 1.0, 2.0, 1.0, 1.0)
    fixed = 8 * 3 + 3.0 + 2.0  # of the second stage, with room for one more of each shared layer
    costs = layers(
        parameter_bytes=(8.0,) * 7,
        held_bytes=held,
        waiting_bytes=tuple(0.5 * each for each in held),
        memory_limit=fixed + room * 4.5,
    )
    failed = frozenset(Worker(*place) for place in places)
    problem = Problem(grid, costs.costs(CUTS), failed, Technique(), memory=costs.memory(CUTS))
    variation = costs.variation(CUTS, grid)
    assert variation is not None
    schedule, _ = heuristic_with_variation(heuristic(problem, 20_000), variation, 20_000)
    for worker in schedule.live_workers:
        now = 8.0 * 3
        for op in schedule.program(worker):
            if op.microbatch is None:
                continue
            bounds = bounds_of(CUTS, op.microbatch.index * grid.pipelines + op.microbatch.pipeline, grid)
            own = sum(held[bounds[worker.stage] : bounds[worker.stage + 1]])
            now += {
                OpKind.FORWARD: own,
                OpKind.BACKWARD_INPUT: -0.5 * own,
                OpKind.BACKWARD_WEIGHT: -0.5 * own,
                OpKind.BACKWARD: -own,
            }[op.kind]
            assert now <= fixed + room * 4.5 + 1e-6


def test_light_micro_batches_leave_room_for_one_more():
    grid, cuts = Grid(1, 3, 12), (0, 2.25, 4.5, 7)
    slots = (1.0,) * 7
    costs = LayerCosts(slots, slots, slots, held_bytes=slots, parameter_bytes=slots, memory_limit=3 + 1 + 8.8)
    problem = Problem(grid, costs.costs(cuts), frozenset(), Technique(), memory=costs.memory(cuts))
    variation = costs.variation(cuts, grid)
    assert variation is not None
    assert problem.counted().in_flight_limit == (3, 3, 3)
    usual = heuristic(problem, 50_000)
    schedule, timing = heuristic_with_variation(usual, variation, 50_000)
    codes, sequence = operations_of(usual, problem, variation)
    assert timing.period < best_timing(codes, sequence).period
    assert max(schedule.peak_in_flight(worker) for worker in schedule.live_workers) > 3
