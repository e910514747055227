"""Tensors that training steps write are those of an undisturbed run, whoever runs the micro-batches."""

import copy
from typing import Any

import lightning as L
import pytest
import torch
from support.growth import AwaitReplacement, rejoined
from support.sampling import sampled
from support.training import difference, failures, grid_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_recycle import UnsupportedFeatureError
from lightning_recycle.callbacks import Fault


class Bank(nn.Module):
    """Remembers the newest features; made when the first ones come."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", None, persistent=False)
        self.register_buffer("place", torch.zeros((), dtype=torch.long))

    @torch.no_grad()
    def forward(self, features: Tensor) -> Tensor:
        if self.rows is None:
            self.rows = features.new_zeros(12, features.shape[1])
        seen = self.rows.clone()
        begin = int(self.place) % 12
        self.rows[begin : begin + len(features)] = features.detach()[: 12 - begin]
        self.place += len(features)
        return seen


class SelfSupervised(L.LightningModule):
    """An average of its weights, one way or another, and a bank."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 4)).double()
        self.target = copy.deepcopy(self.net).requires_grad_(False)
        self.way, self.bank = way, Bank()

    @torch.no_grad()
    def average(self) -> None:
        for mean, weight in zip(self.target.parameters(), self.net.parameters(), strict=True):
            if self.way == "assigned":
                mean.data = mean.data * 0.9 + weight.data * 0.1
            elif self.way == "data":
                mean.data.mul_(0.9).add_(weight.data, alpha=0.1)
            else:
                mean.mul_(0.9).add_(weight, alpha=0.1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.average()
        (x,) = batch
        features = self.net(x)
        loss = (features - self.target(x + 0.1)).pow(2).mean()
        return loss if self.way == "assigned" else loss + 0.1 * (features @ self.bank(features).T).pow(2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def on_grid(model: L.LightningModule, faults: Any = (), callbacks: Any = (), **strategy: Any) -> L.Trainer:
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(96, 8, generator=generator, dtype=torch.float64))
    trainer = grid_trainer(2, 1, faults, strategy, max_epochs=1, callbacks=callbacks)
    trainer.fit(model, DataLoader(data, batch_size=8))
    return trainer


def parameters(model: nn.Module) -> dict[str, Tensor]:
    """Also those that are not trained; running statistics are each worker's own."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


KILL = Fault("kill", 0, 0, step=3)


@pytest.mark.parametrize(
    ("way", "at"), sampled([("assigned", 0), ("data", 0), ("in place", 3)], 1, rest=pytest.mark.long)
)
def test_a_survivor_writes_what_each_would_have(way, at):
    calm, killed = SelfSupervised(way), SelfSupervised(way)
    on_grid(calm)
    assert failures(on_grid(killed, [Fault("kill", 0, 0, step=at)])) == [(0, 0)]
    assert difference(parameters(calm), parameters(killed)) < 1e-12


def test_a_replacement_has_the_values_of_all_micro_batches():
    calm, killed = SelfSupervised("data"), SelfSupervised("data")
    on_grid(calm, num_microbatches=2)
    faults = [Fault("kill", 0, 0, step=1), Fault("kill", 1, 0, step=4)]
    run = on_grid(killed, faults, [AwaitReplacement([3])], num_microbatches=2, max_restarts=10)
    assert (0, 0) in rejoined(run)
    assert difference(parameters(calm), parameters(killed)) < 1e-12


class Large(SelfSupervised):
    """Its own average is of its batches, and large."""

    def __init__(self) -> None:
        super().__init__("assigned")
        self.register_buffer("centre", torch.zeros(700_000, dtype=torch.float64))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.centre.add_(batch[0].mean())
        return super().training_step(batch, batch_idx)


def test_what_is_too_large_to_be_kept_is_refused_by_name_once_its_worker_is_lost():
    on_grid(Large())
    with pytest.raises(UnsupportedFeatureError, match=r"centre is written in a training step"):
        on_grid(Large(), [KILL])
