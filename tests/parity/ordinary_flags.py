"""Cases of docs/trainer_flags.md for an ordinary module: flags of the Trainer."""

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import same_script as same
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.callbacks import timer as timer_module
from lightning.pytorch.loops import training_epoch_loop as epoch_loop_module
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.plugins.io import TorchCheckpointIO
from ordinary_runs import Case, Ordinary, Scheduled, Script, Session, calls, csv_rows, files, validated_at
from support.training import difference
from torch import Tensor
from torch.utils.data import DataLoader, SequentialSampler


def made(callbacks: Callable[[Path], list[Any]] | None, session: Session) -> list[Any]:
    return callbacks(session.root) if callbacks else []


def fits(
    module: Callable[[], Any] = Ordinary,
    pipeline: Callable[[], Any] = same.Classifier,
    validates: bool = True,
    callbacks: Callable[[Path], list[Any]] | None = None,
    trainer: Callable[[Path], dict[str, Any]] | None = None,
    data: Callable[[Session], Any] | None = None,
    validation: Callable[[Session], Any] | None = None,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> Script:
    """A script that trains for two epochs of four batches, or as ``options`` say."""

    def script(session: Session) -> None:
        session.data.dtype = dtype
        arguments = {"max_epochs": 2, **options, **(trainer(session.root) if trainer else {})}
        run = session.trainer(**arguments, callbacks=made(callbacks, session))
        training = (data or (lambda s: s.data.training()))(session)
        validating = (validation or (lambda s: s.data.validation()))(session) if validates else None
        run.fit(session.chosen(module, pipeline), training, validating)

    return script


def evaluates(**options: Any) -> Script:
    def script(session: Session) -> None:
        trainer = session.trainer(**options)
        model, results = session.chosen(Ordinary, NotesInference), session.run.results
        results["validate"] = trainer.validate(model, session.data.validation(), verbose=False)
        results["test"] = trainer.test(model, session.data.validation(), verbose=False)
        results["predict"] = trainer.predict(model, session.data.validation())

    return script


class StopsAtOnce(Callback):
    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        trainer.should_stop = True


class TimePasses(Callback):
    """An hour passes for Lightning's clocks after the ``batches``-th batch, so that nothing depends on speed."""

    def __init__(self, batches: int) -> None:
        self.batches = batches

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self._set(3600.0 if trainer.fit_loop.epoch_loop.total_batch_idx >= self.batches else 0.0)

    def teardown(self, *_: Any, **__: Any) -> None:
        for module in (timer_module, epoch_loop_module):
            module.time = time

    def _set(self, seconds: float) -> None:
        for module in (timer_module, epoch_loop_module):
            module.time = SimpleNamespace(monotonic=lambda: time.monotonic() + seconds)


class LogsSettings(L.LightningModule):
    """Logs what flags set for the whole process."""

    def on_train_start(self) -> None:
        settings = {
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "benchmark": torch.backends.cudnn.benchmark,
            "anomaly": torch.is_anomaly_enabled(),
        }
        self.log_dict({name: float(value) for name, value in settings.items()}, on_step=False, on_epoch=True)


class NotesSettings(LogsSettings, Ordinary): ...


class PipelineOfSettings(LogsSettings, same.Classifier): ...


class NotesInference(same.Classifier):
    """Logs the mode of torch in which its tests run, as :class:`Ordinary` does."""

    def on_test_output(self, output: Tensor, target: Tensor) -> None:
        super().on_test_output(output, target)
        self.log("inference", float(torch.is_inference_mode_enabled()))


class InBFloat16(Ordinary):
    def __init__(self) -> None:
        super().__init__()
        self.float()


class WithHparams(Ordinary):
    def __init__(self, lr: float = 0.1, width: int = 16) -> None:
        super().__init__(lr)
        self.save_hyperparameters()


class NotesModes(Ordinary):
    """Logs the modes of torch in which its evaluations run."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        super().validation_step(batch, batch_idx)
        self.log("inference", float(torch.is_inference_mode_enabled()))
        self.log("grad", float(torch.is_grad_enabled()))


class NotingCheckpointIO(TorchCheckpointIO):
    """Leaves a note beside each checkpoint."""

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        super().save_checkpoint(checkpoint, path, storage_options)
        with open(f"{path}.note", "a") as file:
            file.write("saved")


class ReloadedData(L.LightningDataModule):
    """Other data in every epoch; counts, in its state, how often it was asked."""

    def __init__(self, data: same.Data) -> None:
        super().__init__()
        self.data, self.asked = data, 0

    def train_dataloader(self) -> Any:
        self.asked += 1
        return self.data.loader(same.GLOBAL_BATCH * 2, seed=10 + self.trainer.current_epoch)

    def val_dataloader(self) -> Any:
        return self.data.loader(5, seed=20 + self.trainer.current_epoch)

    def state_dict(self) -> dict[str, Any]:
        return {"asked": self.asked}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.asked = state["asked"]


def reloads(session: Session) -> None:
    trainer = session.trainer(max_epochs=4, reload_dataloaders_every_n_epochs=2)
    datamodule = ReloadedData(session.data)
    trainer.fit(session.chosen(), datamodule=datamodule)
    session.run.results["asked"] = datamodule.asked


class Backwards(SequentialSampler):
    def __iter__(self) -> Any:
        return iter(range(len(self))[::-1])


def backwards(session: Session) -> Any:
    data = session.data.training().dataset
    return DataLoader(data, batch_size=session.data.batch_size, sampler=Backwards(data))


def clipped(run: same.Run, bound: float) -> bool:
    return 0 < difference(run.weights, type(run.module)().state_dict()) < bound


def saved_once(run: same.Run, name: str) -> bool:
    return [(run.root / file).read_text() for file in files(run) if file.endswith(name)] == ["saved"]


def profiled(run: same.Run) -> bool:
    """Whether each worker that ended the run reports what Lightning does."""
    actions = ["run_training_epoch", "run_training_batch", "Strategy.training_step", "Strategy.validation_step"]
    actions.append(f"[LightningModule]{type(run.module).__name__}.optimizer_step")
    reports = [path.read_text() for path in run.root.glob("fit-simple*.txt")]
    return len(reports) >= run.trainer.num_devices - 1 and all(name in text for name in actions for text in reports)


def simple_profiler(root: Path) -> dict[str, Any]:
    return {"profiler": L.pytorch.profilers.SimpleProfiler(root, "simple")}


def by_default(root: Path) -> dict[str, Any]:
    """What the Trainer makes by itself: a logger, checkpoints, their folders."""
    return {"logger": True, "enable_checkpointing": True}


def half() -> MixedPrecision:
    """What ``precision="16-mixed"`` is on a GPU; on a CPU Lightning replaces it."""
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**8))


FLAGS: dict[str, Case] = {
    "a grid": Case(("`accelerator`, `strategy`, `devices`",), fits(), lambda run: run.progress == (2, 8)),
    "precision 32": Case(("`precision` `32-true`, `64-true`",), fits(InBFloat16, dtype=torch.float32),
        lambda run: run.weights["net.0.weight"].dtype is torch.float32, tolerance=1e-5),
    "precision bf16-true": Case(("`precision` `bf16-true`",),
        fits(InBFloat16, dtype=torch.float32, precision="bf16-true"),
        lambda run: run.weights["net.0.weight"].dtype is torch.bfloat16, tolerance=0.2),
    "precision bf16-mixed": Case(("`precision` `bf16-mixed`",),
        fits(InBFloat16, dtype=torch.float32, precision="bf16-mixed"),
        lambda run: run.weights["net.0.weight"].dtype is torch.float32, tolerance=0.05),
    "precision 16-mixed": Case(('`precision` `16-mixed`, `MixedPrecision("16-mixed", device, scaler)`',),
        fits(InBFloat16, dtype=torch.float32, trainer=lambda root: {**by_default(root), "plugins": [half()]}),
        lambda run: run.weights["net.0.weight"].dtype is torch.float32, tolerance=0.05),
    "accumulate_grad_batches": Case(("`accumulate_grad_batches`",), fits(Scheduled, accumulate_grad_batches=3),
        lambda run: run.progress == (2, 4)),
    "gradient_clip_val": Case(("`gradient_clip_val`",), fits(gradient_clip_val=0.01),
        lambda run: clipped(run, 8 * 0.1 * 0.01 * 8)),
    "gradient_clip_algorithm": Case(("`gradient_clip_algorithm`",),
        fits(gradient_clip_val=0.001, gradient_clip_algorithm="value"), lambda run: clipped(run, 8 * 0.1 * 0.001 * 8)),
    "max_steps": Case(("`max_steps`, `min_steps`",), fits(max_steps=7, max_epochs=-1),
        lambda run: run.progress == (2, 7)),
    "min_epochs": Case(("`max_epochs`, `min_epochs`", "`trainer.should_stop`"),
        fits(min_epochs=2, max_epochs=5, callbacks=lambda root: [StopsAtOnce()]), lambda run: run.progress == (2, 8)),
    "max_time": Case(("`max_time`",),
        fits(max_time={"minutes": 30}, max_epochs=5, callbacks=lambda root: [TimePasses(6)]),
        lambda run: run.progress[1] == 7),
    "limit_train_batches": Case(("`limit_train_batches`",), fits(limit_train_batches=3),
        lambda run: calls(run, "on_train_batch_end") == 6, at=("training", 3)),
    "limit_val_batches": Case(("`limit_val_batches`",), fits(limit_val_batches=2, num_sanity_val_steps=1),
        lambda run: calls(run, "on_validation_batch_end") == 5, at=("validation", 1)),
    "limit_test_batches": Case(("`limit_test_batches`, `limit_predict_batches`",),
        evaluates(limit_val_batches=1, limit_test_batches=2, limit_predict_batches=0.7),
        lambda run: len(run.results["predict"]) == 2, at=("test", 1)),
    "overfit_batches": Case(("`overfit_batches`",), fits(overfit_batches=2),
        lambda run: calls(run, "on_train_batch_end") == 4, at=("training", 2)),
    "fast_dev_run": Case(("`fast_dev_run`",), fits(fast_dev_run=2),
        lambda run: (run.progress, calls(run, "on_validation_batch_end")) == ((1, 2), 2), at=("training", 1)),
    "val_check_interval": Case(("`val_check_interval`",),
        fits(val_check_interval=3, check_val_every_n_epoch=None, max_steps=8, max_epochs=-1),
        lambda run: validated_at(run) == [3, 6]),
    "val_check_interval as a time": Case(("`val_check_interval`",),
        fits(val_check_interval={"minutes": 30}, check_val_every_n_epoch=None, callbacks=lambda root: [TimePasses(6)],
            num_sanity_val_steps=0), lambda run: validated_at(run) == [7, 8]),
    "check_val_every_n_epoch": Case(("`check_val_every_n_epoch`",), fits(check_val_every_n_epoch=2, max_epochs=4),
        lambda run: validated_at(run) == [8, 16], at=("validation", 0)),
    "num_sanity_val_steps": Case(("`num_sanity_val_steps`",), fits(num_sanity_val_steps=-1),
        lambda run: calls(run, "on_validation_batch_end") == 9, at=("training", 0)),
    "log_every_n_steps": Case(("`log_every_n_steps`",), fits(log_every_n_steps=3),
        lambda run: [row["step"] for row in csv_rows(run) if "train_loss_step" in row] == [2, 5]),
    "enable_checkpointing": Case(("`enable_checkpointing`, `default_root_dir`",), fits(trainer=by_default),
        lambda run: "lightning_logs/version_0/checkpoints/epoch=1-step=8.ckpt" in files(run)),
    "enable_progress_bar": Case(("`enable_progress_bar`",), fits(enable_progress_bar=True),
        lambda run: run.trainer.progress_bar_callback),
    "enable_autolog_hparams": Case(("`enable_autolog_hparams`",), fits(WithHparams, enable_autolog_hparams=False),
        lambda run: "csv/version_0/hparams.yaml" not in files(run)),
    "deterministic and benchmark": Case(("`deterministic`", "`benchmark`"),
        fits(NotesSettings, PipelineOfSettings, deterministic=True, benchmark=True),
        lambda run: run.metrics["deterministic"] == 1.0),
    "detect_anomaly": Case(("`detect_anomaly`",), fits(NotesSettings, PipelineOfSettings, detect_anomaly=True),
        lambda run: run.metrics["anomaly"] == 1.0),
    "inference_mode": Case(("`inference_mode`",), fits(NotesModes, inference_mode=False),
        lambda run: (run.metrics["inference"], run.metrics["grad"]) == (0.0, 0.0), at=("validation", 1)),
    "inference_mode of a test": Case(("`inference_mode`",), evaluates(inference_mode=False),
        lambda run: run.results["test"][0]["inference"] == 0.0, at=("test", 1)),
    "use_distributed_sampler": Case(("`use_distributed_sampler`",), fits(use_distributed_sampler=False, data=backwards),
        lambda run: True),
    "reload_dataloaders_every_n_epochs": Case(
        ("`reload_dataloaders_every_n_epochs`",),
        reloads,
        lambda run: run.results["asked"] == 2,
        at=("training", 4),
        differs=("trainer.train_dataloader", "trainer.val_dataloaders"),  # a hook's are asked for when they are used
    ),
    "barebones": Case(
        ("`barebones`",),
        fits(barebones=True),
        lambda run: run.progress == (2, 8) and not files(run),
        differs=("module accuracy._update_count",),  # of micro-batches, which nothing sets back if nothing is logged
    ),
    "profiler": Case(("`profiler`", "`SimpleProfiler`, `AdvancedProfiler`"), fits(trainer=simple_profiler),
        lambda run: "fit-simple.txt" in files(run) and profiled(run)),
    "plugins": Case(("`plugins`",), fits(trainer=lambda root: {**by_default(root), "plugins": [NotingCheckpointIO()]}),
        lambda run: saved_once(run, "step=8.ckpt.note")),
    "logger": Case(("`logger`, `callbacks`",), fits(trainer=by_default),
        lambda run: "lightning_logs/version_0/events.out.tfevents" in files(run)),
}  # fmt: skip
