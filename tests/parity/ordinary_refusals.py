"""What docs/trainer_flags.md refuses, for an ordinary module: on which grids, and the words of the error."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import same_script as same
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder, ModelPruning, StochasticWeightAveraging
from ordinary_flags import fits
from ordinary_runs import STAGES, Case, Ordinary, Script, Session, on_a_grid
from torch import nn
from torch.utils.data import DataLoader

from lightning_recycle import LayerSpec, UnsupportedFeatureError
from lightning_recycle.launch.launcher import RunAttempt


@dataclass(frozen=True)
class Refusal:
    """A script that is refused before anything starts, as rows of the page say."""

    rows: tuple[str, ...]
    script: Script
    words: tuple[str, ...]
    stages: tuple[int, ...] = STAGES


def check(refusal: Refusal, stages: int, pipeline: bool, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script is refused in the words of ``refusal``, and no worker is started."""

    def start(*_: Any, **__: Any) -> None:
        raise AssertionError("workers were started")

    monkeypatch.setattr(RunAttempt, "run", start)
    with pytest.raises(UnsupportedFeatureError) as caught:
        on_a_grid(Case(refusal.rows, refusal.script, lambda run: True), stages, "none", root, pipeline)
    assert all(word in str(caught.value) for word in refusal.words), caught.value


class PipelineWithBatchNorm(same.Classifier):
    def configure_pipeline(self) -> list[Any]:
        return [LayerSpec(nn.BatchNorm1d, 8), *super().configure_pipeline()]


class WithBatchNorm(Ordinary):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.BatchNorm1d(8), *self.net).double()


def with_loader(make: Callable[[Session], Any]) -> Script:
    return fits(data=make, validates=False)


REFUSALS: dict[str, Refusal] = {
    "num_nodes": Refusal(("`num_nodes`",), fits(num_nodes=2), ("num_nodes=2",)),
    "precision 16-true": Refusal(("`precision` `16-true`, others",), fits(precision="16-true"),
        ("precision='16-true'", "'bf16-true'")),
    "sync_batchnorm": Refusal(("`sync_batchnorm`",), fits(sync_batchnorm=True), ("sync_batchnorm=True", "LayerNorm")),
    "StochasticWeightAveraging with BatchNorm": Refusal(("`StochasticWeightAveraging`",),
        fits(WithBatchNorm, PipelineWithBatchNorm, callbacks=lambda root: [StochasticWeightAveraging(1e-2)]),
        ("StochasticWeightAveraging", "BatchNorm", "EMAWeightAveraging")),
    "ModelPruning": Refusal(("`ModelPruning`",), fits(callbacks=lambda root: [ModelPruning("l1_unstructured")]),
        ("ModelPruning", "one stage", "pipeline_parallel_size=1"), stages=(2,)),
    "a sampler of one replica": Refusal(("another sampler that divides the data",),
        with_loader(lambda s: DataLoader(s.data.training().dataset, batch_size=4, sampler=same.OwnShare())),
        ("OwnShare(num_replicas=4)", "shuffle=True", "DistributedSampler")),
    "LearningRateFinder": Refusal(("`LearningRateFinder`, `Tuner.lr_find`",),
        fits(callbacks=lambda root: [LearningRateFinder()]),
        ("LearningRateFinder", "Tuner(Trainer(devices=1)).lr_find", "learning rate")),
    "BatchSizeFinder": Refusal(("`BatchSizeFinder`, `Tuner.scale_batch_size`",),
        fits(callbacks=lambda root: [BatchSizeFinder()]),
        ("BatchSizeFinder", "Tuner(Trainer(devices=1)).scale_batch_size", "batch size")),
}  # fmt: skip
