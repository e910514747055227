"""All policies have the same schedule, checkpoints and recovery, unless they are told otherwise."""

from dataclasses import fields

import pytest

from lightning_recycle import simulation as sim
from lightning_recycle.errors import ConfigurationError
from lightning_recycle.simulation.policy import MEASURED_AGREEMENT, agreement_seconds, best_interval, checkpoint_costs

MEDIUM, LARGE = sim.get_model("gpt3_medium"), sim.get_model("gpt3_6_7b")
KINDS = (
    sim.Auto, sim.Recycle, sim.Merge, sim.Spares, sim.DropReplica, sim.Restart, sim.Oobleck,
    sim.Varuna, sim.Bamboo,
)  # fmt: skip
SHARED = [item.name for item in fields(sim.Policy)]


def run(policy, outages, model=LARGE, duration="1h", extra=0):
    return sim.simulate(model, sim.Cluster.of(model, extra_nodes=extra), policy, sim.Scripted(outages), duration)


def paused(result):
    return {i.label: i.end - i.begin for i in result.intervals if i.state is sim.State.PAUSED}


# -- the schedule -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["1f1b", "planned"])
def test_without_failures_policies_with_the_same_schedule_are_equally_fast(schedule) -> None:
    settings = {"schedule": schedule, "effort": 0, "checkpoint": "memory"}
    found = [
        run(kind(**settings), [], extra=1 if kind is sim.Spares else 0).throughput
        for kind in KINDS
        if kind not in (sim.Bamboo, sim.Varuna)  # these compute twice, by design
    ]
    assert found == pytest.approx([found[0]] * len(found), rel=1e-6)
    if schedule == "1f1b":
        assert found[0] == pytest.approx(5.33)
    else:
        assert found[0] > 1.1 * 5.33
        merge = run(sim.Merge(schedule="planned", checkpoint="memory"), [])
        assert merge.throughput == pytest.approx(run(sim.FaultFree("planned"), []).throughput)


# -- checkpoints ------------------------------------------------------------------------------------------------------


def costs(kind, model=LARGE):
    return checkpoint_costs(kind, model, 1e9 / 32)


def test_checkpoints_cost_what_their_kind_says() -> None:
    state = LARGE.transformer.state_bytes()
    assert costs("synchronous") == pytest.approx((state / 1e9, 0.0, state / 1e9))
    assert costs("background") == pytest.approx((state / 32 / 20e9, state / 1e9, state / 1e9))
    assert costs("sharded") == pytest.approx((state / 32 / 1e9, 0.0, state / 8 / 1e9))
    assert costs("memory") == pytest.approx((0.0, state / 32 / 12.5e9, state / 8 / 12.5e9), abs=1e-4)


def test_the_interval_follows_young_and_daly() -> None:
    assert best_interval("young", costs("synchronous"), 7200.0) == pytest.approx((2 * 106.6 * 7200) ** 0.5, rel=0.01)
    assert best_interval("daly", costs("synchronous"), 7200.0) == pytest.approx(1239 - 106.6, rel=0.01)
    assert best_interval("daly", costs("synchronous"), 40.0) == 40.0
    # Not before the last one is written.
    assert best_interval("daly", costs("background"), 600.0) == costs("background").writing
    assert best_interval("young", costs("memory"), None) == 1800.0


# -- recoveries -------------------------------------------------------------------------------------------------------


def test_agreement_takes_what_was_measured_and_grows_with_the_cluster() -> None:
    for workers, seconds in MEASURED_AGREEMENT:
        assert agreement_seconds(workers) == pytest.approx(seconds)
    found = [agreement_seconds(workers) for workers in (1, 32, 64, 300, 1536, 4096, 16384)]
    assert found == sorted(found)
    assert agreement_seconds(0) == 0.0


@pytest.mark.parametrize("kind", [sim.Recycle, sim.Merge, sim.DropReplica, sim.Oobleck])
def test_policies_recover_in_the_same_time_but_for_the_states_they_copy(kind) -> None:
    found = paused(run(kind(schedule="1f1b", detection=3.0, regroup=4.0), [sim.Outage(600.0, (3,))]))
    found.pop("checkpoint")
    found.pop("transfer", 0.0)
    assert found == pytest.approx({"detect": 3.0, "agree": 0.068, "regroup": 4.0 + 0.0025 * 31}, abs=0.02)


def test_all_policies_share_settings_and_defaults() -> None:
    usual = {name: getattr(sim.Merge(), name) for name in SHARED}
    for kind in KINDS:
        own = {name: getattr(kind(), name) for name in SHARED}
        different = {name for name in SHARED if own[name] != usual[name]}
        allowed = {**{key: {"schedule"} for key in (sim.Auto, sim.Recycle)}, sim.Varuna: {"restart"}}
        assert different == allowed.get(kind, set()), kind


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"schedule": "gpipe"}, "schedule='gpipe'"),
        ({"checkpoint": "tape"}, "checkpoint='tape'"),
        ({"checkpoint_every": "sometimes"}, "checkpoint_every"),
        ({"checkpoint_every": 0}, "checkpoint_every"),
        ({"agreement": -1.0}, "agreement"),
        ({"storage": 0.0}, "storage"),
        ({"effort": -1}, "effort"),
    ],
)
def test_impossible_settings_are_refused(settings, message) -> None:
    for kind in KINDS:
        with pytest.raises(ConfigurationError, match=message):
            kind(**settings)
