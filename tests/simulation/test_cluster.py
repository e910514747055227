"""Links that nodes share: copies and re-routed messages get a share of the uplink."""

import pytest
from random_outages import DURATION, small_model

from lightning_recycle import ConfigurationError
from lightning_recycle import simulation as sim

# 4 pipelines of 4 stages, one in each rack of 4 nodes.
MODEL = small_model(4, 4, network_bandwidth=2e7)
POLICIES = [
    sim.Recycle(effort=0), sim.ElasticLayers(effort=0), sim.Merge(), sim.Spares(0), sim.DropReplica(), sim.Restart(),
    sim.Bamboo(), sim.Oobleck(), sim.Varuna(),
]  # fmt: skip


def ratio(policy, outages=(), **links) -> float:
    topology = sim.Topology(rack=4, **links) if links else None
    cluster = sim.Cluster.of(MODEL, topology=topology)
    return sim.simulate(MODEL, cluster, policy, sim.Scripted(outages), DURATION).ratio


def test_an_uplink_is_shared_by_all_that_crosses_it() -> None:
    topology = sim.Topology(rack=4, oversubscription=4.0)  # as wide as one link
    assert topology.transfer({0: 3.0}, 1) == 3.0
    assert topology.transfer({0: 3.0, 1: 3.0, 5: 3.0}, 1) == 6.0
    assert topology.transfer({0: 3.0, 1: 3.0}, 8) == 3.0  # eight workers have eight links
    assert topology.crowding([[0, 1, 2, 3], [4, 5, 6, 7]], 1) == 1.0
    assert topology.crowding([[0, 1, None, 3]], 1) == 2.0
    assert topology.crowding([[0, 4, 1, 5]], 1) == 3.0


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
def test_wide_links_change_nothing(policy) -> None:
    outages = [sim.Outage(100.0, (5,), 900.0), sim.Outage(400.0, (9, 10), 1200.0)]
    assert ratio(policy, outages, oversubscription=1.0) <= ratio(policy, outages)
    if not isinstance(policy, (sim.Oobleck, sim.Varuna)):  # they choose pipelines of other depths
        assert ratio(policy, oversubscription=4.0) == ratio(policy)  # every pipeline has a rack


@pytest.mark.parametrize("policy", POLICIES[:1], ids=lambda policy: type(policy).__name__)
def test_re_routed_messages_crowd_the_uplink(policy) -> None:
    outages = [sim.Outage(100.0, (5,))]
    assert ratio(policy, outages, oversubscription=16.0) < ratio(policy, outages, oversubscription=1.0)


@pytest.mark.parametrize("policy", [sim.Merge(), sim.Recycle(effort=0), sim.Oobleck()], ids=lambda p: type(p).__name__)
def test_copies_of_states_share_the_uplink(policy) -> None:
    def copying(**links: float) -> float:
        cluster = sim.Cluster.of(MODEL, topology=sim.Topology(rack=4, **links))
        outages = [sim.Outage(100.0, (1,), 900.0), sim.Outage(100.0, (6,), 900.0)]
        found = sim.simulate(MODEL, cluster, policy, sim.Scripted(outages), DURATION)
        return sum(i.end - i.begin for i in found.intervals if i.label == "transfer")

    assert copying(oversubscription=16.0) > copying(oversubscription=1.0) > 0


@pytest.mark.parametrize("settings", [{"rack": 0}, {"oversubscription": 0.5}])
def test_impossible_values_are_refused(settings) -> None:
    with pytest.raises(ConfigurationError):
        sim.Topology(**settings)
