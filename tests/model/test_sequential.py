"""``PipelineModule.from_sequential``: the children of an nn.Sequential as layers."""

import copy
import functools
import pickle
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from support.training import on_one_device
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_recycle import ConfigurationError, PipelineModule
from lightning_recycle.model.layers import AbsentLayer
from lightning_recycle.model.module import SequentialPipeline

SGD = functools.partial(torch.optim.SGD, lr=0.1)
STEP_LR = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)


def sequential() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Sequential(nn.Tanh(), nn.Linear(8, 3)))


def sgd_and_scheduler(parameters: Any) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = SGD(parameters)
    return optimizer, STEP_LR(optimizer)


def data() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(12, 4, generator=generator), torch.randint(0, 3, (12,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=4)


def trainer(**options: Any) -> L.Trainer:
    return on_one_device(strategy="auto", **options)


def test_the_children_are_the_layers() -> None:
    model = sequential()
    module = PipelineModule.from_sequential(model, F.cross_entropy, SGD)
    assert isinstance(module, SequentialPipeline)
    assert all(a is b for a, b in zip(module.layers, model, strict=True))
    assert list(module.state_dict()) == [f"layers.{name}" for name in model.state_dict()]
    x = torch.randn(5, 4)
    assert torch.equal(module.eval()(x), model(x))


@pytest.mark.filterwarnings("ignore")
def test_it_trains_on_one_device_as_plain_torch_does() -> None:
    module = PipelineModule.from_sequential(sequential(), nn.CrossEntropyLoss(), (SGD, STEP_LR))
    trainer(max_epochs=2).fit(module, data())
    plain = sequential()
    optimizer = SGD(plain.parameters())
    scheduler = STEP_LR(optimizer)
    for _ in range(2):
        for x, y in data():
            optimizer.zero_grad()
            F.cross_entropy(plain(x), y).backward()
            optimizer.step()
        scheduler.step()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(module.state_dict()[f"layers.{name}"], value)


@pytest.mark.parametrize("loss", [F.cross_entropy, nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]))])
def test_a_pickle_is_the_same_module(loss: Any) -> None:
    module = PipelineModule.from_sequential(sequential(), loss, SGD)
    for other in (pickle.loads(pickle.dumps(module)), copy.deepcopy(module)):
        x, y = torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])
        assert torch.equal(other.eval()(x), module.eval()(x))
        assert torch.equal(other.loss(other(x), y), loss(module(x), y))
        (group,) = other.configure_optimizers()["optimizer"].param_groups
        assert [id(p) for p in group["params"]] == [id(p) for p in other.parameters()]


def test_layers_of_other_stages_are_freed() -> None:
    module = PipelineModule.from_sequential(sequential(), F.cross_entropy, SGD)
    module.keep_layers(range(2, 3))
    assert [type(layer) for layer in module.layers] == [AbsentLayer, AbsentLayer, nn.Sequential]
    small = len(pickle.dumps(module))
    assert small < len(pickle.dumps(PipelineModule.from_sequential(sequential(), F.cross_entropy, SGD)))
    assert len(list(module.parameters())) == 2
    (group,) = module.configure_optimizers()["optimizer"].param_groups
    assert len(group["params"]) == 2


class Pair(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, 2 * x


class Sum(nn.Module):
    """Takes a tuple, as layers of an nn.Sequential do."""

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0] + pair[1]


def test_a_tuple_is_one_argument_as_in_a_sequential() -> None:
    model = nn.Sequential(Pair(), Sum())
    for _ in range(2):  # a model may be used again
        module = PipelineModule.from_sequential(model, F.mse_loss, SGD)
    x = torch.ones(2)
    assert torch.equal(module(x), model(x))
    reversed_model = nn.Sequential(Sum(), Pair())
    module = PipelineModule.from_sequential(reversed_model, F.mse_loss, SGD)
    assert torch.equal(module(x, x)[1], reversed_model((x, x))[1])


@pytest.mark.filterwarnings("ignore")
def test_a_checkpoint_is_loaded_with_the_same_arguments(tmp_path: Path) -> None:
    module = PipelineModule.from_sequential(sequential(), F.cross_entropy, SGD)
    runner = trainer(max_steps=2)
    runner.fit(module, data())
    runner.save_checkpoint(tmp_path / "last.ckpt")
    loaded = SequentialPipeline.load_from_checkpoint(
        tmp_path / "last.ckpt", model=sequential(), loss=F.cross_entropy, optimizer=SGD
    )
    for name, value in module.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value)


@pytest.mark.parametrize("optimizer", [sgd_and_scheduler, (SGD, STEP_LR)], ids=["one function", "two functions"])
def test_a_scheduler_comes_with_the_optimizer_that_it_drives(optimizer: Any) -> None:
    made = PipelineModule.from_sequential(sequential(), F.cross_entropy, optimizer).configure_optimizers()
    assert made["lr_scheduler"].optimizer is made["optimizer"]
    assert isinstance(made["optimizer"], torch.optim.SGD)


def lr_lambda(parameters: Any) -> Any:
    return "adam"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": nn.Linear(2, 2)}, "got a Linear as model; it takes an nn.Sequential"),
        ({"model": [nn.Linear(2, 2)]}, "got a list as model"),
        ({"model": nn.Sequential()}, "returned no layers"),
        ({"loss": "mse"}, "got loss='mse'"),
        ({"loss": nn.MSELoss}, "pass a function of .output, target., such as"),
        ({"loss": nn.Bilinear(2, 2, 1)}, "The loss Bilinear has parameters"),
        ({"optimizer": "adam"}, "optimizer='adam': pass a function"),
        ({"optimizer": torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1)}, r"optimizer=SGD\(...\) is an optimizer"),
        ({"optimizer": (SGD, STEP_LR, STEP_LR)}, "or a pair"),
        ({"optimizer": (SGD, 0.5)}, "or a pair"),
        ({"optimizer": ()}, "or a pair"),
    ],
)
def test_an_argument_of_the_wrong_kind_is_an_error_that_names_it(change: dict[str, Any], message: str) -> None:
    arguments = {"model": sequential(), "loss": F.mse_loss, "optimizer": SGD}
    with pytest.raises(ConfigurationError, match=message):
        PipelineModule.from_sequential(**{**arguments, **change})


@pytest.mark.parametrize("optimizer", [lr_lambda, (sgd_and_scheduler, STEP_LR)])
def test_a_factory_that_makes_no_optimizer_is_an_error_that_shows_what_it_made(optimizer: Any) -> None:
    module = PipelineModule.from_sequential(sequential(), F.mse_loss, optimizer)
    with pytest.raises(ConfigurationError, match="The optimizer factory returned"):
        module.configure_optimizers()


def test_a_class_with_hooks_of_its_own_derives_from_the_adapter() -> None:
    class Hooks(SequentialPipeline):
        pass

    class Lost(PipelineModule):
        pass

    assert type(Hooks.from_sequential(sequential(), F.mse_loss, SGD)) is Hooks
    with pytest.raises(ConfigurationError, match=r"Lost.from_sequential\(\) would ignore"):
        Lost.from_sequential(sequential(), F.mse_loss, SGD)
