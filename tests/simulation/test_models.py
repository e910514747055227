"""Cost and memory models, and their calibration."""

from dataclasses import replace

import pytest

from lightning_recycle.errors import ConfigurationError
from lightning_recycle.planning import Problem, Technique, one_f_one_b
from lightning_recycle.simulation import Gpu, Transformer, available_models, get_model


@pytest.mark.parametrize(
    ("name", "billions", "gpus", "shape"),
    [
        ("gpt3_medium", 0.355, 32, (16, 2)),
        ("gpt3_3_35b", 3.35, 32, (8, 4)),
        ("gpt3_6_7b", 6.7, 32, (4, 8)),
        ("megatron_18_4b", 18.4, 256, (16, 16)),
        ("megatron_39_1b", 39.1, 512, (16, 32)),
        ("megatron_76_1b", 76.1, 1024, (16, 64)),
        ("megatron_145_6b", 145.6, 1536, (24, 64)),
    ],
)
def test_models_have_the_papers_sizes(name, billions, gpus, shape) -> None:
    model = get_model(name)
    assert model.transformer.parameters / 1e9 == pytest.approx(billions, rel=0.01)
    assert (model.gpus, (model.pipelines, model.stages)) == (gpus, shape)


@pytest.mark.parametrize(("name", "goal"), [("gpt3_medium", 27.58), ("gpt3_3_35b", 14.87), ("gpt3_6_7b", 5.33)])
def test_one_number_gives_the_measured_throughput(name, goal) -> None:
    model = get_model(name)
    step = one_f_one_b(Problem(model.grid, model.costs(), technique=Technique(False, False))).makespan
    assert model.global_batch / step == pytest.approx(goal, rel=1e-6)
    assert 0 < model.efficiency < 1


@pytest.mark.parametrize("name", available_models())
def test_operations_are_those_of_megatrons_formula(name) -> None:
    shape = get_model(name).transformer
    s, layers, h, v = shape.sequence, shape.layers, shape.width, shape.vocabulary
    expected = 96 * s * layers * h**2 * (1 + s / (6 * h) + v / (16 * layers * h))
    # The formula does not run the output layer again, which is 2 s h V of operations.
    assert sum(shape.flops(recompute=True)) - 2 * s * h * v == pytest.approx(expected, rel=1e-12)


def test_backward_is_twice_the_forward_and_linear_layers_split_it_evenly() -> None:
    forward, backward, weight = Transformer(24, 1024, 16).flops()
    assert backward + weight == pytest.approx(2 * forward)
    assert weight < forward < backward  # attention products have no weights


def test_activations_follow_korthikanti_and_recomputation_keeps_inputs_only() -> None:
    shape = Transformer(32, 4096, 32)
    assert shape.activation_bytes() == 32 * 2048 * 4096 * (34 + 5 * 32 * 2048 / 4096)
    assert shape.activation_bytes(recompute=True) == 32 * 2048 * 4096 * 2


def test_memory_decides_about_the_micro_batch() -> None:
    model = get_model("gpt3_6_7b")
    assert min(model.in_flight_limit()) >= model.stages  # 1F1B fits
    assert min(get_model("gpt3_6_7b", microbatch=2).in_flight_limit()) < model.stages
    tight = replace(model, gpu=Gpu("small", 312e12, 16e9, 1e12), throughput=None)
    assert tight.in_flight_limit() == (0,) * 8


def test_units_cut_evenly_for_the_grid_and_sum_up_for_any_number_of_stages() -> None:
    model = get_model("megatron_145_6b")
    assert set(model.even()) == {model.units // 64}
    for stages in (1, 7, 63):
        parts = model.even(stages)
        assert (sum(parts), len(parts)) == (model.units, stages)
        assert max(parts) - min(parts) <= 1


def test_costs_grow_with_a_stages_part_and_replicas_cost_a_longer_ring() -> None:
    model = get_model("gpt3_6_7b")
    costs = model.costs((8, 24))
    assert costs.forward[1] == pytest.approx(3 * costs.forward[0])
    assert costs.optimizer[1] == pytest.approx(3 * costs.optimizer[0])
    assert model.costs(pipelines=1).reduce == (0.0,) * 8
    assert model.costs(pipelines=8).reduce[0] > model.costs(pipelines=2).reduce[0] > 0
    assert model.costs((32,)).communication == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"throughput": 1e5}, "cannot be faster"),
        ({"gpu": "A10"}, "unknown GPU 'A10'"),
        ({"global_batch": 100}, "need a multiple of 16"),
        ({"stages": 0}, "stages=0"),
    ],
)
def test_impossible_settings_are_refused(changes, message) -> None:
    with pytest.raises(ConfigurationError, match=message):
        get_model("gpt3_medium", **changes)


def test_unknown_model_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigurationError, match=r"'gpt5'.*gpt3_medium"):
        get_model("gpt5")
