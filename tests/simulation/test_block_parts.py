"""Blocks whose attention and MLP are layers of their own."""

from dataclasses import fields

import pytest

from lightning_recycle.errors import ConfigurationError
from lightning_recycle.simulation import Auto, Cluster, FailedFraction, Oobleck, Transformer, get_model, simulate
from lightning_recycle.simulation.steps import layer_costs
from lightning_recycle.simulation.transformer import LayerPart, block_parts

NAMES = [field.name for field in fields(LayerPart)]
SHAPE = Transformer(32, 4096, 32)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("shape", [SHAPE, Transformer(24, 1024, 16), Transformer(2, 64, 4, 16384, 100)], ids=str)
def test_halves_add_up_to_their_block(shape: Transformer, recompute: bool) -> None:
    attention, mlp = block_parts(shape, recompute=recompute)
    for name in NAMES:
        assert getattr(attention, name) + getattr(mlp, name) == pytest.approx(1.0)
        assert 0 < getattr(attention, name) < 1


def test_halves_of_a_wide_block_are_as_their_weights_and_longer_samples_make_attention_dearer() -> None:
    wide, _ = block_parts(Transformer(8, 2**20, 8, 512, 1))
    for name in ("forward", "backward", "weight", "parameters"):
        assert getattr(wide, name) == pytest.approx(1 / 3, rel=1e-3)
    short, long = (block_parts(Transformer(8, 1024, 8, sequence, 1))[0] for sequence in (512, 8192))
    assert long.forward > short.forward
    assert long.backward > long.forward  # products of attention cost twice as much in B
    assert long.weight == pytest.approx(1 / 3, rel=1e-3)  # and nothing in W
    assert long.activations > short.activations


@pytest.mark.parametrize("name", ["gpt3_medium", "gpt3_3_35b", "gpt3_6_7b"])
def test_the_same_model_is_as_fast_and_as_large_however_it_is_cut(name: str) -> None:
    whole, halves = get_model(name), get_model(name, layers_per_block=2)
    assert halves.units == 2 * whole.transformer.layers
    assert halves.efficiency == pytest.approx(whole.efficiency)
    assert halves.in_flight_limit() == whole.in_flight_limit()
    one, other = layer_costs(whole), layer_costs(halves)
    for values in ("forward", "backward_input", "backward_weight", "optimizer", "parameter_bytes", "held_bytes"):
        assert sum(getattr(one, values)) == pytest.approx(sum(getattr(other, values))), values
        pairs = [sum(getattr(other, values)[n : n + 2]) for n in range(0, other.layers, 2)]
        assert pairs == pytest.approx([sum(getattr(one, values)) / len(pairs)] * len(pairs)), values


def test_a_stage_is_as_large_as_the_halves_that_it_has() -> None:
    model = get_model("gpt3_6_7b", layers_per_block=2)
    attention, mlp = block_parts(model.transformer)
    first, second = model.parts((3, 61))  # two attentions and an MLP
    assert first.forward == pytest.approx((2 * attention.forward + mlp.forward) / 32)
    assert first.forward + second.forward == pytest.approx(1.0)
    with pytest.raises(ConfigurationError, match="give stages of 64 units in all"):
        model.costs((3, 60))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers_per_block": 3}, "layers_per_block=3.*give 1 or 2"),
        ({"layers_per_block": 2, "stages": 5, "pipelines": 4}, "32 blocks are not whole on 5 stages"),
    ],
)
def test_cuts_that_cannot_be_say_what_to_give(changes: dict, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        get_model("gpt3_6_7b", **changes)


def test_halves_let_a_run_with_one_cut_train_more() -> None:
    found = []
    for parts in (1, 2):
        model = get_model("gpt3_6_7b", layers_per_block=parts)
        policy = Auto(shares=False, effort=0, checkpoint="memory")
        found.append(simulate(model, Cluster.of(model), policy, FailedFraction(1 / 32), "1h").ratio)
    assert found[1] > 1.03 * found[0]  # by load alone .895 of ideal instead of .826


def test_other_policies_cut_halves_too() -> None:
    model = get_model("gpt3_6_7b", layers_per_block=2)
    policy = Oobleck(effort=0, checkpoint="memory")
    assert simulate(model, Cluster.of(model), policy, FailedFraction(3 / 32), "1h").ratio > 0
