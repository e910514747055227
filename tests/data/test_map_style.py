"""Micro-batch data by address."""

import os
import pickle
import random
import signal
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.data import _set_sampler_epoch
from support.forked import ForkedProcess
from support.process_tree import is_alive
from support.samplers import Numbers, Told
from support.waiting import next_line, wait_for
from torch import Tensor
from torch.utils import data as td

from lightning_recycle.data.dataloaders import check_dataloader
from lightning_recycle.data.map_style import MicrobatchLoader
from lightning_recycle.data.prebatched import GivenBatchLoader
from lightning_recycle.data.step_sources import StepHandle
from lightning_recycle.errors import ConfigurationError, UnsupportedFeatureError
from lightning_recycle.planning.grid import Grid, Microbatch, global_index

SEED = 11


class Augmented(Numbers):
    """Sample i, and a draw from each random generator; counts nothing, remembers nothing."""

    def __getitem__(self, index: int) -> Tensor:  # (4,)
        return torch.tensor([index, random.random(), float(np.random.rand()), torch.rand(()).item()])


class FromTheEnd(td.SequentialSampler):
    """A sampler that inherits from a known one, with an order of its own that depends on the epoch."""

    def __init__(self, size: int) -> None:
        super().__init__(range(size))
        self.size, self.epoch = size, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter([(i - self.epoch) % self.size for i in reversed(range(self.size))])


class RandomChoice(td.Sampler[int]):
    """A sampler that draws from torch's generator."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randint(self.size, (self.size,)).tolist())


def masked(samples: list[Tensor]) -> Tensor:
    """A collate function that draws, as those for masked language models do."""
    batch = torch.stack(samples)
    return torch.where(torch.rand(batch.shape) < 0.5, batch, -1)


def loader(
    dataset: td.Dataset[Any], grid: Grid, batch_size: int, pipeline: int = 0, *, seed: int = SEED, **options: Any
) -> MicrobatchLoader:
    return MicrobatchLoader(td.DataLoader(dataset, batch_size=batch_size, **options), grid, pipeline, seed)


def step_data(source: MicrobatchLoader, epoch: int, step: int) -> list[Tensor]:
    """The micro-batches of a step by their global index."""
    handle = StepHandle(source, epoch, step)
    source.begin_step(handle)
    microbatches = sorted(source.grid.all_microbatches(), key=lambda mb: global_index(source.grid, mb))
    return [source.fetch(handle, mb) for mb in microbatches]


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    return len(first) == len(second) and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


GRIDS = [(Grid(1, 1, 1), 6), (Grid(2, 1, 3), 6), (Grid(3, 2, 2), 4), (Grid(1, 2, 4), 8), (Grid(2, 3, 2), 2)]


# ---------------------------------------------------------------------- who computes what


class Prepared(td.Dataset[int]):
    """Readable in processes that :func:`prepare` has prepared, such as by opening a file."""

    factor: int | None = None

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> int:
        return index * self.factor


def prepare(_: int) -> None:
    info: Any = td.get_worker_info()
    info.dataset.factor = 2


def test_processes_that_the_user_prepares_read_what_others_would_have_read_too():
    source = loader(Prepared(), Grid(2, 1, 2), 4, num_workers=2, worker_init_fn=prepare)
    with closing(source):
        for epoch in range(2):
            for step in range(len(source)):
                found = torch.cat(step_data(source, epoch, step)).tolist()
                assert sorted(found) == [2 * index for index in range(8 * step, 8 * step + 8)]
                assert sorted(source.collate_batch(StepHandle(source, epoch, step)).tolist()) == sorted(found)


@pytest.mark.parametrize(("grid", "batch_size"), GRIDS, ids=str)
def test_without_shuffling_pipeline_d_gets_every_dth_sample_of_a_contiguous_block(grid, batch_size):
    source = loader(Numbers(100), grid, batch_size)
    for step in range(len(source)):
        block = range(step * grid.pipelines * batch_size, (step + 1) * grid.pipelines * batch_size)
        for pipeline in range(grid.pipelines):
            mine = [
                index
                for m in range(grid.microbatches)
                for _, index in source.addresses(0, step, Microbatch(pipeline, m))
            ]
            assert sorted(mine) == list(block[pipeline :: grid.pipelines])


@pytest.mark.parametrize("shuffle", [False, True], ids=["in order", "shuffled"])
def test_a_global_microbatch_depends_on_d_times_m_only(shuffle):
    expected = None
    for grid, batch_size in ((Grid(1, 1, 6), 12), (Grid(2, 3, 3), 6), (Grid(3, 2, 2), 4), (Grid(6, 1, 1), 2)):
        source = loader(Augmented(40), grid, batch_size, shuffle=shuffle)
        found = [step_data(source, epoch, step) for epoch in range(2) for step in range(len(source))]
        expected = found if expected is None else expected
        assert all(same(a, b) for a, b in zip(found, expected, strict=True)), grid


def test_shuffling_depends_on_seed_and_epoch_and_on_nothing_else():
    def order(seed: int, epoch: int) -> list[int]:
        source = loader(Numbers(64), Grid(1, 1, 1), 64, shuffle=True, seed=seed)
        return step_data(source, epoch, 0)[0].tolist()

    torch.manual_seed(1)
    first = order(0, 0)
    torch.manual_seed(2)
    assert order(0, 0) == first
    assert sorted(first) == list(range(64))
    assert first != list(range(64))
    assert order(0, 1) != first
    assert order(1, 0) != first


def test_iterating_yields_the_steps_of_the_epoch_that_lightning_set():
    source = loader(Numbers(32), Grid(2, 1, 2), 4)
    steps = iter(source)
    source.set_epoch(3)  # after creating the iterator, as Lightning does
    assert [(handle.epoch, handle.index) for handle in steps] == [(3, 0), (3, 1), (3, 2), (3, 3)]


# ---------------------------------------------------------------------- randomness


def test_augmentation_is_drawn_by_sample_and_epoch_whoever_fetches():
    grid = Grid(2, 1, 2)
    mine, other = loader(Augmented(16), grid, 4), loader(Augmented(16), grid, 4, pipeline=1)
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    first = step_data(mine, 0, 1)
    random.seed(2), np.random.seed(2), torch.manual_seed(2)
    step_data(other, 0, 0)
    assert same(step_data(other, 0, 1), first)
    assert not same(step_data(other, 1, 1), first), "another epoch draws anew"
    rows = torch.cat(first)
    assert len(set(rows[:, 1].tolist())) == len(rows), "every sample has draws of its own"


def test_fetching_leaves_the_generators_of_the_process_alone():
    source = loader(Augmented(16), Grid(1, 1, 1), 16, shuffle=True)
    torch.manual_seed(1), random.seed(1)
    expected = (torch.rand(()).item(), random.random())
    torch.manual_seed(1), random.seed(1)
    step_data(source, 0, 0)
    assert (torch.rand(()).item(), random.random()) == expected


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_collate_function_that_draws_gives_the_same_whoever_calls_it(num_workers):
    grid = Grid(2, 1, 2)
    expected = step_data(loader(Numbers(16), grid, 4, collate_fn=masked), 0, 1)
    torch.manual_seed(99)
    source = loader(Numbers(16), grid, 4, pipeline=1, collate_fn=masked, num_workers=num_workers)
    with closing(source):
        assert same(step_data(source, 0, 1), expected)


# ---------------------------------------------------------------------- prefetching and redone steps


def test_dataloader_workers_give_what_fetching_directly_gives():
    grid = Grid(2, 1, 2)
    direct = loader(Augmented(33), grid, 4, shuffle=True)
    source = loader(Augmented(33), grid, 4, pipeline=1, shuffle=True, num_workers=2)
    with closing(source):
        for epoch in range(2):
            for step in range(len(source)):
                found = step_data(source, epoch, step)
                assert same(found, step_data(direct, epoch, step)), (epoch, step)
                assert same(step_data(source, epoch, step), found), "a redone step gets the same"


def test_own_microbatches_may_be_asked_for_in_any_order_and_adopted_ones_between_them():
    grid = Grid(2, 1, 4)
    source = loader(Augmented(64), grid, 4, pipeline=0, num_workers=2)
    direct = loader(Augmented(64), grid, 4)
    wanted = [Microbatch(*place) for place in ((0, 2), (1, 3), (0, 0), (0, 3), (1, 0), (0, 1))]
    with closing(source):
        for step in (0, 1, 3):  # a step may be skipped: another worker's data, or a resumed run
            handle = StepHandle(source, 0, step)
            source.begin_step(handle)
            for microbatch in wanted:
                assert torch.equal(source.fetch(handle, microbatch), direct.fetch(handle, microbatch))


def test_a_hook_uses_the_handle_as_the_batch():
    source = loader(Numbers(32), Grid(2, 1, 2), 4)
    handle = StepHandle(source, 0, 1)
    handle.refuse_changes()
    with closing(source):
        whole = handle.read()
        assert (handle.shape, handle[1], handle.sum()) == (whole.shape, whole[1], torch.sum(handle))
        assert pickle.loads(pickle.dumps(handle)).equal(whole)
        assert torch.cat([handle, handle]).equal(torch.cat([whole, whole]))
        with pytest.raises(AttributeError, match="image"):
            _ = handle.image
        handle.refuse_changes()
        whole.mul_(2)
        for change in (lambda: handle.__setitem__(0, 1), handle.refuse_changes):
            with pytest.raises(UnsupportedFeatureError, match="on_after_batch_transfer"):
                change()
        with pytest.raises(AttributeError, match="image"):
            handle.image = whole


class WhoRead(Numbers):
    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(os.getpid())


def test_only_own_microbatches_are_prefetched_by_other_processes():
    source = loader(WhoRead(32), Grid(2, 1, 2), 4, pipeline=1, num_workers=1)
    handle = StepHandle(source, 0, 0)
    with closing(source):
        own = source.fetch(handle, Microbatch(1, 0))
        adopted = source.fetch(handle, Microbatch(0, 0))
    assert os.getpid() not in own.tolist()
    assert set(adopted.tolist()) == {os.getpid()}


@pytest.mark.parametrize("num_workers", [0, 1])
def test_what_a_step_does_to_its_data_in_place_is_not_seen_when_it_is_redone(num_workers):
    """An in-place first layer, or a split_batch() that normalises in place."""
    source = loader(Numbers(8), Grid(1, 1, 2), 4, num_workers=num_workers)
    handle = StepHandle(source, 0, 0)
    source.begin_step(handle)
    with closing(source):
        fetched = source.fetch(handle, Microbatch(0, 0))
        expected = fetched.clone()
        fetched.add_(100)
        assert torch.equal(source.fetch(handle, Microbatch(0, 0)), expected)


def test_data_of_steps_that_cannot_be_redone_any_more_is_released():
    source = loader(Numbers(32), Grid(1, 1, 2), 4)
    for step in range(len(source)):
        step_data(source, 0, step)
        assert len(source._cache) <= 4, "this step's and the one's before"


# ---------------------------------------------------------------------- samplers and bad input


@pytest.mark.parametrize("sampler", [FromTheEnd, RandomChoice], ids=lambda cls: cls.__name__)
def test_a_sampler_of_the_users_is_followed_and_is_the_same_for_every_grid(sampler):
    def samples(grid: Grid, batch_size: int, epoch: int) -> list[list[int]]:
        source = loader(Numbers(24), grid, batch_size, sampler=sampler(24))
        _set_sampler_epoch(source, epoch)
        return [sorted(torch.cat(step_data(source, epoch, step)).tolist()) for step in range(len(source))]

    expected = samples(Grid(1, 1, 1), 12, 1)
    torch.manual_seed(4)
    assert samples(Grid(3, 2, 2), 4, 1) == expected
    assert samples(Grid(3, 2, 2), 4, 2) != expected
    if sampler is FromTheEnd:
        assert expected[0] == list(range(11, 23)), "the block of the sampler's own order"


class Named(td.DataLoader[Any]):
    """A loader of a user's, with an attribute."""

    name = "mine"


def test_hooks_find_what_the_users_loader_has_and_change_it_there():
    sampler = td.WeightedRandomSampler([1.0, 0.0] * 12, 24, generator=torch.Generator().manual_seed(1))
    users = Named(Numbers(24), batch_size=4, sampler=sampler)
    source = MicrobatchLoader(users, Grid(2, 1, 2), 0, SEED)
    assert source.sampler is sampler
    assert source.batch_sampler is users.batch_sampler
    assert (source.name, source.batch_size, source.dataset) == ("mine", 4, users.dataset)
    with pytest.raises(AttributeError, match="'Named' object has no attribute 'others'"):
        source.others  # noqa: B018
    with pytest.raises(ValueError, match="sampler attribute should not be set"):
        source.sampler = td.SequentialSampler(range(24))
    assert not any(int(i) % 2 for i in torch.cat(step_data(source, 0, 0)))
    source.sampler.weights = 1 - sampler.weights
    source.collate_fn = negated
    source.enter_epoch(0, 3)
    assert all(int(i) < 0 and int(i) % 2 for i in torch.cat(step_data(source, 1, 0)))


def negated(samples: list[Tensor]) -> Tensor:
    return -torch.stack(samples)


@pytest.mark.parametrize(("name", "value"), [("batch_size", 8), ("sampler", td.SequentialSampler(range(24)))])
def test_a_change_of_torchs_batch_sampler_is_refused_before_the_next_epoch(name, value):
    source = loader(Numbers(24), Grid(2, 1, 2), 4)
    step_data(source, 0, 0)
    setattr(source.batch_sampler, name, value)
    with pytest.raises(UnsupportedFeatureError, match="A hook changed batch_size, drop_last or sampler"):
        step_data(source, 1, 0)


def test_an_epoch_is_set_once_and_only_where_lightning_sets_it():
    class Batches(td.BatchSampler):
        def set_epoch(self, epoch: int) -> None:
            raise AssertionError("Lightning does not call it")

    grid, alone, within = Grid(2, 1, 1), Told(24), Told(24)
    batches = Batches(within, 4, drop_last=True)
    for source in (
        MicrobatchLoader(td.DataLoader(Numbers(24), batch_size=4, sampler=alone), grid, 0, SEED),
        GivenBatchLoader(td.DataLoader(Numbers(24), batch_sampler=batches), grid, 0, SEED),
    ):
        for epoch in range(2):
            _set_sampler_epoch(source, epoch)
            step_data(source, epoch, 0)
    assert alone.epochs == within.epochs == [0, 1]


@pytest.mark.parametrize(("dataloader", "error", "message"), [
    (lambda: 3, ConfigurationError, "data is 3, which cannot be iterated over; give a .*DataLoader"),
    (lambda: td.DataLoader(Numbers(99), batch_size=6), ConfigurationError, r"=6.*s=4.*=\.{3}\) with 1, 2, 3 or 6\.$"),
    (lambda: td.DataLoader(Numbers(99), batch_size=1), ConfigurationError, r"ReCycleStrategy\(num_microbatches=1\)\.$"),
    (lambda: td.DataLoader(Numbers(7), batch_size=4), ConfigurationError, "7 samples.*2 pipelines.*batch_size=4"),
], ids=["no data", "indivisible", "of one sample", "too small"])  # fmt: skip
def test_data_that_cannot_be_addressed_is_an_error_that_names_value_and_remedy(dataloader, error, message):
    with pytest.raises(error, match=message):
        MicrobatchLoader(dataloader(), Grid(2, 2, 4), 0, SEED)


def test_the_check_before_the_start_needs_no_worker():
    check_dataloader(td.DataLoader(Numbers(8), batch_size=4), 2)
    with pytest.raises(ConfigurationError, match="multiple of 3"):
        check_dataloader(td.DataLoader(Numbers(8), batch_size=4), 3)
    with pytest.raises(ConfigurationError, match=r"num_microbatches=3, the default where data modules"):
        check_dataloader(td.DataLoader(Numbers(8), batch_size=4), 3, by_default=True)


# ---------------------------------------------------------------------- processes


def print_readers() -> None:
    """A worker whose data two processes read: prints their numbers, and goes on."""
    loader = MicrobatchLoader(td.DataLoader(WhoRead(64), batch_size=4, num_workers=2), Grid(1, 1, 2), 0, 0)
    readers = {pid for m in range(2) for pid in loader.fetch(StepHandle(loader, 0, 0), Microbatch(0, m)).tolist()}
    print(*readers, flush=True)
    time.sleep(60)


def test_dataloader_processes_die_with_a_worker_that_is_killed():
    worker = ForkedProcess(print_readers)
    readers: list[int] = []
    try:
        readers = [int(pid) for pid in next_line(worker).split()]
        assert len(readers) == 2
        assert all(map(is_alive, readers))
        worker.send_signal(signal.SIGKILL)
        worker.wait(10)
        # Without the kernel's help the DataLoader's own watchdog takes 5 s.
        assert wait_for(lambda: not any(map(is_alive, readers)), 2.0)
    finally:
        worker.kill()
        worker.wait(10)
        worker.stdout.close()
        for pid in filter(is_alive, readers):
            os.kill(pid, signal.SIGKILL)


# ---------------------------------------------------------------------- what hooks see of a batch


def test_a_handle_reads_the_whole_global_batch_when_somebody_looks():
    source = loader(Numbers(16), Grid(2, 1, 2), 4)
    handles = list(source)
    assert len(handles) == 2
    whole = handles[1].read()
    assert len(handles[1]) == handles[1].num_samples == 8
    assert torch.equal(whole, torch.stack(list(handles[1])))
    parts = torch.cat(step_data(source, 0, 1))
    assert torch.equal(whole.sort(0).values, parts.sort(0).values)
    assert handles[1].read() is whole, "it is read once"


def test_the_last_batch_of_an_evaluation_counts_the_samples_that_it_has():
    data = td.DataLoader(Numbers(11), batch_size=4)
    source = MicrobatchLoader(data, Grid(2, 1, 2), 0, SEED, evaluation=True)
    assert [handle.num_samples for handle in source] == [8, 3]
    dropping = MicrobatchLoader(
        td.DataLoader(Numbers(11), batch_size=4, drop_last=True), Grid(2, 1, 2), 0, SEED, evaluation=True
    )
    assert [handle.num_samples for handle in dropping] == [8]


@pytest.mark.parametrize(("size", "drop_last", "evaluation", "left_out"), [
    (21, False, False, "the last 5 of 21 samples, fewer than a global batch of 8"),
    (21, True, False, ""),
    (21, False, True, ""),
    (24, False, False, ""),
])  # fmt: skip
def test_a_training_says_which_samples_it_leaves_out(size, drop_last, evaluation, left_out):
    data = td.DataLoader(Numbers(size), batch_size=4, drop_last=drop_last)
    assert MicrobatchLoader(data, Grid(2, 1, 2), 0, SEED, prefetch=False, evaluation=evaluation).left_out == left_out


def test_prepare_gets_a_seed_that_belongs_to_the_microbatch():
    seeds: dict[int, list[int]] = {}
    for attempt in range(2):
        source = loader(Numbers(16), Grid(1, 1, 2), 4)
        source.prepare = lambda data, _, seed, attempt=attempt: seeds.setdefault(attempt, []).append(seed) or data
        for step in range(2):
            step_data(source, 0, step)
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == 4


# ---------------------------------------------------------------------- a DistributedSampler


class Backwards(td.DistributedSampler[int]):
    """A user's own, with another order."""

    def __iter__(self) -> Iterator[int]:
        return iter(list(super().__iter__())[::-1])


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("kind", [td.DistributedSampler, Backwards])
@pytest.mark.parametrize("size", [32, 29])
def test_each_pipeline_reads_what_its_replica_would(kind, shuffle, drop_last, size):
    samplers = [kind(Numbers(size), 2, rank, shuffle, seed=5, drop_last=drop_last) for rank in (0, 1)]
    loader = MicrobatchLoader(
        td.DataLoader(samplers[0].dataset, batch_size=4, sampler=samplers[1]), Grid(2, 1, 2), 0, SEED, prefetch=False
    )
    assert len(loader) == len(samplers[0]) // 4
    for epoch in (0, 3):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        for pipeline, sampler in enumerate(samplers):
            expected = list(sampler)
            for step in range(len(loader)):
                read = [i for m in (0, 1) for _, i in loader.addresses(epoch, step, Microbatch(pipeline, m))]
                assert sorted(read) == sorted(expected[4 * step : 4 * step + 4])


@pytest.mark.parametrize(("drop_last", "read"), [(False, 29), (True, 28)])
def test_an_evaluation_repeats_no_sample(drop_last, read):
    sampler = td.DistributedSampler(Numbers(29), 4, 1, shuffle=False, drop_last=drop_last)
    data = td.DataLoader(sampler.dataset, batch_size=4, sampler=sampler)
    loader = MicrobatchLoader(data, Grid(2, 1, 2), 0, SEED, prefetch=False, evaluation=True)
    assert [int(i) for handle in loader for i in loader.read_batch(handle)] == list(range(read))


class ShufflesItself(td.IterableDataset[int]):
    """As litdata's: with indices, and an order of its own in its iterator."""

    def __init__(self, shuffle: bool) -> None:
        self.shuffle = shuffle

    def __getitem__(self, index: int) -> int:
        return index

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[int]:
        return iter([5, 2, 7, 1, 0, 3, 4, 6])


def test_an_order_that_a_dataset_with_indices_would_lose_is_refused():
    check_dataloader(td.DataLoader(ShufflesItself(shuffle=False), batch_size=4), 2)
    with pytest.raises(UnsupportedFeatureError, match=r"ShufflesItself\(shuffle=True\).*Set shuffle=False"):
        check_dataloader(td.DataLoader(ShufflesItself(shuffle=True), batch_size=4), 2)
