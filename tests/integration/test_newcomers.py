"""A replacement gets what its peer has before anything runs in it; if it differs all the same, it goes, not the run."""

from __future__ import annotations

import csv
import itertools
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from support.growth import AwaitReplacement, happened, rejoined
from support.sampling import sampled
from support.training import TOLERANCE, difference, failures, grid_trainer, on_one_device
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from lightning_recycle.callbacks import Fault
from lightning_recycle.session.worker_snapshot import WorkerState

BATCH = 8
SAMPLES = 64
STAGES = (1, 2)


def points() -> TensorDataset:
    x = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return TensorDataset(x, (x.sum(1) > 0).long())


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2)).double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.3, momentum=0.5)


def train(
    model: L.LightningModule, stages: int, lost_at: int, waits: AwaitReplacement, microbatches: int = 1, **kwargs: Any
) -> L.Trainer:
    """Trains ``model`` in two pipelines; worker (0, 0) is lost, and ``waits`` lets its replacement come."""
    faults = [Fault("kill", 0, 0, step=lost_at)]
    strategy = {"max_restarts": 10, "num_microbatches": microbatches}
    run = grid_trainer(2, stages, faults, strategy, callbacks=[waits], **kwargs)
    run.fit(model)
    return run


# ---------------------------------------------------------------------- loaders


class Growing(Dataset[Any]):
    def __init__(self) -> None:
        self.all, self.used = points(), list(range(16))

    def __len__(self) -> int:
        return len(self.used)

    def __getitem__(self, index: int) -> Any:
        return self.all[self.used[index]]


class Stream(IterableDataset[Any]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Any:
        return (points()[index] for index in range(self.count))


class Large(Dataset[Any]):
    """Over a megabyte, which a replacement has from its own beginning."""

    def __init__(self, scale: float) -> None:
        self.scale, self.data = scale, torch.zeros(200_000, dtype=torch.float64)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        x, y = points()[index]
        return x * self.scale + self.data[index], y


class Loads(Net):
    """Its data are others in each epoch, in the way that ``how`` names."""

    def __init__(self, how: str, pipelines: int) -> None:
        super().__init__()
        self.how, self.pipelines = how, pipelines
        self.pool, self.first, self.size = Growing(), 16, BATCH

    def train_dataloader(self) -> Any:
        size = self.size // self.pipelines
        if self.how == "dataset":
            return DataLoader(self.pool, batch_size=size)
        if self.how in ("subset", "renewed"):
            return DataLoader(Subset(points(), range(self.first)), batch_size=size)
        if self.how == "several":
            return {"a": DataLoader(self.pool, batch_size=size), "b": DataLoader(points(), batch_size=size)}
        if self.how == "stream":
            return DataLoader(Stream(self.first), batch_size=size)
        return DataLoader(Large(16 / self.first) if self.how == "large" else points(), batch_size=size)

    def val_dataloader(self) -> Any:
        if self.how == "large":
            return DataLoader(Large(16 / self.first), batch_size=BATCH // self.pipelines)
        count = self.first if self.how == "validation" else 16
        return DataLoader(Subset(points(), range(count)), batch_size=BATCH // self.pipelines)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.how == "several":
            batch = 0.5 * (batch["a"][0] + batch["b"][0]), batch["a"][1]
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", super().training_step(batch, batch_idx))

    def on_train_epoch_start(self) -> None:
        if self.how == "renewed" and self.current_epoch:
            self.trainer.fit_loop._combined_loader = None
            self.trainer.fit_loop.setup_data()
            self.first += 100  # which is not what the loader was made with

    def on_train_epoch_end(self) -> None:
        self.pool.used.extend(range(len(self.pool), len(self.pool) + 16))
        self.first = 16 * (self.current_epoch + 2)
        if self.how == "batch size":
            self.size = 2 * BATCH


HOW = ("dataset", "subset", "several", "batch size", "validation", "renewed", "stream", "large")


@pytest.mark.parametrize(("how", "stages", "microbatches"), sampled(itertools.product(HOW, STAGES, (1, 4)), 1, seed=75))
def test_a_replacement_reads_the_data_that_its_peer_reads(how: str, stages: int, microbatches: int) -> None:
    options: dict[str, Any] = {"max_epochs": 3, "num_sanity_val_steps": 1 if how == "large" else 0}
    options["reload_dataloaders_every_n_epochs"] = 0 if how == "renewed" else 1
    options["check_val_every_n_epoch"] = 3 if how == "large" else 1
    expected, model = Loads(how, 1), Loads(how, 2)
    alone = on_one_device(**options)
    alone.fit(expected)
    of_epoch = 2 if how in ("dataset", "subset", "renewed", "stream") else 8  # steps of the first one
    run = train(model, stages, of_epoch, AwaitReplacement([of_epoch + 2]), microbatches, **options)
    (joined,) = happened(run, "rejoined")
    assert of_epoch < joined.step < run.global_step
    assert difference(model.state_dict(), expected.state_dict()) < TOLERANCE
    assert abs(run.callback_metrics["val_loss"] - alone.callback_metrics["val_loss"]) < TOLERANCE


# ---------------------------------------------------------------------- optimizers and schedulers


class FloatAverages(torch.optim.Optimizer):
    """Momentum in float32, whatever the weights are; its own number, and state of no parameter, scale the step."""

    def __init__(self, params: Any, lr: float) -> None:
        self.steps = 0
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure()
        self.steps += 1
        whole = self.state["all"]
        whole["decay"] = 0.99 * whole.get("decay", torch.ones((), dtype=torch.float64))
        for group in self.param_groups:
            for p in group["params"]:
                average = self.state[p].setdefault("average", torch.zeros_like(p, dtype=torch.float32))
                average.mul_(0.9).add_(p.grad.float())
                p.sub_((group["lr"] * float(whole["decay"]) / self.steps**0.1) * average)
        return loss


class Nested:
    """A scheduler of the user's, which has another one and says nothing of its state."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.count = optimizer, 0
        self.inner = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    def step(self) -> None:
        self.count += 1
        if self.count % 3 == 1:
            self.inner.step()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def sequence(optimizer: Any) -> Any:
    schedulers = torch.optim.lr_scheduler
    parts = [schedulers.LinearLR(optimizer, 0.1, total_iters=4), schedulers.CosineAnnealingLR(optimizer, 8)]
    inner = schedulers.SequentialLR(optimizer, parts, [4])
    return schedulers.ChainedScheduler([inner, schedulers.ExponentialLR(optimizer, 0.95)], optimizer)


OPTIMIZERS = {"NAdam": torch.optim.NAdam, "ASGD": torch.optim.ASGD, "own": FloatAverages, "SGD": torch.optim.SGD}
SCHEDULERS = {"none": None, "sequence": sequence, "nested": Nested}


class Optimized(Net):
    def __init__(self, optimizer: str, scheduler: str) -> None:
        super().__init__()
        self.optimizer, self.scheduler = optimizer, scheduler

    def train_dataloader(self) -> Any:
        return DataLoader(points(), batch_size=BATCH // min(2, self.trainer.world_size))

    def configure_optimizers(self) -> Any:
        optimizer = OPTIMIZERS[self.optimizer](self.parameters(), lr=0.05)
        if (make := SCHEDULERS[self.scheduler]) is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": make(optimizer), "interval": "step"}}

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step()


class Replaces(Optimized):
    """A hook trains on with another optimizer."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.trainer.strategy.optimizers = [torch.optim.Adam(self.parameters(), lr=0.02)]


KINDS = [(Optimized, *names) for names in [("NAdam", "none"), ("ASGD", "sequence"), ("own", "none"), ("SGD", "nested")]]


@pytest.mark.parametrize(
    ("kind", "optimizer", "scheduler", "stages", "microbatches"),
    sampled([(*each, s, m) for each in [*KINDS, (Replaces, "SGD", "none")] for s in STAGES for m in (1, 4)], 1, seed=5),
)
def test_a_replacement_steps_as_its_peer_does(
    kind: Any, optimizer: str, scheduler: str, stages: int, microbatches: int
) -> None:
    expected, model = kind(optimizer, scheduler), kind(optimizer, scheduler)
    on_one_device(max_epochs=2).fit(expected)
    run = train(model, stages, 8, AwaitReplacement([10]), microbatches, max_epochs=2)
    assert rejoined(run) == failures(run) == [(0, 0)]
    # Averages in float32 round sums in float64, which are not those of one device to the last bit.
    assert difference(model.state_dict(), expected.state_dict()) < (1e-6 if optimizer == "own" else TOLERANCE)


# ---------------------------------------------------------------------- validation


class Validates(Net):
    """Hooks change how much is validated, after the loader was read; loggers get each batch's value with its number."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.training_step(batch, batch_idx), on_step=True, on_epoch=True)

    def on_train_epoch_end(self) -> None:
        self.trainer.limit_val_batches = 1 if self.current_epoch == 0 else 2


def test_a_replacement_counts_batches_of_validation_as_its_peer_does(tmp_path):
    """Also where it leads, and writes them down."""
    found = []
    for kills in ({}, {6: 0, 14: 1}):
        faults = [Fault("kill", pipeline, 0, step=step) for step, pipeline in kills.items()]
        logger = CSVLogger(tmp_path, version=len(kills))
        options = {"callbacks": [AwaitReplacement([12, 20])], "logger": logger, "log_every_n_steps": 1}
        run = grid_trainer(2, 1, faults, {"max_restarts": 2}, max_epochs=4, **options)
        run.fit(Validates(), *(DataLoader(points(), batch_size=BATCH // 2) for _ in range(2)))
        assert rejoined(run) == [(d, 0) for d in kills.values()]
        with open(tmp_path / "lightning_logs" / f"version_{len(kills)}" / "metrics.csv", newline="") as file:
            found.append([(row["step"], float(row["val_step"])) for row in csv.DictReader(file) if row["val_step"]])
    assert found[1] == [(step, pytest.approx(value, abs=1e-12)) for step, value in found[0]]
    assert [int(step) for step, _ in found[0]] == list(range(len(found[0])))


# ---------------------------------------------------------------------- newcomers that differ


class Wrong(AwaitReplacement):
    """Makes the first ``count`` replacements differ, in the way that ``how`` names; two are waited for."""

    def __init__(self, how: str, count: int, directory: Path) -> None:
        super().__init__(range(3, 16))
        self.how, self.count, self.second = how, count, directory / "the second replacement is there"

    def missing(self, strategy: Any) -> bool:
        return super().missing(strategy) and not self.second.exists()

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if self.how == "state" and self._is_wrong(trainer):
            WorkerState._restore_objects = miscopied(WorkerState._restore_objects)  # type: ignore[method-assign]

    def on_train_batch_start(self, trainer: L.Trainer, *arguments: Any) -> None:
        super().on_train_batch_start(trainer, *arguments)
        if getattr(trainer.strategy, "incarnation", 0) == 2:
            self.second.touch()
        if self.how == "option" and self._is_wrong(trainer):
            trainer.optimizers[0].param_groups[0]["lr"] = 0.1

    def on_before_optimizer_step(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        for parameter in module.parameters() if self.how == "step" and self._is_wrong(trainer) else ():
            assert parameter.grad is not None
            parameter.grad.mul_(1.5)

    def _is_wrong(self, trainer: Any) -> bool:
        return 0 < getattr(trainer.strategy, "incarnation", 0) <= self.count


def miscopied(restore: Any) -> Any:
    """As ``restore``, but one number of a parameter is another."""

    def restore_wrongly(self: Any, snapshot: Any) -> Any:
        restored = restore(self, snapshot)
        with torch.no_grad():
            next(self._module.parameters()).flatten()[0] += 0.25
        return restored

    return restore_wrongly


NAMED = {"option": "lr is ", "step": "parameters differ", "state": "its peer gave it: parameters"}


@pytest.mark.parametrize(("how", "stages", "count"), sampled(itertools.product(NAMED, STAGES, (1, 9)), 1))
def test_a_replacement_that_differs_is_dismissed_and_tried_once_more(
    how: str, stages: int, count: int, tmp_path: Path
) -> None:
    expected, model = Optimized("SGD", "none"), Optimized("SGD", "none")
    on_one_device(max_epochs=2).fit(expected)
    run = train(model, stages, 1, Wrong(how, count, tmp_path), max_epochs=2)
    dismissed = happened(run, "dismissed")
    assert [event.worker for event in dismissed] == [(0, 0)] * min(count, 2)
    assert all(NAMED[how] in event.details["cause"] for event in dismissed)
    assert [event.details["stays_empty"] for event in dismissed] == [False, True][: len(dismissed)]
    assert not happened(run, "corruption")
    assert len(happened(run, "restarting")) == 2
    assert failures(run) == [(0, 0)] * (1 + len(dismissed))
    assert difference(model.state_dict(), expected.state_dict()) < TOLERANCE
