"""Batches that a batch sampler composes or that are samples of the dataset, and equal parts of a batch."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

from lightning_recycle.data.prebatched import GivenBatchLoader, sliced
from lightning_recycle.errors import ConfigurationError
from lightning_recycle.planning.grid import Grid, Microbatch


class Numbers(Dataset[Tensor]):
    def __getitem__(self, index: int) -> Tensor:
        return torch.arange(4 * index, 4 * index + 4)

    def __len__(self) -> int:
        return 7


class Pairs(BatchSampler):
    """A batch sampler of one's own, with as many batches as it draws."""


def loader(grid: Grid, evaluation: bool = False, **options: Any) -> GivenBatchLoader:
    return GivenBatchLoader(DataLoader(Numbers(), **options), grid, 0, 11, evaluation=evaluation)


def test_each_pipeline_takes_one_batch_of_a_step_and_divides_it() -> None:
    source = loader(Grid(2, 1, 2), batch_size=None)
    assert len(source) == 3
    first, second, _ = source
    assert source.fetch(second, Microbatch(1, 0)).tolist() == [12, 13]
    assert source.fetch(second, Microbatch(1, 1)).tolist() == [14, 15]
    assert [part.tolist() for part in first.read()] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_an_evaluation_computes_each_batch_once_and_all_of_them() -> None:
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
def test_the_batches_of_a_sampler_are_the_same_on_every_grid_with_as_many_pipelines_of_batches(pipelines: int) -> None:
    def read(grid: Grid) -> list[list[int]]:
        batches = Pairs(RandomSampler(range(7)), 2, True)
        source = GivenBatchLoader(DataLoader(Numbers(), batch_sampler=batches), grid, 0, 11, batch_pipelines=pipelines)
        found = [source.fetch(h, mb) for h in source for mb in sorted(grid.all_microbatches(), key=str)]
        return sorted(row.tolist() for part in found for row in part)

    assert read(Grid(pipelines, 1, 2)) == read(Grid(1, 1, 2 * pipelines))


def test_what_cannot_be_divided_is_told_with_the_remedy() -> None:
    source = loader(Grid(2, 1, 3), batch_sampler=Pairs(range(7), 2, True))
    with pytest.raises(ConfigurationError, match=r"Pairs composed a batch of 2 .*num_microbatches=3.*multiple of 3"):
        source.fetch(next(iter(source)), Microbatch(0, 0))
    with pytest.raises(ConfigurationError, match=r"holds a str.*num_microbatches=2.*num_microbatches=1"):
        sliced({"x": torch.ones(4), "name": "a"}, 0, 2)
    with pytest.raises(ConfigurationError, match=r"lengths \[3, 4\]"):
        sliced([torch.ones(4), torch.ones(3)], 0, 1 + 1)


def test_parts_of_a_batch_are_those_of_all_its_tensors() -> None:
    batch = {"x": torch.arange(6), "rest": [torch.arange(12).view(6, 2), None]}
    part = sliced(batch, 1, 3)
    assert part["x"].tolist() == [2, 3]
    assert part["rest"][0].tolist() == [[4, 5], [6, 7]]
    assert part["rest"][1] is None
    assert sliced(batch, 0, 1) is batch
