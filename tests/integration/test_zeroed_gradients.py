"""What an override of ``optimizer_zero_grad`` leaves in ``.grad`` counts, as on one device, whoever dies."""

import itertools
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

from lightning_recycle.callbacks import Fault

pytestmark = pytest.mark.long

BATCH, SAMPLES, EPOCHS = 8, 48, 2
ZEROINGS = ("default", "kept", "faded", "zeros", "every other", "replaced", "nothing")
LOST, BACK = 5, 9


class Turns(nn.Module):
    """Uses one of two layers, by the batch: the other has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.even, self.odd = nn.Linear(6, 16), nn.Linear(6, 16), nn.Linear(6, 16)

    def forward(self, x: Tensor) -> Tensor:
        x, number = x[:, :-1], x[0, -1]
        return self.shared(x) + (self.odd if int(number) % 2 else self.even)(x)


class Zeroing(L.LightningModule):
    def __init__(self, how: str, reads: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.how, self.reads = how, reads
        self.seen: list[float] = []
        self.net = nn.Sequential(Turns(), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2)).double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        step = self.trainer.global_step
        held = [p for p in self.parameters() if p.grad is not None]
        if self.how == "default" or (self.how == "kept" and step % 2 == 0):
            super().optimizer_zero_grad(epoch, batch_idx, optimizer)
        elif self.how == "faded":
            for parameter in held:
                parameter.grad.mul_(0.5)
        elif self.how == "zeros":
            optimizer.zero_grad(set_to_none=False)
        elif self.how == "every other":
            for name, parameter in self.named_parameters():
                parameter.grad = None if name.endswith(("weight", "bias")[step % 2]) else parameter.grad
        elif self.how == "replaced":
            for parameter in held:
                parameter.grad = 0.1 * torch.sign(parameter.detach())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.03, weight_decay=0.3)


class Plain(Zeroing):
    """Without an override; a hook changes what the last step left."""

    optimizer_zero_grad = L.LightningModule.optimizer_zero_grad

    def on_before_zero_grad(self, optimizer: Any) -> None:
        if self.how == "nothing":
            return
        for parameter in self.parameters():  # all that is dropped afterwards
            parameter.grad = None if self.how == "kept" else torch.ones_like(parameter)


def points() -> TensorDataset:
    x = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    number = (torch.arange(SAMPLES) // BATCH).double()
    return TensorDataset(torch.cat([x, number[:, None]], 1), (x.sum(1) > 0).long())


def options(accumulate: int, clip: float | None) -> dict[str, Any]:
    return {"max_epochs": EPOCHS, "accumulate_grad_batches": accumulate, "gradient_clip_val": clip}


@cache
def alone(kind: type[Zeroing], how: str, accumulate: int, clip: float | None) -> dict[str, Tensor]:
    model = kind(how)
    on_one_device(**options(accumulate, clip)).fit(model, DataLoader(points(), BATCH))
    return model.state_dict()


def check(
    kind: type[Zeroing], how: str, accumulate: int, clip: float | None, stages: int, microbatches: int, fate: str
) -> None:
    expected, model = alone(kind, how, accumulate, clip), kind(how)
    lost = (stages + microbatches) % 2, (accumulate + microbatches) % stages
    faults = [] if fate == "undisturbed" else [Fault("kill", *lost, step=LOST)]
    replaced = {"max_restarts": 10} if fate == "replaced" else {}
    waits = [AwaitReplacement(range(LOST // accumulate + 1, SAMPLES))] if fate == "replaced" else []
    strategy = {"num_microbatches": microbatches, **replaced}
    run = grid_trainer(2, stages, faults, strategy, callbacks=waits, **options(accumulate, clip))
    run.fit(model, DataLoader(points(), BATCH // 2))
    assert failures(run) == ([] if fate == "undisturbed" else [lost])
    assert rejoined(run) == ([lost] if fate == "replaced" else [])
    assert difference(model.state_dict(), expected) < TOLERANCE


FATES = ("undisturbed", "killed", "replaced")
CASES = itertools.product(ZEROINGS, (1, 2), (None, 0.05), (1, 2), (1, 4), FATES)


@pytest.mark.parametrize(("how", "accumulate", "clip", "stages", "microbatches", "fate"), sampled(CASES, 10, seed=3))
def test_what_an_override_leaves_counts(how, accumulate, clip, stages, microbatches, fate):
    check(Zeroing, how, accumulate, clip, stages, microbatches, fate)


PLAIN = itertools.product(("nothing", "kept", "ones"), (1, 2), (1, 2), (1, 4), FATES)


@pytest.mark.parametrize(("how", "accumulate", "stages", "microbatches", "fate"), sampled(PLAIN, 3, seed=4))
def test_what_hooks_put_before_zeroing_is_dropped(how, accumulate, stages, microbatches, fate):
    check(Plain, how, accumulate, None, stages, microbatches, fate)
