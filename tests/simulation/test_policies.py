"""What each policy decides, and that its constants are what they say."""

from dataclasses import replace

import pytest

from lightning_recycle import simulation
from lightning_recycle.errors import ConfigurationError
from lightning_recycle.planning import HeuristicPlanner, Problem, normalize, normalized_failures
from lightning_recycle.simulation.published_policies import (
    cut,
    iteration_estimate,
    least_nodes,
    morph,
    pipelines_step,
    share_batch,
    stage_ranges,
)

MEDIUM, MIDDLE, LARGE = (simulation.get_model(name) for name in ("gpt3_medium", "gpt3_3_35b", "gpt3_6_7b"))


def run(policy, outages, model=MIDDLE, duration="1h", extra=0):
    return simulation.simulate(
        model, simulation.Cluster.of(model, extra_nodes=extra), policy, simulation.Scripted(outages), duration
    )


# -- ReCycle ----------------------------------------------------------------------------------------------------------


def test_recycle_chooses_the_stages_of_failures_by_the_plans_as_a_run_does() -> None:
    """Bounds alone choose a stage whose plan is 7.5 % above the bound with 32 samples in a step."""
    model = simulation.get_model("gpt3_6_7b", global_batch=32)
    limit = model.in_flight_limit()
    problem = Problem(model.grid, model.costs(), in_flight_limit=limit)
    gone = normalized_failures(model.grid, normalize(problem, 1))
    by_bounds = HeuristicPlanner(100_000).plan(replace(problem, failed=gone))
    result = simulation.simulate(
        model, simulation.Cluster.of(model), simulation.Recycle(), simulation.FailedFraction(1 / 32), "1h"
    )
    assert model.global_batch / result.throughput < by_bounds.period / 1.02


def test_other_techniques_need_re_routing() -> None:
    with pytest.raises(ConfigurationError, match="adaptive=False"):
        simulation.Recycle(adaptive=False)


# -- spares, drop_replica, restart ------------------------------------------------------------------------------------


def test_spares_must_be_in_the_cluster() -> None:
    with pytest.raises(ConfigurationError, match="extra_nodes=2"):
        run(simulation.Spares(2), [], extra=1)


# -- Bamboo -----------------------------------------------------------------------------------------------------------


def test_bamboo_runs_out_of_memory_where_the_paper_says() -> None:
    assert [simulation.Bamboo().fits(model) for model in (MEDIUM, MIDDLE, LARGE)] == [True, False, False]
    result = run(simulation.Bamboo(), [])
    assert (result.throughput, [interval.label for interval in result.intervals]) == (0.0, ["out of memory"])
    assert result.accounting.fractions()["idle"] == 1.0
    assert simulation.Bamboo().node_start == 45.0


# -- Oobleck ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("units", [8, 28, 80])
@pytest.mark.parametrize("stages", [1, 2, 3, 5, 8])
def test_templates_are_as_even_as_can_be(units, stages) -> None:
    parts = cut(units, stages)
    assert (sum(parts), len(parts)) == (units, stages)
    assert max(parts) == -(-units // stages)
    assert stage_ranges(parts)[-1][1] == units


def test_the_estimate_is_ooblecks_formula() -> None:
    # The slowest is stage 1: T1 = 9, T2 = (2 * 3 + 1 + 1) * 4, T3 = 4 + 3.
    assert iteration_estimate((2.0, 4.0, 3.0)) == 9 + 8 * 4 + 7


def test_batches_are_shared_by_speed() -> None:
    assert share_batch(128, (1.0,) * 8) == (16,) * 8
    shares = share_batch(128, (1.0, 1.0, 0.75))
    assert sum(shares) == 128
    assert shares == pytest.approx((46.5, 46.5, 34.9), abs=1)
    assert share_batch(3, (1.0, 1.0, 0.001)) == (1, 1, 1)


def test_least_nodes_follow_from_memory() -> None:
    assert [least_nodes(model, 6.0) for model in (MEDIUM, MIDDLE, LARGE)] == [1, 2, 4]
    tiny = replace(MEDIUM, gpu=simulation.Gpu("tiny", 312e12, 1e9, 1e12), throughput=None)
    assert least_nodes(tiny, 6.0) is None


def test_uneven_pipelines_are_as_slow_as_their_slowest() -> None:
    shapes = ((8, 8, 8, 8), (8, 8, 8, 7), (8, 8, 8, 4), (8, 8, 8))
    for schedule in ("1f1b", "planned"):
        seconds = [pipelines_step(LARGE, sizes, schedule, 0).period for sizes in shapes]
        assert seconds == sorted(seconds)
        assert len(set(seconds)) == 4
    assert pipelines_step(LARGE, (8, 8, 8, 8)).period == pytest.approx(LARGE.fault_free_seconds())


# -- Varuna -----------------------------------------------------------------------------------------------------------


def test_varuna_takes_the_fastest_depth_that_fits() -> None:
    model = replace(LARGE, recompute=True, throughput=None)
    layout = morph(model, 32)
    assert layout is not None
    pipelines, depth, size, seconds = layout
    assert model.transformer.layers % depth == 0
    assert (pipelines, size) == (32 // depth, 1)
    fewer = morph(model, 31)
    assert fewer is not None
    assert seconds < fewer[3]
    planned = morph(model, 32, "planned", 0)
    assert planned is not None
    assert (planned[:3], planned[3] < seconds) == (layout[:3], True)
    assert morph(replace(model, gpu=simulation.Gpu("tiny", 312e12, 1e9, 1e12)), 32) is None


# -- all --------------------------------------------------------------------------------------------------------------


def test_fault_free_baselines_are_the_papers_and_the_zero_bubble_one() -> None:
    kinds = ("1f1b", "zero_bubble", "planned")
    usual, zero, planned = (run(simulation.FaultFree(schedule), [], model=LARGE).ratio for schedule in kinds)
    assert usual == pytest.approx(1.0)
    assert 1.05 < zero < 1.25
    assert zero < planned < 1.27
    with pytest.raises(ConfigurationError, match="gpipe"):
        simulation.FaultFree("gpipe")
