"""Tied weights: one parameter under several names, with the same initial values on every grid."""

import copy
import itertools
import pickle
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_recycle import ConfigurationError, LayerSpec, PipelineModule
from lightning_recycle.model.layers import even_parts, merge_groups, ties_between_stages

VOCABULARY, WIDTH = 11, 6
FIRST, LAST = "layers.0.weight", "layers.3.logits.weight"


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.logits(x)


class Model(PipelineModule):
    """Embedding and head share a weight; each layer is built here (concrete) or given as a recipe.

    Args:
        kinds: for each of the four layers "c" or "s".
    """

    def __init__(self, kinds: str = "ssss", groups: Sequence[Sequence[str]] = ((FIRST, LAST),)) -> None:
        super().__init__()
        self.kinds = kinds
        self.groups = groups

    def configure_pipeline(self) -> list[Any]:
        torch.manual_seed(5)
        recipes = [
            LayerSpec(nn.Embedding, VOCABULARY, WIDTH),
            LayerSpec(nn.Linear, WIDTH, WIDTH),
            LayerSpec(nn.Tanh),
            LayerSpec(Head),
        ]
        return [
            recipe.cls(*recipe.args) if kind == "c" else recipe
            for recipe, kind in zip(recipes, self.kinds, strict=True)
        ]

    def tied_parameters(self) -> Sequence[Sequence[str]]:
        return self.groups

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, target)


def built(kinds: str = "ssss", seed: int = 3) -> Model:
    model = Model(kinds)
    model.materialize(seed=seed)
    return model


def stages(model: PipelineModule, num_stages: int, seed: int = 3) -> list[PipelineModule]:
    """What the workers of each stage hold: as the strategy does it, each from a pickle."""
    found = []
    for part in even_parts(len(model.layers), num_stages):
        worker = pickle.loads(pickle.dumps(model))
        worker.keep_layers(part)
        worker.materialize(part, seed)
        found.append(worker)
    return found


KINDS = ["".join(kinds) for kinds in itertools.product("cs", "s", "s", "cs")]


# ---------------------------------------------------------------------- one process


def test_the_first_recipe_decides_on_the_initial_values():
    expected = LayerSpec(nn.Embedding, VOCABULARY, WIDTH).build(0, seed=3).weight
    assert torch.equal(built("ssss").layers[0].weight, expected)


@pytest.mark.parametrize("kinds", ["cssc", "cccs", "sccc"])
def test_a_concrete_layer_decides_on_the_initial_values(kinds):
    """It keeps the weights that it has when training begins, even if a recipe comes first."""
    model = Model(kinds)
    index = kinds.index("c") if kinds[0] == "c" else 3
    before = next(model.layers[index].parameters()).clone()
    model.materialize(seed=3)
    assert torch.equal(model.layers[0].weight, before)


@pytest.mark.parametrize("kinds", KINDS)
def test_the_tie_outlives_copies_conversions_and_state_dicts(kinds):
    for model in (built(kinds), Model(kinds)):
        other = pickle.loads(pickle.dumps(copy.deepcopy(model))).double()
        other.load_state_dict(built(kinds, seed=9).state_dict())
        other.materialize()
        assert other.layers[0].weight is other.layers[3].logits.weight
        assert other.layers[0].weight.dtype == torch.float64
        assert torch.equal(other.layers[0].weight.float(), built(kinds, seed=9).layers[0].weight)


def test_a_part_of_a_state_dict_that_was_loaded_before_the_other_end_exists_is_kept():
    model, values = Model(), torch.randn(VOCABULARY, WIDTH)
    model.load_state_dict({LAST: values}, strict=False)
    model.materialize()
    assert torch.equal(model.layers[0].weight, values)


def test_every_use_within_a_layer_follows():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.two.weight = self.one.weight

    class Tied(Model):
        def configure_pipeline(self) -> list[Any]:
            return [LayerSpec(nn.Linear, WIDTH, WIDTH), LayerSpec(Twice)]

    model = Tied(groups=[("layers.0.weight", "layers.1.one.weight")])
    model.materialize()
    assert model.layers[0].weight is model.layers[1].one.weight is model.layers[1].two.weight


def test_a_layer_that_is_used_twice_is_tied_to_itself():
    class Repeated(Model):
        def configure_pipeline(self) -> list[Any]:
            layer = nn.Linear(WIDTH, WIDTH)
            return [layer, nn.Tanh(), layer]

    groups = Repeated(groups=()).tied_groups()
    assert groups == (("layers.0.weight", "layers.2.weight"), ("layers.0.bias", "layers.2.bias"))


# ---------------------------------------------------------------------- stages


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
@pytest.mark.parametrize("kinds", KINDS)
def test_every_stage_starts_from_the_weights_of_one_device(kinds, num_stages):
    whole = built(kinds)
    names: set[str] = set()
    for worker in stages(Model(kinds), num_stages):
        assert worker.tied_groups() == ((FIRST, LAST),)
        for name, value in worker.state_dict().items():
            assert torch.equal(value, whole.state_dict()[name]), name
            names.add(name)
    assert names == set(whole.state_dict())


def test_a_stage_that_is_built_late_has_the_precision_asked_for_meanwhile():
    for kinds in KINDS:
        model = Model(kinds)
        model.keep_layers(range(2, 4))
        model.double()
        model.materialize(seed=3)
        assert model.layers[3].logits.weight.dtype == torch.float64
        assert torch.equal(model.layers[3].logits.weight, built(kinds).double().layers[3].logits.weight)


def test_only_ties_that_cross_a_stage_concern_the_run_time():
    groups = (("layers.0.a", "layers.1.b"), ("layers.1.c", "layers.2.c", "layers.5.d", "layers.5.e"))
    parts = (range(2), range(2, 4), range(4, 6))
    (tie,) = ties_between_stages(groups, parts)
    assert tie.copies == ((0, "layers.1.c"), (1, "layers.2.c"), (2, "layers.5.d"))
    assert (tie.names, tie.owner, tie.stages) == (groups[1], 0, (0, 1, 2))
    assert ties_between_stages(groups, (range(6),)) == ()


# ---------------------------------------------------------------------- groups and errors


def test_groups_that_overlap_are_one_in_the_order_of_the_layers():
    groups = [("layers.10.a", "layers.2.b"), ("layers.4.x", "layers.3.x"), ("layers.0.c", "layers.10.a")]
    assert merge_groups(groups) == (("layers.0.c", "layers.2.b", "layers.10.a"), ("layers.3.x", "layers.4.x"))


@pytest.mark.parametrize(("groups", "message"), [
    ([FIRST], "a group is at least two different names"),
    ([(FIRST, FIRST)], "a group is at least two different names"),
    ([(FIRST, "layers.4.weight")], r"names 'layers.4.weight'; the model has 4 layers"),
    ([(FIRST, "head.weight")], "'head.weight' is not the name of a layer's parameter"),
    ([(FIRST, "layers.3")], "'layers.3' is not the name of a layer's parameter"),
    ([(FIRST, "layers.3.weight")], r"layer 3 \(Head\) has no such parameter; it has logits.weight"),
    ([(FIRST, "layers.1.weight")], r"layers.1.weight of shape \(6, 6\) cannot be tied to layers.0.weight"),
])  # fmt: skip
@pytest.mark.parametrize("kinds", ["cccc", "ssss"])
def test_a_group_that_cannot_be_tied_is_an_error_that_names_it(kinds, groups, message):
    model = Model(kinds, groups)
    for _ in range(2):  # the error does not leave layers half made
        with pytest.raises(ConfigurationError, match=message):
            model.materialize()
