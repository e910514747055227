"""Whatever users keep in their objects: a replacement has it from its peer."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from support.growth import AwaitReplacement, rejoined
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_recycle import ReCycleStrategy
from lightning_recycle.callbacks import Fault, FaultInjectionCallback

EPOCH = 5  # steps
SAMPLES = 8 * EPOCH


class Curriculum(Dataset[Tensor]):
    """Samples that become harder: the module sets ``level``."""

    def __init__(self) -> None:
        self.data = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        self.level = 1.0

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        return self.data[index]


class Data(L.LightningDataModule):
    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.batch_size, self.rate = batch_size, 1.0

    def setup(self, stage: str) -> None:
        self.train = Curriculum()

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.train, batch_size=self.batch_size)


class Damp(nn.Module):
    p = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return x.tanh() * (1 - self.p)


class Annealed(L.LightningModule):
    """Its loss depends on attributes that hooks set at the beginning of an epoch, here and there."""

    alpha = 0.0
    bank: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(4, 8), Damp(), nn.Linear(8, 2)).double()
        self.register_buffer("bank", None)

    def on_train_epoch_start(self) -> None:
        data: Any = self.trainer.datamodule  # type: ignore[attr-defined]
        epoch = self.current_epoch
        self.alpha = 0.5 * epoch
        self.net[1].p = 0.1 * epoch  # type: ignore[union-attr, assignment]
        data.rate = 1 + epoch
        data.train.level = 1 + 0.25 * epoch
        rows = torch.full((1, 2), float(epoch), dtype=torch.float64, device=self.device)
        self.bank = rows if self.bank is None else torch.cat([self.bank, rows])

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        data: Any = self.trainer.datamodule  # type: ignore[attr-defined]
        output = self.net(batch * data.train.level)
        assert self.bank is not None
        return (output - self.bank.mean(0)).pow(2).mean() * data.rate + self.alpha * output.mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Memory:
    def __init__(self) -> None:
        self.epochs: list[int] = []


class Scales(L.Callback):
    """Scales gradients by the number of epochs that an object of its has seen."""

    def __init__(self) -> None:
        self.memory = Memory()

    def on_train_epoch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self.memory.epochs.append(trainer.current_epoch)

    def on_before_optimizer_step(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        for parameter in module.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(0.5 + 0.1 * len(self.memory.epochs))


def _train(faults: list[Fault]) -> tuple[L.Trainer, Annealed]:
    model = Annealed()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=ReCycleStrategy(restart_workers=True),
        max_epochs=4,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Scales(), AwaitReplacement([9, 14]), FaultInjectionCallback(faults)],
    )
    trainer.fit(model, datamodule=Data(batch_size=4))
    return trainer, model


def test_a_replacement_has_what_hooks_have_set_also_when_it_becomes_the_leader_and_a_donor() -> None:
    _, undisturbed = _train([])
    trainer, model = _train([Fault("kill", 1, 0, step=7), Fault("kill", 0, 0, step=12)])
    assert sorted(rejoined(trainer)) == [(0, 0), (1, 0)]
    for (name, parameter), expected in zip(model.named_parameters(), undisturbed.parameters(), strict=True):
        assert (parameter - expected).abs().max() < 1e-10, name
