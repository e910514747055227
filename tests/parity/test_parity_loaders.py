"""Data of every kind give what they give on one device, whoever dies or resumes."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import same_script as same
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import CombinedLoader
from support.growth import AwaitReplacement, rejoined
from support.samplers import Counts, Told
from support.sampling import sampled
from support.training import failures
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
    WeightedRandomSampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_recycle import ConfigurationError
from lightning_recycle.callbacks import Fault, FaultInjectionCallback

STEPS = 5
SIZE = STEPS * same.GLOBAL_BATCH


def batches_in(batch: Any) -> list[Any]:
    """The batches of the loaders that have not ended: pairs of inputs and classes."""
    whole = getattr(batch, "read", lambda: batch)()  # in hooks a grid's batch is an address
    leaves = [leaf for leaf in tree_leaves(whole) if leaf is not None]
    return list(zip(leaves[::2], leaves[1::2], strict=True))


class Several(same.Classifier):
    """Its loss is the sum of those of all loaders."""

    def split_batch(self, batch: Any) -> tuple[Any, Any]:
        batches = batches_in(batch)
        return torch.cat([x for x, _ in batches]), tuple(y for _, y in batches)

    def loss(self, output: Tensor, target: Any) -> Tensor:
        parts = output.split([len(y) for y in target])
        return sum(functional.cross_entropy(part, y) for part, y in zip(parts, target, strict=True))

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Sees the combination, as it is on one device."""
        count = len(batches_in(batch))
        return tree_map(
            lambda leaf: leaf * count if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf, batch
        )

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("seen", torch.stack([x.sum() for x, _ in batches_in(batch)]).sum(), on_step=True, on_epoch=True)


def small(session: same.Session, steps: int, **options: Any) -> Any:
    """A loader with half the batch size."""
    data = same.Data(session.data.batch_size // 2)
    return data.loader(same.GLOBAL_BATCH // 2 * steps, seed=7, **options)


def large(session: same.Session, steps: int, **options: Any) -> Any:
    return session.data.loader(same.GLOBAL_BATCH * steps, **options)


COMBINED: dict[str, Callable[[same.Session], Any]] = {
    "a dict": lambda s: {"a": large(s, 4), "b": small(s, 3)},
    "a list": lambda s: [small(s, 2), large(s, 5)],
    "nested": lambda s: {"a": [large(s, 2), small(s, 5)], "b": small(s, 3)},
    "a dict of one": lambda s: {"a": large(s, 4)},
    "max_size_cycle": lambda s: CombinedLoader({"a": small(s, 2, num_workers=1), "b": large(s, 5)}, "max_size_cycle"),
    "max_size": lambda s: CombinedLoader({"a": large(s, 4), "b": small(s, 3)}, "max_size"),
    "max_size, the other way": lambda s: CombinedLoader([small(s, 2), large(s, 4)], "max_size"),
    "min_size": lambda s: CombinedLoader({"a": large(s, 4), "b": small(s, 3)}, "min_size"),
}


def batch(index: int, size: int) -> list[Tensor]:
    return list(same.samples(SIZE)[index * size : (index + 1) * size])


class Batches:
    """No DataLoader: an object that yields batches."""

    def __init__(self, last: int = same.GLOBAL_BATCH) -> None:
        self.last = last

    def __iter__(self) -> Iterator[list[Tensor]]:
        for index in range(STEPS):
            size = same.GLOBAL_BATCH if index < STEPS - 1 else self.last
            yield [part[:size] for part in batch(index, same.GLOBAL_BATCH)]


class Sized(Batches):
    def __len__(self) -> int:
        return STEPS


class BatchesOfStream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(Sized())


class BatchesByIndex(Dataset[Any]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return SIZE // self.size

    def __getitem__(self, index: int) -> list[Tensor]:
        return batch(index, self.size)


class Composed(BatchSampler):
    """Batches of consecutive samples, the second half of the data first."""

    def __iter__(self) -> Iterator[list[int]]:
        made = list(super().__iter__())
        half = len(made) // (2 * same.GLOBAL_BATCH // self.batch_size) * (same.GLOBAL_BATCH // self.batch_size)
        yield from made[half:] + made[:half]


def composed(session: same.Session, **options: Any) -> Any:
    data = same.samples(SIZE)
    return DataLoader(data, batch_sampler=Composed(SequentialSampler(data), session.data.batch_size, False), **options)


class Unsized:
    """A batch sampler that is not a BatchSampler."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[list[int]]:
        for first in range(0, SIZE, self.size):
            yield list(range(first, first + self.size))


def by_index(session: same.Session, **options: Any) -> Any:
    return DataLoader(BatchesByIndex(session.data.batch_size), batch_size=None, **options)


GIVEN: dict[str, Callable[[same.Session], Any]] = {
    "an iterable": lambda s: Batches(),
    "an iterable with a length": lambda s: Sized(),
    "a stream of batches": lambda s: DataLoader(BatchesOfStream(), batch_size=None),
    "a stream of batches, read by a process": lambda s: DataLoader(BatchesOfStream(), batch_size=None, num_workers=1),
    "a dataset of batches": by_index,
    "a dataset of batches, read by a process": lambda s: by_index(s, num_workers=1),
    "a batch sampler": composed,
    "a batch sampler, read by a process": lambda s: composed(s, num_workers=1),
    "a batch sampler of another kind": lambda s: DataLoader(
        same.samples(SIZE), batch_sampler=Unsized(s.data.batch_size)
    ),
}


def weighted(session: same.Session) -> Any:
    sampler = WeightedRandomSampler([1.0, 9.0] * (SIZE // 2), SIZE, generator=torch.Generator().manual_seed(7))
    return StatefulDataLoader(same.samples(SIZE), batch_size=session.data.batch_size, sampler=sampler)


def shuffled(session: same.Session) -> Any:
    return CombinedLoader(
        {"a": small(session, 2, shuffle=True), "b": large(session, 5, shuffle=True)}, "max_size_cycle"
    )


ORDERED: dict[str, Callable[[same.Session], Any]] = {
    "a sampler that counts": lambda s: DataLoader(same.samples(SIZE), s.data.batch_size, sampler=Counts(SIZE)),
    "a sampler with a generator": weighted,
    "a loader with a generator": lambda s: s.data.loader(
        SIZE, shuffle=True, generator=torch.Generator().manual_seed(7)
    ),
}
DATA = {**COMBINED, **GIVEN, **ORDERED, "shuffled loaders": shuffled}


def trains_on(
    name: str, *callbacks: Callback, epochs: int = 2, ckpt_path: Path | None = None, **trainer: Any
) -> Callable[[same.Session], None]:
    def script(session: same.Session) -> None:
        module = session.run.module = Several()
        made = session.trainer(max_epochs=epochs, callbacks=[session.diary(), *callbacks], **trainer)
        made.fit(module, DATA[name](session), ckpt_path=ckpt_path)
        session.run.results["batches"] = made.num_training_batches
        session.run.results["metrics"] = session.run.metrics

    return script


def hooks_of(run: same.Run) -> list[Any]:
    """The hooks of a callback, whatever kind of batch they get."""
    return [[*entry[:2], ["batch" if arg == "mapping" else arg for arg in entry[2]]] for entry in run.diary("callback")]


@pytest.mark.parametrize("name", sampled(COMBINED, 1, seed=1))
def test_training_takes_the_combined_batches_of_one_device(tmp_path, name):
    one, grid = same.run_both(trains_on(name), tmp_path)
    same.assert_same(hooks_of(one), hooks_of(grid), where="hooks")
    same.assert_same(one.weights, grid.weights)
    same.assert_same(one.results, grid.results, same.FLOAT32_TOLERANCE)


def in_each_phase(make: Callable[[same.Session], Any]) -> Callable[[same.Session], None]:
    def script(session: same.Session) -> None:
        module = session.run.module = Several()
        trainer = session.trainer(max_epochs=2)
        trainer.fit(module, make(session), make(session))
        session.run.results["fit"] = session.run.metrics
        session.run.results["test"] = trainer.test(module, make(session), verbose=False)
        session.run.results["predict"] = torch.cat(trainer.predict(module, make(session)))

    return script


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*batch sampler.*")
@pytest.mark.parametrize("name", sampled(GIVEN, 2, seed=2))
def test_each_phase_takes_the_given_batches_as_on_one_device(tmp_path, name):
    one, grid = same.run_both(in_each_phase(GIVEN[name]), tmp_path)
    same.assert_same(one.weights, grid.weights)
    same.assert_same(one.results, grid.results, same.FLOAT32_TOLERANCE)


def evaluated(mode: str) -> Callable[[same.Session], None]:
    def script(session: same.Session) -> None:
        """The last batches are of 5 samples and of 1, which cannot be divided."""
        data, half = session.data, same.Data(session.data.batch_size // 2)
        loaders = CombinedLoader({"a": data.loader(21, seed=2), "b": half.loader(9, seed=3)}, mode)
        module = session.run.module = Several()
        trainer = session.trainer(max_epochs=1)
        trainer.fit(module, large(session, 2), loaders)
        session.run.results["fit"] = session.run.metrics
        session.run.results["test"] = trainer.test(module, loaders, verbose=False)

    return script


@pytest.mark.parametrize("mode", sampled(["min_size", "max_size", "max_size_cycle", "sequential"], 1))
def test_evaluations_take_the_combined_batches_of_one_device(tmp_path, mode):
    one, grid = same.run_both(evaluated(mode), tmp_path)
    assert one.results["test"]
    same.assert_same(one.results, grid.results, same.FLOAT32_TOLERANCE)


KILLED = [
    *sampled(ORDERED, 1, rest=pytest.mark.long),
    *(pytest.param(name, marks=pytest.mark.long) for name in ("a list", "an iterable")),
    *sampled(["a dataset of batches", "a batch sampler"], 0),
]
"""Of what a replacement must find its place in."""


@pytest.mark.parametrize("name", KILLED)
def test_a_kill_changes_nothing_and_a_replacement_finds_its_place(tmp_path, name):
    one = same.on_one_device(trains_on(name, epochs=3), tmp_path / "one")
    faults = FaultInjectionCallback([Fault("kill", 1, 1, step=2), Fault("kill", 0, 0, step=6)])
    grid = same.on_a_grid(trains_on(name, faults, AwaitReplacement([4, 8]), epochs=3), tmp_path, max_restarts=10)
    assert failures(grid.trainer) == rejoined(grid.trainer) == [(1, 1), (0, 0)]
    same.assert_same(one.weights, grid.weights)
    same.assert_same(one.results, grid.results, same.FLOAT32_TOLERANCE)


class Steers(Several):
    """Changes the order of the next epoch through the Trainer, and counts batches as they are moved."""

    moved = 0

    def on_train_epoch_end(self) -> None:
        self.trainer.train_dataloader.sampler.order.reverse()

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.moved += 1
        return super().on_after_batch_transfer(batch, dataloader_idx)


def steered(*callbacks: Callback) -> Callable[[same.Session], None]:
    def script(session: same.Session) -> None:
        module, sampler = Steers(), Told(SIZE)
        trainer = session.trainer(max_epochs=3, callbacks=[*callbacks])
        trainer.fit(module, DataLoader(same.samples(SIZE), session.data.batch_size, sampler=sampler))
        session.run.results.update(weights=module.state_dict(), moved=module.moved, epochs=sampler.epochs)

    return script


def test_hooks_steer_the_users_sampler_and_what_moves_batches_counts_them_once(tmp_path):
    one = same.on_one_device(steered(), tmp_path / "one")
    faults = FaultInjectionCallback([Fault("kill", 0, 1, step=2), Fault("kill", 1, 0, step=6)])
    grid = same.on_a_grid(steered(faults, AwaitReplacement([4, 8])), tmp_path, max_restarts=10)
    assert failures(grid.trainer) == [(0, 1), (1, 0)]
    assert one.results["epochs"] == [0, 1, 2]
    same.assert_same(one.results, grid.results)


RESUMED = [
    *sampled([("shuffled loaders", step) for step in (3, 5, 9)], 1),
    *sampled(
        [("a sampler that counts", 8), ("a sampler with a generator", 10), ("a dataset of batches", 3)],
        0,
        rest=pytest.mark.long,
    ),
    ("a batch sampler", 3),
    *sampled([("an iterable", 3)], 0),
]


@pytest.mark.parametrize(("name", "batch"), RESUMED)
def test_a_run_resumes_where_it_was(tmp_path, name, batch):
    path = tmp_path / "saved.ckpt"
    whole = same.on_a_grid(trains_on(name, same.SavesAt(batch, path), epochs=3), tmp_path / "whole")
    resumed = same.on_a_grid(trains_on(name, epochs=3, ckpt_path=path), tmp_path / "resumed")
    same.assert_same(whole.weights, resumed.weights)
    assert whole.progress == resumed.progress


@pytest.mark.long
def test_batches_of_any_size_need_one_microbatch_and_the_error_says_so(tmp_path):
    def script(session: same.Session) -> None:
        session.trainer(max_epochs=1).fit(same.Classifier(), Sized(last=3))

    with pytest.raises(ConfigurationError, match=r"lengths \[3\].*num_microbatches=2.*num_microbatches=1"):
        same.on_a_grid(script, tmp_path)


@pytest.mark.long
def test_with_one_microbatch_the_last_batch_may_be_smaller(tmp_path):
    script = in_each_phase(lambda _: Sized(last=3))
    one = same.on_one_device(script, tmp_path / "one")
    grid = same.on_a_grid(script, tmp_path / "grid", num_microbatches=1)
    same.assert_same(one.weights, grid.weights)
    same.assert_same(one.results, grid.results, same.FLOAT32_TOLERANCE)


class NoisyOnTheDevice(same.Classifier):
    """Augments whole batches, when they are on the device."""

    def on_after_batch_transfer(self, batch: list[Tensor], dataloader_idx: int) -> list[Tensor]:
        return [batch[0] + 0.1 * torch.randn_like(batch[0]), batch[1]]


def augmented(session: same.Session) -> None:
    session.fit(NoisyOnTheDevice(), max_epochs=2)


def test_what_a_batch_hook_draws_depends_on_the_data_alone(tmp_path):
    grid = same.on_a_grid(augmented, tmp_path / "2x2")
    again = same.on_a_grid(augmented, tmp_path / "again", staggered=False, split_backward=False)
    same.assert_same(grid.weights, again.weights)
