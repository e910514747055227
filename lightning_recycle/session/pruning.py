"""``ModelPruning``: parameters that are masked while a run goes on.

Concept: torch's pruning replaces a parameter ``weight`` by ``weight_orig``, the same object, and a buffer
``weight_mask``. The callback does so on every worker, which needs the whole model for it: one stage. What is pruned at
random is the same everywhere, whichever workers have died or joined; and a process that did not see it done (a worker
that joins, the launching process) takes the form of a state dict before it loads that.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelPruning
from torch import nn
from torch.nn.utils import prune

from lightning_recycle.errors import UnsupportedFeatureError
from lightning_recycle.randomness import derive_seed, layer_randomness, seeded_everything

__all__ = ["Pruning", "check_pruning", "take_pruned_form"]

_ORIGINAL, _MASK = "_orig", "_mask"
_PURPOSE = 7_308_893_256_327_950_949  # sets these draws apart from others with the same seed and step


def check_pruning(trainer: pl.Trainer, stages: int) -> None:
    """Raises UnsupportedFeatureError if a callback would prune the layers of a stage as if they were the model."""
    if stages > 1 and _callbacks(trainer):
        raise UnsupportedFeatureError(
            "strategy='recycle' supports the callback ModelPruning with one stage only: it prunes what it finds in the"
            " whole model. Use pipeline_parallel_size=1, or prune the model before fit, or after it."
        )


def take_pruned_form(module: nn.Module, names: Collection[str]) -> None:
    """Masks those parameters of ``module`` that are masked in a state dict with these ``names``, and no others."""
    for path, part in module.named_modules():
        prefix = f"{path}." if path else ""
        for name in [name for name, value in part._parameters.items() if value is not None]:
            plain = name.removesuffix(_ORIGINAL)
            if name == plain and f"{prefix}{name}{_ORIGINAL}" in names and f"{prefix}{name}{_MASK}" in names:
                prune.identity(part, name)
            elif name != plain and hasattr(part, plain + _MASK) and f"{prefix}{plain}" in names:
                prune.remove(part, plain)


class Pruning:
    """The ``ModelPruning`` callbacks of a worker's Trainer."""

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer

    def connect(self, seed: int) -> None:
        """Lets them draw from (seed, step)."""
        for callback in _callbacks(self._trainer):
            run = partial(_seeded, callback._run_pruning, self._trainer, seed)
            vars(callback)["_run_pruning"] = run

    def release(self) -> None:
        """The run is over: the callbacks are Lightning's again."""
        for callback in _callbacks(self._trainer):
            vars(callback).pop("_run_pruning", None)


def _callbacks(trainer: pl.Trainer) -> list[ModelPruning]:
    return [callback for callback in trainer.callbacks if isinstance(callback, ModelPruning)]  # type: ignore[attr-defined]


def _seeded(run: Callable[[int], Any], trainer: pl.Trainer, seed: int, current_epoch: int) -> None:
    drawn = derive_seed(seed, trainer.global_step, _PURPOSE)
    with seeded_everything() as reseed, layer_randomness(trainer.strategy.root_device) as generator:
        reseed(drawn)
        generator.manual_seed(drawn)
        run(current_epoch)
