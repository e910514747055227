"""Failure sources: rates, seeds, and the one rule that a dead node does not die."""

import statistics

import pytest

from lightning_recycle import simulation as sim
from lightning_recycle.errors import ConfigurationError
from lightning_recycle.simulation.failures import LLAMA3_PER_GPU_DAY, RSC1_PER_GPU_DAY
from lightning_recycle.traces import load_trace

CLUSTER = sim.Cluster(32)
DAY = 86400.0
SOURCES = [
    sim.Poisson("1h"),
    sim.Poisson("10min", repair="2h"),
    sim.FailureRate("rsc1", repair="1h", scale=300),
    sim.Weibull("20h", 0.7, repair="1h"),
    sim.Weibull("20h", 2.0, repair=None),
    sim.Correlated("30min", group=4, repair="3h"),
    sim.TraceReplay("aws-p3"),
    sim.TraceReplay("gcp-a100", start="2h", speed=2.0),
    sim.FailedFraction(0.25, within="12h"),
    sim.Regular("1h"),
    sim.Scripted([sim.Outage(10.0, (1, 2), 50.0), sim.Outage(20.0, (2, 3), 30.0), sim.Outage(40.0, (2,), 60.0)]),
]


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: type(source).__name__)
def test_changes_are_in_order_and_alternate_for_every_node(source) -> None:
    live = set(range(CLUSTER.nodes))
    ticks = []
    for change in source.changes(CLUSTER, DAY, 3):
        assert live.issuperset(change.down)
        assert live.isdisjoint(change.up)
        live = (live - set(change.down)) | set(change.up)
        ticks.append(change.tick)
    assert ticks == sorted(set(ticks))
    assert ticks
    assert 0 <= ticks[0] <= ticks[-1] < DAY * 1e9


@pytest.mark.parametrize("source", SOURCES[:6], ids=lambda source: type(source).__name__)
def test_a_seed_decides(source) -> None:
    assert source.changes(CLUSTER, DAY, 3) == source.changes(CLUSTER, DAY, 3)
    assert source.changes(CLUSTER, DAY, 3) != source.changes(CLUSTER, DAY, 4)


def failures(source, cluster, duration, seed=0) -> int:
    return sum(len(change.down) for change in source.changes(cluster, duration, seed))


def test_poisson_has_its_mean_time_between_failures() -> None:
    count = failures(sim.Poisson("1h", repair=1.0), sim.Cluster(1000), 2000 * 3600.0)
    assert count == pytest.approx(2000, abs=3 * 2000**0.5)


def test_published_rates_are_per_gpu_and_day() -> None:
    hours = [24 / rate for rate in (LLAMA3_PER_GPU_DAY, RSC1_PER_GPU_DAY)]
    assert hours == pytest.approx([50_700, 29_500], rel=2e-3)
    # Llama 3's own numbers: 419 on 16,384 GPUs in 54 days; 8 GPUs a node, instant repair.
    count = failures(sim.FailureRate("llama3", repair=1.0), sim.Cluster(2048, 8), 54 * DAY)
    assert count == pytest.approx(419, abs=3 * 419**0.5)


@pytest.mark.parametrize("shape", [0.7, 1.0, 3.0])
def test_weibull_has_its_mean_whatever_its_shape(shape) -> None:
    source = sim.Weibull("10h", shape, repair=None)
    lives = [change.tick / 3.6e12 for change in source.changes(sim.Cluster(4000), 1e9, 1) for _ in change.down]
    assert len(lives) == 4000
    assert statistics.fmean(lives) == pytest.approx(10, rel=0.06)


def test_correlated_failures_take_neighbours_together() -> None:
    found = sim.Correlated("1h", group=8, probability=1.0, repair="1s").changes(CLUSTER, 30 * DAY, 0)
    downs = [change.down for change in found if change.down]
    assert all(down == tuple(range(down[0], down[0] + 8)) and down[0] % 8 == 0 for down in downs)
    single = sim.Correlated("1h", group=8, probability=0.0, repair="1s").changes(CLUSTER, 30 * DAY, 0)
    assert {len(change.down) for change in single} == {0, 1}


def test_a_node_in_two_outages_is_back_after_the_last() -> None:
    changes = SOURCES[-1].changes(CLUSTER, DAY, 0)
    assert [(change.tick // 10**9, change.down, change.up) for change in changes] == [
        (10, (1, 2), ()),
        (20, (3,), ()),
        (30, (), (3,)),
        (50, (), (1,)),
        (60, (), (2,)),
    ]


def test_a_fraction_above_nothing_takes_at_least_one_node() -> None:
    model = sim.get_model("gpt3_medium")
    found = [
        sim.simulate(model, sim.Cluster.of(model), sim.Merge(), sim.FailedFraction(part), "1h").failures
        for part in (0.0, 0.01, 0.03, 0.05, 0.1)
    ]
    assert found == [0, 1, 1, 2, 3]


@pytest.mark.parametrize(("part", "count"), [(0.01, 10), (0.05, 51), (0.1, 102)])
def test_failed_fraction_is_exact_and_final(part, count) -> None:
    cluster = sim.Cluster(1024)
    (change,) = sim.FailedFraction(part).changes(cluster, DAY, 0)
    assert (change.tick, len(change.down), change.up) == (0, count, ())
    assert len(sim.FailedFraction(part, within="1h").changes(cluster, DAY, 0)) == count


def test_regular_failures_stop_at_half_as_in_oobleck() -> None:
    changes = sim.Regular("30min").changes(sim.Cluster(30), 5 * DAY, 0)
    assert [change.tick // 10**9 for change in changes] == [1800 * n for n in range(1, 16)]


@pytest.mark.parametrize("name", ["aws-p3", "gcp-v100"])
@pytest.mark.parametrize("factor", [1, 2])
def test_replay_has_the_availability_of_the_trace(name, factor) -> None:
    trace = load_trace(name)
    cluster = sim.Cluster(trace.peak * factor)
    live = cluster.nodes
    by_time = {}
    for change in sim.TraceReplay(name).changes(cluster, trace.duration + 1, 0):
        live += len(change.up) - len(change.down)
        by_time[change.tick / 1e9] = live
    assert by_time == pytest.approx({t: n * factor for t, n in trace.availability if t in by_time})
    assert set(dict(trace.availability)).difference(by_time) <= {0.0}


@pytest.mark.parametrize(
    ("text", "seconds"), [("30min", 1800), ("6h", 21600), ("1.5d", 129600), (90, 90), ("250ms", 0.25)]
)
def test_durations_are_written_as_people_do(text, seconds) -> None:
    assert sim.as_seconds("x", text) == seconds


@pytest.mark.parametrize("wrong", ["soon", "3 weeks", -1, float("nan"), True, None])
def test_what_is_no_duration_is_refused(wrong) -> None:
    with pytest.raises(ConfigurationError, match=r"mtbf"):
        sim.Poisson(mtbf=wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: sim.FailureRate("google"),
        lambda: sim.FailedFraction(1.5),
        lambda: sim.Correlated(group=0),
        lambda: sim.Weibull(shape=0.0),
        lambda: sim.TraceReplay("nowhere"),
        lambda: sim.Scripted([(0.0, (99,), None)]).changes(CLUSTER, DAY, 0),
    ],
)
def test_impossible_settings_are_refused(wrong) -> None:
    with pytest.raises(ConfigurationError):
        wrong()


# -- by cause ---------------------------------------------------------------------------------------------------------


def test_causes_strike_as_often_as_published_and_take_what_is_below_them() -> None:
    cluster = sim.Cluster(2048, 8)
    changes = sim.FailureCauses().changes(cluster, 54 * 86400.0, 1)
    events = [change for change in changes if change.down]
    assert len(events) == pytest.approx(419, abs=62)  # 3 standard deviations
    racks = [change for change in events if len(change.down) > 1]
    assert len(racks) == pytest.approx(35, abs=18)
    for change in racks:
        assert len({node // 4 for node in change.down}) == 1


def test_a_switch_takes_its_racks_and_all_come_back_together() -> None:
    cause = {"name": "switch", "count": 50_000, "scope": "switch", "repair": "30min"}
    source = sim.FailureCauses([cause], rack=2, switch=3)
    cluster = sim.Cluster(12, 8)
    changes = source.changes(cluster, 10 * 86400.0, 2)
    first = next(change for change in changes if change.down)
    assert first.down in (tuple(range(6)), tuple(range(6, 12)))
    back = next(change for change in changes if change.up)
    assert (back.up, back.tick - first.tick) == (first.down, 1800 * 10**9)


def test_lemons_fail_more_often_but_not_the_cluster() -> None:
    cluster = sim.Cluster(500, 8)
    causes = [sim.FailureCause("anything", 40_000, repair="1min")]

    def counts(**lemons):
        found = [0] * 500
        for change in sim.FailureCauses(causes, **lemons).changes(cluster, 5 * 86400.0, 3):
            for node in change.down:
                found[node] += 1
        return sorted(found, reverse=True)

    usual, sour = counts(), counts(lemons=0.02, lemon_factor=20.0)
    assert sum(sour) == pytest.approx(sum(usual), rel=0.1)
    # 10 of 500 nodes have 10 * 20 / (490 + 200) of the failures.
    assert sum(sour[:10]) / sum(sour) == pytest.approx(200 / 690, abs=0.06)
    assert sum(usual[:10]) / sum(usual) < 0.1


def test_causes_must_be_possible() -> None:
    for changes in ({"scope": "planet"}, {"count": -1.0}, {"repair": 0.0}):
        with pytest.raises(ConfigurationError, match=next(iter(changes))):
            sim.FailureCause("any", **{"count": 1.0, **changes})
    with pytest.raises(ConfigurationError, match="lemons"):
        sim.FailureCauses(lemons=1.5)
