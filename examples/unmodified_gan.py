"""An ordinary Lightning script with manual optimization, a GAN: half a minute on two cores.

    python examples/unmodified_gan.py                       # four workers; half a minute on two cores
    python examples/unmodified_gan.py --kill                # one of them gets SIGKILL between the two optimizers' steps
    python examples/unmodified_gan.py --strategy auto --devices 1 --batch-size 128

A generator learns to draw scikit-learn's handwritten digits against a discriminator that tells them from real ones. The
last lines are one of its drawings, and how far the mean of many is from the mean digit.
"""

import argparse
import os
import signal
from typing import Any

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_recycle  # noqa: F401  registers the strategy

PIXELS = 64  # 8 x 8


class GAN(L.LightningModule):
    """Draws images of 8 x 8 pixels from ``latent`` random numbers."""

    def __init__(self, latent: int = 16, lr: float = 2e-3, kill: bool = False) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator = nn.Sequential(
            nn.Linear(latent, 128), nn.LeakyReLU(0.2), nn.Linear(128, 128), nn.LeakyReLU(0.2), nn.Linear(128, PIXELS),
            nn.Sigmoid(),
        )  # fmt: skip
        self.discriminator = nn.Sequential(
            nn.Linear(PIXELS, 128), nn.LeakyReLU(0.2), nn.Dropout(0.3), nn.Linear(128, 1)
        )

    def forward(self, z: Tensor) -> Tensor:
        return self.generator(z)  # type: ignore[no-any-return]

    def taken_for(self, x: Tensor, real: bool) -> Tensor:
        """The discriminator's loss if ``x`` is real, or is not."""
        logits = self.discriminator(x)
        return nn.functional.binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(real)))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        (real,) = batch
        g_optimizer, d_optimizer = self.optimizers()  # type: ignore[attr-defined]
        z = torch.randn(len(real), self.hparams["latent"], device=self.device)

        self.toggle_optimizer(g_optimizer)
        g_loss = self.taken_for(self(z), True)
        g_optimizer.zero_grad()
        self.manual_backward(g_loss)
        g_optimizer.step()
        self.untoggle_optimizer(g_optimizer)

        if self.hparams["kill"] and self.trainer.global_rank == 1 and self.trainer.current_epoch == 2:
            os.kill(os.getpid(), signal.SIGKILL)  # as a machine that loses power would end

        self.toggle_optimizer(d_optimizer)
        d_loss = (self.taken_for(real, True) + self.taken_for(self(z).detach(), False)) / 2
        d_optimizer.zero_grad()
        self.manual_backward(d_loss)
        d_optimizer.step()
        self.untoggle_optimizer(d_optimizer)
        self.log_dict({"g_loss": g_loss, "d_loss": d_loss}, prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> Any:
        lr = self.hparams["lr"]
        return [
            torch.optim.Adam(self.generator.parameters(), lr=lr, betas=(0.5, 0.999)),
            torch.optim.Adam(self.discriminator.parameters(), lr=lr, betas=(0.5, 0.999)),
        ]


def digits() -> Tensor:
    """1,797 handwritten digits, as (digit, pixel) from 0 to 1."""
    return torch.tensor(load_digits().images, dtype=torch.float32).flatten(1) / 16


def drawn(model: GAN, count: int, seed: int = 1) -> Tensor:
    """``count`` drawings, as (drawing, pixel)."""
    z = torch.randn(count, model.hparams["latent"], generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        return model.cpu().eval()(z)  # type: ignore[no-any-return]


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="recycle")
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=32, help="of each worker")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--kill", action="store_true", help="kill one worker in the third epoch")
    options = parser.parse_args()
    L.seed_everything(0)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=options.devices,
        strategy=options.strategy,
        max_epochs=options.epochs,
        logger=False,
        enable_checkpointing=False,
    )
    model = GAN(kill=options.kill)
    trainer.fit(model, DataLoader(TensorDataset(digits()), options.batch_size, shuffle=True, drop_last=True))
    for row in drawn(model, 1).view(8, 8):
        print("".join(" .:-=+*#%@"[int(9.99 * shade)] for shade in row.tolist()))
    distance = (drawn(model, 1000).mean(0) - digits().mean(0)).abs().mean()
    print(f"Mean distance from the mean digit: {float(distance):.3f}")


if __name__ == "__main__":
    main()
