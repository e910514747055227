"""Cases of docs/trainer_flags.md for an ordinary module: data, and the Trainer after a run."""

from collections.abc import Iterator
from typing import Any

import lightning as L
import same_script as same
import torch
from ordinary_flags import fits
from ordinary_runs import Case, Ordinary, Scheduled, ScheduledPipeline, Session, calls
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset


class Module(L.LightningDataModule):
    """All of its hooks, those that convert included, and a state; its batch size is the global one, divided."""

    def __init__(self, data: same.Data) -> None:
        super().__init__()
        self.data, self.epochs, self.count = data, 0, 0

    def prepare_data(self) -> None:
        """It is there."""

    def setup(self, stage: str) -> None:
        self.count = same.GLOBAL_BATCH * same.STEPS_PER_EPOCH
        self.data = same.Data(same.GLOBAL_BATCH // self.trainer.world_size)

    def train_dataloader(self) -> Any:
        self.epochs += 1
        return self.data.loader(self.count)

    def val_dataloader(self) -> Any:
        return [self.data.validation(), self.data.loader(9, seed=5)]

    def test_dataloader(self) -> Any:
        return self.data.loader(11, seed=4)

    def predict_dataloader(self) -> Any:
        return self.data.loader(11, seed=6)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] * 2, batch[1]]

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        x, y = super().transfer_batch_to_device(batch, device, dataloader_idx)
        return [x + 1, y]

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] + dataloader_idx * 0.5, batch[1]]

    def state_dict(self) -> dict[str, Any]:
        return {"epochs": self.epochs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epochs = state["epochs"]


def with_a_data_module(session: Session) -> None:
    module, results, evaluates = session.chosen(), session.run.results, session.trainer(logger=False)
    results["test"] = evaluates.test(module, datamodule=Module(session.data), verbose=False)
    results["predict"] = evaluates.predict(module, datamodule=Module(session.data))
    trainer, datamodule = session.trainer(max_epochs=2, reload_dataloaders_every_n_epochs=1), Module(session.data)
    trainer.fit(module, datamodule=datamodule)
    results["epochs"] = datamodule.epochs
    results["batches"] = trainer.num_training_batches


class Several(Ordinary):
    """Its loss is the sum of those of all loaders."""

    def loss_of(self, batch: Any) -> tuple[Tensor, Tensor]:
        if not isinstance(batch, dict):
            return super().loss_of(batch)
        output = self(torch.cat([x for x, _ in batch.values()]))
        parts = output.split([len(y) for _, y in batch.values()])
        losses = [functional.cross_entropy(part, y) for part, (_, y) in zip(parts, batch.values(), strict=True)]
        return torch.stack(losses).sum(), output

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.reached("training", batch_idx)
        loss, _ = self.loss_of(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss


def several(session: Session) -> Any:
    half = same.Data(session.data.batch_size // 2)
    return {"a": session.data.training(), "b": half.loader(same.GLOBAL_BATCH // 2 * 3, seed=7)}


def several_to_evaluate(session: Session) -> Any:
    return [session.data.validation(), session.data.loader(11, seed=7)]


class Batches:
    """No DataLoader: an object that yields batches."""

    def __iter__(self) -> Iterator[Any]:
        data = same.samples(same.GLOBAL_BATCH * same.STEPS_PER_EPOCH)
        for first in range(0, len(data), same.GLOBAL_BATCH):
            yield list(data[first : first + same.GLOBAL_BATCH])


class Stream(IterableDataset[Any]):
    """A stream that can be read again from where it was."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[Any]:
        data = same.samples(same.GLOBAL_BATCH * same.STEPS_PER_EPOCH)
        while self.position < len(data):
            self.position += 1
            yield data[self.position - 1]
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class StreamWithoutState(IterableDataset[Any]):
    """A stream that begins anew whenever it is iterated over."""

    def __iter__(self) -> Iterator[Any]:
        return iter(same.samples(same.GLOBAL_BATCH * same.STEPS_PER_EPOCH))


def sampled_by_torch(session: Session) -> Any:
    """As a user of DDP writes it; on one device the sampler's order is that of its one replica."""
    data = session.data.training().dataset
    world = same.GLOBAL_BATCH // session.data.batch_size
    sampler = DistributedSampler(data, world, 0, shuffle=False)
    return DataLoader(data, batch_size=session.data.batch_size, sampler=sampler)


def fits_again(session: Session) -> None:
    """On one Trainer: fit, evaluate, fit on, fit with nothing left to do; then a checkpoint."""
    trainer = session.trainer(max_epochs=1)
    module, data, results = session.chosen(Scheduled, ScheduledPipeline), session.data, session.run.results

    def fit(until: int) -> None:
        trainer.fit_loop.max_epochs = until
        trainer.fit(module, data.training(), data.validation())
        results[f"fit {len(results)}"] = (session.run.progress, trainer.fit_loop.state_dict(), session.run.weights)

    fit(1)
    for name in ("validate", "test"):
        results[name] = getattr(trainer, name)(module, data.validation(), verbose=False)
        results[f"after {name}"] = (session.run.progress, session.run.metrics)
    results["predict"] = trainer.predict(module, data.validation())
    fit(2)
    fit(2)
    trainer.save_checkpoint(session.root / "after.ckpt")
    saved = torch.load(session.root / "after.ckpt", weights_only=False)
    kept = ("epoch", "global_step", "state_dict", "optimizer_states", "lr_schedulers")
    results["saved"] = {name: saved[name] for name in kept}


def resumes(session: Session) -> None:
    """A checkpoint in the middle of an epoch is resumed."""
    data, path = session.data, session.root / "saved.ckpt"
    trainer = session.trainer(max_steps=3)
    trainer.fit(session.chosen(Scheduled, ScheduledPipeline), data.training(), data.validation())
    trainer.save_checkpoint(path)
    module = session.chosen(Scheduled, ScheduledPipeline)
    options: Any = {"ckpt_path": path, "weights_only": False}
    session.trainer(max_epochs=2, logger=False).fit(module, data.training(), data.validation(), **options)


DATA: dict[str, Case] = {
    "a data module": Case(
        (
            "`trainer.world_size`, `trainer.global_rank`",
            "`LightningDataModule`",
            "hooks that convert a batch",
            "several loaders in evaluation",
        ),
        with_a_data_module,
        lambda run: (
            run.results["epochs"] == 2 and {f"val_loss/dataloader_idx_{i}" for i in (0, 1)} <= run.metrics.keys()
        ),
        differs=("trainer.train_dataloader", "trainer.val_dataloaders"),  # a hook's are asked for when they are used
    ),
    "several loaders": Case(("several loaders in training, `CombinedLoader`", "several loaders in evaluation"),
        fits(Several, data=several, validation=several_to_evaluate), lambda run: run.progress == (2, 8)),
    "batches": Case(("any iterable, batch samplers, `batch_size=None`",), fits(data=lambda session: Batches()),
        lambda run: run.progress == (2, 8)),
    "a stream": Case(("`IterableDataset`",),
        fits(data=lambda session: DataLoader(Stream(), batch_size=session.data.batch_size)),
        lambda run: run.progress == (2, 8)),
    "a stream without state": Case(("`IterableDataset` without state",),
        fits(data=lambda session: DataLoader(StreamWithoutState(), batch_size=session.data.batch_size)),
        lambda run: run.progress == (2, 8)),
    "runs of one Trainer": Case(("the Trainer after a run", "a second `fit`", "`trainer.save_checkpoint` after `fit`"),
        fits_again, lambda run: run.progress == (2, 8) and calls(run, "on_test_start") == 1, at=("training", 6)),
    "resuming": Case(("`trainer.save_checkpoint` after `fit`",), resumes, lambda run: run.progress == (2, 7),
        at=("training", 6)),
    "DistributedSampler": Case(("a user's `DistributedSampler`",), fits(data=sampled_by_torch),
        lambda run: run.progress == (2, 8)),
}  # fmt: skip
