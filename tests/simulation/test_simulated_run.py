"""A simulated run, with a policy whose every second is known."""

from dataclasses import dataclass, field, replace

import pytest

from lightning_recycle import simulation as sim
from lightning_recycle.errors import ConfigurationError, PlanningError
from lightning_recycle.simulation.failures import LLAMA3_PER_GPU_DAY
from lightning_recycle.simulation.policy import Configuration, Downtime, Loss, Reaction

MODEL = sim.get_model("gpt3_medium")
CLUSTER = sim.Cluster.of(MODEL)
STEADY = Configuration("steady", 10.0, 100, 32, 240.0)  # a quarter of the time is bubble


@dataclass(frozen=True)
class Script:
    """Starts with ``first``, answers what it is told."""

    answers: dict = field(default_factory=dict, hash=False)  # (time, what) -> Reaction
    first: Configuration = STEADY
    ignores_failures = False

    def begin(self, context, live):
        return Reaction(self.first)

    def react(self, context, current, trigger):
        what = "down" if trigger.down else "up" if trigger.up else "woken"
        return self.answers.get((trigger.time, what))


def run(answers, outages, duration=100.0, first=STEADY):
    return sim.simulate(MODEL, CLUSTER, Script(answers, first), sim.Scripted(outages), duration)


def parts(result):
    return {cause.value: result.accounting.seconds(cause) for cause in sim.Cause if result.accounting.seconds(cause)}


def timeline(result):
    return [(interval.begin, interval.end, interval.state.value, interval.label) for interval in result.intervals]


LESS = replace(STEADY, label="less", gpus=31, useful_gpu_seconds=232.5)


def test_a_failure_loses_the_step_in_progress_and_pauses():
    answer = Reaction(LESS, (Downtime("detect", 3.0), Downtime("regroup", 4.0)), Loss.STEP)
    result = run({(36.0, "down"): answer}, [sim.Outage(36.0, (5,))])
    assert timeline(result) == [
        (0, 30, "training", "steady"),
        (30, 36, "lost", "steady"),
        (36, 39, "paused", "detect"),
        (39, 43, "paused", "regroup"),
        (43, 100, "training", "less"),
    ]
    assert result.samples == pytest.approx(300 + 570)
    useful = 30 * 24 + 57 * 23.25
    assert parts(result) == {
        "useful": useful,
        "bubble": 30 * 32 + 57 * 31 - useful,
        "redone": 6 * 32,
        "reconfiguring": 7 * 31,
        "failed": 64,
    }


def test_a_policy_that_claims_impossible_work_is_found_out():
    with pytest.raises(PlanningError, match="impossible"):
        run({}, [], first=replace(STEADY, useful_gpu_seconds=321.0))
    with pytest.raises(PlanningError, match="impossible"):
        run({}, [sim.Outage(36.0, (5,))])  # it goes on with 32 GPUs of 31


def test_a_cluster_must_hold_the_grid():
    with pytest.raises(ConfigurationError, match="32 GPUs, the cluster has 31"):
        sim.simulate(MODEL, sim.Cluster(31), sim.FaultFree(), sim.Poisson(), "1h")
    with pytest.raises(ConfigurationError, match="not a whole number of nodes"):
        sim.Cluster.of(MODEL, gpus_per_node=5)


def test_weeks_of_thousands_of_gpus_take_a_moment():
    import time

    model = sim.get_model("gpt3_medium", pipelines=512, global_batch=512 * 8, throughput=None)
    started = time.process_time()
    result = sim.simulate(
        model, sim.Cluster.of(model, gpus_per_node=8), sim.DropReplica(), sim.FailureRate(16 * LLAMA3_PER_GPU_DAY),
        "54d", 1,
    )  # fmt: skip
    assert result.failures == pytest.approx(419, abs=62)
    assert time.process_time() - started < 20


def test_goodput_ettr_and_mfu_follow_from_the_accounting():
    usual = sim.simulate(MODEL, CLUSTER, sim.FaultFree(), sim.Scripted(), "1h")
    assert usual.ettr == 1.0
    assert usual.goodput == pytest.approx(usual.fraction_of_ideal)
    assert usual.throughput == pytest.approx(usual.goodput * 32 * MODEL.global_batch / MODEL.useful_gpu_seconds)
    assert usual.mfu == pytest.approx(MODEL.efficiency * usual.goodput)

    # Half of the nodes for half of the time.
    outage = sim.Outage(1800.0, tuple(range(16)))
    broken = sim.simulate(MODEL, CLUSTER, sim.Merge(checkpoint="memory", regroup=55.0), sim.Scripted([outage]), "1h")
    paused = sum(i.end - i.begin for i in broken.intervals if i.state is not sim.State.TRAINING)
    assert 60 < paused < 75
    assert broken.ettr == pytest.approx(1 - paused / 3600)
    assert broken.fraction_of_ideal > broken.goodput
