"""An ordinary LightningModule cut into two pipeline stages: half a minute on two cores.

    python examples/unmodified_stages.py                       # two pipelines of two stages; half a minute on two cores
    python examples/unmodified_stages.py --kill                # one of the workers gets SIGKILL in the middle
    recycle-run --nproc-per-node 4 examples/unmodified_stages.py      # the same with workers as on a cluster
    python examples/unmodified_stages.py --strategy auto --devices 1 --batch-size 32

A small GPT learns the bytes of a text. Its blocks are the chain that is cut: they are called one after another, each
with what the one before returned. Embeddings, the last norm and the head are outside of it. The last line is the loss
in bits per byte of text that it has not seen.
"""

import argparse
import math
import os
import signal
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_recycle import ReCycleStrategy


class Block(nn.Module):
    """Pre-norm causal self-attention and a feed-forward network; (batch, sequence, width) stays."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.query_key_value(self.norm_1(x)).chunk(3, dim=-1)
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.output(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.feed_forward(self.norm_2(x))  # type: ignore[no-any-return]


class TinyGPT(L.LightningModule):
    """Predicts the next byte."""

    def __init__(self, width: int = 64, heads: int = 4, layers: int = 4, context: int = 64, lr: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.token, self.position = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        self.head.weight = self.token.weight
        nn.init.normal_(self.token.weight, std=0.02)
        nn.init.normal_(self.position.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]

    def loss(self, window: Tensor) -> Tensor:
        return F.cross_entropy(self(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("bits_per_byte", self.loss(batch) / math.log(2), prog_bar=True)

    def configure_optimizers(self) -> Any:
        decays = [p for p in self.parameters() if p.dim() >= 2]
        others = [p for p in self.parameters() if p.dim() < 2]
        groups = [{"params": decays, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=self.hparams["lr"])


class Windows(Dataset[Tensor]):
    """Windows of ``length`` bytes and the one behind them."""

    def __init__(self, text: bytes, length: int) -> None:
        self.bytes, self.length = torch.frombuffer(bytearray(text), dtype=torch.uint8), length

    def __len__(self) -> int:
        return (len(self.bytes) - 1) // self.length

    def __getitem__(self, index: int) -> Tensor:
        start = index * self.length
        return self.bytes[start : start + self.length + 1].long()


class Text(L.LightningDataModule):
    """The source of the module ``argparse``; its last tenth is not trained with."""

    def __init__(self, batch_size: int, context: int = 64) -> None:
        super().__init__()
        self.batch_size, self.context = batch_size, context

    def setup(self, stage: str) -> None:
        with open(argparse.__file__, "rb") as file:
            text = file.read()
        border = len(text) * 9 // 10
        self.train, self.validation = Windows(text[:border], self.context), Windows(text[border:], self.context)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.train, self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.validation, self.batch_size)


class KillsOneWorker(L.Callback):
    """A worker of the last stage kills itself in the middle of the training, as a machine that loses power would."""

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        is_victim = isinstance(trainer.strategy, ReCycleStrategy) and trainer.strategy.grid_rank == 1
        if is_victim and trainer.global_step == int(trainer.estimated_stepping_batches) // 2:
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="recycle")
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=16, help="of a pipeline")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--kill", action="store_true", help="kill a worker in the middle")
    options = parser.parse_args()
    L.seed_everything(0)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=options.devices,
        strategy=ReCycleStrategy(pipeline_parallel_size=2) if options.strategy == "recycle" else options.strategy,
        max_epochs=options.epochs,
        callbacks=[KillsOneWorker()] if options.kill else [],
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(TinyGPT(), datamodule=Text(options.batch_size))
    print(f"Bits per byte: {float(trainer.callback_metrics['bits_per_byte']):.3f}")


if __name__ == "__main__":
    main()
