"""The policy that chooses: by the planner of a run, and never worse than the best single one."""

import pytest

from lightning_recycle import simulation
from lightning_recycle.planning import Problem, Technique
from lightning_recycle.simulation.policy import Context, layer_costs

LARGE, MIDDLE = simulation.get_model("gpt3_6_7b"), simulation.get_model("gpt3_3_35b")


def run(policy, outages, model=MIDDLE, duration="1h"):
    return simulation.simulate(model, simulation.Cluster.of(model), policy, simulation.Scripted(outages), duration)


def lost(policy, count, model=LARGE):
    return simulation.simulate(model, simulation.Cluster.of(model), policy, simulation.FailedFraction(count / 32), "1h")


def choices(result):
    return [i.choice for i in result.intervals if i.state is simulation.State.TRAINING]


@pytest.mark.parametrize("model", [MIDDLE, LARGE], ids=lambda model: model.name)
def test_costs_of_layers_are_those_of_the_model(model):
    layers = layer_costs(model)
    even = model.even()
    cuts = tuple(sum(even[:stage]) for stage in range(model.stages + 1))
    costs, expected = layers.costs(cuts), model.costs()
    for name in ("forward", "backward_input", "backward_weight", "reduce", "optimizer", "communication"):
        assert getattr(costs, name) == pytest.approx(getattr(expected, name))
    problem = Problem(model.grid, costs, technique=Technique(), memory=layers.memory(cuts))
    assert problem.counted().in_flight_limit == model.in_flight_limit()


@pytest.mark.parametrize("count", [1, 4, 9])
def test_auto_is_not_below_any_single_policy(count):
    settings = {"schedule": "planned", "effort": 0, "checkpoint": "memory"}
    auto = lost(simulation.Auto(**settings), count).ratio
    for kind in (simulation.Recycle, simulation.Merge, simulation.Oobleck):
        assert auto > 0.98 * lost(kind(**settings), count).ratio, kind


def test_layers_move_where_they_may():
    settings = {"effort": 0, "checkpoint": "memory"}
    auto, plain = lost(simulation.Auto(**settings), 9), lost(simulation.Recycle(**settings), 9)
    assert set(choices(auto)) <= {"layers", "both"}
    assert auto.ratio > 1.2 * plain.ratio


def test_what_was_chosen_is_told_for_every_interval():
    result = run(simulation.Auto(effort=0), [simulation.Outage(600.0, (3,), 1500.0)])
    assert choices(result)[0] == choices(result)[-1] == "reroute"
    (middle,) = {
        i.choice for i in result.intervals if i.begin > 700 and i.end < 1500 and i.state is simulation.State.TRAINING
    }
    assert middle
    assert result.intervals[-1].gpus == 32
    assert all(i.choice == "" for i in run(simulation.Merge(), []).intervals)


def test_with_all_workers_back_the_layers_are_as_at_the_start():
    outages = [simulation.Outage(600.0, (3,), 1500.0), simulation.Outage(600.0, (9,), 1500.0)]
    result = run(simulation.Auto(effort=0), outages)
    speeds = [i.throughput for i in result.intervals if i.state is simulation.State.TRAINING]
    assert min(speeds) < 0.98 * speeds[0]
    assert speeds[-1] == pytest.approx(speeds[0], rel=1e-3)


def test_copies_are_paid_for_in_the_recovery():
    result = run(simulation.Auto(effort=0, checkpoint="memory"), [simulation.Outage(600.0, (3,))], LARGE)
    pauses = {i.label: i.end - i.begin for i in result.intervals if i.state is simulation.State.PAUSED}
    assert 0 < pauses["transfer"] < 20
    assert pauses["detect"] == pytest.approx(5.0)


def test_a_return_that_does_not_pay_waits():
    """Workers that come and go every few seconds are not worth a stop each time."""
    comings = [simulation.Outage(600.0 + 20 * n, (3,), 610.0 + 20 * n) for n in range(140)]
    busy = run(simulation.Auto(effort=0, checkpoint="memory"), comings)
    always = run(simulation.Recycle(effort=0, checkpoint="memory"), comings)
    assert busy.throughput > 1.02 * always.throughput


def test_a_lost_layer_restarts_from_the_checkpoint():
    holders = [d * LARGE.stages + 2 for d in range(LARGE.pipelines)]
    result = run(simulation.Auto(effort=0), [simulation.Outage(900.0, tuple(holders))], LARGE)
    assert "restart" in {i.label for i in result.intervals if i.state is simulation.State.PAUSED}
    assert result.intervals[-1].throughput > 0


def test_stages_that_were_measured_as_a_whole_keep_their_layers():
    model = simulation.MeasuredModel(
        "measured", MIDDLE.transformer, MIDDLE.pipelines, MIDDLE.stages, MIDDLE.global_batch, stage_costs=MIDDLE.costs()
    )
    result = run(simulation.Auto(effort=0), [simulation.Outage(600.0, (3,))], model)
    assert set(choices(result)) <= {"reroute", "workers"}
    assert Context(model, simulation.Cluster.of(model)).model is model


def test_workers_that_fail_and_come_back_together_never_hold_all_of_a_stage():
    again = (9, 17, 25, 26)  # three of the four of a stage
    outages = [simulation.Outage(600.0, again, 1500.0), simulation.Outage(2000.0, again, 2300.0)]
    result = run(simulation.Auto(effort=0), outages, LARGE)
    assert "both" in choices(result)  # so places were vacant where few had been
    assert not any(interval.label == "restart" for interval in result.intervals)
