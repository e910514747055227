"""Cases of docs/trainer_flags.md for an ordinary module: callbacks."""

import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import same_script as same
import torch
from lightning.pytorch import callbacks as cb
from ordinary_flags import StopsAtOnce, fits
from ordinary_runs import Case, Ordinary, Scheduled, ScheduledPipeline, Session, WithExample, columns, files, to_both
from torch import Tensor


def callback(run: same.Run, kind: type) -> Any:
    """The callback of a kind in the launching process."""
    return next(found for found in run.trainer.callbacks if type(found) is kind)


def several_checkpoints(root: Path) -> list[Any]:
    best = {"monitor": "val_loss", "save_top_k": 2, "save_last": True, "filename": "{epoch}-{val_loss:.4f}"}
    by_step = {"monitor": "train_loss_step", "every_n_train_steps": 2, "save_top_k": 3, "mode": "max"}
    return [
        cb.ModelCheckpoint(root / "best", **best),
        cb.ModelCheckpoint(root / "by_step", **by_step, filename="{step}-{train_loss_step:.4f}"),
        cb.ModelCheckpoint(root / "by_epoch", monitor="train_loss_epoch", save_on_train_epoch_end=True),
        cb.ModelCheckpoint(root / "steps", every_n_train_steps=3, save_top_k=-1, save_weights_only=True),
        cb.ModelCheckpoint(root / "timed", train_time_interval=timedelta(seconds=0), save_top_k=-1),
    ]


def watch(root: Path) -> list[Any]:
    return [
        cb.EarlyStopping("val_loss", patience=2),
        cb.LearningRateMonitor(log_momentum=True),
        cb.Timer("00:00:10:00"),
    ]


class Saves(cb.Callback):
    """Asks for the end of the run from within it, as a scheduler of jobs does."""

    def __init__(self) -> None:
        self.caller = os.getpid()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 7 and trainer.is_global_zero:
            os.kill(self.caller, signal.SIGTERM)


def interrupted(session: Session) -> None:
    savers = [
        cb.OnExceptionCheckpoint(session.root / "any"),
        cb.ModelCheckpoint(session.root, "model", save_on_exception=True, every_n_train_steps=10_000),
    ]
    trainer = session.trainer(max_steps=10_000, callbacks=[Saves(), *savers], enable_checkpointing=True)
    with pytest.raises(SystemExit):
        trainer.fit(session.chosen(), session.data.training())


def of_one_step(run: same.Run) -> bool:
    """Whether both callbacks that save when a run is interrupted did, at the same boundary."""
    paths = [run.root / name for name in ("any/on_exception.ckpt", "model.ckpt")]
    return len({torch.load(path, weights_only=True)["global_step"] for path in paths}) == 1


class WritesSummary(cb.ModelSummary):
    @staticmethod
    def summarize(*summary: Any, path: Path, **flops: Any) -> None:
        with path.open("a") as file:
            file.write(f"{summary} {flops}")


def summarized(session: Session) -> None:
    path = session.root / "summary.txt"
    fits(WithExample, callbacks=lambda root: [WritesSummary(2, path=path)], enable_model_summary=True)(session)
    session.run.results["summary"] = path.read_text()


def batch_size(batch: Any) -> int:
    return len(batch[0])


class Writer(cb.BasePredictionWriter):
    """Writes predictions and the indices of their samples; fails if another worker has written them."""

    def __init__(self, folder: Path) -> None:
        super().__init__("batch_and_epoch")
        self.folder = folder

    def write_on_batch_end(self, trainer: Any, module: Any, prediction: Any, indices: Any, *where: Any) -> None:
        batch, batch_idx, loader = where
        self._write(f"batch-{loader}_{batch_idx}.pt", (prediction, indices, batch[0], batch[1]))

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, indices: Any) -> None:
        self._write("epoch.pt", (predictions, indices))

    def _write(self, name: str, value: Any) -> None:
        self.folder.mkdir(exist_ok=True)
        with open(self.folder / name, "xb") as file:
            torch.save(value, file)


def predicts(session: Session) -> None:
    folder = session.root / "predictions"
    trainer = session.trainer(callbacks=[Writer(folder)])
    model, loaders = session.chosen(), [session.data.validation(), session.data.loader(5, seed=3)]
    returned = trainer.predict(model, loaders)
    written = {path.name: torch.load(path) for path in folder.iterdir()}
    session.run.results["predict"] = {"returned": returned, "written": written}


class Counts(cb.Callback):
    """Keeps a state of its own, which a checkpoint has and a replacement would need."""

    def __init__(self) -> None:
        self.seen: dict[str, int] = {}

    def count(self, what: str) -> None:
        self.seen[what] = self.seen.get(what, 0) + 1

    def on_train_batch_end(self, *_: Any) -> None:
        self.count("batches")

    def on_validation_end(self, *_: Any) -> None:
        self.count("validations")

    def state_dict(self) -> dict[str, Any]:
        return dict(self.seen)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = dict(state)


def lambdas(root: Path) -> list[Any]:
    counts = Counts()
    return [
        counts,
        cb.LambdaCallback(
            on_train_epoch_start=lambda trainer, module: setattr(module, "epoch_seen", trainer.current_epoch)
        ),
    ]


class ByEpoch(Ordinary):
    """With a schedule that StochasticWeightAveraging replaces."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


class Backbone(Ordinary):
    """Two chains in a row, the first of which is trained later."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = self.net[:4], self.net[4:]
        del self.net

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(filter(lambda p: p.requires_grad, self.parameters()), lr=1e-2)


def profilers(kind: str, root: Path) -> dict[str, Any]:
    return {"profiler": getattr(L.pytorch.profilers, kind)(root, kind.lower())}


def traced(run: same.Run) -> bool:
    """Whether traces have the operations of the layers."""
    traces = [path.read_text() for path in run.root.glob("*.json")]
    return len(traces) > 0 and all("aten::linear" in trace for trace in traces)


CALLBACKS: dict[str, Case] = {
    "EarlyStopping": Case(("`EarlyStopping`", "learning-rate schedulers, `ReduceLROnPlateau`"),
        fits(lambda: Scheduled(0.4), lambda: ScheduledPipeline(0.4), max_epochs=20, trainer=to_both, callbacks=watch),
        lambda run: 1 < callback(run, cb.EarlyStopping).stopped_epoch < 19, at=("training", 9)),
    "ModelCheckpoint": Case(("`ModelCheckpoint`",),
        fits(lambda: Scheduled(0.4), callbacks=several_checkpoints, enable_checkpointing=True, max_epochs=3),
        lambda run: callback(run, cb.ModelCheckpoint).best_model_path),
    "ModelCheckpoint, killed in a validation": Case(("`ModelCheckpoint`",),
        fits(lambda: Scheduled(0.4), callbacks=several_checkpoints, enable_checkpointing=True, val_check_interval=0.5),
        lambda run: callback(run, cb.ModelCheckpoint).best_model_path, at=("validation", 2)),
    "OnExceptionCheckpoint": Case(
        ("`ModelCheckpoint(save_on_exception=True)`, `OnExceptionCheckpoint`",),
        interrupted,
        of_one_step,
        ignored=("weights", "progress", "metrics", "csv", "hooks", "attributes"),  # it ends after one of the next steps
    ),
    "schedulers": Case(("learning-rate schedulers, `ReduceLROnPlateau`", "`LearningRateMonitor`"),
        fits(lambda: Scheduled(0.4),
            callbacks=lambda root: [cb.LearningRateMonitor(log_momentum=True, log_weight_decay=True)], max_epochs=4),
        lambda run: any("momentum" in name for name in columns(run)), at=("validation", 1)),
    "ThroughputMonitor": Case(("`ThroughputMonitor`",),
        fits(callbacks=lambda root: [cb.ThroughputMonitor(batch_size_fn=batch_size, window_size=2)]),
        lambda run: "train/device/samples_per_sec" in columns(run)),
    "DeviceStatsMonitor": Case(("`DeviceStatsMonitor`",),
        fits(callbacks=lambda root: [cb.DeviceStatsMonitor(cpu_stats=True)]),
        lambda run: any("DeviceStatsMonitor" in name for name in columns(run))),
    "ModelSummary": Case(("`ModelSummary`, `RichModelSummary`", "`enable_model_summary`"), summarized,
        lambda run: "484" in run.results["summary"] and "[2, 4]" in run.results["summary"]),
    "RichModelSummary": Case(("`ModelSummary`, `RichModelSummary`",),
        fits(callbacks=lambda root: [cb.RichModelSummary(max_depth=2)], enable_model_summary=True),
        lambda run: run.progress == (2, 8)),
    "Timer": Case(("`Timer`",), fits(callbacks=lambda root: [cb.Timer("00:00:10:00", interval="epoch")]),
        lambda run: callback(run, cb.Timer).time_elapsed() > 0),
    "TQDMProgressBar": Case(("`TQDMProgressBar`, `RichProgressBar`",),
        fits(callbacks=lambda root: [cb.TQDMProgressBar(refresh_rate=2)], enable_progress_bar=True),
        lambda run: callback(run, cb.TQDMProgressBar)),
    "RichProgressBar": Case(("`TQDMProgressBar`, `RichProgressBar`",),
        fits(callbacks=lambda root: [cb.RichProgressBar(leave=True)], enable_progress_bar=True),
        lambda run: callback(run, cb.RichProgressBar)),
    "BasePredictionWriter": Case(
        ("`BasePredictionWriter`",),
        predicts,
        lambda run: (
            [len(torch.cat(loader)) for loader in run.results["predict"]["returned"]] == [same.VALIDATION_SAMPLES, 5]
        ),
        at=("predict", 1),
    ),
    "LambdaCallback and a state": Case(("`LambdaCallback`",), fits(callbacks=lambdas),
        lambda run: callback(run, Counts).seen == {"batches": 8, "validations": 3} and run.module.epoch_seen == 1),
    "AdvancedProfiler": Case(("`SimpleProfiler`, `AdvancedProfiler`",),
        fits(trainer=lambda root: profilers("AdvancedProfiler", root)),
        lambda run: "fit-advancedprofiler.txt" in files(run)),
    "PyTorchProfiler": Case(
        ("`PyTorchProfiler`",),
        fits(trainer=lambda root: profilers("PyTorchProfiler", root), max_epochs=1),
        lambda run: traced(run) and any(name.endswith(".txt") for name in files(run)),
        at=("training", 2),
        ignored=("files",),  # a trace has the time in its name
    ),
    "EMAWeightAveraging": Case(
        ("`WeightAveraging`, `EMAWeightAveraging`",),
        fits(
            Scheduled,
            callbacks=lambda root: [
                cb.EMAWeightAveraging(decay=0.8, update_starting_at_step=2),
                cb.ModelCheckpoint(root / "saved", save_last=True),
            ],
            enable_checkpointing=True,
        ),
        lambda run: "saved/last.ckpt" in files(run),
        at=("training", 3),  # averages exist, and no checkpoint is under way that the next leader would ask for again
    ),
    "StochasticWeightAveraging instead of a schedule": Case(("`StochasticWeightAveraging`", "the Trainer after a run"),
        fits(ByEpoch, callbacks=lambda root: [cb.StochasticWeightAveraging(0.05, 1, 2, "linear")], max_epochs=3),
        lambda run: type(run.trainer.lr_scheduler_configs[0].scheduler).__name__ == "SWALR"),
    "GradientAccumulationScheduler": Case(("`GradientAccumulationScheduler`",),
        fits(callbacks=lambda root: [cb.GradientAccumulationScheduler({0: 1, 1: 2, 3: 1})], max_epochs=4),
        lambda run: run.progress[1] == 4 + 2 + 2 + 4, at=("training", 6)),
    "BackboneFinetuning": Case(("`BaseFinetuning`, `BackboneFinetuning`",),
        fits(Backbone, callbacks=lambda root: [cb.BackboneFinetuning(unfreeze_backbone_at_epoch=1)], max_epochs=3),
        lambda run: len(run.trainer.optimizers[0].param_groups) == 2, strategy={"layers": ["backbone", "head"]}),
    "ModelPruning": Case(("`ModelPruning`",),
        fits(callbacks=lambda root: [cb.ModelPruning("l1_unstructured", amount=0.3)]),
        lambda run: int((run.weights["net.0.weight"] == 0).sum()) > 10, stages=(1,)),
    "should_stop": Case(("`trainer.should_stop`",), fits(callbacks=lambda root: [StopsAtOnce()]),
        lambda run: run.progress[1] == 1, at=("training", 0)),
}  # fmt: skip
