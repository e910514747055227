"""The user's model: layers by index, built on first access, the same weights everywhere."""

import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from support.training import on_one_device
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_recycle import ConfigurationError, LayerSpec, PipelineModule, UnsupportedFeatureError
from lightning_recycle.model.module import AbsentLayer
from lightning_recycle.model.parts import LayerParts

NAMES = ["layers.0.weight", "layers.0.bias", "layers.2.weight", "layers.2.bias"]


class Small(PipelineModule):
    """Concrete layers. ``calls`` counts how often they were built."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def configure_pipeline(self) -> nn.Sequential:
        self.calls += 1
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(output, target)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Specified(Small):
    """The same as recipes."""

    def configure_pipeline(self) -> list[Any]:
        self.calls += 1
        return [LayerSpec(nn.Linear, 4, 8), nn.Tanh(), LayerSpec(nn.Linear, 8, out_features=2)]


def returning(value: Any) -> PipelineModule:
    class Returns(Small):
        def configure_pipeline(self) -> Any:
            return value

    return Returns()


# ---------------------------------------------------------------------- layers exist on first access

DOORS: dict[str, Callable[[Small], Any]] = {
    "layers": lambda m: m.layers,
    "parameters": lambda m: list(m.parameters()),
    "named_parameters": lambda m: dict(m.named_parameters()),
    "buffers": lambda m: list(m.buffers()),
    "state_dict": lambda m: m.state_dict(),
    "load_state_dict": lambda m: m.load_state_dict(Small().state_dict()),
    "modules": lambda m: list(m.modules()),
    "children": lambda m: list(m.children()),
    "double": lambda m: m.double(),
    "to": lambda m: m.to("cpu"),
    "train": lambda m: m.train(),
    "apply": lambda m: m.apply(lambda _: None),
    "zero_grad": lambda m: m.zero_grad(),
    "requires_grad_": lambda m: m.requires_grad_(False),
    "get_parameter": lambda m: m.get_parameter("layers.2.bias"),
    "get_submodule": lambda m: m.get_submodule("layers.0"),
    "forward": lambda m: m(torch.ones(1, 4)),
    "configure_model": lambda m: m.configure_model(),
}


@pytest.mark.parametrize("door", DOORS)
def test_layers_are_built_once_whichever_door_is_used(door):
    module = Small()
    assert module.calls == 0, "nothing is built in the constructor"
    DOORS[door](module)
    assert "layers" in dict(nn.Module.named_children(module))
    list(module.parameters()), module.state_dict(), module.layers
    assert module.calls == 1


def test_a_layer_that_returns_a_tuple_passes_its_items_on_as_arguments():
    class Two(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x, x + 1

    class Multiply(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return a * b

    assert returning([Two(), Multiply()])(torch.tensor([2.0])).tolist() == [6.0]


# ---------------------------------------------------------------------- recipes


def test_a_recipe_gives_the_same_weights_for_the_same_seed_and_index():
    spec = LayerSpec(nn.Linear, 4, 8)
    torch.manual_seed(1)
    first = spec.build(2, seed=5).state_dict()["weight"]
    torch.manual_seed(2)
    assert torch.equal(spec.build(2, seed=5).state_dict()["weight"], first)
    assert not torch.equal(spec.build(3, seed=5).state_dict()["weight"], first)
    assert not torch.equal(spec.build(2, seed=6).state_dict()["weight"], first)


def test_building_a_recipe_leaves_the_generator_alone():
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    LayerSpec(nn.Linear, 4, 8).build(0, seed=5)
    assert torch.equal(torch.rand(3), expected)


def test_a_stage_builds_its_recipes_only_and_gets_the_weights_of_the_whole_model():
    whole, stage = Specified(), Specified()
    whole.materialize(seed=3)
    stage.keep_layers(range(1, 3))
    stage.materialize(range(1, 3), seed=3)
    assert [type(layer) for layer in stage.layers] == [AbsentLayer, nn.Tanh, nn.Linear]
    assert list(stage.state_dict()) == NAMES[2:]
    assert all(torch.equal(value, whole.state_dict()[name]) for name, value in stage.state_dict().items())


def test_the_seed_of_recipes_is_that_of_seed_everything(monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "17")
    module, expected = Specified(), Specified()
    module.configure_model()
    expected.materialize(seed=17)
    assert all(torch.equal(v, expected.state_dict()[k]) for k, v in module.state_dict().items())


def test_a_recipe_follows_the_mode_of_the_module():
    class WithDropout(Small):
        def configure_pipeline(self) -> list[Any]:
            return [LayerSpec(nn.Dropout, 0.5), nn.Linear(4, 2)]

    module = WithDropout().eval()
    module.materialize()
    assert not module.layers[0].training


@pytest.mark.parametrize(("spec", "message"), [
    (LayerSpec(nn.Linear, 4), r"Layer 1, LayerSpec\(Linear, 4\), cannot be built: TypeError"),
    (LayerSpec(nn.Linear, 4, out_features=-1), r"Layer 1, LayerSpec\(Linear, 4, out_features=-1\)"),
    (LayerSpec(dict, a=1), "built an object of type dict, not an nn.Module"),
])  # fmt: skip
def test_a_recipe_that_cannot_be_built_is_an_error_that_names_layer_and_arguments(spec, message):
    with pytest.raises(ConfigurationError, match=message):
        returning([nn.Linear(4, 4), spec]).configure_model()


def test_a_recipe_of_a_module_instead_of_a_class_is_not_mistaken_for_one():
    with pytest.raises(ConfigurationError, match="LayerSpec"):
        LayerSpec("Linear", 4)
    with pytest.raises(ConfigurationError, match="LayerSpec"):
        LayerSpec(nn.Linear(8, 8)).build(0, seed=0)


def test_an_absent_layer_cannot_be_run_by_mistake():
    module = Small()
    module.keep_layers(range(1))
    with pytest.raises(UnsupportedFeatureError, match="a layer of another stage"):
        module(torch.ones(1, 4))


# ---------------------------------------------------------------------- errors


@pytest.mark.parametrize(("value", "message"), [
    (None, "configure_pipeline.. returned an object of type NoneType; return an nn.Sequential"),
    (nn.Linear(2, 2), "returned an object of type Linear"),
    ([], "returned no layers"),
    (nn.Sequential(), "returned no layers"),
    ([nn.Linear(2, 2), torch.tanh], "as layer 1; every layer must"),
    ([nn.Linear], "as layer 0; every layer must"),
], ids=["None", "a layer", "an empty list", "an empty Sequential", "a function", "a class"])  # fmt: skip
def test_layers_that_are_none_are_an_error_that_names_them(value, message):
    with pytest.raises(ConfigurationError, match=message):
        list(returning(value).parameters())


def test_what_is_not_implemented_is_named():
    class Empty(PipelineModule):
        pass

    with pytest.raises(ConfigurationError, match=r"Empty must implement configure_pipeline"):
        list(Empty().parameters())
    with pytest.raises(ConfigurationError, match=r"Empty must implement loss"):
        Empty().loss(None, None)


def test_an_error_inside_configure_pipeline_surfaces_as_itself():
    class Misspelt(Small):
        def configure_pipeline(self) -> nn.Sequential:
            return nn.Sequential(nn.Linear(4, self.widht))

    with pytest.raises(AttributeError, match="widht"):
        list(Misspelt().parameters())
    with pytest.raises(AttributeError, match="widht"):
        _ = Misspelt().layers


@pytest.mark.parametrize("batch", [torch.ones(2), (1, 2, 3), {"x": 1}], ids=["tensor", "triple", "dictionary"])
def test_a_batch_that_is_no_pair_needs_a_split_batch_of_the_users(batch):
    with pytest.raises(ConfigurationError, match=r"Override split_batch"):
        Small().split_batch(batch)


# ---------------------------------------------------------------------- one device


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [Small, Specified])
def test_the_module_trains_on_one_device_as_plain_torch_does(kind):
    torch.manual_seed(0)
    dataset = TensorDataset(torch.randn(8, 4), torch.randn(8, 2))
    module, plain = kind(), kind()
    plain.configure_model()
    module.load_state_dict(plain.state_dict())
    trainer = on_one_device(strategy="auto", max_steps=2)
    trainer.fit(module, DataLoader(dataset, batch_size=4))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for x, y in DataLoader(dataset, batch_size=4):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(nn.Sequential(*plain.layers)(x), y)
        loss.backward()
        optimizer.step()
    assert trainer.global_step == 2
    torch.testing.assert_close(dict(module.state_dict()), dict(plain.state_dict()))
    assert trainer.callback_metrics["train_loss"].item() == pytest.approx(loss.item())


def penalty(module: Any) -> Any:
    return sum(parameter.square().sum() for parameter in module.parameters())


def kept_by_layers(module: Any) -> Any:
    return sum(layer.balance for layer in module.layers if hasattr(layer, "balance"))


def harmless(module: Any) -> Any:
    return torch.zeros((), device=next(module.parameters()).device)


@pytest.mark.parametrize(("term", "words"), [
    (penalty, "a parameter of self.layers[0] (square), which is on another stage"),
    (kept_by_layers, "self.layers[0].balance, which is on another stage"),
    (harmless, ""),
])  # fmt: skip
@pytest.mark.parametrize("num_stages", [1, 2])
def test_a_loss_that_means_layers_of_other_stages_is_an_error(term, words, num_stages):
    class Model(Specified):
        def loss(self, output: Tensor, target: Tensor) -> Tensor:
            return super().loss(output, target) + term(self)

    parts = LayerParts(Model())
    parts.keep(parts.cut(num_stages, "count"), num_stages - 1)
    parts.build()
    _, target = parts.split((torch.zeros(3, 4), torch.zeros(3, 2)), 0)
    with (
        pytest.raises(ConfigurationError, match=re.escape(f"Model.loss() uses {words}"))
        if words and num_stages > 1
        else nullcontext()
    ):
        assert parts.loss(torch.ones(3, 2), target) >= 1.0
    assert not hasattr(parts.module, "balance")
    assert not hasattr(parts.module.layers[0], "balance")
