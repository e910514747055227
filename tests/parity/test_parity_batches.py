"""Data whose batches are given: any iterable, batch samplers of one's own, and DataLoaders without batching."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import same_script as same
import torch
from lightning.pytorch.callbacks import Callback
from support.growth import AwaitReplacement, rejoined
from support.sampling import sampled
from support.training import failures
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler

from lightning_recycle import ConfigurationError
from lightning_recycle.callbacks import Fault, FaultInjectionCallback

pytestmark = pytest.mark.long

BATCHES = 5


def batch(index: int, size: int) -> list[Tensor]:
    data = same.samples(BATCHES * same.GLOBAL_BATCH)
    return list(data[index * size : (index + 1) * size])


class Batches:
    """No DataLoader: an object that yields batches."""

    def __init__(self, size: int = same.GLOBAL_BATCH, last: int | None = None) -> None:
        self.size, self.last = size, last

    def __iter__(self) -> Iterator[list[Tensor]]:
        for index in range(BATCHES):
            size = self.size if self.last is None or index < BATCHES - 1 else self.last
            yield [part[:size] for part in batch(index, self.size)]


class Sized(Batches):
    def __len__(self) -> int:
        return BATCHES


class Rows:
    """Yields one sample at a time, as an iterable without batches may."""

    def __iter__(self) -> Iterator[Any]:
        return iter([torch.zeros(3)])


class BatchesOfStream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(Sized())


class BatchesByIndex(Dataset[Any]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return BATCHES * same.GLOBAL_BATCH // self.size

    def __getitem__(self, index: int) -> list[Tensor]:
        return batch(index, self.size)


class Composed(BatchSampler):
    """Batches of consecutive samples, the second half of the data first."""

    def __iter__(self) -> Iterator[list[int]]:
        made = list(super().__iter__())
        half = len(made) // (2 * same.GLOBAL_BATCH // self.batch_size) * (same.GLOBAL_BATCH // self.batch_size)
        yield from made[half:] + made[:half]


def composed(session: same.Session, **options: Any) -> Any:
    data = same.samples(BATCHES * same.GLOBAL_BATCH)
    return DataLoader(data, batch_sampler=Composed(SequentialSampler(data), session.data.batch_size, False), **options)


class Unsized:
    """A batch sampler that is no BatchSampler."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[list[int]]:
        for first in range(0, BATCHES * same.GLOBAL_BATCH, self.size):
            yield list(range(first, first + self.size))


DATA: dict[str, Callable[[same.Session], Any]] = {
    "an iterable": lambda s: Batches(),
    "an iterable with a length": lambda s: Sized(),
    "a stream of batches": lambda s: DataLoader(BatchesOfStream(), batch_size=None),
    "a stream of batches, read by a process": lambda s: DataLoader(BatchesOfStream(), batch_size=None, num_workers=1),
    "a dataset of batches": lambda s: DataLoader(BatchesByIndex(s.data.batch_size), batch_size=None),
    "a dataset of batches, read by a process": lambda s: DataLoader(
        BatchesByIndex(s.data.batch_size), batch_size=None, num_workers=1
    ),
    "a batch sampler": composed,
    "a batch sampler, read by a process": lambda s: composed(s, num_workers=1),
    "a batch sampler of another kind": lambda s: DataLoader(
        same.samples(BATCHES * same.GLOBAL_BATCH),
        batch_sampler=Unsized(s.data.batch_size),  # type: ignore[arg-type]
    ),
}


def trains_on(make: Callable[[same.Session], Any], *callbacks: Callback, **trainer: Any) -> Callable[[Any], None]:
    def script(session: same.Session) -> None:
        module = session.run.module = same.Classifier()
        made = session.trainer(**{"max_epochs": 2, "callbacks": list(callbacks), **trainer})
        made.fit(module, make(session), make(session))
        session.run.results["fit"] = session.run.metrics
        session.run.results["test"] = made.test(module, make(session), verbose=False)
        session.run.results["predict"] = torch.cat(made.predict(module, make(session)))

    return script


@pytest.mark.filterwarnings("ignore:.*batch sampler.*")
@pytest.mark.parametrize("name", sampled(DATA, 2, seed=2))
def test_each_phase_takes_the_batches_as_on_one_device(tmp_path: Path, name: str) -> None:
    one, grid = same.run_both(trains_on(DATA[name]), tmp_path)
    same.assert_same(one.weights, grid.weights)
    same.assert_same(one.results, grid.results, same.FLOAT32_TOLERANCE)


@pytest.mark.parametrize("name", sampled(["an iterable", "a dataset of batches", "a batch sampler"], 1))
def test_a_kill_changes_nothing_and_a_replacement_finds_its_place(tmp_path: Path, name: str) -> None:
    (tmp_path / "one").mkdir()
    one = same.on_one_device(trains_on(DATA[name]), tmp_path / "one")
    faults = FaultInjectionCallback([Fault("kill", 1, 1, step=2), Fault("kill", 0, 0, step=6)])

    def script(session: same.Session) -> None:
        session.run.module = same.Classifier()
        trainer = session.trainer(max_epochs=2, callbacks=[faults, AwaitReplacement([4, 8])])
        trainer.fit(session.run.module, DATA[name](session), DATA[name](session))

    grid = same.on_a_grid(script, tmp_path, max_restarts=10)
    assert failures(grid.trainer) == rejoined(grid.trainer) == [(1, 1), (0, 0)]
    same.assert_same(one.weights, grid.weights)
    same.assert_same(one.results["fit"], grid.metrics)


@pytest.mark.parametrize("name", sampled(["an iterable", "a dataset of batches", "a batch sampler"], 1, seed=1))
def test_a_run_resumes_in_the_middle_of_an_epoch(tmp_path: Path, name: str) -> None:
    def fit(session: same.Session, callbacks: list[Callback], **options: Any) -> None:
        session.run.module = same.Classifier()
        trainer = session.trainer(max_epochs=2, callbacks=callbacks)
        trainer.fit(session.run.module, DATA[name](session), **options)

    path = tmp_path / "saved.ckpt"
    whole = same.on_a_grid(lambda session: fit(session, [same.SavesAt(3, path)]), tmp_path)
    resumed = same.on_a_grid(lambda session: fit(session, [], ckpt_path=path), tmp_path)
    same.assert_same(whole.weights, resumed.weights)
    assert whole.progress == resumed.progress


def test_batches_of_any_size_need_one_microbatch_and_the_error_says_so(tmp_path: Path) -> None:
    def script(session: same.Session) -> None:
        session.trainer(max_epochs=1).fit(same.Classifier(), Sized(last=3))

    with pytest.raises(ConfigurationError, match=r"lengths \[3\].*num_microbatches=2.*num_microbatches=1"):
        same.on_a_grid(script, tmp_path)


def test_with_one_microbatch_the_last_batch_may_be_smaller(tmp_path: Path) -> None:
    script = trains_on(lambda _: Sized(last=3))
    for name in ("one", "grid"):
        (tmp_path / name).mkdir()
    one, grid = (
        same.on_one_device(script, tmp_path / "one"),
        same.on_a_grid(script, tmp_path / "grid", num_microbatches=1),
    )
    same.assert_same(one.weights, grid.weights)
    same.assert_same(one.results, grid.results, same.FLOAT32_TOLERANCE)
