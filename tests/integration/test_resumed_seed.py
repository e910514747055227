"""A run that resumes with another seed goes on with that of the checkpoint: the same samples, the same draws."""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from support.models import GLOBAL_BATCH, Regression, dataset
from support.samplers import Counts
from support.training import difference, trainer
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, TensorDataset

from lightning_recycle.callbacks import Fault

EPOCH = 4  # steps
DATA = GLOBAL_BATCH * EPOCH
SAVED = EPOCH + 2
WRITER, READER = 11, 17  # seeds


class Noisy(TensorDataset):
    """Augments its samples."""

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return x + 0.1 * torch.randn_like(x), y, torch.tensor(index)


class NoisyStream(IterableDataset[Any]):
    """A stream with state that augments its samples."""

    def __init__(self, samples: Noisy) -> None:
        self.samples, self.position = samples, 0

    def __iter__(self) -> Iterator[Any]:
        while self.position < len(self.samples):
            self.position += 1
            yield self.samples[self.position - 1]
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        self.position = state["position"] if state else 0


LOADERS: dict[str, Callable[[Noisy, int], Any]] = {
    "shuffled": lambda data, size: DataLoader(data, size, shuffle=True),
    "with replacement": lambda data, size: DataLoader(data, size, sampler=RandomSampler(data, True)),
    "a sampler that counts": lambda data, size: DataLoader(data, size, sampler=Counts(DATA)),
    "a stream": lambda data, size: DataLoader(NoisyStream(data), size),
}


class Notes(L.Callback):
    """Appends the indices of the samples of each step to a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, *_: Any) -> None:
        if trainer.is_global_zero:
            with self.path.open("a") as file:
                file.write(f"{trainer.global_step} {' '.join(map(str, batch[2].tolist()))}\n")


class WithDropout(Regression):
    """Its schedule asks for the number of steps, so the loaders are made before the checkpoint is read."""

    def split_batch(self, batch: Any) -> Any:
        return batch[:2]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1e-2, momentum=0.9)
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=max(steps, 2 * EPOCH))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def train(
    directory: Path, loader: str, seed: int, grid: tuple[int, int] = (2, 2), *faults: Fault, **options: Any
) -> tuple[dict[str, Tensor], list[list[int]], L.Trainer]:
    """The weights after two epochs, the samples of each step, and the Trainer; a checkpoint of each second step."""
    L.seed_everything(1, verbose=False)
    model = WithDropout(0.5).double()
    L.seed_everything(seed, verbose=False)
    ckpt_path, seen = options.pop("ckpt_path", None), directory / f"seen-{seed}"
    size = options.pop("size", GLOBAL_BATCH)
    seen.touch()
    callbacks = [ModelCheckpoint(directory, "{step}", every_n_train_steps=2, save_top_k=-1), Notes(seen)]
    run = trainer(*grid, faults, callbacks=callbacks, max_epochs=2, max_steps=-1, enable_checkpointing=True, **options)
    data = Noisy(*dataset(DATA).tensors)
    run.fit(model, LOADERS[loader](data, size // grid[0]), ckpt_path=ckpt_path)
    steps = {int(step): [int(n) for n in samples] for step, *samples in map(str.split, seen.open())}
    return model.state_dict(), [steps.get(step, []) for step in range(1, 2 * EPOCH + 1)], run


Run = tuple[Path, dict[str, Tensor], list[list[int]]]


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Callable[[str], Run]:
    """What a run with a loader leaves behind: its checkpoints, its weights, and the samples of each step."""

    @functools.cache
    def run(loader: str) -> Run:
        folder = tmp_path_factory.mktemp("written")
        return folder, *train(folder, loader, WRITER)[:2]

    return run


@pytest.mark.parametrize(("loader", "grid"), [
    ("shuffled", (1, 2)),
    *(pytest.param(*case, marks=pytest.mark.long) for case in [
        ("shuffled", (2, 2)), ("with replacement", (1, 2)), ("a sampler that counts", (1, 2)), ("a stream", (1, 2)),
    ]),
])  # fmt: skip
def test_a_run_resumes_with_another_seed_exactly(written, loader, grid, tmp_path, caplog):
    folder, weights, samples = written(loader)
    caplog.clear()
    resumed, rest, _ = train(tmp_path, loader, READER, grid, ckpt_path=folder / f"step={SAVED}.ckpt")
    assert rest == [[]] * SAVED + samples[SAVED:]
    if loader != "with replacement":
        assert sorted(n for step in samples[EPOCH:SAVED] + rest[SAVED:] for n in step) == list(range(DATA))
    assert difference(resumed, weights) < 1e-10
    told = [line for line in caplog.messages if "The checkpoint was written with seed" in line]
    assert len(told) == 1
    assert f"seed {WRITER}" in told[0]
    assert f"seed {READER}" in told[0]
    assert not any("global batches" in line for line in caplog.messages)


@pytest.mark.parametrize(("step", "repeats"), [(SAVED, True), (EPOCH, False)], ids=["in an epoch", "at its end"])
def test_a_run_that_resumes_with_batches_of_another_size_is_warned(written, step, repeats, tmp_path, caplog):
    folder, *_ = written("shuffled")
    caplog.clear()
    train(tmp_path, "shuffled", READER, (1, 2), size=2 * GLOBAL_BATCH, ckpt_path=folder / f"step={step}.ckpt")
    (told,) = [line for line in caplog.messages if "global batches" in line]
    assert f"of {GLOBAL_BATCH} samples" in told
    assert f"have {2 * GLOBAL_BATCH}" in told
    assert ("leaves out samples" in told) is repeats
