"""Streams of Hugging Face's ``datasets``: from wherever they are set back, the samples are those of one device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from test_iterable_style import GLOBAL_BATCH, GRIDS, SEED, SIZE, epochs, read
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_recycle.data.iterable_style import StreamLoader, has_shuffle_buffer
from lightning_recycle.planning.grid import Grid

if TYPE_CHECKING:
    from datasets import IterableDataset

pytestmark = pytest.mark.long


def plain(first: int = 0) -> IterableDataset:
    from datasets import Dataset  # slow: by the one process that runs these tests

    return Dataset.from_dict({"n": list(range(first, first + SIZE))}).to_iterable_dataset(num_shards=4)


def shuffled() -> IterableDataset:
    return plain().shuffle(seed=3, buffer_size=7)


def transformed() -> IterableDataset:
    return plain().map(lambda row: {"n": 3 * row["n"]}).filter(lambda row: row["n"] % 2 == 0)


def mixed() -> IterableDataset:
    from datasets import interleave_datasets

    return interleave_datasets([plain(), plain(SIZE)], probabilities=[0.3, 0.7], seed=5)


def mixed_with_buffers() -> IterableDataset:
    from datasets import interleave_datasets

    return interleave_datasets([plain(), shuffled().take(30)])


KINDS = [plain, shuffled, transformed, mixed, mixed_with_buffers]


def numbers(rows: list[dict[str, Any]]) -> Tensor:
    return torch.tensor([row["n"] for row in rows])


def loader(dataset: IterableDataset, grid: Grid, num_workers: int = 0) -> StreamLoader:
    data = DataLoader(dataset, batch_size=GLOBAL_BATCH // grid.pipelines, num_workers=num_workers, collate_fn=numbers)
    made = StreamLoader(data, grid, SEED)
    made.enter_epoch(0, float("inf"))
    return made


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_the_global_batches_of_all_epochs_are_those_of_one_device(kind):
    found, _ = read(loader(kind(), GRIDS[1]), 0, 3, None)
    one_device = DataLoader(kind(), batch_size=GLOBAL_BATCH, collate_fn=numbers, drop_last=True)
    expected = [sorted(batch.tolist()) for _ in range(3) for batch in one_device]
    assert [sorted(n for part in parts for n in part) for _, parts in found] == expected


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_from_a_place_all_later_epochs_have_the_same_samples(kind, num_workers):
    source = loader(kind(), GRIDS[1], num_workers)
    uninterrupted, places = read(source, 0, 3, None)
    source.close()
    last = {epoch: index for (epoch, index), _ in uninterrupted}
    for number, ((epoch, index), _) in enumerate(uninterrupted):
        if num_workers and number % 3:
            continue  # starting processes takes long
        after = (epoch, index + 1) if index < last[epoch] else (epoch + 1, 0)
        other = loader(kind(), GRIDS[0], num_workers)
        other.load_state_dict(places[number])
        assert read(other, after[0], 3, None, after[1])[0] == uninterrupted[number + 1 :]
        other.close()


@pytest.mark.parametrize("kind", [plain, shuffled], ids=lambda kind: kind.__name__)
def test_the_epoch_that_a_user_sets_is_part_of_the_place(kind):
    """Their ``set_epoch()`` lets a dataset that is shuffled have another order; a joiner has not called it."""
    dataset = kind()
    source = loader(dataset, GRIDS[1])
    steps = []
    for epoch in range(2):
        dataset.set_epoch(epoch)
        for handle, parts in epochs(source, epoch, epoch + 1, None):
            steps.append((handle.index, [part.tolist() for part in parts], source.state_dict()))
    per_epoch = len(steps) // 2
    assert (steps[0][1] != steps[per_epoch][1]) == (kind is shuffled)
    for number in (per_epoch, per_epoch + 1, 2 * per_epoch - 1):
        other = loader(kind(), GRIDS[0])
        other.load_state_dict(steps[number][2])
        found = [[part.tolist() for part in parts] for _, parts in epochs(other, 1, 2, None, number - per_epoch + 1)]
        assert found == [parts for _, parts, _ in steps[number + 1 :]]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_shuffle_buffer_is_found_wherever_it_is(kind):
    assert has_shuffle_buffer(kind()) == (kind in (shuffled, mixed_with_buffers))
