"""The partition by dynamic programming against every partition there is."""

import math
from itertools import combinations, pairwise, product

from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_recycle.planning.layouts.cuts import Stages, cheapest, fastest, shares

SECONDS = st.sampled_from([0.0, 0.1, 0.5, 1.0, 1.3, 4.0])
CLOSE = 1e-6


@st.composite
def cases(draw: st.DrawFn) -> tuple[Stages, list]:
    """Stages of up to seven layers, and what they may be."""
    stages = draw(st.integers(1, 4))
    layers = draw(st.integers(stages, 7))
    work = draw(st.lists(SECONDS, min_size=layers, max_size=layers))
    once = draw(st.lists(SECONDS, min_size=layers, max_size=layers))
    pipelines, microbatches = draw(st.integers(1, 4)), draw(st.integers(1, 9))
    table = shares(microbatches, (1.0,) * pipelines)
    options = []
    for _ in range(stages):
        least = draw(st.integers(1, pipelines))
        most = draw(st.integers(least, pipelines))
        options.append([(count, table[count]) for count in range(least, most + 1)])
    rooms = [draw(st.integers(1, layers)) for _ in range(stages)]
    workers = draw(st.integers(stages, stages * pipelines))
    overhead = draw(st.sampled_from([0.0, 0.2]))
    return Stages(work, once, options, workers, lambda s, i, j: j - i <= rooms[s], overhead), rooms


def every(stages: Stages, rooms: list) -> list[tuple[float, tuple, tuple]]:
    """Bottleneck, bounds and workers of every partition that is allowed."""
    found = []
    for inner in combinations(range(1, stages.count), stages.stages - 1):
        cuts = (0, *inner, stages.count)
        ranges = list(enumerate(pairwise(cuts)))
        if any(end - begin > rooms[stage] for stage, (begin, end) in ranges):
            continue
        for needs in product(*([count for count, _ in options] for options in stages._options)):
            if sum(needs) <= stages.workers:
                found.append((max(stages.load(s, i, j, needs[s]) for s, (i, j) in ranges), cuts, needs))
    return found


@settings(max_examples=120, deadline=None)
@given(cases())
def test_the_bottleneck_is_the_least_of_all_partitions(case: tuple[Stages, list]) -> None:
    stages, rooms = case
    all_of_them = every(stages, rooms)
    found = fastest(stages)
    if not all_of_them:
        assert found is None
        return
    assert found is not None
    assert found.bottleneck <= min(all_of_them)[0] * (1 + CLOSE) + CLOSE
    assert (found.cuts, found.needs) in {(cuts, needs) for _, cuts, needs in all_of_them}


@settings(max_examples=120, deadline=None)
@given(cases(), st.randoms(use_true_random=False))
def test_the_cost_is_the_least_of_all_partitions_within_the_limit(case: tuple[Stages, list], random) -> None:
    stages, rooms = case
    best = fastest(stages)
    if best is None:
        return
    prices: dict[tuple, float] = {}

    def cost(*key: int) -> float:  # more workers cost nothing less
        stage, begin, end, workers = key
        return prices.setdefault((stage, begin, end), random.randint(0, 5)) + workers

    limit = best.bottleneck * 1.2 + CLOSE
    found = cheapest(stages, limit, cost)
    least = min(
        sum(cost(s, cuts[s], cuts[s + 1], needs[s]) for s in range(stages.stages))
        for bottleneck, cuts, needs in every(stages, rooms)
        if bottleneck <= limit
    )
    assert found is not None
    assert found.bottleneck <= limit * (1 + CLOSE)
    assert sum(cost(s, found.cuts[s], found.cuts[s + 1], need) for s, need in enumerate(found.needs)) == least


@given(st.integers(1, 12), st.lists(st.sampled_from([0.5, 1.0, 2.0, 3.0]), min_size=1, max_size=4))
def test_a_share_is_the_best_distribution(microbatches: int, factors: list[float]) -> None:
    found = shares(microbatches, factors)
    assert found[0] == math.inf
    for count in range(1, len(factors) + 1):
        least = min(
            max(held * factor for held, factor in zip(split, factors[:count], strict=True))
            for split in product(range(microbatches + 1), repeat=count)
            if sum(split) == microbatches
        )
        assert found[count] == least
