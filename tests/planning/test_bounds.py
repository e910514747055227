"""No schedule beats the lower bounds: all schedules of tiny grids are tried."""

from collections.abc import Iterator
from itertools import product
from random import Random

import pytest

from lightning_recycle import planning
from lightning_recycle.errors import PlanningError
from lightning_recycle.planning.timing import BACKWARD, FORWARD, WEIGHT, Codes, best_timing, interleave


def best_of_all(problem: planning.Problem) -> float:
    """The smallest period over all orders of operations on all workers, with the routing of the heuristic."""
    grid = problem.grid
    routes = planning.reroute(grid, problem.failed, dict(problem.worker_factors))
    codes = Codes(problem, routes, fused=not problem.technique.split_backward)
    kinds = (FORWARD, BACKWARD, WEIGHT) if problem.technique.split_backward else (FORWARD, BACKWARD)
    programs: dict[int, list[list[int]]] = {}
    for worker in problem.live_workers():
        limit = grid.global_microbatches if problem.in_flight_limit is None else problem.in_flight_limit[worker.stage]
        mine = [n for n, mb in enumerate(codes.microbatches) if routes[worker.stage][mb] == worker]
        chains = [[codes.code(kind, worker.stage, number) for kind in kinds] for number in mine]
        programs[grid.rank(worker)] = list(interleavings(chains, len(kinds), limit))
    best = float("inf")
    for choice in product(*programs.values()):
        try:
            sequence = interleave(codes, dict(zip(programs, choice, strict=True)))
        except PlanningError:
            continue  # these orders wait for each other
        timing = best_timing(codes, sequence)
        best = min(best, timing.period if problem.technique.staggered else timing.makespan)
    return best


def interleavings(chains: list[list[int]], length: int, limit: int) -> Iterator[list[int]]:
    """All orders in which each chain stays in order and at most ``limit`` are open at once."""
    if not any(chains):
        yield []
    opened = sum(0 < len(chain) < length for chain in chains)
    for at, chain in enumerate(chains):
        if chain and (len(chain) < length or opened < limit):
            rest = [*chains[:at], chain[1:], *chains[at + 1 :]]
            yield from ([chain[0], *order] for order in interleavings(rest, length, limit))


def tiny(seed: int) -> planning.Problem:
    draw = Random(seed)
    fused = draw.random() < 0.4
    grid, failed = draw.choice(
        [
            (planning.Grid(1, 2, 2), []),
            (planning.Grid(1, 3, 2), []),
            (planning.Grid(2, 2, 1), [planning.Worker(0, 0)]),
            (planning.Grid(2, 2, 1), [planning.Worker(1, 1)]),
            (planning.Grid(2, 3, 1), [planning.Worker(1, 1)]),
            (planning.Grid(2, 3, 1), [planning.Worker(0, 0), planning.Worker(0, 2)]),
            (planning.Grid(1, 2, 3), []) if fused else (planning.Grid(1, 1, 3), []),
            (planning.Grid(1, 3, 2), []),
        ]
    )
    stages = range(grid.stages)

    def per_stage() -> list[float]:
        return [draw.choice([0.5, 1.0, 1.0, 1.3, 2.0]) for _ in stages]

    closing = [draw.choice([0.0, 0.4]) for _ in stages]
    costs = planning.Costs(per_stage(), per_stage(), per_stage(), closing, closing, draw.choice([0.0, 0.2, 1.0]))
    limit = tuple(draw.choice([1, 2, 3]) for _ in stages) if draw.random() < 0.5 else None
    live = [worker for worker in grid.workers() if worker not in failed]
    factors = {draw.choice(live): 1.5} if draw.random() < 0.3 and grid.microbatches > 1 else {}
    technique = planning.Technique(not fused, draw.random() < 0.6)
    return planning.Problem(grid, costs, frozenset(failed), technique, limit, factors)


@pytest.mark.parametrize("part", range(6))
def test_no_schedule_of_a_tiny_grid_beats_the_bound(part):
    gaps = []
    for seed in range(part * 10, part * 10 + 10):
        problem = tiny(seed)
        optimum = best_of_all(problem)
        assert planning.lower_bound(problem) <= optimum + 1e-9, (seed, problem)
        found = planning.heuristic(problem).period
        assert found >= optimum - 1e-9, (seed, problem)
        gaps.append(found / optimum - 1)
    # Seeded, so this is a statement about the heuristic, not about luck.
    assert sum(gaps) / len(gaps) < 0.01
    assert max(gaps) < 0.1


@pytest.mark.parametrize(("grid", "technique", "limit", "failed", "bound"), [
    (planning.Grid(3, 4, 6), planning.Technique(), None, (), 19.0),  # round trip: 7 slots for 6 forwards
    (planning.Grid(3, 4, 6), planning.Technique(), (4,) * 4, (), 21.0),
    (planning.Grid(3, 4, 6), planning.Technique(False, False), (4,) * 4, ((1, 0),), 36.0),  # three rounds of memory
    (planning.Grid(3, 4, 6), planning.Technique(), (4,) * 4, ((1, 3),), 30.0),  # detour through stage 3
    (planning.Grid(1, 1, 5), planning.Technique(), None, (), 15.0),
])  # fmt: skip
def test_bounds_by_hand(grid, technique, limit, failed, bound):
    workers = frozenset(planning.Worker(*position) for position in failed)
    assert (
        planning.lower_bound(planning.Problem(grid, planning.Costs.uniform(grid.stages), workers, technique, limit))
        == bound
    )


def test_slow_workers_raise_the_bound_by_what_the_others_cannot_take_over():
    grid, costs = planning.Grid(3, 1, 6), planning.Costs.uniform(1)
    slow = planning.Problem(grid, costs, worker_factors={planning.Worker(0, 0): 2.0})
    assert planning.lower_bound(planning.Problem(grid, costs)) == 18.0
    assert (
        planning.lower_bound(slow) == planning.makespan_lower_bound(slow) == planning.heuristic(slow).period == 24.0
    )  # shares 4, 7, 7
