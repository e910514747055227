"""Trains models of public projects, unmodified, with and without a kill, and compares their weights.

    python benchmarks/projects.py CHECKOUTS [--only NAME ...] [--stages 1 2]

``CHECKOUTS`` is a folder with checkouts of the projects (``NAMES`` tells which); nothing is fetched. A project's
LightningModule is used as it is; a model that has none gets one whose step calls it. Dropout is off, as its draws are
different ones on each side, and everything is in float64.

For each project: Lightning's DDP in two processes, then ``ReCycleStrategy`` on the same batches with two pipelines,
with one stage and with two where the model is a chain, each without a failure and with a worker killed from outside, by
SIGKILL, at a moment that nobody chose. Two stages have two micro-batches, or one where batch normalisation would see
the difference. Printed are the largest differences of the trained weights. Two lines of the script differ from the one
with DDP: the import and the strategy.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from harness import console, describe_machine, quieten
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from rich.table import Table
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_recycle import ReCycleStrategy
from lightning_recycle.errors import ReCycleError

STEPS, BATCH, PIPELINES = 12, 8, 2
VOCABULARY, CONTEXT = 64, 16


class Step(L.LightningModule):
    """The training step for a model that has none: ``loss(model, batch)``."""

    def __init__(self, model: nn.Module, loss: Callable[[nn.Module, Any], torch.Tensor]) -> None:
        super().__init__()
        self.model = model
        self.loss = loss

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(self.model, batch)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


@dataclass(frozen=True)
class Project:
    """One model of a project.

    Args:
        folder: of its checkout, to be imported from.
        build: makes the LightningModule.
        data: makes tensors, the first dimension of which counts samples.
        pipeline: the option of that name that two stages need; None if the chain is found.
        chain: whether the model can have two stages.
    """

    folder: str
    build: Callable[[], L.LightningModule]
    data: Callable[[int], tuple[torch.Tensor, ...]]
    pipeline: str | None = None
    chain: bool = True


# ---------------------------------------------------------------------- data


def _images(samples: int, channels: int = 1, size: int = 28) -> tuple[torch.Tensor, ...]:
    return torch.randn(samples, channels, size, size, dtype=torch.float64), torch.randint(10, (samples,))


def _tokens(samples: int) -> tuple[torch.Tensor, ...]:
    text = torch.randint(1, VOCABULARY, (samples, CONTEXT + 1))
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def _segments(samples: int) -> tuple[torch.Tensor, ...]:
    images, _ = _images(samples, 3, 32)
    return images, torch.randint(4, (samples, 32, 32))


# ---------------------------------------------------------------------- losses


def _own_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(*batch)[1]


def _cross_entropy(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def _segmentation(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def _language(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(input_ids=batch[0], labels=batch[0]).loss


# ---------------------------------------------------------------------- projects


def _autoencoder() -> L.LightningModule:
    from autoencoder import LitAutoEncoder

    return LitAutoEncoder()


def _transformer() -> L.LightningModule:
    from transformer import LanguageModel

    return LanguageModel(VOCABULARY)


def _nano_gpt() -> L.LightningModule:
    from model import GPT, GPTConfig

    return Step(GPT(GPTConfig(CONTEXT, VOCABULARY, n_layer=4, n_head=2, n_embd=32)), _own_loss)


def _min_gpt() -> L.LightningModule:
    from mingpt.model import GPT

    config = GPT.get_default_config()
    config.model_type, config.n_layer, config.n_head, config.n_embd = None, 4, 2, 32
    config.vocab_size, config.block_size = VOCABULARY, CONTEXT
    return Step(GPT(config), _own_loss)


def _lit_gpt() -> L.LightningModule:
    from litgpt.config import Config
    from litgpt.model import GPT

    sizes = {"n_layer": 4, "n_head": 2, "n_embd": 32, "block_size": CONTEXT, "padded_vocab_size": VOCABULARY}
    return Step(GPT(Config(**sizes)), _cross_entropy)


def _gpt2() -> L.LightningModule:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": VOCABULARY, "n_positions": CONTEXT, "n_embd": 32, "n_layer": 4, "n_head": 2}
    return Step(GPT2LMHeadModel(GPT2Config(**sizes, use_cache=False)), _language)


def _llama() -> L.LightningModule:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4}
    return Step(LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, use_cache=False)), _language)


def _bert() -> L.LightningModule:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4}
    return Step(BertForMaskedLM(BertConfig(**sizes, num_attention_heads=2)), _language)


def _unet() -> L.LightningModule:
    from unet import UNet

    return Step(UNet(4, num_layers=3, features_start=8), _segmentation)


def _hydra_template() -> L.LightningModule:
    from functools import partial

    from src.models.components.simple_dense_net import SimpleDenseNet
    from src.models.mnist_module import MNISTLitModule

    scheduler = partial(torch.optim.lr_scheduler.ReduceLROnPlateau, mode="min", factor=0.1, patience=10)
    return MNISTLitModule(SimpleDenseNet(), partial(torch.optim.Adam, lr=0.001), scheduler, compile=False)


PROJECTS: dict[str, Project] = {
    "Lightning's autoencoder": Project("lightning/examples/pytorch/basics", _autoencoder, _images, "decoder"),
    "Lightning's transformer": Project("lightning/examples/pytorch/basics", _transformer, _tokens, chain=False),
    "nanoGPT": Project("nanoGPT", _nano_gpt, _tokens),
    "minGPT": Project("minGPT", _min_gpt, _tokens),
    "litgpt": Project("litgpt", _lit_gpt, _tokens),
    "Hugging Face GPT-2": Project(".", _gpt2, _tokens),
    "Hugging Face Llama": Project(".", _llama, _tokens),
    "Hugging Face BERT": Project(".", _bert, _tokens),
    "bolts' UNet": Project("lightning-bolts/src/pl_bolts/models/vision", _unet, _segments, chain=False),
    "lightning-hydra-template": Project("lightning-hydra-template", _hydra_template, _images),
}


# ---------------------------------------------------------------------- one training


class _Data(L.LightningDataModule):
    """The samples in their order: left alone, Lightning's DDP shuffles training data whatever the DataLoader says."""

    def __init__(self, data: TensorDataset, validates: bool) -> None:
        super().__init__()
        self.data = data
        self.validates = validates

    def train_dataloader(self) -> DataLoader[Any]:
        rank = self.trainer.global_rank if self.trainer is not None else 0
        sampler: Any = DistributedSampler(self.data, PIPELINES, rank, shuffle=False)
        return DataLoader(self.data, BATCH, sampler=sampler)

    def val_dataloader(self) -> Any:
        return DataLoader(self.data, BATCH) if self.validates else []


class _Victim(L.Callback):
    """In one worker: tells its process id in ``path`` after a few steps, and takes its time."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if getattr(trainer.strategy, "grid_rank", 0) == PIPELINES * trainer.strategy.pipeline_parallel_size - 1:
            if trainer.global_step == 2:
                self.path.with_suffix(".new").write_text(str(os.getpid()))
                self.path.with_suffix(".new").rename(self.path)
            time.sleep(0.02)


def _kill_from_outside(path: Path) -> None:
    while not path.exists():
        time.sleep(0.005)
    os.kill(int(path.read_text()), signal.SIGKILL)


def train(project: Project, strategy: Any, stages: int = 1, kill: bool = False) -> dict[str, torch.Tensor]:
    """The trained parameters, by name; batch-normalisation's statistics are left out, as peers have their own."""
    torch.manual_seed(0)
    module, data = project.build().double(), TensorDataset(*project.data(STEPS * BATCH * PIPELINES))
    for part in module.modules():
        if isinstance(getattr(part, "dropout", None), float):
            part.dropout = 0.0
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "victim"
        trainer = L.Trainer(
            accelerator="cpu",
            devices=PIPELINES * stages,
            strategy=strategy,
            max_steps=STEPS,
            precision="64-true",
            callbacks=[_Victim(path)] if kill else [],
            num_sanity_val_steps=0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        if kill:
            threading.Thread(target=_kill_from_outside, args=(path,), daemon=True).start()
        trainer.fit(module, _Data(data, is_overridden("validation_step", module)))
        if kill and not any(event.kind == "failure" for event in trainer.strategy.history):
            raise RuntimeError("nobody was killed")
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def _difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> str:
    assert a.keys() == b.keys()
    return f"{max(float((a[name] - b[name]).abs().max()) for name in a):.1e}"


def main(arguments: list[str] | None = None) -> None:
    """Trains what is asked for and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", type=Path)
    parser.add_argument("--only", nargs="*", choices=list(PROJECTS), default=list(PROJECTS))
    parser.add_argument("--stages", nargs="*", type=int, default=[1, 2])
    options = parser.parse_args(arguments)
    quieten()
    warnings.filterwarnings("ignore")
    table = Table("project", "stages", "from DDP", "with a kill, from DDP")
    for name in options.only:
        project = PROJECTS[name]
        sys.path.insert(0, str((options.checkouts / project.folder).resolve()))
        reference = train(project, DDPStrategy(start_method="fork"))
        for stages in options.stages:
            if stages > 1 and not project.chain:
                table.add_row(name, str(stages), "no chain", "")
                continue
            pipeline = project.pipeline if stages > 1 else None
            normalises = any(isinstance(part, _BatchNorm) for part in project.build().modules())
            microbatches = 1 if normalises else stages
            found = []
            for kill in (False, True):
                strategy = ReCycleStrategy(
                    pipeline_parallel_size=stages, num_microbatches=microbatches, layers=pipeline
                )
                try:
                    found.append(_difference(reference, train(project, strategy, stages, kill)))
                except ReCycleError as error:
                    found.append(str(error))
            table.add_row(name, str(stages), *found)
            console.print(f"{name}, {stages} stages: {', '.join(found)}", highlight=False)
    console.print(table)
    console.print(describe_machine())


if __name__ == "__main__":
    main()
