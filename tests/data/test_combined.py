"""Several DataLoaders at once: addresses that Lightning combines, and the data that they stand for."""

import itertools
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from support.samplers import Numbers
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from lightning_recycle.data.map_style import MicrobatchLoader
from lightning_recycle.data.step_sources import StepHandle, as_one_step
from lightning_recycle.planning.grid import Grid, Microbatch

GRID = Grid(2, 1, 2)


def loader(
    first: int, steps: int, evaluation: bool = False, size: int | None = None, **options: Any
) -> MicrobatchLoader:
    data = DataLoader(Numbers(size or 4 * steps, first), batch_size=2, **options)
    return MicrobatchLoader(data, GRID, 0, 11, evaluation=evaluation)


def steps_of(mode: Any, *loaders: MicrobatchLoader) -> Iterator[StepHandle]:
    for batch, _, _ in CombinedLoader(list(loaders), mode):
        yield as_one_step(batch)


def microbatches(step: StepHandle) -> list[Any]:
    step.loader.begin_step(step)
    found = GRID.all_microbatches()
    return [step.loader.fetch(step, mb) for mb in found if step.loader.num_samples(step, mb)]


@pytest.mark.parametrize("mode", ["min_size", "max_size", "max_size_cycle"])
def test_the_microbatches_of_a_step_hold_each_loaders_batch_once(mode):
    expected = [
        batch for batch, _, _ in CombinedLoader([DataLoader(Numbers(4 * n, f), 4) for f, n in ((0, 5), (100, 2))], mode)
    ]
    found = list(steps_of(mode, loader(0, 5), loader(100, 2)))
    assert [step.index for step in found] == list(range(len(expected)))
    for step, batch in zip(found, expected, strict=True):
        parts = microbatches(step)
        for index, whole in enumerate(batch):
            if whole is None:
                assert all(part[index] is None for part in parts)
            else:
                assert sorted(torch.cat([part[index] for part in parts]).tolist()) == whole.tolist()
        assert [leaf.tolist() for leaf in tree_leaves(step.read()) if leaf is not None] == [
            leaf.tolist() for leaf in batch if leaf is not None
        ]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_each_round_of_a_shorter_loader_has_an_order_of_its_own_that_can_be_read_again(num_workers):
    def read(*begin_with: int) -> dict[int, list[Any]]:
        found = {}
        with closing(loader(100, 2, shuffle=True, num_workers=num_workers)) as shorter:
            for step in steps_of("max_size_cycle", loader(0, 6), shorter):
                if not begin_with or step.index in begin_with:
                    found[step.index] = [part[1].tolist() for part in microbatches(step)]
        return found

    whole = read()
    rounds = [[*itertools.chain(*whole[i], *whole[i + 1])] for i in (0, 2, 4)]
    assert sorted(rounds[0]) == sorted(rounds[1]) == sorted(rounds[2])
    assert rounds[0] != rounds[1] != rounds[2]
    assert read(3, 5) == {3: whole[3], 5: whole[5]}


def test_a_step_of_an_earlier_round_can_be_redone():
    with closing(loader(100, 2, shuffle=True, num_workers=1)) as shorter:
        steps = list(steps_of("max_size_cycle", loader(0, 4), shorter))
        found = [[part[1].tolist() for part in microbatches(step)] for step in steps]
        for index in (2, 1, 2, 3):
            step = steps[index]
            assert [step.loader.fetch(step, mb)[1].tolist() for mb in GRID.all_microbatches()] == found[index]


def test_a_step_of_an_evaluation_with_too_few_samples_of_one_loader_is_one_microbatch():
    found = list(steps_of("min_size", loader(0, 2, True, size=7), loader(100, 2, True, size=5)))
    assert [len(microbatches(step)) for step in found] == [4, 1]
    (last,) = microbatches(found[1])
    assert [part.tolist() for part in last] == [[4, 5, 6], [104]]
    assert found[1].num_samples == 3


def test_what_is_no_combination_of_addresses_is_left_alone():
    for batch in ([torch.ones(2)], {"a": None}, [], "text", None):
        assert as_one_step(batch) is batch


def test_divisions_are_those_of_each_loader():
    large = DataLoader(Numbers(40, 100), batch_size=4)
    step = next(steps_of("min_size", loader(0, 5), loader(50, 5), MicrobatchLoader(large, GRID, 0, 11)))
    divisions = step.loader.divisions(step, [1, 1, 1, 1])
    assert divisions == [[range(g, 4, 4) for g in range(4)], [range(g, 8, 4) for g in range(4)]]
    of_largest = [step.loader.fetch(step, mb)[2].tolist() for mb in (Microbatch(0, 0), Microbatch(1, 0))]
    assert of_largest == [[100, 104], [101, 105]]
