"""Parameters that come, go, freeze and change places while a run goes on get gradients as on one device."""

import itertools
from collections.abc import Callable
from functools import cache
from typing import Any

import lightning as L
import pytest
import torch
from support.growth import AwaitReplacement, rejoined
from support.sampling import sampled
from support.training import TOLERANCE, difference, failures, grid_trainer, on_one_device
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_recycle import UnsupportedFeatureError
from lightning_recycle.callbacks import Fault

pytestmark = pytest.mark.long

BATCH, SAMPLES, EPOCHS = 8, 48, 2
CHANGE = 6  # the step before which the parameters change, where a hook of each batch does it
FATES = {"undisturbed": None, "killed before": 4, "killed in it": 6, "killed after": 8, "replaced before": 3}
FATES["replaced after"] = 7


def new(*shape: int) -> nn.Parameter:
    return nn.Parameter(0.1 * torch.randn(*shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64))


def optimizer_of(module: L.LightningModule) -> Any:
    return module.optimizers().optimizer


def add_group(module: Any) -> None:
    torch.manual_seed(5)
    module.more.append(nn.Linear(2, 2).double())
    optimizer_of(module).add_param_group({"params": module.more[-1].parameters(), "lr": 0.1})


def extend_group(module: Any) -> None:
    torch.manual_seed(5)
    module.more.append(nn.Linear(2, 2).double())
    optimizer_of(module).param_groups[0]["params"] += list(module.more[-1].parameters())


def exchange(module: Any) -> None:
    old, module.net[2].weight = module.net[2].weight, new(2, 16)
    group = optimizer_of(module).param_groups[0]
    group["params"] = [module.net[2].weight if p is old else p for p in group["params"]]
    optimizer_of(module).state.pop(old, None)


def exchange_layer(module: Any) -> None:
    torch.manual_seed(5)
    take_from_optimizer(module, module.net[2])
    module.net[2] = nn.Linear(16, 2, bias=False).double()
    optimizer_of(module).param_groups[0]["params"] += [module.net[2].weight]


def take_from_optimizer(module: Any, layer: nn.Module, with_state: bool = True) -> None:
    optimizer, gone = optimizer_of(module), list(layer.parameters())
    group = optimizer.param_groups[0]
    group["params"] = [p for p in group["params"] if all(p is not other for other in gone)]
    for parameter in gone if with_state else ():
        optimizer.state.pop(parameter, None)


def take_away(module: Any) -> None:
    take_from_optimizer(module, module.side)
    module.side = nn.Identity()


def take_away_without_state(module: Any) -> None:
    """The optimizer's state of parameters that are gone stays in it."""
    take_from_optimizer(module, module.side, with_state=False)
    module.side = nn.Identity()


def leave_to_itself(module: Any) -> None:
    """Out of the optimizer, not of the module: it gets gradients, and nothing zeroes them."""
    take_from_optimizer(module, module.side)


def freeze(module: Any) -> None:
    module.net[0].requires_grad_(False)


def freeze_and_drop(module: Any) -> None:
    module.net[0].requires_grad_(False)
    for parameter in module.net[0].parameters():
        parameter.grad = None


def thaw(module: Any) -> None:
    module.late.requires_grad_(True)


def only_optimizer(module: Any) -> None:
    module.plain.scale = new(2)
    optimizer_of(module).add_param_group({"params": [module.plain.scale]})


CHANGES: dict[str, Callable[[Any], None]] = {
    change.__name__: change
    for change in (
        *(add_group, extend_group, exchange, exchange_layer, take_away, take_away_without_state),
        *(leave_to_itself, freeze, freeze_and_drop, thaw, only_optimizer),
    )
}
HOOKS = ("on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_train_batch_end")


class Box:
    """An object of the user's that is not a module."""

    scale: nn.Parameter | None = None


class Changing(L.LightningModule):
    def __init__(self, change: str, hook: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.change, self.hook = change, hook
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2)).double()
        self.side, self.late = nn.Linear(6, 2).double(), nn.Linear(6, 2).double()
        self.late.requires_grad_(False)
        self.more = nn.ModuleList()
        self.plain = Box()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        side = self.side(x)[:, :2]
        output = self.net(x) + side + self.late(x)
        for layer in self.more:
            output = output + layer(output)
        if self.plain.scale is not None:
            output = output * (1 + self.plain.scale)
        return nn.functional.cross_entropy(output, y)

    def _now(self, hook: str) -> None:
        due = {"on_train_start": 0, "on_train_batch_end": CHANGE - 1}.get(hook, CHANGE)
        is_now = {"on_train_start": True, "on_train_epoch_start": self.current_epoch == 1}
        if hook == self.hook and is_now.get(hook, self.batch == due):
            CHANGES[self.change](self)

    @property
    def batch(self) -> int:
        """The number of the batch, counted over epochs."""
        ready = self.trainer.fit_loop.epoch_loop.batch_progress.current.ready
        return self.current_epoch * (SAMPLES // BATCH) + ready - 1

    def on_train_start(self) -> None:
        self._now("on_train_start")

    def on_train_epoch_start(self) -> None:
        self._now("on_train_epoch_start")

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._now("on_train_batch_start")

    def on_train_batch_end(self, *_: Any) -> None:
        self._now("on_train_batch_end")

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.03, weight_decay=0.1)

    def trained(self) -> dict[str, Tensor]:
        beside = {} if self.plain.scale is None else {"scale": self.plain.scale.detach()}
        return {**self.state_dict(), **beside}


def points() -> TensorDataset:
    x = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return TensorDataset(x, (x.sum(1) > 0).long())


@cache
def alone(change: str, hook: str, accumulate: int, clip: float | None) -> dict[str, Tensor]:
    model = Changing(change, hook)
    run = on_one_device(max_epochs=EPOCHS, accumulate_grad_batches=accumulate, gradient_clip_val=clip)
    run.fit(model, DataLoader(points(), BATCH))
    return model.trained()


def check(change: str, hook: str, fate: str, microbatches: int, accumulate: int = 1, clip: float | None = None) -> None:
    expected, model = alone(change, hook, accumulate, clip), Changing(change, hook)
    at = FATES[fate]
    lost = (microbatches % 2, 0)
    faults = [] if at is None else [Fault("kill", *lost, step=at)]
    is_replaced = fate.startswith("replaced")
    waits = [AwaitReplacement(range((at or 0) // accumulate + 1, SAMPLES))] if is_replaced else []
    strategy = {"num_microbatches": microbatches, **({"max_restarts": 10} if is_replaced else {})}
    settings = {"max_epochs": EPOCHS, "accumulate_grad_batches": accumulate, "gradient_clip_val": clip}
    run = grid_trainer(2, 1, faults, strategy, callbacks=waits, **settings)
    run.fit(model, DataLoader(points(), BATCH // 2))
    assert failures(run) == ([] if at is None else [lost])
    assert rejoined(run) == ([lost] if is_replaced else [])
    assert difference(model.trained(), expected) < TOLERANCE


MATRIX = [
    *itertools.product(CHANGES, HOOKS, FATES, (1, 4), (1,), (None,)),
    *itertools.product(CHANGES, HOOKS[1:], FATES, (2,), (2,), (None, 0.05)),
]


@pytest.mark.parametrize(("change", "hook", "fate", "microbatches", "accumulate", "clip"), sampled(MATRIX, 12, seed=5))
def test_parameters_are_those_of_each_step(change, hook, fate, microbatches, accumulate, clip):
    check(change, hook, fate, microbatches, accumulate, clip)


class InStages(L.LightningModule):
    """A chain over two stages; hooks change what is in it, or beside it."""

    def __init__(self, change: str, hook: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.change, self.hook = change, hook
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2)).double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def on_train_start(self) -> None:
        if self.hook == "on_train_start":
            self._change()

    def on_train_epoch_start(self) -> None:
        if self.hook == "on_train_epoch_start" and self.current_epoch == 1:
            self._change()

    def _change(self) -> None:
        group = optimizer_of(self).param_groups[0]
        if self.change == "freeze":
            self.net[0].requires_grad_(False)
        elif self.change == "exchange":
            old = getattr(self.net[4], "weight", None)
            if old is not None:  # a layer of this stage
                self.net[4].weight = new(2, 16)
                group["params"] = [self.net[4].weight if p is old else p for p in group["params"]]
        else:
            self.beside = new(2)
            group["params"] += [self.beside]

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.03, weight_decay=0.1)


@pytest.mark.parametrize("hook", ["on_train_start", "on_train_epoch_start"])
@pytest.mark.parametrize("change", ["freeze", "exchange", "beside"])
def test_several_stages_follow_what_freezes_and_refuse_the_rest_by_name(change, hook):
    alone, model = InStages(change, hook), InStages(change, hook)
    on_one_device(max_epochs=EPOCHS).fit(alone, DataLoader(points(), BATCH))
    run = grid_trainer(2, 2, (), {"num_microbatches": 2}, max_epochs=EPOCHS)
    if change == "freeze":
        run.fit(model, DataLoader(points(), BATCH // 2))
        assert difference(model.state_dict(), alone.state_dict()) < TOLERANCE
    else:
        with pytest.raises(UnsupportedFeatureError, match=r"net\.4\.weight" if change == "exchange" else "beside"):
            run.fit(model, DataLoader(points(), BATCH // 2))


class HeadAlone(L.LightningModule):
    """The optimizer has the last layer; the others get gradients, too."""

    def __init__(self, hook: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.hook = hook
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2)).double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.net.parameters() if self.hook else ():
            if parameter.grad is not None:
                parameter.grad.mul_(2)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net[4].parameters() if hasattr(self.net[4], "weight") else [], lr=0.3)


@pytest.mark.parametrize(
    ("stages", "accumulate", "hook", "is_killed"),
    sampled(itertools.product((1, 2), (1, 2), (False, True), (False, True)), 4, seed=2),
)
def test_only_gradients_that_the_optimizer_has_are_clipped(stages, accumulate, hook, is_killed):
    alone, model = HeadAlone(hook), HeadAlone(hook)
    settings = {"max_epochs": EPOCHS, "accumulate_grad_batches": accumulate, "gradient_clip_val": 0.05}
    on_one_device(**settings).fit(alone, DataLoader(points(), BATCH))
    faults = [Fault("kill", 1, 0, step=4)] if is_killed else []
    run = grid_trainer(2, stages, faults, {"num_microbatches": 2}, **settings)
    run.fit(model, DataLoader(points(), BATCH // 2))
    assert difference(model.state_dict(), alone.state_dict()) < TOLERANCE
