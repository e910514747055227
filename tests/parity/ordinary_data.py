"""Cases of docs/trainer_flags.md for an ordinary module: data, and the Trainer after a run."""

from collections.abc import Iterator
from typing import Any

import lightning as L
import same_script as same
import torch
from ordinary_flags import fits
from ordinary_runs import Case, Ordinary, Scheduled, Session, calls
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

__all__ = ["DATA"]


class Module(L.LightningDataModule):
    """All of its hooks, one that converts included, and a state; its batch size is the global one, divided."""

    def __init__(self, data: same.Data) -> None:
        super().__init__()
        self.data, self.epochs, self.count = data, 0, 0

    def prepare_data(self) -> None:
        """It is there."""

    def setup(self, stage: str) -> None:
        assert self.trainer is not None
        self.count = same.GLOBAL_BATCH * same.STEPS_PER_EPOCH
        self.data = same.Data(same.GLOBAL_BATCH // self.trainer.world_size)

    def train_dataloader(self) -> Any:
        self.epochs += 1
        return self.data.loader(self.count)

    def val_dataloader(self) -> Any:
        return [self.data.validation(), self.data.loader(9, seed=5)]

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [2 * batch[0], batch[1]]

    def state_dict(self) -> dict[str, Any]:
        return {"epochs": self.epochs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epochs = state["epochs"]


def with_a_data_module(session: Session) -> None:
    trainer = session.trainer(max_epochs=2, reload_dataloaders_every_n_epochs=1)
    datamodule = Module(session.data)
    trainer.fit(session.prepared(Ordinary()), datamodule=datamodule)
    session.run.results["epochs"] = datamodule.epochs
    session.run.results["world"] = trainer.num_training_batches


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
    """On one Trainer: fit, test, fit on; then a checkpoint."""
    trainer = session.trainer(max_epochs=1)
    module, data, results = session.prepared(Scheduled()), session.data, session.run.results
    trainer.fit(module, data.training(), data.validation())
    results["test"] = trainer.test(module, data.validation(), verbose=False)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, data.training(), data.validation())
    trainer.save_checkpoint(session.root / "after.ckpt")
    saved = torch.load(session.root / "after.ckpt", weights_only=False)
    kept = ("epoch", "global_step", "state_dict", "optimizer_states", "lr_schedulers")
    results["saved"] = {name: saved[name] for name in kept}


def resumes(session: Session) -> None:
    """A checkpoint in the middle of an epoch is resumed."""
    trainer = session.trainer(max_steps=3)
    trainer.fit(session.prepared(Scheduled()), session.data.training(), session.data.validation())
    trainer.save_checkpoint(session.root / "saved.ckpt")
    session.trainer(max_epochs=2, logger=False).fit(
        session.prepared(Scheduled()),
        session.data.training(),
        session.data.validation(),
        ckpt_path=session.root / "saved.ckpt",
        weights_only=False,
    )


DATA: dict[str, Case] = {
    "a data module": Case(
        (
            "`trainer.world_size`, `trainer.global_rank`",
            "`LightningDataModule`",
            "hooks that convert a batch",
            "several loaders in evaluation",
        ),
        with_a_data_module,
        lambda run: run.results["epochs"] == 2,
        differs=("trainer.train_dataloader", "trainer.val_dataloaders"),  # a hook's are asked for when they are used
    ),
    "several loaders": Case(
        ("several loaders in training, `CombinedLoader`", "several loaders in evaluation"),
        fits(Several, data=several, validation=several_to_evaluate),
        lambda run: run.progress == (2, 8),
    ),
    "batches": Case(
        ("any iterable, batch samplers, `batch_size=None`",),
        fits(data=lambda session: Batches()),
        lambda run: run.progress == (2, 8),
    ),
    "a stream": Case(
        ("`IterableDataset`",),
        fits(data=lambda session: DataLoader(Stream(), batch_size=session.data.batch_size)),
        lambda run: run.progress == (2, 8),
    ),
    "a stream without state": Case(
        ("`IterableDataset` without state",),
        fits(data=lambda session: DataLoader(StreamWithoutState(), batch_size=session.data.batch_size)),
        lambda run: run.progress == (2, 8),
    ),
    "runs of one Trainer": Case(
        ("the Trainer after a run", "a second `fit`", "`trainer.save_checkpoint` after `fit`"),
        fits_again,
        lambda run: run.progress == (2, 8) and calls(run, "on_test_start") == 1,
        at=("training", 6),
    ),
    "resuming": Case(
        ("`trainer.save_checkpoint` after `fit`",), resumes, lambda run: run.progress == (2, 7), at=("training", 6)
    ),
    "DistributedSampler": Case(
        ("a user's `DistributedSampler`",), fits(data=sampled_by_torch), lambda run: run.progress == (2, 8)
    ),
}
