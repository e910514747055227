"""A naive simulator written from the documentation comes to the same results, whatever fails."""

import functools

import pytest
from hypothesis import strategies as st
from naive_simulator import AGREEMENT, NAIVE
from random_outages import DURATION, GRIDS, outages, small_model
from support.drawn_examples import check_examples, examples

from lightning_recycle import simulation

COMMON = {"effort": 0, "agreement": AGREEMENT, "restart": 60.0, "detection": 2.0, "regroup": 3.0}
SLOW = {"storage": 2e6, "checkpoint_every": 100.0}  # writing takes longer than the interval
SYNC = {"checkpoint": "synchronous", "checkpoint_every": 150.0, "storage": 5e7}
POLICIES = [
    simulation.Recycle(**COMMON),
    simulation.Recycle(**COMMON, normalization=False, fault_free="1f1b"),
    simulation.Recycle(**COMMON, schedule="1f1b", checkpoint="memory", checkpoint_every=50.0),
    simulation.Merge(**COMMON),
    simulation.Merge(**COMMON, **SYNC, schedule="planned"),
    simulation.Spares(2, **COMMON, schedule="planned"),
    simulation.Restart(**COMMON, **SLOW),
    simulation.Restart(**COMMON, **SYNC, schedule="planned"),
    simulation.Restart(**COMMON, checkpoint="sharded", checkpoint_every=70.0),
    simulation.DropReplica(**COMMON),
    simulation.DropReplica(**COMMON, schedule="planned", checkpoint="sharded", checkpoint_every=70.0),
    simulation.Oobleck(**COMMON),
    simulation.Oobleck(**COMMON, **SYNC, schedule="planned", memory_factor=1000.0),  # pipelines of at least 3 workers
    simulation.Elastic(**COMMON),
    simulation.Elastic(**COMMON, schedule="1f1b", max_pipelines=3),
    simulation.Bamboo(**COMMON, **SLOW),
    simulation.Bamboo(**COMMON, **SYNC, schedule="planned", threshold=0.5, node_start=20.0),
    simulation.Varuna(**COMMON, **SLOW),
    simulation.Varuna(**COMMON, **SYNC, schedule="planned"),
    simulation.Recycle(**COMMON, schedule="1f1b", adaptive=False),
]


NAMED = pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: f"{type(policy).__name__}-{policy.schedule}")


@NAMED
@examples(8, 100)
def test_both_simulators_agree(policy, examples):
    check_examples(functools.partial(check_outages, policy), examples)


def check_outages(policy, data) -> None:
    pipelines, stages = data.draw(st.sampled_from(GRIDS))
    chosen = small_model(pipelines, stages, network_bandwidth=1e8)
    extra = getattr(policy, "spares", 0) or data.draw(st.sampled_from([0, 3]))
    cluster = simulation.Cluster.of(chosen, extra_nodes=extra)
    compare(policy, chosen, cluster, simulation.Scripted(data.draw(outages(cluster.nodes))))


def compare(policy, chosen: simulation.TrainingModel, cluster: simulation.Cluster, source: simulation.Scripted) -> None:
    result = simulation.simulate(chosen, cluster, policy, source, DURATION)
    play = NAIVE[type(policy).__name__]
    naive = play(chosen, policy, list(source.outages), DURATION, cluster.nodes).play()

    def seconds(state):
        return sum(i.end - i.begin for i in result.intervals if i.state is state)

    assert seconds(simulation.State.PAUSED) == pytest.approx(naive.paused, abs=1e-3)
    assert seconds(simulation.State.STOPPED) == pytest.approx(naive.stopped, abs=1e-3)
    assert result.samples == pytest.approx(naive.samples, rel=1e-6, abs=1e-3)


@pytest.mark.parametrize("policy", POLICIES[::2], ids=lambda policy: f"{type(policy).__name__}-{policy.schedule}")
def test_both_agree_on_a_day_of_the_papers_model(policy):
    chosen = simulation.get_model("gpt3_medium" if isinstance(policy, simulation.Bamboo) else "gpt3_3_35b")
    cluster = simulation.Cluster.of(chosen, extra_nodes=getattr(policy, "spares", 0))
    source = simulation.Poisson("40min", repair="3h")
    changes = source.changes(cluster, 86400.0, 5)
    down: dict[int, float] = {}
    broken = []
    for change in changes:
        down |= dict.fromkeys(change.down, change.tick / 1e9)
        broken += [simulation.Outage(down.pop(node), (node,), change.tick / 1e9) for node in change.up]
    broken += [simulation.Outage(begin, (node,)) for node, begin in down.items()]
    result = simulation.simulate(chosen, cluster, policy, source, "1d", 5)
    assert result.samples > 0
    naive = NAIVE[type(policy).__name__](chosen, policy, broken, 86400.0, cluster.nodes).play()
    assert result.samples == pytest.approx(naive.samples, rel=1e-6)
