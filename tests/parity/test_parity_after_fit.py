"""After a run the Trainer is as on one device, attribute by attribute."""

from collections.abc import Iterator
from copy import deepcopy
from functools import partial, update_wrapper
from pathlib import Path
from types import MethodType
from typing import Any

import lightning as L
import pytest
import same_script as same
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint, Timer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.types import LRSchedulerConfig
from ordinary_runs import Ordinary
from same_script import Classifier, Session, assert_same
from seen_attributes import DIFFERS, attributes_of, differences
from support.sampling import sampled
from torch import Tensor, nn
from torch.utils.data import DataLoader


@pytest.fixture(autouse=True)
def unpatched() -> Iterator[None]:
    """Lightning patches DataLoader while it asks for one, and for good if there is none (2.6)."""
    before = dict(vars(DataLoader))
    yield
    for name, value in before.items():
        if vars(DataLoader)[name] is not value:
            setattr(DataLoader, name, value)
    for name in vars(DataLoader).keys() - before.keys():
        delattr(DataLoader, name)


class Keeps(L.Callback):
    """Keeps things as users' callbacks do."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []
        self.notes: dict[str, Any] = {}
        self.watched: Any = None
        self.file: Any = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.watched = pl_module
        self.file = open(__file__)  # noqa: SIM115, which cannot be pickled

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, *_: Any) -> None:
        self.losses.append(outputs["loss"].detach().clone())

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.file.close()
        self.notes = {"epoch": trainer.current_epoch, "trainer": trainer}


class Remembers(nn.Linear):
    """A layer with an attribute that is in no state dict."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls = 1
        return super().forward(x)


class Module(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.epochs: list[int] = []
        self.configured_at: list[int] = []
        self.best: Tensor | None = None
        self.untouched = self.twin = {"kept": [1, 2]}

    def configure_pipeline(self) -> list[Any]:
        torch.manual_seed(0)
        return [layer.double() for layer in (Remembers(8, 16), nn.Tanh(), Remembers(16, same.CLASSES))]

    def configure_optimizers(self) -> Any:
        self.configured_at.append(self.trainer.global_step)
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
        total = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=2 * int(total))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def configure_callbacks(self) -> Any:
        return [EarlyStopping("val_loss", patience=10)]

    def on_train_epoch_end(self) -> None:
        self.epochs.append(self.current_epoch)
        self.best = torch.ones(2) * self.current_epoch


def fit(session: Session, *callbacks: Any) -> None:
    module = session.run.module = Module()
    trainer = session.trainer(
        max_epochs=2,
        logger=CSVLogger(session.root),
        enable_checkpointing=True,
        log_every_n_steps=1,
        callbacks=[
            LearningRateMonitor("step"),
            Timer(),
            Keeps(),
            ModelCheckpoint(monitor="val_loss", save_top_k=-1),
            *callbacks,
        ],
    )
    trainer.fit(module, session.data.training(), session.data.validation())


def fit_and_save(session: Session) -> None:
    fit(session)
    session.run.trainer.save_checkpoint(session.root / "after.ckpt")


fitted = same.runs_of(fit_and_save)


def test_every_attribute_after_fit_is_that_of_one_device(fitted):
    found = differences(*fitted)
    assert not found, "\n".join(found)


@pytest.mark.long
def test_what_may_differ_exists(fitted):
    """An entry of the list that stands for nothing would hide what gets its name."""
    known = attributes_of(fitted[0].trainer, fitted[0].module, fitted[0].root)
    attributes = vars(Timer()), vars(ModelCheckpoint())
    assert {path for path in DIFFERS if path not in known} <= {f"callback Timer.{name}" for name in attributes[0]}


def test_what_callbacks_and_the_module_keep_is_there(fitted):
    trainer, module = fitted[1].trainer, fitted[1].module
    keeps = next(callback for callback in trainer.callbacks if isinstance(callback, Keeps))
    assert len(keeps.losses) == trainer.global_step == 2 * same.STEPS_PER_EPOCH
    assert keeps.watched is module  # not a worker's, which has one stage
    assert keeps.notes == {"epoch": 2, "trainer": trainer}
    assert (module.epochs, module.best.tolist()) == ([0, 1], [1.0, 1.0])
    assert module.layers[0].calls == module.layers[2].calls == 1  # of both stages
    assert module.untouched is module.twin  # what has not changed is the same object
    assert trainer.early_stopping_callback.best_score < float("inf")  # from configure_callbacks()
    assert module.trainer is trainer
    assert trainer.estimated_stepping_batches == 2 * same.STEPS_PER_EPOCH


def assert_same_checkpoints(one: Path, other: Path) -> None:
    mine, its = (torch.load(path, weights_only=False) for path in (one, other))
    assert list(mine) == list(its)
    for key in mine:
        if key == "callbacks":  # Timer and the folders of ModelCheckpoint
            assert list(mine[key]) == [name for name in its[key] if "HeartbeatCallback" not in name]
        else:
            assert_same(mine[key], its[key], same.FLOAT32_TOLERANCE, key)


def test_a_checkpoint_that_is_saved_after_fit_is_whole(fitted):
    one, grid = fitted
    assert_same_checkpoints(one.root / "after.ckpt", grid.root / "after.ckpt")


def test_it_holds_what_the_last_checkpoint_of_the_workers_holds(fitted):
    folder = fitted[1].root
    (last,) = folder.rglob("epoch=1-step=8.ckpt")
    mine, its = (torch.load(path, weights_only=False) for path in (folder / "after.ckpt", last))
    for key in ("state_dict", "optimizer_states", "lr_schedulers", "global_step"):
        assert_same(mine[key], its[key], 0.0, key)


@pytest.mark.parametrize("resume", sampled([same.on_one_device, same.on_a_grid], 1, rest=pytest.mark.long))
def test_it_can_be_resumed_on_one_device_and_on_a_grid(resume, fitted, tmp_path):
    def go_on(before: same.Run, run: Any, folder: str) -> same.Run:
        path = before.root / "after.ckpt"

        def script(session: Session) -> None:
            module = session.run.module = Module()
            loaders = session.data.training(), session.data.validation()
            session.trainer(max_epochs=3).fit(module, *loaders, ckpt_path=path, weights_only=False)

        return run(script, tmp_path / folder)

    expected, resumed = go_on(fitted[0], same.on_one_device, "one"), go_on(fitted[1], resume, "resumed")
    assert resumed.progress == expected.progress
    assert_same(expected.weights, resumed.weights)


# ---------------------------------------------------------------------- what hooks and scripts replace


class Switches(Classifier):
    """In its second epoch it trains other parameters, with another optimizer and other schedules."""

    def configure_pipeline(self) -> list[Any]:
        layers = super().configure_pipeline()
        for layer in (layers[0], layers[4]):
            layer.bias.requires_grad_(False)
        return layers

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            for name, parameter in self.named_parameters():
                parameter.requires_grad_("bias" in name)
            optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
            self.trainer.strategy.optimizers = [optimizer]
            self.trainer.strategy.lr_scheduler_configs = [
                LRSchedulerConfig(torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5), interval="step"),
                LRSchedulerConfig(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)),
            ]


def both(module: Any, optimizer: Any, lr_scheduler: Any) -> Any:
    return [optimizer], [lr_scheduler]


def with_its_own_optimizer() -> Ordinary:
    """A module whose instance has got ``configure_optimizers``, as by LightningCLI with ``optimizer:`` in the YAML."""
    module = Ordinary()
    optimizer = torch.optim.Adam(module.parameters(), lr=0.03)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    configure = update_wrapper(partial(both, optimizer=optimizer, lr_scheduler=schedule), both)
    module.configure_optimizers = MethodType(configure, module)
    module.held, module.marked = [optimizer], []
    return module


class NotesMarks(L.Callback):
    """Notes whether schedulers see the steps of the optimizer; torch warns if not."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        pl_module.marked.append(hasattr(trainer.optimizers[0].step, "_wrapped_by_lr_sched"))


@pytest.mark.parametrize(
    ("make", "stages", "callbacks"), [(Switches, 2, []), (with_its_own_optimizer, 1, [NotesMarks()])]
)
def test_replaced_optimizers_and_flags_are_those_of_one_device_and_a_second_fit_goes_on(
    make, stages, callbacks, tmp_path
):
    found: dict[Path, list[Any]] = {}

    def script(session: Session) -> None:
        module = session.run.module = make()
        trainer = session.trainer(max_epochs=2, callbacks=callbacks)
        for epochs in (2, 3):
            trainer.fit_loop.max_epochs = epochs
            trainer.fit(module, session.data.training())
            flags = {name: parameter.requires_grad for name, parameter in module.named_parameters()}
            configs = trainer.lr_scheduler_configs
            kinds = [type(each) for each in trainer.optimizers]
            kinds += [type(config.scheduler) for config in configs]
            states = [each.state_dict() for each in trainer.optimizers]
            states += [{**vars(config), "scheduler": config.scheduler.state_dict()} for config in configs]
            trainer.save_checkpoint(session.root / f"{epochs}.ckpt")
            held = getattr(module, "held", trainer.optimizers) == trainer.optimizers
            found.setdefault(session.root, []).append((flags, kinds, held, session.run.weights, deepcopy(states)))

    one = same.on_one_device(script, tmp_path / "one")
    grid = same.on_a_grid(script, tmp_path / "grid", stages=stages)
    for (flags, kinds, held, *values), (its_flags, its_kinds, its_held, *its_values) in zip(
        *found.values(), strict=True
    ):
        assert (flags, kinds, held) == (its_flags, its_kinds, its_held)
        assert_same(values, its_values)
    assert found[grid.root][0][1][0] is (torch.optim.SGD if make is Switches else torch.optim.Adam)
    assert getattr(grid.module, "marked", None) == getattr(one.module, "marked", None)
    for name in ("2.ckpt", "3.ckpt"):
        assert_same_checkpoints(one.root / name, grid.root / name)
