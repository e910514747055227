"""Streams: the samples of every step are those of one device, also read from a place in the middle."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from traceback import clear_frames
from typing import Any

import pytest
import torch
from support.sampling import sampled
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_recycle.data.dataloaders import add_sample, is_stream, promises_nothing
from lightning_recycle.data.iterable_style import StreamLoader
from lightning_recycle.data.map_style import MicrobatchLoader
from lightning_recycle.data.step_sources import StepHandle
from lightning_recycle.errors import ConfigurationError, UnsupportedFeatureError
from lightning_recycle.planning.grid import Grid, Microbatch, global_index

SEED = 11
SIZE = 53  # samples; a multiple of no batch below
GLOBAL_BATCH = 12
GRIDS = [Grid(1, 1, 6), Grid(2, 2, 3), Grid(3, 2, 2)]


def _share() -> tuple[int, int]:
    """(first sample, stride) of this process."""
    info = get_worker_info()
    return (0, 1) if info is None else (info.id, info.num_workers)


class GoingOn(IterableDataset[int]):
    """An epoch begins where the one before stopped; after the last sample it begins anew. Endless if ``endless``."""

    def __init__(self, endless: bool = False) -> None:
        self.endless = endless
        self.place = _share()[0]

    def __iter__(self) -> Iterator[int]:
        first, stride = _share()
        while True:
            while self.place + first < SIZE:
                self.place += stride
                yield self.place + first - stride
            self.place = 0
            if not self.endless:
                return

    def state_dict(self) -> dict[str, Any]:
        return vars(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class BeginningAnew(IterableDataset[int]):
    """Every epoch begins with the first sample, unless a state was loaded."""

    def __init__(self) -> None:
        self.read, self.resumed = 0, False

    def __iter__(self) -> Iterator[int]:
        first, stride = _share()
        if not self.resumed:
            self.read = 0
        self.resumed = False
        while first + self.read * stride < SIZE:
            self.read += 1
            yield first + (self.read - 1) * stride

    def state_dict(self) -> dict[str, Any]:
        return {"read": self.read}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.read, self.resumed = state["read"], True


class Reshuffling(GoingOn):
    """Counts its epochs at their end, and orders them differently."""

    def __init__(self) -> None:
        super().__init__()
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        for i in super().__iter__():
            yield (i * (2 * self.epoch + 3)) % SIZE
        self.epoch += 1


class OfIterators(IterableDataset[int]):
    """The iterator knows where it is, the dataset does not."""

    def __iter__(self) -> Iterator[int]:
        return Counting()


class Counting:
    """Gives away, and keeps, the very dict that it changes."""

    def __init__(self) -> None:
        self.state = {"next": _share()[0]}

    def __iter__(self) -> Counting:
        return self

    def __next__(self) -> int:
        if self.state["next"] >= SIZE:
            raise StopIteration
        self.state["next"] += _share()[1]
        return self.state["next"] - _share()[1]

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class ItsOwnIterator(IterableDataset[int], Counting):
    def __iter__(self) -> ItsOwnIterator:
        if self.state["next"] >= SIZE:
            self.state = {"next": _share()[0]}
        return self


class WithoutState(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(*_share()[:1], SIZE, _share()[1]))


class SaysNothing(WithoutState):
    """As many are written: it has no state, and nobody promises anything."""


class ToldTheEpoch(SaysNothing):
    """In another order in each epoch, of which a callback tells it the number."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        order = random.Random(self.epoch).sample(range(SIZE), SIZE)
        return iter([order[i] for i in super().__iter__()])


class Drawing(BeginningAnew):
    """Each sample with a draw."""

    def __iter__(self) -> Iterator[Any]:
        for i in super().__iter__():
            yield torch.tensor([i, random.random(), torch.rand(()).item()])


STREAMS: dict[str, Any] = {
    "going on": GoingOn,
    "endless": lambda: GoingOn(endless=True),
    "beginning anew": BeginningAnew,
    "reshuffling": Reshuffling,
    "of iterators": OfIterators,
    "its own iterator": ItsOwnIterator,
    "without state": WithoutState,
    "says nothing": SaysNothing,
}
# With the number of steps of an epoch, if it is limited.
CASES = [(name, limit) for name in STREAMS for limit in (None, 3, 1) if limit is not None or name != "endless"]


def dataloader(stream: Any, pipelines: int, num_workers: int = 0, **options: Any) -> DataLoader[Any]:
    kind = StatefulDataLoader if type(stream) is WithoutState else DataLoader
    return kind(stream, batch_size=GLOBAL_BATCH // pipelines, num_workers=num_workers, **options)


def loader(stream: Any, grid: Grid, num_workers: int = 0, **options: Any) -> StreamLoader:
    made = StreamLoader(dataloader(stream, grid.pipelines, num_workers), grid, SEED, **options)
    made.enter_epoch(0, float("inf"))
    return made


def microbatches(source: StreamLoader, handle: StepHandle) -> list[Any]:
    """The micro-batches of a step by their global index."""
    found = sorted(source.grid.all_microbatches(), key=lambda mb: global_index(source.grid, mb))
    return [source.fetch(handle, mb) for mb in found if source.num_samples(handle, mb)]


def epochs(
    source: StreamLoader, first: int, last: int, limit: int | None, first_step: int = 0
) -> Iterator[tuple[StepHandle, list[Any]]]:
    """Drives a loader as Lightning does: a batch ahead where the number of steps is not known, else not."""
    for epoch in range(first, last):
        source.set_epoch(epoch)
        source.enter_epoch(first_step if epoch == first else 0, float("inf") if limit is None else limit)
        steps = iter(source)
        if limit is not None:
            ahead, steps = [], islice(steps, limit - source.first_step)
        else:
            ahead = list(islice(steps, 1))
        while handle := next(iter(ahead), None) or next(steps, None):
            if limit is None:
                ahead = list(islice(steps, 1))
            source.begin_step(handle)
            source.read_ahead(handle)
            yield handle, microbatches(source, handle)


def read(
    source: StreamLoader, first: int, last: int, limit: int | None, first_step: int = 0
) -> tuple[list[tuple[tuple[int, int], list[Any]]], list[Any]]:
    """The micro-batches of every step of these epochs, and the loader's state after each."""
    found, places = [], []
    for handle, parts in epochs(source, first, last, limit, first_step):
        found.append(((handle.epoch, handle.index), [part.tolist() for part in parts]))
        places.append(source.state_dict())
    return found, places


def one_device(stream: Any, num_workers: int, count: int, limit: int | None) -> list[list[list[int]]]:
    """The batches of the epochs of PyTorch's own DataLoader."""
    batches = DataLoader(stream, batch_size=GLOBAL_BATCH, num_workers=num_workers, drop_last=True)
    return [[sorted(batch.tolist()) for batch in islice(batches, limit)] for _ in range(count)]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize(("name", "limit"), [(name, limit) for name, limit in CASES if limit != 1])
def test_the_global_batches_of_all_epochs_are_those_of_one_device(name, limit, grid):
    found: list[list[list[int]]] = [[], [], []]
    for handle, parts in epochs(loader(STREAMS[name](), grid), 0, 3, limit):
        assert [len(part) for part in parts] == [GLOBAL_BATCH // grid.global_microbatches] * grid.global_microbatches
        found[handle.epoch].append(sorted(torch.cat(parts).tolist()))
    assert found == one_device(STREAMS[name](), 0, 3, limit)


@pytest.mark.parametrize("limit", [None, 3], ids=["to the end", "limited"])
def test_with_processes_that_read_in_turns_the_batches_are_those_of_one_device(limit):
    source = loader(BeginningAnew(), GRIDS[1], num_workers=2)
    found: list[list[list[int]]] = [[], []]
    for handle, parts in epochs(source, 0, 2, limit):
        found[handle.epoch].append(sorted(torch.cat(parts).tolist()))
    source.close()
    assert found == one_device(BeginningAnew(), 2, 2, limit)


def test_microbatches_are_composed_as_those_of_data_with_addresses():
    for grid in GRIDS:
        source = loader(BeginningAnew(), grid)
        addressed = MicrobatchLoader(DataLoader(range(SIZE), batch_size=GLOBAL_BATCH // grid.pipelines), grid, 0, SEED)
        for (_, found), handle in zip(epochs(source, 0, 1, None), addressed, strict=True):
            expected = microbatches(addressed, handle)
            assert [part.tolist() for part in found] == [part.tolist() for part in expected]


@pytest.mark.parametrize("finished", [True, False], ids=["after a step", "in a step"])
@pytest.mark.parametrize(("name", "limit"), sampled(CASES, 4, rest=pytest.mark.long))
def test_from_every_step_on_another_grid_goes_on_with_the_same_samples(name, limit, finished):
    """After a step as a resumed run does, at the start of one as a worker does that joins."""
    source = loader(STREAMS[name](), GRIDS[1])
    uninterrupted, places = read(source, 0, 3, limit)
    last = {epoch: index for (epoch, index), _ in uninterrupted}
    for number, ((epoch, index), _) in enumerate(uninterrupted):
        place, rest = places[number], uninterrupted[number:]
        if finished:
            rest = rest[1:]
            epoch, index = (epoch, index + 1) if index < last[epoch] else (epoch + 1, 0)
        other = loader(STREAMS[name](), GRIDS[0])
        other.load_state_dict(place)
        found, further_places = read(other, epoch, 3, limit, index)
        assert found == rest, (epoch, index)
        assert further_places == places[len(places) - len(rest) :]


def test_a_place_counts_the_batches_that_were_skipped():
    """``on_train_batch_start`` may return -1: the batch has been read, and so is the one that Lightning is ahead."""
    source = loader(GoingOn(endless=True), GRIDS[1])
    ahead = iter(source)
    for handle in islice(ahead, 2):
        source.begin_step(handle)
    list(islice(ahead, 2))
    place = source.state_dict()
    ((_, expected),) = epochs(source, 1, 2, 1)
    assert sorted(torch.cat(expected).tolist()) == [*range(7), *range(48, SIZE)], "the fifth batch of the stream"
    for grid in GRIDS:
        other = loader(GoingOn(endless=True), grid)
        other.load_state_dict(place)
        ((_, found),) = epochs(other, 1, 2, 1)
        assert [part.tolist() for part in found] == [part.tolist() for part in expected]


class Unequal(GoingOn):
    """The second process has fewer samples than the first."""

    def __iter__(self) -> Iterator[int]:
        number, _ = _share()
        while self.place < (50, 14)[number]:
            self.place += 1
            yield self.place * 2 + number
        self.place = 0


@pytest.mark.parametrize("stream", [BeginningAnew, Unequal, OfIterators, WithoutState])
def test_processes_go_on_from_a_place_in_the_middle_of_their_round(stream):
    source = loader(stream(), GRIDS[1], num_workers=2)
    uninterrupted, places = read(source, 0, 2, None)
    source.close()
    steps = len(uninterrupted) // 2
    assert steps == (5 if stream is Unequal else 4)
    for number in (1, steps - 1, steps + 2):
        (epoch, index), _ = uninterrupted[number]
        other = loader(stream(), GRIDS[0], num_workers=2)
        other.load_state_dict(places[number])
        found, _ = read(other, epoch, 2, None, index)
        other.close()
        assert found == uninterrupted[number:]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_a_stream_draws_depends_on_seed_epoch_and_place_only(num_workers):
    torch.manual_seed(1), random.seed(1)
    source, drawn, places = loader(Drawing(), GRIDS[1], num_workers), [], []
    for _, parts in epochs(source, 0, 2, None):
        drawn.append(torch.cat(parts))
        places.append(source.state_dict())
    torch.manual_seed(2), random.seed(2)
    other = loader(Drawing(), GRIDS[2], num_workers)
    other.load_state_dict(places[2])
    state = torch.get_rng_state()
    again = [torch.cat(parts) for _, parts in epochs(other, 0, 2, None, 2)]
    source.close(), other.close()
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(again, drawn[2:], strict=True))
    assert not torch.equal(drawn[0], drawn[len(drawn) // 2]), "another epoch draws anew"


# ---------------------------------------------------------------------- redone steps, gradient accumulation, evaluation


def own_samples(samples: list[Tensor]) -> Tensor:
    """A collate function that returns a sample itself."""
    return samples[0]


class Vectors(BeginningAnew):
    def __iter__(self) -> Iterator[Any]:
        return (torch.full((2,), float(i)) for i in super().__iter__())


@pytest.mark.parametrize("collate", [None, own_samples], ids=["default", "the sample itself"])
def test_the_step_before_can_be_had_again_also_across_epochs_whatever_was_done_to_its_data(collate):
    grid = Grid(2, 2, 6)
    source = StreamLoader(dataloader(Vectors(), 2, collate_fn=collate), grid, SEED)
    before: tuple[StepHandle, list[Tensor]] | None = None
    for handle, parts in epochs(source, 0, 3, None):
        if before is not None:
            again = [source.fetch(before[0], mb) for mb in grid.all_microbatches()]
            assert all(torch.equal(a, b) for a, b in zip(again, before[1], strict=True))
            [part.add_(100) for part in again]
        before = handle, [source.fetch(handle, mb).clone() for mb in grid.all_microbatches()]
        [part.add_(100) for part in parts]


def test_a_batch_looked_into_too_late_is_an_error_and_in_time_it_is_the_whole():
    source = loader(BeginningAnew(), GRIDS[1])
    handles = []
    for handle, parts in epochs(source, 0, 1, None):
        handles.append(handle)
        assert handle.num_samples == len(handle) == GLOBAL_BATCH
        assert sorted(handle.read().tolist()) == sorted(torch.cat(parts).tolist())
    with pytest.raises(UnsupportedFeatureError, match=r"step 0 of epoch 0.*hooks of its own step"):
        source.fetch(handles[0], Microbatch(0, 0))


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("drop_last", [False, True])
def test_an_evaluation_has_the_batches_of_one_device_every_time(num_workers, drop_last):
    options: dict[str, Any] = {"num_workers": num_workers, "drop_last": drop_last}
    source = StreamLoader(dataloader(GoingOn(), 2, **options), GRIDS[1], SEED, evaluation=True)
    expected = [batch.tolist() for batch in DataLoader(GoingOn(), batch_size=GLOBAL_BATCH, **options)]
    for limit in (2, None, None):
        handles = islice(source, limit)
        found = [(handle.num_samples, torch.cat(microbatches(source, handle)).tolist()) for handle in handles]
        assert found == [(len(batch), batch) for batch in expected][:limit]
    source.close()


# ---------------------------------------------------------------------- what Lightning asks


class WithLength(BeginningAnew):
    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length

    def __len__(self) -> int:
        return self.length


def test_the_length_is_that_of_the_stream_in_steps():
    assert len(loader(WithLength(SIZE), GRIDS[1])) == 4
    assert len(loader(WithLength(SIZE), GRIDS[1], evaluation=True)) == 5
    with pytest.raises(TypeError, match="no len"):
        len(loader(BeginningAnew(), GRIDS[1]))
    with pytest.raises(ConfigurationError, match=r"(?s)WithLength.*has 5 samples.*12 samples.*batch_size=6"):
        len(loader(WithLength(5), GRIDS[1]))


def test_before_the_epoch_is_known_one_batch_is_promised_and_nothing_is_read():
    stream = GoingOn()
    source = StreamLoader(dataloader(stream, 2), GRIDS[1], SEED)
    assert len(list(source)) == 1
    assert stream.place == 0


class Empty(BeginningAnew):
    def __iter__(self) -> Iterator[int]:
        return islice(super().__iter__(), 5)


def test_a_stream_of_a_training_without_one_global_batch_is_an_error():
    with pytest.raises(ConfigurationError, match=r"Empty.*ended.*less than one global batch of 12 samples"):
        list(epochs(loader(Empty(), GRIDS[1]), 0, 1, None))


def split_by_dataset(worker_id: int) -> None:
    """A ``worker_init_fn`` as PyTorch's documentation has it."""
    get_worker_info().dataset.first = worker_id


class Whose(BeginningAnew):
    first = -1

    def __iter__(self) -> Iterator[int]:
        return iter([self.first] * 2 * GLOBAL_BATCH)


def test_a_worker_init_fn_finds_the_users_dataset():
    source = StreamLoader(dataloader(Whose(), 2, 2, worker_init_fn=split_by_dataset), GRIDS[1], SEED)
    found = [set(torch.cat(parts).tolist()) for _, parts in epochs(source, 0, 1, None)]
    source.close()
    assert found == [{0}, {1}, {0}, {1}]


# ---------------------------------------------------------------------- streams with indices, and bad input


class Indexed(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        raise AssertionError("its indices are used")

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> int:
        return index


def test_an_iterable_dataset_with_indices_is_read_by_them():
    data = DataLoader(Indexed(), batch_size=6)
    assert not is_stream(data)
    source = MicrobatchLoader(data, GRIDS[1], 0, SEED)
    assert len(source) == 4
    assert [sorted(handle.read().tolist()) for handle in source] == [list(range(i, i + 12)) for i in range(0, 48, 12)]


@pytest.mark.parametrize(("made", "words"), [
    (lambda: DataLoader(GoingOn(), batch_size=6, num_workers=1, persistent_workers=True),
     "persistent_workers=True.*GoingOn.*num_workers=0"),
    (lambda: DataLoader(GoingOn(), batch_size=7), "batch_size=7.*num_microbatches=3"),
    (lambda: StatefulDataLoader(torch.utils.data.datapipes.iter.IterableWrapper([1]), batch_size=6),
     "IterDataPipe.*IterableDataset"),
], ids=["persistent", "indivisible", "data pipe"])  # fmt: skip
def test_streams_that_cannot_be_read_again_are_refused_with_a_remedy(made, words):
    with pytest.raises(ConfigurationError, match=words):
        StreamLoader(made(), GRIDS[1], SEED)


def test_a_state_of_something_else_is_refused():
    with pytest.raises(ConfigurationError, match=r"not written by strategy='recycle'.*GoingOn"):
        loader(GoingOn(), GRIDS[1]).load_state_dict({"_num_yielded": 3})
    one = loader(BeginningAnew(), GRIDS[1])
    list(epochs(one, 0, 1, None))
    with pytest.raises(ConfigurationError, match=r"with 1 reading processes.*num_workers=2.*num_workers=1 or 0"):
        loader(BeginningAnew(), GRIDS[1], num_workers=2).load_state_dict(one.state_dict())


class EndsSooner(BeginningAnew):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict({"read": state["read"] + 30})


def test_a_stream_that_does_not_keep_its_promise_is_named():
    source = loader(EndsSooner(), GRIDS[1])
    list(epochs(source, 0, 1, None))
    other = loader(EndsSooner(), GRIDS[1])
    other.load_state_dict(source.state_dict())
    with pytest.raises(ConfigurationError, match="EndsSooner ended before step 3 of epoch 0"):
        list(epochs(other, 0, 1, None, 3))


class AnotherTime(IterableDataset[Any]):
    """Gives other samples from the second time on that it is read, after the first ``same``."""

    read_before = 0

    def __init__(self, same: int = 0) -> None:
        self.same = same

    def __iter__(self) -> Iterator[Any]:
        AnotherTime.read_before += 1
        for i in WithoutState():
            yield {"x": torch.tensor(float(i)), "name": "" if i < self.same else str(AnotherTime.read_before)}


@pytest.mark.parametrize(("same", "num_workers"), [(0, 0), (GLOBAL_BATCH + 3, 0), (2 * GLOBAL_BATCH + 3, 0), (0, 2)])
def test_a_stream_without_state_that_gives_other_samples_again_is_an_error(monkeypatch, same, num_workers):
    """Wherever the first other sample is, among those that are skipped or those that are needed for a redo."""
    monkeypatch.setattr(AnotherTime, "read_before", 0)
    source = loader(AnotherTime(same), GRIDS[1], num_workers=num_workers)
    source.set_epoch(0)
    steps = iter(source)
    for _ in range(3):
        source.begin_step(next(steps))
    place = source.state_dict()
    source.close()
    other = loader(AnotherTime(same), GRIDS[1], num_workers=num_workers)
    if num_workers:
        AnotherTime.read_before += 1
    other.load_state_dict(place)
    other.enter_epoch(3, float("inf"))
    with pytest.raises(ConfigurationError, match=r"AnotherTime gave other samples") as caught:
        list(other)
    clear_frames(caught.tb)  # torch's are a cycle that holds the processes: collecting it waits 5 s for each
    other.close()


def test_the_place_in_a_stream_without_state_has_the_number_of_the_epoch():
    source = loader(ToldTheEpoch(), GRIDS[1])
    source.dataset.set_epoch(2)
    found, places = read(source, 2, 3, None)
    other = loader(ToldTheEpoch(), GRIDS[1])
    other.load_state_dict(places[1])
    assert read(other, 2, 3, None, 2)[0] == found[2:]


@pytest.mark.parametrize(
    ("stream", "nothing"),
    [(GoingOn, False), (OfIterators, False), (ItsOwnIterator, False), (WithoutState, False), (SaysNothing, True)],
)
def test_which_streams_promise_nothing(stream, nothing):
    assert promises_nothing(dataloader(stream(), 1)) is nothing


def test_digests_differ_where_samples_do():
    samples: list[Any] = [
        1,
        1.0,
        "1",
        torch.tensor(1),
        torch.tensor([1]),
        torch.tensor(1.0),
        torch.tensor(1.0, dtype=torch.bfloat16),
        torch.tensor(1.0).numpy(),
        {"a": torch.zeros(0)},
        [torch.ones(2, 3)[:, 1], None],
        (b"1", [True, (2, 3)]),
    ]
    found = [add_sample(0, sample) for sample in samples]
    assert len(set(found)) == len(samples)
    assert found == [add_sample(0, sample) for sample in samples]
    assert add_sample(found[0], 1) not in found
    assert add_sample(0, {object()}) == add_sample(0, {object()}), "of what has no value, the type counts"
