"""Reads a stream batch by batch, from its start or from its state before a batch.

A pass is what ``iter(dataset)`` gives, read by this process, or by DataLoader processes that each read a part in turns.
Randomness depends only on (seed, epoch, part, number of the sample). The state of a part is that of the user's dataset
and iterator; without one the part is read again from the start, and a digest tells whether that gave the same samples.

Streams of Hugging Face's ``datasets`` (version 5.2) return to a loaded state also at the beginning of later passes that
have its epoch number, ignore it if they have another one, and leave the samples in a shuffle buffer out of it. So a
state is reset before the next pass (``load_state_dict(None)``), the epoch number is part of the place in the data, and
a dataset with a shuffle buffer is read again up to its place. ``datasets`` must not be imported here.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, TypeAlias

from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lightning_recycle.data.batching import is_stateful
from lightning_recycle.data.map_style import WorkerInit, as_read
from lightning_recycle.data.sample_order import add_sample
from lightning_recycle.errors import ConfigurationError
from lightning_recycle.randomness import derive_seed, seeded_everything


def is_huggingface(dataset: Any) -> bool:
    """Whether ``dataset`` is an ``IterableDataset`` of ``datasets``."""
    return any(kind.__module__ == "datasets.iterable_dataset" for kind in type(dataset).__mro__)


def has_shuffle_buffer(dataset: Any) -> bool:
    """Whether samples wait in a buffer of ``dataset``, which its state leaves out."""
    return _holds_buffer(dataset._ex_iterable)


def _holds_buffer(examples: Any) -> bool:
    if type(examples).__name__ == "BufferShuffledExamplesIterable":
        return True
    sources = [*getattr(examples, "ex_iterables", ()), getattr(examples, "ex_iterable", None)]
    return any(_holds_buffer(source) for source in sources if source is not None)


_Batch: TypeAlias = tuple[int, list[Any], dict[str, Any]]
"""(part, samples, state of the part after them)."""


class StreamReader:
    """The batches of consecutive passes.

    If ``independent``, every pass begins with the dataset as it was given, as in DataLoader processes; otherwise as the
    previous pass left it. ``digest`` is that of the newest batch's part in this pass.
    """

    def __init__(self, dataloader: DataLoader[Any], batch_size: int, seed: int, independent: bool = False) -> None:
        self.ended, self.digest = False, 0
        self._dataloader = dataloader
        self._batch_size = batch_size
        self.seed = seed
        self._copies = independent and dataloader.num_workers == 0
        self._batches: Iterator[_Batch] = iter(())
        # Parts are read in turns. A restarted reader starts with the first part, so at the beginning of a round.
        self._parts: list[dict[str, Any] | None] = []  # states after what was read
        self._round: list[dict[str, Any] | None] = []  # states at the beginning of the current round
        self._last = -1  # the part that was read last in this round
        self._taken = 0  # batches of this round

    def begin(self, epoch: int, state: dict[str, Any] | None = None) -> None:
        """Begins the pass of ``epoch``, or resumes it from a state."""
        self.close()
        self.ended, self.digest = False, 0
        self._parts = list(state["parts"]) if state else [None] * max(1, self._dataloader.num_workers)
        self._round, self._last, self._taken = list(self._parts), -1, 0
        self._batches = self._start(epoch)
        for _ in range(state["skip"] if state else 0):
            self.read()

    def read(self) -> list[Any] | None:
        """The next batch, incomplete where a part ends; None at the end of the pass."""
        batch = next(self._batches, None)
        if batch is None:
            self.ended = True
            return None
        part, samples, state = batch
        self.digest = state["digest"]
        if part <= self._last:
            self._round, self._taken = list(self._parts), 0
        self._parts[part] = state
        self._last, self._taken = part, self._taken + 1
        if part == len(self._parts) - 1:
            self._round, self._last, self._taken = list(self._parts), -1, 0
        return samples

    def state(self) -> dict[str, Any]:
        """The state from which :meth:`begin` resumes with the next batch."""
        return {"parts": list(self._round), "skip": self._taken}

    def close(self) -> None:
        self._batches = iter(())

    def _start(self, epoch: int) -> Iterator[_Batch]:
        user = self._dataloader
        dataset = copy.deepcopy(user.dataset) if self._copies else user.dataset
        parts = _SharesReader(dataset, self._batch_size, self.seed, epoch, list(self._parts))
        if user.num_workers == 0:
            return iter(parts)
        loader = DataLoader(
            parts,
            batch_size=None,  # it yields batches already
            collate_fn=as_read,
            num_workers=user.num_workers,
            timeout=user.timeout,
            worker_init_fn=WorkerInit(user.worker_init_fn, dataset),
            multiprocessing_context=user.multiprocessing_context,
            prefetch_factor=user.prefetch_factor,
        )
        with seeded_everything() as reseed:
            reseed(derive_seed(self.seed, epoch))  # the processes' own seeds come from these generators
            return iter(loader)


class _SharesReader(IterableDataset[_Batch]):
    def __init__(
        self, dataset: Any, batch_size: int, seed: int, epoch: int, states: list[dict[str, Any] | None]
    ) -> None:
        self.dataset, self.batch_size, self.seed, self.epoch, self.states = dataset, batch_size, seed, epoch, states

    def __iter__(self) -> Iterator[_Batch]:
        info = get_worker_info()
        number = info.id if info is not None else 0
        part = _PassShare(self.dataset, self.seed, self.epoch, number, self.states[number])
        while not part.ended:
            samples = part.take(self.batch_size)
            yield number, samples, part.state()


class _PassShare:
    """One process's part of a pass, resumed from ``state``."""

    def __init__(self, dataset: Any, seed: int, epoch: int, number: int, state: dict[str, Any] | None) -> None:
        self.ended = False
        self._dataset = dataset
        self._seeds = seed, epoch, number
        self._read = self._digest = 0
        state = copy.deepcopy(state) or {"read": 0, "ended": False, "dataset": None, "iterator": None}
        with seeded_everything() as reseed:
            reseed(derive_seed(*self._seeds, -1))
            if is_huggingface(dataset) or state["dataset"] is not None:  # the order that torchdata keeps, too
                dataset.load_state_dict(state["dataset"])
            self._samples: Any = iter(dataset)
            if state["iterator"] is not None:
                self._samples.load_state_dict(state["iterator"])
        self.ended = state["ended"]
        if state["dataset"] is not None or state["iterator"] is not None:
            self._read, self._digest = state["read"], state.get("digest", 0)
        while self._read < state["read"] and not self.ended:
            self.take(min(state["read"] - self._read, 1000))
        if self._digest != state.get("digest", self._digest):  # older checkpoints have none
            raise ConfigurationError(
                f"{type(dataset).__name__} gave other samples when the first {state['read']} of epoch {epoch} were read"
                " again, for a worker that joins or a run that resumes. A stream without state must give the same"
                " samples in each epoch whenever it is read, by any process: not depend on the time, the process, the"
                " order of a set, or on earlier epochs (with num_workers=1 each epoch begins with the dataset as it was"
                " given). Otherwise give it state_dict() and load_state_dict()."
            )

    def take(self, count: int) -> list[Any]:
        samples: list[Any] = []
        with seeded_everything() as reseed:
            while len(samples) < count and not self.ended:
                reseed(derive_seed(*self._seeds, self._read))
                try:
                    samples.append(next(self._samples))
                    self._read += 1
                    self._digest = add_sample(self._digest, samples[-1])
                except StopIteration:
                    self.ended = True
        return samples

    def state(self) -> dict[str, Any]:
        return {
            "read": self._read,
            "ended": self.ended,
            "digest": self._digest,
            "dataset": _state_of(self._dataset) if self._samples is not self._dataset else None,
            "iterator": _state_of(self._samples),
        }


def _state_of(thing: Any) -> Any:
    """A copy: the state may be the very dict that the next sample changes."""
    if not is_stateful(thing) or (is_huggingface(thing) and has_shuffle_buffer(thing)):
        return None
    return copy.deepcopy(thing.state_dict())
