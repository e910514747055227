"""An ordinary Lightning script that trains low-rank adapters (LoRA): half a minute on two cores.

    pip install peft transformers
    python examples/unmodified_lora.py                         # four workers; half a minute on two cores
    python examples/unmodified_lora.py --kill                  # one of them gets SIGKILL in the middle
    python examples/unmodified_lora.py --strategy auto --devices 1 --batch-size 64

A small Llama with random weights, which stay as they are, learns through its adapters to continue sequences that repeat
themselves. Nothing is downloaded. The last lines are the loss on sequences that it has not seen, and where the adapters
are.
"""

import argparse
import os
import signal
from pathlib import Path
from typing import Any

import lightning as L
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM

import lightning_recycle  # noqa: F401  registers the strategy

VOCABULARY = 32


class Repeating(Dataset[Tensor]):
    """Sequences (length,) of random tokens with a period of 2 to 4."""

    def __init__(self, count: int, first: int = 0, length: int = 24) -> None:
        self.count, self.first, self.length = count, first, length

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.first + index)
        period = int(torch.randint(2, 5, (), generator=generator))
        tokens = torch.randint(VOCABULARY, (period,), generator=generator)
        return tokens.repeat(self.length // period + 1)[: self.length]


class Adapted(L.LightningModule):
    """A language model of which only the adapters are trained."""

    def __init__(self, lr: float = 3e-3, dropout: float = 0.05) -> None:
        super().__init__()
        self.save_hyperparameters()
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, tie_word_embeddings=False, **sizes))
        adapters = LoraConfig(r=8, lora_alpha=16, lora_dropout=dropout, target_modules="all-linear")
        self.model = get_peft_model(model, adapters)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.model(input_ids=batch, labels=batch).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss  # type: ignore[no-any-return]

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.model(input_ids=batch, labels=batch).loss, prog_bar=True)

    def configure_optimizers(self) -> Any:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=self.hparams["lr"])


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
    parser.add_argument("--batch-size", type=int, default=16, help="of each worker")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--folder", type=Path, default=Path("outputs/lora"), help="where the adapters are saved")
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
    model = Adapted()
    train = DataLoader(Repeating(2048), batch_size=options.batch_size, shuffle=True)
    trainer.fit(model, train, DataLoader(Repeating(256, first=2048), batch_size=options.batch_size))
    print(f"Validation loss: {float(trainer.callback_metrics['val_loss']):.3f}")
    model.model.save_pretrained(options.folder)
    print(f"The adapters are in {options.folder}.")


if __name__ == "__main__":
    main()
