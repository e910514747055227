"""Cost and memory models, their calibration, measured stages, and blocks in halves."""

from dataclasses import replace

import pytest

from lightning_recycle import simulation
from lightning_recycle.errors import ConfigurationError
from lightning_recycle.planning import Costs, Problem, Technique, one_f_one_b
from lightning_recycle.simulation import Gpu, Transformer, available_models, get_model


@pytest.mark.parametrize(("name", "billions", "gpus", "shape"), [
    ("gpt3_medium", 0.355, 32, (16, 2)),
    ("gpt3_3_35b", 3.35, 32, (8, 4)),
    ("gpt3_6_7b", 6.7, 32, (4, 8)),
    ("megatron_18_4b", 18.4, 256, (16, 16)),
    ("megatron_39_1b", 39.1, 512, (16, 32)),
    ("megatron_76_1b", 76.1, 1024, (16, 64)),
    ("megatron_145_6b", 145.6, 1536, (24, 64)),
])  # fmt: skip
def test_models_have_the_papers_sizes(name, billions, gpus, shape):
    model = get_model(name)
    assert model.transformer.parameters / 1e9 == pytest.approx(billions, rel=0.01)
    assert (model.gpus, (model.pipelines, model.stages)) == (gpus, shape)


@pytest.mark.parametrize(("name", "goal"), [("gpt3_medium", 27.58), ("gpt3_3_35b", 14.87), ("gpt3_6_7b", 5.33)])
def test_one_number_gives_the_measured_throughput(name, goal):
    model = get_model(name)
    step = one_f_one_b(Problem(model.grid, model.costs(), technique=Technique(False, False))).makespan
    assert model.global_batch / step == pytest.approx(goal, rel=1e-6)
    assert 0 < model.efficiency < 1


@pytest.mark.parametrize("name", available_models())
def test_operations_are_those_of_megatrons_formula(name):
    shape = get_model(name).transformer
    s, layers, h, v = shape.sequence, shape.layers, shape.width, shape.vocabulary
    expected = 96 * s * layers * h**2 * (1 + s / (6 * h) + v / (16 * layers * h))
    # The formula does not run the output layer again, which is 2 s h V of operations.
    assert sum(shape.flops(recompute=True)) - 2 * s * h * v == pytest.approx(expected, rel=1e-12)


def test_backward_is_twice_the_forward_and_linear_layers_split_it_evenly():
    forward, backward, weight = Transformer(24, 1024, 16).flops()
    assert backward + weight == pytest.approx(2 * forward)
    assert weight < forward < backward  # attention products have no weights


def test_activations_follow_korthikanti_and_recomputation_keeps_inputs_only():
    shape = Transformer(32, 4096, 32)
    assert shape.activation_bytes() == 32 * 2048 * 4096 * (34 + 5 * 32 * 2048 / 4096)
    assert shape.activation_bytes(recompute=True) == 32 * 2048 * 4096 * 2


def test_memory_decides_about_the_micro_batch():
    model = get_model("gpt3_6_7b")
    assert min(model.in_flight_limit()) >= model.stages  # 1F1B fits
    assert min(get_model("gpt3_6_7b", microbatch=2).in_flight_limit()) < model.stages
    tight = replace(model, gpu=Gpu("small", 312e12, 16e9, 1e12), throughput=None)
    assert tight.in_flight_limit() == (0,) * 8


def test_units_cut_evenly_for_the_grid():
    model = get_model("megatron_145_6b")
    assert (sum(model.even()), len(model.even())) == (model.units, 64)


def test_costs_grow_with_a_stages_part_and_replicas_cost_a_longer_ring():
    model = get_model("gpt3_6_7b")
    costs = model.costs((8, 24))
    assert costs.forward[1] == pytest.approx(3 * costs.forward[0])
    assert costs.optimizer[1] == pytest.approx(3 * costs.optimizer[0])
    assert model.costs(pipelines=1).reduce == (0.0,) * 8
    assert model.costs(pipelines=8).reduce[0] > model.costs(pipelines=2).reduce[0] > 0
    assert model.costs((32,)).communication == 0


@pytest.mark.parametrize(("changes", "message"), [
    ({"throughput": 1e5}, "cannot be faster"),
    ({"gpu": "A10"}, r"gpu='A10'\): choose one of V100"),
    ({"gpu": "A100-40G"}, r"or give a Gpu\(...\). Did you mean 'A100-40GB'\?$"),
    ({"global_batch": 100}, "need a multiple of 16"),
    ({"stages": 0}, "stages=0"),
])  # fmt: skip
def test_impossible_settings_are_refused(changes, message):
    with pytest.raises(ConfigurationError, match=message):
        get_model("gpt3_medium", **changes)


def test_unknown_model_is_refused_with_the_known_ones():
    with pytest.raises(ConfigurationError, match=r"'gpt5'.*gpt3_medium"):
        get_model("gpt5")


UNEVEN = Costs((1.0, 2.0), (1.0, 2.5), (1.0, 1.5), (0.0, 0.0), (0.0, 0.0))


def measured(costs=UNEVEN, **changes):
    settings = {"pipelines": 3, "stages": 2, "global_batch": 18, **changes}
    return simulation.MeasuredModel("measured", simulation.Transformer(8, 8, 1, 8, 8), stage_costs=costs, **settings)


def test_costs_are_those_that_were_given():
    model = measured()
    assert model.costs() == model.costs(model.even(), pipelines=2) == UNEVEN
    assert model.fault_free_seconds() == 1.0 + 6 * 6.0 + 2.0  # 1F1B: the slower stage is busy from the first F on
    assert model.useful_gpu_seconds == 18 * 9.0
    assert model.in_flight_limit() == (18, 18)  # the layers are tiny


def test_a_micro_batch_of_several_samples_costs_what_was_measured():
    model = measured(global_batch=36, microbatch=2)
    assert model.grid.microbatches == 6
    assert model.useful_gpu_seconds == 18 * 9.0
    assert measured(recompute=True).useful_gpu_seconds == 18 * 6.0


def test_measured_stages_cannot_be_cut_otherwise():
    model = measured(Costs.uniform(2))
    assert simulation.simulate(
        model, simulation.Cluster.of(model), simulation.Restart(), simulation.Scripted(), 210.0
    ).samples == pytest.approx(180)
    with pytest.raises(ConfigurationError, match="measured stages say nothing"):
        simulation.simulate(
            model,
            simulation.Cluster.of(model),
            simulation.Oobleck(effort=0),
            simulation.Scripted([simulation.Outage(50.0, (1,))]),
            200.0,
        )


@pytest.mark.parametrize(("changes", "message"), [
    ({"stages": 3}, "3 stages, the costs have 2"),
    ({"costs": Costs.uniform(2, 0.0, 0.0, 0.0)}, "no time at all"),
    ({"throughput": 0.1}, "no calibration"),
    ({"global_batch": 17}, "need a multiple of 3"),
])  # fmt: skip
def test_impossible_settings_are_refused_of_measured_model(changes, message):
    with pytest.raises(ConfigurationError, match=message):
        measured(**changes)
