"""A model of known durations, and the steps that a policy makes of them."""

import pytest

from lightning_recycle import simulation as sim
from lightning_recycle.errors import ConfigurationError
from lightning_recycle.planning import Costs

UNEVEN = Costs((1.0, 2.0), (1.0, 2.5), (1.0, 1.5), (0.0, 0.0), (0.0, 0.0))


def measured(costs=UNEVEN, **changes):
    settings = {"pipelines": 3, "stages": 2, "global_batch": 18, **changes}
    return sim.MeasuredModel("measured", sim.Transformer(8, 8, 1, 8, 8), stage_costs=costs, **settings)


def test_costs_are_those_that_were_given() -> None:
    model = measured()
    assert model.costs() == model.costs(model.even(), pipelines=2) == UNEVEN
    assert model.fault_free_seconds() == 1.0 + 6 * 6.0 + 2.0  # 1F1B: the slower stage is busy from the first F on
    assert model.useful_gpu_seconds == 18 * 9.0
    assert model.in_flight_limit() == (18, 18)  # the layers are tiny


def test_a_micro_batch_of_several_samples_costs_what_was_measured() -> None:
    model = measured(global_batch=36, microbatch=2)
    assert model.grid.microbatches == 6
    assert model.useful_gpu_seconds == 18 * 9.0
    assert measured(recompute=True).useful_gpu_seconds == 18 * 6.0


def test_measured_stages_cannot_be_cut_otherwise() -> None:
    model = measured(Costs.uniform(2))
    assert sim.simulate(model, sim.Cluster.of(model), sim.Restart(), sim.Scripted(), 210.0).samples == pytest.approx(
        180
    )
    with pytest.raises(ConfigurationError, match="measured stages say nothing"):
        sim.simulate(
            model, sim.Cluster.of(model), sim.ElasticLayers(effort=0), sim.Scripted([sim.Outage(50.0, (1,))]), 200.0
        )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stages": 3}, "3 stages, the costs have 2"),
        ({"costs": Costs.uniform(2, 0.0, 0.0, 0.0)}, "no time at all"),
        ({"throughput": 0.1}, "no calibration"),
        ({"global_batch": 17}, "need a multiple of 3"),
    ],
)
def test_impossible_settings_are_refused(changes, message) -> None:
    with pytest.raises(ConfigurationError, match=message):
        measured(**changes)


@pytest.mark.parametrize(("staggered", "step", "degraded", "fill"), [(False, 19, 28, 0), (True, 18, 27, 1)])
def test_the_first_step_after_a_stop_begins_with_empty_pipelines(staggered, step, degraded, fill) -> None:
    model = measured(Costs.uniform(2), network_latency=0.0, network_bandwidth=1e18)
    own = {"detection": 1.0, "regroup": 2.0, "rejoin": 4.0, "agreement": 0.0, "lookup": 0.0, "connect": 0.0}
    policy = sim.Recycle(staggered=staggered, normalization=False, **own)
    result = sim.simulate(model, sim.Cluster.of(model), policy, sim.Scripted([sim.Outage(50.0, (5,), 100.0)]), 300.0)
    begin = 53.0 + fill
    assert begin + 2 * degraded > 100  # when a step ends, the replacement has come
    again = begin + 2 * degraded + 4 + fill
    paused = [(i.begin, i.end, i.label) for i in result.intervals if i.state is sim.State.PAUSED]
    expected = [(50, 51, "detect"), (51, 53, "regroup"), (53, begin, "fill")]
    expected += [(begin + 2 * degraded, again - fill, "rejoin"), (again - fill, again, "fill")]
    assert paused == [pause for pause in expected if pause[0] < pause[1]]
    assert result.samples == pytest.approx(18 * (2 + 2 + (300 - again) / step))
    assert result.accounting.total == 6 * 300 * 10**9
    assert result.accounting.redone == (50 - 2 * step) * 6 * 10**9


def test_a_rejoin_costs_what_a_failure_does_unless_said_otherwise() -> None:
    model = measured(Costs.uniform(2))
    result = sim.simulate(
        model, sim.Cluster.of(model), sim.Recycle(regroup=2.0), sim.Scripted([sim.Outage(50.0, (5,), 100.0)]), 300.0
    )
    failure, rejoin = [interval for interval in result.intervals if interval.label == "regroup"]
    assert failure.end - failure.begin == pytest.approx(2.0 + 5 * 0.0025)
    assert rejoin.end - rejoin.begin == pytest.approx(2.0 + 6 * 0.0025)
