"""What each policy decides, and that its constants are what they say."""

from dataclasses import replace

import pytest

from lightning_recycle import simulation
from lightning_recycle.errors import ConfigurationError
from lightning_recycle.planning import HeuristicPlanner, Problem, Technique, Worker, normalize, normalized_failures
from lightning_recycle.simulation.policy import Context
from lightning_recycle.simulation.published_policies import (
    cut,
    iteration_estimate,
    least_nodes,
    morph,
    pipelines_step,
    share_batch,
    stage_ranges,
)
from lightning_recycle.simulation.recycle_and_common_policies import WorkerPlacement, assemble_teams, fresh, place

# Checkpoints, and the parts of a recovery that grow with the number of workers, have tests of their own.
AT_ONCE = {"agreement": 0.0, "lookup": 0.0, "connect": 0.0, "checkpoint": "memory"}
MEDIUM, MIDDLE, LARGE = (simulation.get_model(name) for name in ("gpt3_medium", "gpt3_3_35b", "gpt3_6_7b"))


def run(policy, outages, model=MIDDLE, duration="1h", extra=0):
    return simulation.simulate(
        model, simulation.Cluster.of(model, extra_nodes=extra), policy, simulation.Scripted(outages), duration
    )


def labels(result, state=simulation.State.PAUSED):
    return [interval.label for interval in result.intervals if interval.state is state]


def pauses(result):
    return {i.label: pytest.approx(i.end - i.begin) for i in result.intervals if i.state is simulation.State.PAUSED}


# -- ReCycle ----------------------------------------------------------------------------------------------------------


def fill(distribution):
    """What the first step after a stop takes longer under the plan for these failures: it overlaps with no other."""
    gone = normalized_failures(MIDDLE.grid, distribution)
    problem = Problem(MIDDLE.grid, MIDDLE.costs(), gone, in_flight_limit=MIDDLE.in_flight_limit())
    schedule = HeuristicPlanner(0).plan(problem)
    return pytest.approx(schedule.makespan - schedule.period)


@pytest.mark.parametrize("technique", [Technique(False, False), Technique(True, False), Technique(True, True)])
@pytest.mark.parametrize("failed", [1, 5, 9])
def test_recycle_steps_take_what_the_planner_says(technique, failed) -> None:
    limit = MIDDLE.in_flight_limit()
    spread = normalize(Problem(MIDDLE.grid, MIDDLE.costs(), frozenset(), technique, limit), failed)
    problem = Problem(MIDDLE.grid, MIDDLE.costs(), normalized_failures(MIDDLE.grid, spread), technique, limit)
    period = HeuristicPlanner(0).plan(problem).period
    policy = simulation.Recycle(
        split_backward=technique.split_backward, staggered=technique.staggered, effort=0, checkpoint="memory"
    )
    result = simulation.simulate(
        MIDDLE, simulation.Cluster.of(MIDDLE), policy, simulation.FailedFraction(failed / 32), "1h", 7
    )
    assert result.throughput == pytest.approx(MIDDLE.global_batch / period)
    assert result.accounting.idle == 0


def test_elastic_trains_with_whatever_nodes_there_are() -> None:
    """The batch stays: a step takes what the plan for so many workers takes, also beyond the fault-free grid."""
    speeds = []
    for extra in (0, 8, 32, 48):
        policy = simulation.Elastic(effort=0, checkpoint="memory", max_pipelines=2 * MIDDLE.pipelines)
        result = run(policy, [], extra=extra)
        speeds.append(result.throughput)
        workers = min(64, 32 + extra)
        grid = replace(MIDDLE.grid, lanes=workers // MIDDLE.stages)  # they fill all lanes
        problem = Problem(grid, MIDDLE.costs(), in_flight_limit=MIDDLE.in_flight_limit())
        assert result.throughput == pytest.approx(MIDDLE.global_batch / HeuristicPlanner(0).plan(problem).period)
    assert speeds == sorted(speeds)
    assert speeds[2] > 1.3 * speeds[0]
    assert speeds[3] == speeds[2], "no more than max_pipelines"


def test_elastic_is_recycle_where_no_node_is_beyond_the_grid() -> None:
    outages = [simulation.Outage(600.0, (3,), 1500.0), simulation.Outage(1200.0, (9,))]
    common = {"effort": 0, "checkpoint": "memory"}
    elastic, recycle = (run(kind(**common), outages) for kind in (simulation.Elastic, simulation.Recycle))
    assert elastic.throughput == pytest.approx(recycle.throughput, rel=0.01)


def test_nodes_beyond_the_grid_join_at_a_step_boundary() -> None:
    result = run(
        simulation.Elastic(effort=0, checkpoint="memory"), [simulation.Outage(0.0, (30, 31, 32, 33), 900.0)], extra=2
    )
    trained = [i.label for i in result.intervals if i.state is simulation.State.TRAINING]
    assert trained[-1] == "34 workers"
    assert "30 workers" in trained


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


@pytest.mark.long
def test_each_technique_is_worth_something() -> None:
    ratios = [
        simulation.simulate(LARGE, simulation.Cluster.of(LARGE), policy, simulation.FailedFraction(3 / 32), "1h").ratio
        for policy in (
            simulation.Recycle(adaptive=False, split_backward=False, staggered=False),
            simulation.Recycle(split_backward=False, staggered=False),
            simulation.Recycle(staggered=False),
            simulation.Recycle(),
        )
    ]
    assert ratios == sorted(ratios)
    assert ratios[0] < ratios[1] < ratios[2] < ratios[3]


def test_other_techniques_need_re_routing() -> None:
    with pytest.raises(ConfigurationError, match="adaptive=False"):
        simulation.Recycle(adaptive=False)


def test_recycle_pauses_to_detect_regroup_and_move_one_stage() -> None:
    # Two failures at the same stage: normalization sends one of the vacancies to another stage, with one copy.
    first, second = MIDDLE.grid.rank(Worker(0, 3)), MIDDLE.grid.rank(Worker(1, 3))
    result = run(simulation.Recycle(effort=0, **AT_ONCE), [simulation.Outage(100.0, (first, second))])
    transfer = MIDDLE.transfer_seconds(0.25)
    spread = normalize(Problem(MIDDLE.grid, MIDDLE.costs(), in_flight_limit=MIDDLE.in_flight_limit()), 2)
    assert pauses(result) == {"detect": 5.0, "regroup": 5.0, "transfer": transfer, "fill": fill(spread)}
    still = run(
        simulation.Recycle(effort=0, normalization=False, **AT_ONCE), [simulation.Outage(100.0, (first, second))]
    )
    assert pauses(still) == {"detect": 5.0, "regroup": 5.0, "fill": fill((0, 0, 0, 2))}
    assert still.throughput < result.throughput


def test_a_rejoin_with_seconds_of_its_own_needs_no_recovery() -> None:
    result = run(
        simulation.Recycle(effort=0, checkpoint="memory", rejoin=2.0), [simulation.Outage(100.0, (3,), 1000.0)]
    )
    assert labels(result)[-3:] == ["rejoin", "transfer", "fill"]


def test_moving_workers_copy_from_peers_in_parallel() -> None:
    grid = MIDDLE.grid
    everybody = fresh(grid, range(32), (0, 0, 0, 0))
    alive = set(range(32)) - {grid.rank(Worker(d, 0)) for d in range(4)}
    after = place(grid, everybody, alive, (1, 1, 1, 1))
    assert after.failures(grid) == (1, 1, 1, 1)
    assert after.copies == 1
    kept = place(grid, everybody, alive)
    assert (kept.failures(grid), kept.copies) == ((4, 0, 0, 0), 0)
    assert WorkerPlacement(()).failures(grid) == (8, 8, 8, 8)


# -- spares, drop_replica, restart ------------------------------------------------------------------------------------


def test_spares_must_be_in_the_cluster() -> None:
    with pytest.raises(ConfigurationError, match="extra_nodes=2"):
        run(simulation.Spares(2), [], extra=1)


def test_survivors_fill_each_others_gaps_or_form_new_pipelines() -> None:
    before = ((0, 1, 2), (3, 4, 5), (6, 7, 8))
    assert assemble_teams(before, {0, 1, 3, 4, 5, 6, 7, 8}, 3, 3) == (((3, 4, 5), (6, 7, 8)), 0)
    assert assemble_teams(before, {0, 1, 3, 4, 6, 7}, 3, 3) == (((0, 1, 6), (3, 4, 7)), 2)
    assert assemble_teams(before, {0, 1, 3, 4, 6, 7}, 3, 3, repair=False) == (((0, 1, 3), (4, 6, 7)), 6)
    assert assemble_teams(before, {0, 1}, 3, 3) == ((), 0)


def test_drop_replica_shrinks_the_batch_at_the_same_speed() -> None:
    policy = simulation.DropReplica(**AT_ONCE)
    result = run(policy, [simulation.Outage(100.0, (5,), 2000.0)])
    during = next(interval for interval in result.intervals if interval.gpus == 28 and interval.throughput)
    assert during.throughput == pytest.approx(14.87 * 7 / 8)
    assert pauses(result) == {"detect": 5.0, "regroup": 5.0, "transfer": MIDDLE.transfer_seconds(0.25)}
    assert result.intervals[-1].gpus == 32


# -- Bamboo -----------------------------------------------------------------------------------------------------------


def test_bamboo_runs_out_of_memory_where_the_paper_says() -> None:
    assert [simulation.Bamboo().fits(model) for model in (MEDIUM, MIDDLE, LARGE)] == [True, False, False]
    result = run(simulation.Bamboo(), [])
    assert (result.throughput, labels(result, simulation.State.STOPPED)) == (0.0, ["out of memory"])
    assert result.accounting.fractions()["idle"] == 1.0


def big_bamboo(**changes):
    roomy = replace(MIDDLE, gpu=simulation.Gpu("roomy", 312e12, 800e9, 2e12), throughput=None)
    policy = simulation.Bamboo(**AT_ONCE, **changes)
    return lambda outages, duration="1h": run(policy, outages, model=roomy, duration=duration)


def test_bamboo_slows_down_by_half_until_it_reconfigures() -> None:
    result = big_bamboo(threshold=1.0)([simulation.Outage(1000.0, (5,))])
    first, last = result.intervals[0], result.intervals[-1]
    assert last.throughput == pytest.approx(first.throughput / 1.5)
    assert (last.gpus, labels(result)) == (31, [])
    assert result.accounting.fractions()["redone"] > 0.1  # redundant forwards
    result = big_bamboo()([simulation.Outage(1000.0, (5,))])  # 2 of 31 without redundancy are more than 5 %
    assert pauses(result)["reconfigure"] == 20.0
    assert (result.intervals[-1].gpus, result.intervals[-1].label) == (28, "bamboo, 7 of 8 pipelines")
    assert simulation.Bamboo().node_start == 45.0


def test_bamboo_cannot_lose_two_neighbours() -> None:
    apart = big_bamboo(threshold=1.0)([simulation.Outage(1000.0, (4,)), simulation.Outage(1001.0, (6,))])
    assert labels(apart) == []
    for second in (4, 6):  # the predecessor that does both, or the next one
        fatal = big_bamboo(threshold=1.0)([simulation.Outage(1000.0, (5,)), simulation.Outage(1001.0, (second,))])
        assert pauses(fatal)["rendezvous"] == 30.0
        assert any(interval.state is simulation.State.LOST for interval in fatal.intervals)


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


def test_oobleck_shrinks_borrows_and_merges() -> None:
    def shapes(nodes):
        return (
            run(simulation.Oobleck(), [simulation.Outage(1000.0, nodes)], model=LARGE, duration="2000s")
            .intervals[-1]
            .label
        )

    assert shapes((0,)) == "oobleck, 3 x 8, 1 x 7"
    assert shapes((0, 1, 2, 3)) == "oobleck, 3 x 8, 1 x 4"
    assert shapes((0, 1, 2, 3, 4)) == "oobleck, 2 x 8, 1 x 7, 1 x 4"  # borrowed one
    # All pipelines have n0 = 4 left, one has 2: it merges with another.
    lost = (*range(6), *range(8, 12), *range(20, 24), *range(24, 28))
    assert shapes(lost) == "oobleck, 1 x 6, 2 x 4"


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


def test_varuna_relaunches_from_a_checkpoint_with_the_same_batch() -> None:
    result = run(simulation.Varuna(), [simulation.Outage(1500.0, (5,))])
    assert pauses(result)["restart"] == 90.0
    assert [interval.state for interval in result.intervals].count(simulation.State.LOST) >= 1
    assert result.intervals[-1].gpus < 32
    assert (
        result.accounting.seconds(simulation.Cause.REDONE) > result.accounting.seconds(simulation.Cause.USEFUL) / 5
    )  # recomputation


# -- all --------------------------------------------------------------------------------------------------------------


def test_fault_free_baselines_are_the_papers_and_the_zero_bubble_one() -> None:
    kinds = ("1f1b", "zero_bubble", "planned")
    usual, zero, planned = (run(simulation.FaultFree(schedule), [], model=LARGE).ratio for schedule in kinds)
    assert usual == pytest.approx(1.0)
    assert 1.05 < zero < 1.25
    assert zero < planned < 1.27
    with pytest.raises(ConfigurationError, match="gpipe"):
        simulation.FaultFree("gpipe")


@pytest.mark.parametrize(
    "policy",
    [
        simulation.Recycle(),
        simulation.Merge(),
        simulation.Spares(0),
        simulation.DropReplica(),
        simulation.Restart(),
        simulation.Oobleck(),
        simulation.Varuna(),
        simulation.Auto(effort=0),
    ],
    ids=lambda policy: type(policy).__name__,
)
def test_policies_survive_the_loss_and_return_of_everything(policy) -> None:
    context = Context(MEDIUM, simulation.Cluster.of(MEDIUM))
    assert policy.begin(context, frozenset()).configuration.running is False
    result = run(policy, [simulation.Outage(600.0, tuple(range(32)), 900.0)], model=MEDIUM)
    assert result.intervals[-1].gpus == 32
    stop = [interval for interval in result.intervals if interval.state is simulation.State.STOPPED]
    assert (stop[0].begin, stop[-1].end) == (600.0, pytest.approx(900.0, abs=0.01))
