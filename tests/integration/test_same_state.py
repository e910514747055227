"""Who joins a running training holds what its peers hold, and decides what they decide."""

import json
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint, Timer
from lightning.pytorch.loggers import CSVLogger
from state_graph import describe, differences
from support.growth import AwaitReplacement, rejoined
from support.models import GLOBAL_BATCH, Regression, dataset
from support.training import fit
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import MeanSquaredError

from lightning_recycle import ReCycleError
from lightning_recycle.callbacks import Fault

EPOCH = 5  # steps
DATA = dataset(GLOBAL_BATCH * EPOCH)


class Plateau(Regression):
    """The learning rate follows what was logged in the epoch."""

    def on_training_output(self, output: Tensor, target: Tensor) -> None:
        self.log("error", (output - target).square().mean(), on_step=False, on_epoch=True)
        self.log("samples", float(len(output)), on_step=False, on_epoch=True, reduce_fx="sum")

    def on_train_batch_start(self, *_: Any) -> None:
        self.log("begun", 1.0, on_step=False, on_epoch=True, reduce_fx="sum")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.9)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "error"}}


class Rich(Plateau):
    """With a metric, validation, dropout, and things that hooks do at the start of a batch."""

    def __init__(self) -> None:
        super().__init__(dropout=0.5)
        self.train_error, self.val_error = MeanSquaredError(), MeanSquaredError()

    def on_training_output(self, output: Tensor, target: Tensor) -> None:
        super().on_training_output(output, target)
        self.train_error(output, target)
        self.log("train_error", self.train_error, on_step=True, on_epoch=True, prog_bar=True)

    def on_validation_output(self, output: Tensor, target: Tensor) -> None:
        self.val_error(output, target)
        self.log("val_error", self.val_error)
        self.log("val_loss", (output - target).abs().mean())

    def on_train_batch_start(self, *arguments: Any) -> None:
        super().on_train_batch_start(*arguments)
        self.trainer.optimizers[0].param_groups[0]["weight_decay"] += 1e-3


class Counting(L.Callback):
    """Counts what begins and what ends, and keeps that in its state."""

    def __init__(self) -> None:
        self.begun = self.ended = 0

    def on_train_batch_start(self, *_: Any) -> None:
        self.begun += 1

    def on_train_batch_end(self, *_: Any) -> None:
        self.ended += 1

    def state_dict(self) -> dict[str, Any]:
        return {"begun": self.begun, "ended": self.ended}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        vars(self).update(state_dict)


ALLOWED = {  # path or class -> why workers may differ there
    "lightning_recycle.session.worker_context.WorkerCollectives": "where this worker is",
    "lightning_recycle.strategy.*": "which worker this is; its optimizers and precision are looked at by themselves",
    "lightning_recycle.session.session.*": "which worker this is",
    "lightning_recycle.session.training_steps.*": "which worker this is",
    "lightning_recycle.session.checkpoint_callbacks.*": "which worker this is",
    "lightning_recycle.data.*": "the place in the data, which is this pipeline's",
    "lightning_recycle.runtime.*": "connections, times",
    "lightning_recycle.callbacks.*": "faults are injected in one worker",
    "lightning.pytorch.loops.fetchers.*": "the place in the data, which is this pipeline's",
    "lightning.pytorch.utilities.combined_loader.*": "the same",
    "trainer._loggers*": "only the leader writes",
    "lightning.pytorch.callbacks.timer.Timer": "clocks; the leader decides for all (broadcast)",
    "lightning.pytorch.callbacks.lr_monitor.LearningRateMonitor": "what it gave to loggers; decides nothing",
    "fsspec.*": "identity of the process",
    "trainer._last_val_time": "a clock; the leader decides for all",
    "trainer.callbacks*._last_time_checked": "a clock; the leader decides for all",
    "trainer.num_sanity_val_steps": "those are over",
    "trainer.profiler._local_rank": "which worker this is",
    "trainer.fit_loop._restart_stage": "in the epoch that is entered: its beginning is not run again",
    "trainer.*val_loop._module_mode.mode*": "captured again by each validation",
    "trainer.*val_loop._data_fetcher": "made again by each validation",
    "lightning_recycle.session.worker_context.Preemption": "signals are of the process that they reach",
}


class GraphDiary(L.Callback):
    """Every process writes down all that its Trainer holds, at the end of each step and epoch."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self._describe(trainer, "step")

    def on_train_epoch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self._describe(trainer, "epoch")

    def _describe(self, trainer: L.Trainer, point: str) -> None:
        name = f"{trainer.strategy.grid_rank}-{trainer.strategy.incarnation}-{trainer.global_step:02}-{point}"
        (self._directory / name).write_text(json.dumps(describe(trainer, ALLOWED)))


@pytest.mark.long
def test_who_joins_holds_what_its_peers_hold(tmp_path):
    (tmp_path / "states").mkdir()
    callbacks = [
        AwaitReplacement([7]), EarlyStopping("error", patience=10),
        ModelCheckpoint(monitor="error", save_top_k=2, save_last=True, every_n_train_steps=3), LearningRateMonitor(),
        Timer(), Counting(), GraphDiary(tmp_path / "states"),
    ]  # fmt: skip
    run = fit(
        Rich().double(),
        2,
        2,
        [Fault("kill", 1, 0, step=2), Fault("kill", 1, 1, step=2)],
        data=DATA,
        val=DataLoader(DATA, batch_size=GLOBAL_BATCH // 2),
        max_epochs=4,
        max_steps=-1,
        strategy={"max_restarts": 10, "rebalance": "never"},  # who joins measures no layers
        callbacks=callbacks,
        check_val_every_n_epoch=2,
        num_sanity_val_steps=2,
        enable_checkpointing=True,
        logger=CSVLogger(tmp_path),
        default_root_dir=tmp_path,
        reload_dataloaders_every_n_epochs=1,
    )
    assert sorted(rejoined(run)) == [(1, 0), (1, 1)]
    for stage in (0, 1):
        joined = sorted((tmp_path / "states").glob(f"{2 + stage}-1-*"))
        assert len(joined) >= 10
        for path in joined:
            peer = path.with_name(path.name.replace(f"{2 + stage}-1-", f"{stage}-0-"))
            found = differences(json.loads(path.read_text()), json.loads(peer.read_text()))
            assert not found, f"{path.name} differs from {peer.name}"


class ChangesItsRate(L.Callback):
    """One worker steps with a learning rate of its own."""

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.strategy.grid_rank == 2 and trainer.global_step == 3:
            trainer.optimizers[0].param_groups[0]["lr"] = 0.0625


def test_a_worker_with_another_learning_rate_than_its_peers_ends_the_run():
    with pytest.raises(ReCycleError, match=r"After step 3 .*lr is 0\.(2|0625) on worker .*0\.(2|0625)"):
        fit(Plateau().double(), 2, 2, data=DATA, callbacks=[ChangesItsRate()], max_steps=10)
