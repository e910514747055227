"""Nodes that are slow or compute wrong results, under all policies."""

import dataclasses

import pytest
from random_outages import DURATION, small_model

from lightning_recycle import ConfigurationError
from lightning_recycle import simulation as sim
from lightning_recycle.planning import Costs
from lightning_recycle.simulation.policies.policy import Configuration, Context, waiting
from lightning_recycle.simulation.training_model import one_f_one_b_seconds

MODEL = small_model(3, 2)
CLUSTER = sim.Cluster.of(MODEL)
SETTINGS = {"checkpoint": "memory", "checkpoint_every": 100.0, "agreement": 0.0, "restart": 50.0}
ALL = [
    sim.Recycle(effort=0, **SETTINGS),
    sim.Recycle(effort=0, schedule="1f1b", **SETTINGS),
    sim.ElasticLayers(effort=0, **SETTINGS),
    sim.Merge(**SETTINGS),
    sim.Spares(0, **SETTINGS),
    sim.DropReplica(**SETTINGS),
    sim.Restart(**SETTINGS),
    sim.Bamboo(**SETTINGS),
    sim.Oobleck(**SETTINGS),
    sim.Varuna(**SETTINGS),
]
DEALING = [*ALL[:5], ALL[6], ALL[8]]


def name(policy) -> str:
    return f"{type(policy).__name__}-{policy.schedule}"


def run(policy, **source) -> sim.SimulationResult:
    return sim.simulate(MODEL, CLUSTER, policy, sim.Scripted(**source), DURATION)


def slow(speed: float, begin: float = 0.0, end: float | None = None) -> dict:
    return {"slowdowns": [sim.Slowdown(begin, (3,), speed, end)]}


@pytest.mark.parametrize("stage", range(4))
def test_waiting_for_a_slow_worker_is_exact_for_the_last_stage_and_an_upper_bound_for_the_others(stage: int) -> None:
    costs = Costs.uniform(4)
    factors = [3.0 if place == stage else 1.0 for place in range(4)]
    parts = ("forward", "backward_input", "backward_weight")
    slower = {part: tuple(map(float.__mul__, getattr(costs, part), factors)) for part in parts}
    found = Configuration("", one_f_one_b_seconds(costs, 12), 1, 4, 4 * 12 * 3.0)
    exact = one_f_one_b_seconds(dataclasses.replace(costs, **slower), 12)
    assumed = waiting(found, {stage: 1 / 3}).step_seconds
    assert assumed == pytest.approx(exact) if stage == 3 else exact <= assumed < 1.2 * exact


@pytest.mark.parametrize("policy", ALL, ids=name)
def test_all_wait_for_a_slow_node_while_nobody_knows_it(policy) -> None:
    policy = dataclasses.replace(policy, slow_after=None)
    usual, found = run(policy), run(policy, **slow(0.5))
    first = policy.begin(Context(MODEL, CLUSTER), frozenset(range(6))).configuration
    step = first.step_seconds
    computing = (first.useful_gpu_seconds + first.repeated_gpu_seconds) / first.gpus
    assert found.throughput == pytest.approx(usual.throughput * step / (step + computing), rel=1e-6)
    assert found.accounting.seconds("slow") == pytest.approx(DURATION * first.gpus * computing / (step + computing))
    assert found.losses()["slow"] > 0


@pytest.mark.parametrize("policy", ALL, ids=name)
def test_a_slow_node_costs_no_more_than_waiting_for_it_or_twice_as_much_as_leaving_it_out(policy) -> None:
    waits = run(dataclasses.replace(policy, slow_after=None), **slow(0.2))
    gone = run(policy, outages=[sim.Outage(0.0, (3,))])
    usual, found = run(policy), run(policy, **slow(0.2))
    assert found.samples >= waits.samples
    least = min(usual.samples - waits.samples, 2 * (usual.samples - gone.samples))
    first_minute = 90.0 * usual.throughput  # until it is known, and a recovery or restart at the beginning
    assert usual.samples - found.samples <= least + first_minute


@pytest.mark.parametrize("policy", DEALING, ids=name)
def test_work_is_dealt_out_by_speed_without_a_pause(policy) -> None:
    policy = dataclasses.replace(policy, slow_after=0.0)
    waits = run(dataclasses.replace(policy, slow_after=None), **slow(0.6))
    found = run(policy, **slow(0.6))
    assert waits.throughput < found.throughput < run(policy).throughput
    assert not [event for event in found.events if event.kind == "left out"]
    assert found.accounting.reconfiguring == run(policy).accounting.reconfiguring


@pytest.mark.parametrize("policy", ALL, ids=name)
def test_a_node_that_hardly_works_is_left_out_and_comes_back_when_it_is_fast_again(policy) -> None:
    found = run(policy, **slow(0.01, 300.0, 1300.0))
    kinds = [event.kind for event in found.events if event.kind != "alarm"]
    if isinstance(policy, sim.Recycle):  # peers take all of its work
        assert kinds == ["slow", "fast again"]
    else:
        assert kinds == ["slow", "left out", "fast again"]
        assert found.accounting.idle > 0
    assert found.accounting.failed == 0
    assert [i.gpus for i in found.intervals][-1] == 6


@pytest.mark.parametrize("policy", ALL, ids=name)
def test_wrong_results_found_late_cost_everything_since_the_checkpoint_before_them(policy) -> None:
    found = run(policy, corruptions=[sim.Corruption(250.0, 3, 300.0, None)])
    lost = [interval for interval in found.intervals if interval.state is sim.State.LOST]
    assert 190 < lost[0].begin < 250
    assert lost[-1].end == pytest.approx(550.0)
    assert sum(interval.end - interval.begin for interval in lost) > 299
    assert found.accounting.failed == round((DURATION - 550) * 1e9)
    assert found.tainted_samples == 0
    assert [event.kind for event in found.events if event.kind != "alarm"] == ["wrong", "found", "failure"]


@pytest.mark.parametrize("policy", ALL, ids=name)
def test_wrong_results_found_in_their_step_cost_no_more_than_a_failure(policy) -> None:
    policy = dataclasses.replace(policy, check_every=0.0)
    found = run(policy, corruptions=[sim.Corruption(250.0, 3, None, 600.0)])
    when = next(event.time for event in found.events if event.kind == "found")
    assert 250 < when < 254.0
    failed = run(policy, outages=[sim.Outage(when - 1e-3, (3,), when + 600.0)])
    step = 128.0 / failed.fault_free_throughput
    assert found.samples == pytest.approx(failed.samples, abs=2 * step * failed.fault_free_throughput)
    assert found.tainted_samples == 0


def test_checks_find_wrong_results_at_the_end_of_the_step_in_which_they_are_due() -> None:
    policy = dataclasses.replace(ALL[3], check_every=100.0)
    found = run(policy, corruptions=[sim.Corruption(250.0, 3, None, None)])
    when = next(event.time for event in found.events if event.kind == "found")
    assert 300.0 <= when < 304.0
    lost = [interval for interval in found.intervals if interval.state is sim.State.LOST]
    assert 190 < lost[0].begin < 250


def test_checking_costs_a_part_of_every_step_which_is_computed_twice() -> None:
    usual = run(ALL[3])
    found = run(dataclasses.replace(ALL[3], check_every=0.0, check_cost=0.1))
    assert found.throughput == pytest.approx(usual.throughput / 1.1, rel=1e-3)
    assert found.accounting.fractions()["redone"] == pytest.approx(0.1 / 1.1, rel=1e-3)


def test_what_nobody_finds_taints_all_samples_since_then() -> None:
    found = run(ALL[3], corruptions=[sim.Corruption(500.0, 3)])
    assert found.samples == run(ALL[3]).samples
    assert found.tainted_samples == pytest.approx(found.samples * 0.75, rel=1e-2)


def test_a_failure_that_undoes_wrong_results_leaves_none() -> None:
    policy = dataclasses.replace(ALL[6], check_every=None)  # restart
    broken = [sim.Outage(260.0, (0, 3), None)]
    found = run(policy, outages=broken, corruptions=[sim.Corruption(250.0, 3)])
    assert found.tainted_samples == 0
    assert found.samples == run(policy, outages=broken).samples


def test_a_wrong_node_that_takes_no_part_changes_nothing() -> None:
    cluster = sim.Cluster.of(MODEL, extra_nodes=1)
    policy = sim.Spares(1, **SETTINGS)
    source = sim.Scripted(corruptions=[sim.Corruption(250.0, 6, 100.0)], slowdowns=[sim.Slowdown(0.0, (6,), 0.1)])
    found = sim.simulate(MODEL, cluster, policy, source, DURATION)
    assert found.samples == sim.simulate(MODEL, cluster, policy, sim.Scripted(), DURATION).samples


def test_sources_of_slow_and_wrong_nodes_are_seeded_and_as_frequent_as_said() -> None:
    for source in (sim.SlowNodes(mtbf="10min", length="30s"), sim.CorruptNodes(mtbf="10min")):
        changes = source.changes(CLUSTER, 400 * 600.0, 1)
        assert changes == source.changes(CLUSTER, 400 * 600.0, 1) != source.changes(CLUSTER, 400 * 600.0, 2)
        count = sum(len(change.wrong) + sum(speed < 1 for _, speed in change.speeds) for change in changes)
        assert 320 < count < 480


def test_overlapping_slowdowns_count_as_the_worst_of_them() -> None:
    both = [sim.Slowdown(10.0, (1,), 0.5, 40.0), sim.Slowdown(20.0, (1,), 0.2, 30.0)]
    changes = sim.Scripted(slowdowns=both).changes(CLUSTER, 100.0, 0)
    assert [(change.tick // 10**9, change.speeds) for change in changes] == [
        (10, ((1, 0.5),)), (20, ((1, 0.2),)), (30, ((1, 0.5),)), (40, ((1, 1.0),)),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "make",
    [
        lambda: sim.Slowdown(0.0, (0,), 0.0),
        lambda: sim.SlowNodes(speed=1.5),
        lambda: sim.CorruptNodes(noticed="never"),
        lambda: sim.Merge(check_cost=-1),
        lambda: sim.Merge(slow_after="soon"),
    ],
)
def test_impossible_values_are_refused(make) -> None:
    with pytest.raises(ConfigurationError):
        make()
