"""Failure sources: rates, seeds, and the one rule that a dead node does not die."""

import pytest

from lightning_recycle import simulation
from lightning_recycle.errors import ConfigurationError
from lightning_recycle.simulation.failures import LLAMA3_PER_GPU_DAY, RSC1_PER_GPU_DAY
from lightning_recycle.traces import load_trace

CLUSTER = simulation.Cluster(32)
DAY = 86400.0
SOURCES = [
    simulation.Poisson("1h"),
    simulation.Poisson("10min", repair="2h"),
    simulation.FailureRate(0.25, repair="1h"),
    simulation.TraceReplay("aws-p3"),
    simulation.TraceReplay("gcp-a100", start="2h"),
    simulation.FailedFraction(0.25),
    simulation.Regular("1h"),
    simulation.Scripted(
        [
            simulation.Outage(10.0, (1, 2), 50.0),
            simulation.Outage(20.0, (2, 3), 30.0),
            simulation.Outage(40.0, (2,), 60.0),
        ]
    ),
]


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: type(source).__name__)
def test_changes_are_in_order_and_alternate_for_every_node(source):
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


@pytest.mark.parametrize("source", SOURCES[:3], ids=lambda source: type(source).__name__)
def test_a_seed_decides(source):
    assert source.changes(CLUSTER, DAY, 3) == source.changes(CLUSTER, DAY, 3)
    assert source.changes(CLUSTER, DAY, 3) != source.changes(CLUSTER, DAY, 4)


def failures(source, cluster, duration, seed=0) -> int:
    return sum(len(change.down) for change in source.changes(cluster, duration, seed))


def test_poisson_has_its_mean_time_between_failures():
    count = failures(simulation.Poisson("1h", repair=1.0), simulation.Cluster(1000), 2000 * 3600.0)
    assert count == pytest.approx(2000, abs=3 * 2000**0.5)


def test_published_rates_are_per_gpu_and_day():
    hours = [24 / rate for rate in (LLAMA3_PER_GPU_DAY, RSC1_PER_GPU_DAY)]
    assert hours == pytest.approx([50_700, 29_500], rel=2e-3)
    # Llama 3's own numbers: 419 on 16,384 GPUs in 54 days; 8 GPUs a node, instant repair.
    count = failures(simulation.FailureRate("llama3", repair=1.0), simulation.Cluster(2048, 8), 54 * DAY)
    assert count == pytest.approx(419, abs=3 * 419**0.5)


def test_a_node_in_two_outages_is_back_after_the_last():
    changes = SOURCES[-1].changes(CLUSTER, DAY, 0)
    assert [(change.tick // 10**9, change.down, change.up) for change in changes] == [
        (10, (1, 2), ()),
        (20, (3,), ()),
        (30, (), (3,)),
        (50, (), (1,)),
        (60, (), (2,)),
    ]


def test_a_fraction_above_nothing_takes_at_least_one_node():
    model = simulation.get_model("gpt3_medium")
    found = [
        simulation.simulate(
            model, simulation.Cluster.of(model), simulation.Merge(), simulation.FailedFraction(part), "1h"
        ).failures
        for part in (0.0, 0.01, 0.03, 0.05, 0.1)
    ]
    assert found == [0, 1, 1, 2, 3]


@pytest.mark.parametrize(("part", "count"), [(0.01, 10), (0.05, 51), (0.1, 102)])
def test_failed_fraction_is_exact_and_final(part, count):
    cluster = simulation.Cluster(1024)
    (change,) = simulation.FailedFraction(part).changes(cluster, DAY, 0)
    assert (change.tick, len(change.down), change.up) == (0, count, ())


def test_regular_failures_stop_at_half_as_in_oobleck():
    changes = simulation.Regular("30min").changes(simulation.Cluster(30), 5 * DAY, 0)
    assert [change.tick // 10**9 for change in changes] == [1800 * n for n in range(1, 16)]


@pytest.mark.parametrize("name", ["aws-p3", "gcp-v100"])
@pytest.mark.parametrize("factor", [1, 2])
def test_replay_has_the_availability_of_the_trace(name, factor):
    trace = load_trace(name)
    cluster = simulation.Cluster(trace.peak * factor)
    live = cluster.nodes
    by_time = {}
    for change in simulation.TraceReplay(name).changes(cluster, trace.duration + 1, 0):
        live += len(change.up) - len(change.down)
        by_time[change.tick / 1e9] = live
    assert by_time == pytest.approx({t: n * factor for t, n in trace.availability if t in by_time})
    assert set(dict(trace.availability)).difference(by_time) <= {0.0}


@pytest.mark.parametrize(
    ("text", "seconds"), [("30min", 1800), ("6h", 21600), ("1.5d", 129600), (90, 90), ("250ms", 0.25)]
)
def test_durations_are_written_as_people_do(text, seconds):
    assert simulation.as_seconds("x", text) == seconds


@pytest.mark.parametrize("wrong", ["soon", "3 weeks", -1, float("nan"), True, None])
def test_what_is_no_duration_is_refused(wrong):
    with pytest.raises(ConfigurationError, match=r"mtbf"):
        simulation.Poisson(mtbf=wrong)


@pytest.mark.parametrize("wrong", [
    lambda: simulation.FailureRate("google"),
    lambda: simulation.FailedFraction(1.5),
    lambda: simulation.TraceReplay("nowhere"),
    lambda: simulation.Scripted([(0.0, (99,), None)]).changes(CLUSTER, DAY, 0),
])  # fmt: skip
def test_impossible_settings_are_refused(wrong):
    with pytest.raises(ConfigurationError):
        wrong()
