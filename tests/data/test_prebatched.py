"""Batches that a batch sampler composes or that are samples of the dataset, and equal parts of a batch."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

from lightning_recycle.data.prebatched import BatchIterableLoader, GivenBatchLoader, sliced
from lightning_recycle.data.step_sources import StepHandle
from lightning_recycle.errors import ConfigurationError
from lightning_recycle.planning.grid import Grid, Microbatch, global_index


class Numbers(Dataset[Tensor]):
    def __getitem__(self, index: int) -> Tensor:
        return torch.arange(4 * index, 4 * index + 4)

    def __len__(self) -> int:
        return 7


class Pairs(BatchSampler):
    """A batch sampler of one's own, with as many batches as it draws."""


def loader(grid: Grid, evaluation: bool = False, **options: Any) -> GivenBatchLoader:
    return GivenBatchLoader(DataLoader(Numbers(), **options), grid, 0, 11, evaluation=evaluation)


def test_each_pipeline_takes_one_batch_of_a_step_and_divides_it():
    source = loader(Grid(2, 1, 2), batch_size=None)
    assert len(source) == 3
    first, second, _ = source
    assert source.fetch(second, Microbatch(1, 0)).tolist() == [12, 13]
    assert source.fetch(second, Microbatch(1, 1)).tolist() == [14, 15]
    assert [part.tolist() for part in first.read()] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_an_evaluation_computes_each_batch_once_and_all_of_them():
    source = loader(Grid(2, 1, 2), evaluation=True, batch_size=None)
    found = [
        (microbatch, source.fetch(handle, microbatch)[0].item(), source.num_samples(handle, microbatch))
        for handle in source
        for microbatch in source.grid.all_microbatches()
        if source.num_samples(handle, microbatch)
    ]
    assert sorted(first for _, first, _ in found) == [0, 4, 8, 12, 16, 20, 24]
    assert all(microbatch.index == 0 and size == 4 for microbatch, _, size in found)


@pytest.mark.parametrize("pipelines", [1, 2])
def test_the_batches_of_a_sampler_are_the_same_on_every_grid_with_as_many_pipelines_of_batches(pipelines):
    def read(grid: Grid) -> list[list[int]]:
        batches = Pairs(RandomSampler(range(7)), 2, True)
        source = GivenBatchLoader(DataLoader(Numbers(), batch_sampler=batches), grid, 0, 11, batch_pipelines=pipelines)
        found = [source.fetch(h, mb) for h in source for mb in sorted(grid.all_microbatches(), key=str)]
        return sorted(row.tolist() for part in found for row in part)

    assert read(Grid(pipelines, 1, 2)) == read(Grid(1, 1, 2 * pipelines))


def test_what_cannot_be_divided_is_told_with_the_remedy():
    source = loader(Grid(2, 1, 3), batch_sampler=Pairs(range(7), 2, True))
    with pytest.raises(ConfigurationError, match=r"Pairs composed a batch of 2 .*num_microbatches=3.*multiple of 3"):
        source.fetch(next(iter(source)), Microbatch(0, 0))
    with pytest.raises(
        ConfigurationError, match=r"holds an object of type str.*num_microbatches=2.*num_microbatches=1"
    ):
        sliced({"x": torch.ones(4), "name": "a"}, 0, 2)
    with pytest.raises(ConfigurationError, match=r"lengths \[3, 4\]"):
        sliced([torch.ones(4), torch.ones(3)], 0, 1 + 1)


def test_parts_of_a_batch_are_those_of_all_its_tensors():
    batch = {"x": torch.arange(6), "rest": [torch.arange(12).view(6, 2), None]}
    part = sliced(batch, 1, 3)
    assert part["x"].tolist() == [2, 3]
    assert part["rest"][0].tolist() == [[4, 5], [6, 7]]
    assert part["rest"][1] is None
    assert sliced(batch, 0, 1) is batch


def whole(handle: StepHandle) -> list[Any]:
    read = handle.read()
    return torch.cat(read).tolist() if isinstance(read, list) else read.tolist()


def by_division(handle: StepHandle, parts: list[Tensor], sizes: list[int] | None) -> list[Any]:
    """The rows of all micro-batches at the places that the division gives them."""
    (places,) = handle.loader.divisions(handle, sizes)
    assert [len(own) for own in places] == [len(part) for part in parts]
    rows = {place: row for own, part in zip(places, parts, strict=True) for place, row in zip(own, part, strict=True)}
    return [rows[place].tolist() for place in sorted(rows)]


class Uneven(Dataset[Tensor]):
    """Batches of 2, 4, 6 and 8 numbers."""

    def __getitem__(self, index: int) -> Tensor:
        return torch.arange(100 * index, 100 * index + 2 * (index + 1))

    def __len__(self) -> int:
        return 4


@pytest.mark.parametrize("grid", [Grid(1, 1, 2), Grid(2, 1, 2)], ids=str)
def test_divisions_are_the_places_of_samples_in_the_batch(grid):
    batches = [[0, 1], [2, 3, 4, 5], [6, 5], [4, 3, 2, 1]]
    for data in (DataLoader(Numbers(), batch_sampler=batches), DataLoader(Uneven(), batch_size=None)):
        source = GivenBatchLoader(data, grid, 0, 11)
        for handle in source:
            source.begin_step(handle)
            ordered = sorted(grid.all_microbatches(), key=lambda mb: global_index(grid, mb))
            parts = [source.fetch(handle, mb) for mb in ordered]
            assert by_division(handle, parts, [len(part) for part in parts]) == whole(handle)


def test_parts_that_returned_nothing_leave_the_others_in_order():
    source = GivenBatchLoader(DataLoader(Uneven(), batch_size=None), Grid(2, 1, 2), 0, 11)
    (places,) = source.divisions(next(iter(source)), [0, 2, 1, 0])
    assert places == [range(1), range(2, 4), range(1, 2), range(4, 6)]
    assert source.divisions(next(iter(source)), None) == []


@pytest.mark.parametrize("grid", [Grid(1, 1, 2), Grid(2, 1, 2)], ids=str)
def test_every_pipeline_has_the_places_of_a_whole_batch(grid):
    source = BatchIterableLoader([Uneven()[index] for index in range(4)], grid, 11)
    for handle in source:
        ordered = sorted(grid.all_microbatches(), key=lambda mb: global_index(grid, mb))
        parts = [source.fetch(handle, mb) for mb in ordered]
        assert by_division(handle, parts, None) == whole(handle)
