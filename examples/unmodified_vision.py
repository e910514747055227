"""An ordinary Lightning script with another strategy: half a minute on two cores.

    pip install '.[examples]'
    python examples/unmodified_vision.py                       # four workers; half a minute on two cores
    python examples/unmodified_vision.py --kill                # one of them gets SIGKILL in the middle
    python examples/unmodified_vision.py --strategy auto --devices 1 --batch-size 128

A small convolutional network with batch normalization learns scikit-learn's handwritten digits. The last line is the
accuracy on those that it has not seen.
"""

import argparse
import os
import signal
from typing import Any

import lightning as L
import torch
import torchmetrics
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_recycle  # noqa: F401  registers the strategy


class DigitsModel(L.LightningModule):
    """Classifies images of 8 x 8 pixels."""

    def __init__(self, lr: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(256, 10),
        )
        self.train_accuracy = torchmetrics.Accuracy("multiclass", num_classes=10)
        self.val_accuracy = torchmetrics.Accuracy("multiclass", num_classes=10)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)  # type: ignore[no-any-return]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        output = self(x)
        loss = nn.functional.cross_entropy(output, y)
        self.train_accuracy(output, y)
        self.log("train_loss", loss, prog_bar=True)
        self.log("train_accuracy", self.train_accuracy, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        output = self(x)
        self.val_accuracy(output, y)
        self.log("val_loss", nn.functional.cross_entropy(output, y), prog_bar=True)
        self.log("val_accuracy", self.val_accuracy, prog_bar=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"])
        steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.hparams["lr"], total_steps=int(steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Digits(L.LightningDataModule):
    """1,437 digits to learn, 360 to test."""

    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        digits = load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
        data = TensorDataset(images[order], torch.tensor(digits.target)[order])
        self.train, self.val = torch.utils.data.random_split(
            data, [0.8, 0.2], generator=torch.Generator().manual_seed(0)
        )

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.val, batch_size=self.batch_size)


class KillsOneWorker(L.Callback):
    """The worker with rank 1 kills itself in the middle of the training, as a machine that loses power would."""

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_rank == 1 and trainer.global_step == int(trainer.estimated_stepping_batches) // 2:
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="recycle")
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=32, help="of each worker")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--kill", action="store_true", help="kill one worker in the middle")
    options = parser.parse_args()
    L.seed_everything(0)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=options.devices,
        strategy=options.strategy,
        max_epochs=options.epochs,
        logger=False,
        enable_checkpointing=False,
        callbacks=[KillsOneWorker()] if options.kill else [],
    )
    trainer.fit(DigitsModel(), datamodule=Digits(options.batch_size))
    print(f"Validation accuracy: {float(trainer.callback_metrics['val_accuracy']):.3f}")


if __name__ == "__main__":
    main()
