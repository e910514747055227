"""Who adopts what: even, spread over the iteration, and according to the workers' speeds."""

from collections import Counter
from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_recycle.planning import Grid, Microbatch, Worker, reroute

GRID = Grid(3, 4, 6)


def test_orphans_of_several_failures_in_one_stage_are_dealt_in_the_order_of_arrival() -> None:
    route = reroute(Grid(4, 1, 2), {Worker(0, 0), Worker(2, 0)})[0]
    adopted = [(Microbatch(0, 0), 1), (Microbatch(2, 0), 3), (Microbatch(0, 1), 1), (Microbatch(2, 1), 3)]
    assert [(microbatch, route[microbatch].pipeline) for microbatch, _ in adopted] == adopted


def test_a_slow_worker_gives_up_microbatches_spread_over_the_iteration() -> None:
    route = reroute(GRID, (), {Worker(1, 2): 2.0})[2]
    moved = {
        microbatch: worker.pipeline for microbatch, worker in route.items() if worker.pipeline != microbatch.pipeline
    }
    # 18 micro-batches: shares 7, 4, 7 end at 7, 8, 7; two leave. 8, 3, 7 would end at 8, 6, 7.
    assert Counter(route.values())[Worker(1, 2)] * 2.0 <= 8
    assert set(moved) <= {Microbatch(1, m) for m in range(6)}
    assert reroute(GRID, (), {Worker(1, 2): 2.0})[1] == reroute(GRID, ())[1]


def test_a_much_slower_worker_gets_nothing() -> None:
    loads = Counter(reroute(GRID, (), {Worker(1, 2): 100.0})[2].values())
    assert loads == {Worker(0, 2): 9, Worker(2, 2): 9}


def test_a_fast_peer_adopts_more_and_not_all_at_once() -> None:
    grid = Grid(3, 1, 12)
    route = reroute(grid, {Worker(0, 0)}, {Worker(1, 0): 0.5})[0]
    assert Counter(route.values()) == {Worker(1, 0): 24, Worker(2, 0): 12}
    route = reroute(grid, {Worker(0, 0)}, {Worker(1, 0): 0.75})[0]
    adopted = [route[Microbatch(0, m)].pipeline for m in range(12)]
    assert Counter(adopted) == {1: 9, 2: 3}  # 21 x 0.75 = 15.75 and 15
    assert max(len(run) for run in "".join(map(str, adopted)).split("2")) <= 4


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from([0.5, 1.0, 1.25, 2.0, 3.0]), min_size=2, max_size=3), st.integers(1, 5), st.booleans())
def test_no_assignment_has_a_smaller_slowest_worker(speeds: list[float], microbatches: int, fails: bool) -> None:
    grid = Grid(len(speeds) + fails, 1, microbatches)
    failed = {Worker(len(speeds), 0)} if fails else set()
    factors = {Worker(d, 0): factor for d, factor in enumerate(speeds)}
    loads = Counter(reroute(grid, failed, factors)[0].values())
    total = grid.global_microbatches
    slowest = max(loads[worker] * factor for worker, factor in factors.items())
    best = min(
        max(count * factor for count, factor in zip(counts, speeds, strict=True))
        for counts in product(range(total + 1), repeat=len(speeds))
        if sum(counts) == total
    )
    assert sum(loads.values()) == total
    assert slowest == best
