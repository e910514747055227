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


def test_without_events_steps_follow_each_other():
    result = run({}, [], duration=95.0)
    assert result.samples == pytest.approx(950)
    assert parts(result) == {"useful": 95 * 24, "bubble": 95 * 8}
    assert timeline(result) == [(0, 95, "training", "steady")]


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


def test_a_checkpoint_loss_goes_back_over_pauses_and_configurations():
    # Checkpoints at the ends of steps, every 20 s, 1 s each: complete at 21 and 42.
    first = replace(STEADY, checkpoint_every=20.0, checkpoint_seconds=1.0)
    again = replace(LESS, checkpoint_every=20.0, checkpoint_seconds=1.0)
    answers = {
        (55.0, "down"): Reaction(again, (Downtime("regroup", 2.0),), Loss.STEP),
        (61.0, "down"): Reaction(
            replace(again, gpus=30, useful_gpu_seconds=225.0), (Downtime("load", 9.0),), Loss.CHECKPOINT
        ),
    }
    result = run(answers, [sim.Outage(55.0, (0,)), sim.Outage(61.0, (1,))], first=first)
    assert timeline(result) == [
        (0, 20, "training", "steady"),
        (20, 21, "paused", "checkpoint"),
        (21, 41, "training", "steady"),
        (41, 42, "paused", "checkpoint"),
        (42, 52, "lost", "steady"),
        (52, 55, "lost", "steady"),
        (55, 57, "paused", "regroup"),
        (57, 61, "lost", "less"),
        (61, 70, "paused", "load"),
        (70, 90, "training", "less"),
        (90, 91, "paused", "checkpoint"),
        (91, 100, "training", "less"),
    ]


def test_a_repair_waits_for_the_end_of_the_step():
    answers = {(0.0, "down"): None, (36.0, "up"): Reaction(STEADY, (Downtime("join", 2.0),), at_boundary=True)}
    result = run(answers, [sim.Outage(0.0, (5,), 36.0)], first=LESS)
    assert timeline(result) == [
        (0, 36, "training", "less"),
        (36, 40, "training", "less"),
        (40, 42, "paused", "join"),
        (42, 100, "training", "steady"),
    ]
    assert parts(result)["failed"] == 36
    assert parts(result)["idle"] == 4
    assert "redone" not in parts(result)


@pytest.mark.parametrize(("lead", "boundary"), [(0.0, 40), (3.9, 40), (4.1, 50), (13.9, 50), (14.1, 60)])
def test_a_repair_waits_for_the_end_of_the_newest_step_that_somebody_has_begun(lead, boundary):
    overlapping = replace(LESS, lead_seconds=lead)
    answers = {(0.0, "down"): None, (36.0, "up"): Reaction(STEADY, (Downtime("join", 2.0),), at_boundary=True)}
    result = run(answers, [sim.Outage(0.0, (5,), 36.0)], first=overlapping)
    assert timeline(result)[2] == (boundary, boundary + 2, "paused", "join")
    assert "redone" not in parts(result)


def test_a_step_goes_on_at_another_speed_where_a_policy_loses_nothing():
    slow = replace(LESS, step_seconds=20.0)
    result = run({(35.0, "down"): Reaction(slow)}, [sim.Outage(35.0, (5,))], duration=65.0)
    # Half of the fourth step is done at 35; the other half takes 10 s; then one step until 65.
    assert result.samples == pytest.approx(500)
    lost = run({(35.0, "down"): Reaction(slow), (44.0, "down"): Reaction(replace(slow, gpus=30), lost=Loss.STEP)},
               [sim.Outage(35.0, (5,)), sim.Outage(44.0, (6,))], duration=50.0)  # fmt: skip
    assert next(interval.begin for interval in lost.intervals if interval.state is sim.State.LOST) == 30


def test_an_alarm_rings_once_and_a_new_reaction_clears_it():
    fast = replace(LESS, label="fast", step_seconds=8.0)
    answers = {
        (10.0, "down"): Reaction(LESS, lost=Loss.STEP, wake=25.0),
        (35.0, "woken"): Reaction(fast, at_boundary=True),
    }
    result = run(answers, [sim.Outage(10.0, (5,))])
    assert timeline(result)[-1] == (40, 100, "training", "fast")
    assert [event.kind for event in result.events] == ["failure", "alarm"]
    answers[20.0, "down"] = Reaction(replace(LESS, gpus=30, useful_gpu_seconds=225.0), lost=Loss.STEP)
    result = run(answers, [sim.Outage(10.0, (5,)), sim.Outage(20.0, (6,))])
    assert [event.kind for event in result.events] == ["failure", "failure"]


def test_what_waits_for_the_end_of_a_step_does_not_outlive_the_node_it_rests_on():
    asked = []

    class Recorder(Script):
        def react(self, context, current, trigger):
            asked.append((trigger.time, trigger.down, trigger.up))
            return super().react(context, current, trigger)

    policy = Recorder({(36.0, "up"): Reaction(STEADY, at_boundary=True)}, LESS)
    result = sim.simulate(
        MODEL, CLUSTER, policy, sim.Scripted([sim.Outage(0.0, (5,), 36.0), sim.Outage(38.0, (5,))]), 100.0
    )
    assert asked == [(36.0, (), (5,)), (38.0, (5,), ())]
    assert {interval.label for interval in result.intervals} == {"less"}


def test_where_nothing_runs_all_live_gpus_are_idle():
    from lightning_recycle.simulation.policy import stopped

    result = run({(36.0, "down"): Reaction(stopped("too few"), lost=Loss.STEP)}, [sim.Outage(36.0, (5,))])
    assert timeline(result)[-1] == (36, 100, "stopped", "too few")
    assert parts(result)["idle"] == 64 * 31


def test_a_policy_that_claims_impossible_work_is_found_out():
    with pytest.raises(PlanningError, match="impossible"):
        run({}, [], first=replace(STEADY, useful_gpu_seconds=321.0))
    with pytest.raises(PlanningError, match="impossible"):
        run({}, [sim.Outage(36.0, (5,))])  # it goes on with 32 GPUs of 31


def test_nodes_that_are_down_from_the_start_interrupt_nothing():
    result = sim.simulate(
        MODEL, CLUSTER, sim.DropReplica(checkpoint="memory"), sim.Scripted([sim.Outage(0.0, (5,))]), "1h"
    )
    assert result.ratio == pytest.approx(15 / 16)
    assert result.accounting.reconfiguring == 0


def test_losses_explain_the_whole_difference_to_fault_free():
    result = sim.simulate(MODEL, CLUSTER, sim.DropReplica(), sim.Poisson("30min"), "6h", 1)
    assert sum(result.losses().values()) == pytest.approx(27.58 - result.throughput)
    assert sim.simulate(MODEL, CLUSTER, sim.FaultFree(), sim.Poisson("30min"), "6h").throughput == pytest.approx(27.58)


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
