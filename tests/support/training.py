"""Runs on a grid, the plain loop that they must equal, and views of what a run left behind."""

import copy
from collections.abc import Sequence
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_recycle import PipelineModule
from lightning_recycle.callbacks import Fault, FaultInjectionCallback
from support.models import GLOBAL_BATCH, GLOBAL_MICROBATCHES, STEPS, dataset
from support.options import recycle_strategy

QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
"""A Trainer with these prints and writes nothing by itself."""

TOLERANCE = 1e-10
"""What float64 may lose by adding gradients in another order."""


def plain_loop(
    model: PipelineModule,
    data: TensorDataset,
    steps: int = STEPS,
    clip_norm: float | None = None,
    global_batch: int = GLOBAL_BATCH,
) -> dict[str, Tensor]:
    """Trains a copy of ``model`` in this process, without anything of this project's; returns its state dict."""
    reference = copy.deepcopy(model)
    layers = nn.Sequential(*reference.layers)
    configured = reference.configure_optimizers()
    optimizer = configured["optimizer"] if isinstance(configured, dict) else configured
    scheduler = configured["lr_scheduler"]["scheduler"] if isinstance(configured, dict) else None
    for step in range(steps):
        x, y = data[step * global_batch : (step + 1) * global_batch]
        optimizer.zero_grad()
        reference.loss(layers(x), y).backward()
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(layers.parameters(), clip_norm)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return reference.state_dict()


def on_one_device(**kwargs: Any) -> L.Trainer:
    """A quiet Trainer without anything of this project's."""
    return L.Trainer(accelerator="cpu", devices=1, **{**QUIET, **kwargs})


def grid_trainer(
    pipelines: int, stages: int, faults: Sequence[Fault] = (), strategy: dict[str, Any] | None = None, **kwargs: Any
) -> L.Trainer:
    """A quiet Trainer on ``pipelines`` x ``stages`` workers, for a module and data of a test's own."""
    callbacks = [FaultInjectionCallback(list(faults)), *kwargs.pop("callbacks", [])]
    return L.Trainer(
        accelerator="cpu",
        devices=pipelines * stages,
        strategy=recycle_strategy(**{"pipeline_parallel_size": stages, **(strategy or {})}),
        callbacks=callbacks,
        **{**QUIET, **kwargs},
    )


def trainer(
    pipelines: int, stages: int, faults: Sequence[Fault] = (), strategy: dict[str, Any] | None = None, **kwargs: Any
) -> L.Trainer:
    """As :func:`grid_trainer`, with the same global micro-batches on every grid."""
    options = {"num_microbatches": GLOBAL_MICROBATCHES // pipelines, "run_metrics": True, **(strategy or {})}
    return grid_trainer(pipelines, stages, faults, options, **{"max_steps": STEPS, **kwargs})


def samples_for(steps: int) -> TensorDataset:
    return dataset(GLOBAL_BATCH * max(steps, STEPS))


def fit(
    model: PipelineModule, pipelines: int, stages: int, faults: Sequence[Fault] = (), data: Any = None, **kwargs: Any
) -> L.Trainer:
    """Trains ``model`` and returns the trainer; by default on as many samples as its steps need."""
    loader, val, ckpt_path = kwargs.pop("loader", {}), kwargs.pop("val", None), kwargs.pop("ckpt_path", None)
    run = trainer(pipelines, stages, faults, **kwargs)
    data = samples_for(kwargs.get("max_steps", STEPS)) if data is None else data
    train = DataLoader(data, batch_size=GLOBAL_BATCH // pipelines, **loader)
    run.fit(model, train, val, ckpt_path=ckpt_path)
    return run


def exact_fit(
    model: PipelineModule, pipelines: int, stages: int, faults: Sequence[Fault] = (), data: Any = None, **kwargs: Any
) -> L.Trainer:
    """:func:`fit`, whose weights must be those of :func:`plain_loop` to 1e-10."""
    data = samples_for(kwargs.get("max_steps", STEPS)) if data is None else data
    expected = plain_loop(model, data, kwargs.get("max_steps", STEPS), kwargs.get("gradient_clip_val"))
    run = fit(model, pipelines, stages, faults, data, **kwargs)
    assert difference(model.state_dict(), expected) < TOLERANCE
    return run


def difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Largest absolute difference between two state dicts with the same names."""
    assert a.keys() == b.keys()
    pairs = [[t if t.is_complex() else t.double() for t in (a[name], b[name])] for name in a]
    return max(float((one - other).abs().max()) for one, other in pairs)


UNDISTURBED = {
    *("resumed", "regrouped", "step", "checkpoint_begun", "saved", "memory"),
    *("chosen", "replanned", "layout", "paused", "layers_moved"),
}


def undisturbed(run: L.Trainer) -> bool:
    """Whether the run's history tells nothing but training: a better plan or layout may come in any run."""
    others = [event for event in run.strategy.history if event.kind not in UNDISTURBED]
    print("disturbed by", *others, sep="\n")  # shown of a test that fails
    return not others


def failures(run: L.Trainer) -> list[tuple[int, int]]:
    """The workers that were lost, in order."""
    return [event.worker for event in run.strategy.history if event.kind == "failure"]


def committed_steps(run: L.Trainer) -> list[int]:
    return [event.step for event in run.strategy.history if event.kind == "step"]
