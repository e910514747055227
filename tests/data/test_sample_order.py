"""One order of samples: the state of samplers, what a replacement takes over, and what workers compare."""

import pickle
import random
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.data import _set_sampler_epoch
from support.samplers import Counts, Numbers, Told
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, WeightedRandomSampler

from lightning_recycle.data.dataloaders import SamplerState, compare
from lightning_recycle.data.map_style import MicrobatchLoader
from lightning_recycle.data.prebatched import GivenBatchLoader
from lightning_recycle.errors import ConfigurationError
from lightning_recycle.planning.grid import Grid, Microbatch

SIZE, STEPS = 24, 3


class OwnGenerator(Numbers):
    """Draws from a generator that nothing seeds by sample."""

    def __init__(self) -> None:
        super().__init__(SIZE)
        self.draws = np.random.default_rng()

    def __getitem__(self, index: Any) -> Tensor:
        return torch.tensor(self.draws.random())


class Memory:
    """What a sampler holds."""

    def __init__(self) -> None:
        self.python, self.numpy, self.old = random.Random(1), np.random.default_rng(2), np.random.RandomState(3)
        self.seen: deque[int] = deque([0], maxlen=3)
        self.met: frozenset[int] = frozenset()
        self.others = [np.random.default_rng(7)]


class Draws(Counts):
    """Draws from generators of all kinds, and remembers."""

    def __init__(self, data: Any) -> None:
        super().__init__(SIZE)
        self.data, self.memory, self.torch = data, Memory(), torch.Generator().manual_seed(4)
        self.weights = torch.rand(20_000)

    def __iter__(self) -> Iterator[int]:
        memory = self.memory
        drawn = memory.python.randrange(100) + int(memory.numpy.integers(100)) + memory.old.randint(100)
        drawn += int(torch.randint(100, (), generator=self.torch)) + memory.seen[0]
        drawn += int(memory.others[0].integers(100)) + len(memory.met)
        memory.seen.append(drawn)
        memory.met |= {drawn}
        self.newest = np.float64(drawn)
        return iter(np.random.default_rng(drawn).permutation(SIZE).tolist())


def loader(data: Any = None, pipeline: int = 0, batch: int = 4, **options: Any) -> MicrobatchLoader:
    grid = Grid(pipelines=2, stages=1, microbatches=1)
    return MicrobatchLoader(DataLoader(data or Numbers(SIZE), batch_size=batch, **options), grid, pipeline, 7)


SAMPLERS: dict[str, Any] = {
    "that counts": lambda: {"sampler": Counts(SIZE)},
    "with generators": lambda: {"sampler": Draws(Numbers(SIZE))},
    "weighted": lambda: {
        "sampler": WeightedRandomSampler([1.0, 9.0] * 12, SIZE, generator=torch.Generator().manual_seed(1))
    },
    "with replacement": lambda: {
        "sampler": RandomSampler(range(SIZE), replacement=True, generator=torch.Generator().manual_seed(2))
    },
    "from the global generators": lambda: {"sampler": WeightedRandomSampler([1.0, 9.0] * 12, SIZE)},
    "shuffled": lambda: {"shuffle": True},
    "of a loader with a generator": lambda: {"shuffle": True, "generator": torch.Generator().manual_seed(3)},
}


def order(source: MicrobatchLoader, epoch: int) -> list[int]:
    return [int(i) for step in range(STEPS) for _, i in source._addresses(epoch, step)]


@pytest.mark.parametrize("name", SAMPLERS)
def test_an_order_is_drawn_again_from_a_checkpoint_in_its_epoch_and_after_it(name):
    whole = loader(**SAMPLERS[name]())
    wanted = [order(whole, epoch) for epoch in range(2)]
    state = pickle.loads(pickle.dumps(whole.order_state()))
    wanted.append(order(whole, 2))
    for epoch in (1, 2):
        resumed = loader(**SAMPLERS[name]())
        resumed.load_order_state(state)
        assert [order(resumed, e) for e in range(epoch, 3)] == wanted[epoch:]


@pytest.mark.parametrize("name", [name for name in SAMPLERS if name not in ("shuffled", "from the global generators")])
def test_an_order_that_the_users_generators_draw_is_that_of_one_device(name):
    source, alone = loader(**SAMPLERS[name]()), DataLoader(Numbers(SIZE), batch_size=8, **SAMPLERS[name]())
    for epoch in range(3):
        for step, batch in enumerate(islice(alone, STEPS)):  # Lightning asks for no more
            assert [index for _, index in source._addresses(epoch, step)] == batch.tolist()


@pytest.mark.parametrize("name", [name for name in SAMPLERS if name not in ("shuffled", "from the global generators")])
def test_an_iterator_that_one_device_replaces_unused_leaves_the_same_order(name):
    source, alone = loader(**SAMPLERS[name]()), DataLoader(Numbers(SIZE), batch_size=8, **SAMPLERS[name]())
    source.iterate_again()
    iter(alone)
    assert order(source, 2) == [index for batch in alone for index in batch.tolist()]


def test_the_epoch_of_a_sampler_is_set_again_on_its_state_of_an_earlier_epoch():
    whole, resumed = loader(sampler=Told(SIZE)), loader(sampler=Told(SIZE))
    orders, states = [], []
    for epoch in range(3):
        _set_sampler_epoch(whole, epoch)
        orders.append(order(whole, epoch))
        states.append(whole.order_state())
    for epoch in (1, 2):
        resumed.load_order_state(states[1])
        _set_sampler_epoch(resumed, epoch)
        assert order(resumed, epoch) == orders[epoch]
        assert resumed.sampler.epochs == list(range(epoch + 1))


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_replacement_has_the_order_of_its_donor_and_goes_on_from_it(name):
    donor, joiner = loader(**SAMPLERS[name]()), loader(pipeline=1, **SAMPLERS[name]())
    for source in (donor, joiner):
        source.set_epoch(0)
    order(donor, 0)
    order(donor, 1)
    joiner.take_over(pickle.loads(pickle.dumps(donor.joining_state())))
    assert [order(joiner, e) for e in (0, 1, 2)] == [order(donor, e) for e in (0, 1, 2)]


@pytest.mark.parametrize("name", SAMPLERS)
def test_further_rounds_of_an_epoch_are_drawn_in_turn_when_it_resumes(name):
    whole, resumed = loader(**SAMPLERS[name]()), loader(**SAMPLERS[name]())
    wanted = [whole._addresses(0, step) for step in range(3 * STEPS)]
    resumed.load_order_state(whole.order_state())
    assert [resumed._addresses(0, step) for step in range(2 * STEPS, 3 * STEPS)] == wanted[2 * STEPS :]


def test_a_loader_that_the_user_gives_anew_for_the_epoch_begins_as_given():
    whole, resumed = loader(sampler=Counts(SIZE)), loader(sampler=Counts(SIZE))
    first = order(whole, 0)
    order(whole, 1)
    resumed.load_order_state({**(whole.order_state() or {}), "reload": 2})
    assert order(resumed, 2) == first


def test_what_is_large_and_unchanged_is_in_no_state_and_what_a_sampler_reads_neither():
    sampler = Draws(Numbers(SIZE))
    taker = SamplerState(sampler)
    list(sampler)
    assert len(pickle.dumps(taker.take())) < 20_000
    sampler.weights += 1
    assert set(taker.take()) >= {"weights", "torch", "newest", "memory.python", "memory.numpy", "memory.seen"}
    assert not any(path.startswith("data") for path in taker.take())


def test_a_long_list_is_in_the_state_once_it_has_changed():
    sampler = Counts(SIZE)
    sampler.indices = list(range(10_000))
    taker, other = SamplerState(sampler), Counts(SIZE)
    assert "indices" not in taker.take()
    sampler.indices.append(7)
    SamplerState(other).load(taker.take())
    assert other.indices == sampler.indices


def test_a_state_can_be_loaded_without_trust(tmp_path):
    source = loader(sampler=Draws(Numbers(SIZE)))
    order(source, 0)
    torch.save(source.order_state(), tmp_path / "state")
    torch.load(tmp_path / "state", weights_only=True)


def test_an_iterator_that_a_sampler_keeps_is_named():
    sampler = Counts(SIZE)
    sampler.endless = iter([1, 2])
    assert loader(sampler=sampler).lost_state == ["Counts.endless"]


def test_workers_with_other_samples_lengths_or_orders_are_refused_by_name():
    seeded = torch.Generator().manual_seed
    same = [loader(pipeline=d, sampler=Counts(SIZE)).facts() for d in (0, 1)]
    compare([[facts] for facts in same])
    with pytest.raises(ConfigurationError, match=r"samples of Numbers differ.*default_rng\(0\)"):
        compare([[loader(Numbers(SIZE, d)).facts()] for d in (0, 1)])
    weights = [1.0] * SIZE
    with pytest.raises(ConfigurationError, match="orders of WeightedRandomSampler differ"):
        compare([[loader(sampler=WeightedRandomSampler(weights, SIZE, generator=seeded(d))).facts()] for d in (0, 1)])


@pytest.mark.parametrize("whole_script", [False, True])
def test_the_remedy_is_for_the_way_in_which_workers_run_the_script(whole_script, monkeypatch):
    if whole_script:
        monkeypatch.setenv("RECYCLE_COORDINATOR", "127.0.0.1:1")
    with pytest.raises(ConfigurationError) as caught:
        compare([[loader(Numbers(SIZE, d)).facts()] for d in (0, 1)])
    assert ("L.seed_everything(0) first" in str(caught.value)) is whole_script
    assert ("__main__" in str(caught.value)) is not whole_script


def test_other_classes_and_numbers_of_loaders_are_named():
    class Words(Numbers):
        pass

    with pytest.raises(ConfigurationError, match="classes of what gives the lengths differ"):
        compare([[loader(data(SIZE)).facts()] for data in (Numbers, Words)])
    with pytest.raises(ConfigurationError, match="numbers of DataLoaders differ"):
        compare([[loader(Numbers(SIZE)).facts()] * count for count in (1, 2)])


def test_a_replacement_whose_samples_are_others_is_refused():
    donor, joiner = loader(Numbers(SIZE)), loader(Numbers(SIZE, 1))
    donor.facts()
    with pytest.raises(ConfigurationError, match="Numbers must be the same in every process"):
        joiner.take_over(donor.joining_state())


@pytest.mark.parametrize("processes", [0, 1])
def test_a_replacement_has_the_samples_of_a_dataset_that_hooks_have_changed(processes):
    donor, joiner = (loader(Numbers(SIZE), num_workers=processes) for _ in range(2))
    donor.facts()
    for source in (donor, joiner):
        source.dataset.first = 7
    joiner.take_over(donor.joining_state())


@pytest.mark.parametrize("processes", [0, 1])
def test_samples_that_differ_with_each_reading_are_not_compared_but_named(processes):
    with pytest.warns(UserWarning, match="OwnGenerator gives another sample"):
        facts = [[loader(OwnGenerator(), num_workers=processes).facts()] for _ in range(2)]
    compare(facts)


def test_an_index_may_be_a_list_which_the_dataset_reads_at_once():
    batches = BatchSampler(Counts(SIZE), batch_size=4, drop_last=True)
    grid = Grid(pipelines=2, stages=1, microbatches=2)
    given = DataLoader(Numbers(SIZE), batch_size=None, sampler=batches)
    source = GivenBatchLoader(given, grid, 0, 7)
    step = next(iter(source))
    read = [source.fetch(step, Microbatch(d, m)) for d in (0, 1) for m in (0, 1)]
    assert torch.cat(read).tolist() == list(Counts(SIZE))[:8]
