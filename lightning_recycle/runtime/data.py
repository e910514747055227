"""Micro-batch data by address: any worker can fetch micro-batch (epoch, step, d, m) of the first or last stage.

Step t of an epoch covers a contiguous block of the sampler's order. Pipeline d gets the samples d, d+D, d+2D, ... of
it, as with a DistributedSampler, and micro-batch m of that pipeline every M-th of those. So the composition of the
global micro-batch g = m * D + d depends on D * M only: with the same number of micro-batches every grid computes the
same sums and draws the same dropout.

Own micro-batches are prefetched by a ``DataLoader`` with the user's workers; adopted ones are fetched directly.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from lightning_recycle.errors import ConfigurationError, UnsupportedFeatureError
from lightning_recycle.planning.grid import Grid, Microbatch
from lightning_recycle.runtime.program import global_index
from lightning_recycle.runtime.randomness import derive_seed, seeded_everything

__all__ = ["MicrobatchLoader", "StepHandle"]


class StepHandle:
    """What Lightning's loops and hooks see as the batch of one step: an address, not the data.

    Callbacks that look into the batch, by index, key or iteration, find the whole global batch: it is read, in this
    process, the first time that somebody looks.

    Args:
        loader: where its data comes from.
        epoch: of the loader.
        index: of the step within the epoch.
    """

    def __init__(self, loader: MicrobatchLoader, epoch: int, index: int) -> None:
        self.loader, self.epoch, self.index = loader, epoch, index
        self._data: tuple[Any] | None = None

    @property
    def num_samples(self) -> int:
        """Of the global batch."""
        return self.loader.samples_in(self.index)

    def read(self) -> Any:
        """The whole global batch as the user's collate function makes it, on the device."""
        if self._data is None:
            self._data = (self.loader.read_batch(self),)
        return self._data[0]

    def __getitem__(self, key: Any) -> Any:
        return self.read()[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.read())

    def __len__(self) -> int:
        return len(self.read())

    def __repr__(self) -> str:
        return f"StepHandle(epoch={self.epoch}, index={self.index})"


_AddressedSample: TypeAlias = tuple[tuple[int, int], Any]
"""((epoch, dataset index), sample)."""


class _Addressed(Dataset[Any]):
    """The user's dataset, with randomness that depends on the sample and the epoch only."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset, self.seed = dataset, seed

    def read(self, addresses: Sequence[tuple[int, int]], reseed: Callable[[int], None]) -> list[_AddressedSample]:
        """The samples at (epoch, index) ``addresses``, with these."""
        samples = []
        for epoch, index in addresses:
            reseed(derive_seed(self.seed, epoch, index))
            samples.append(((epoch, index), self.dataset[index]))
        return samples

    def __getitems__(self, addresses: Sequence[tuple[int, int]]) -> list[_AddressedSample]:
        """As :meth:`read`, in a DataLoader process."""
        with seeded_everything() as reseed:
            return self.read(addresses, reseed)

    def __getitem__(self, address: tuple[int, int]) -> _AddressedSample:
        return self.__getitems__([address])[0]


class _Collate:
    """The user's collate function, with randomness that depends on the samples and the epoch only."""

    def __init__(self, collate: Callable[[list[Any]], Any], seed: int) -> None:
        self.collate, self.seed = collate, seed

    def collect(self, addressed: list[_AddressedSample], reseed: Callable[[int], None]) -> Any:
        epoch = addressed[0][0][0]
        reseed(derive_seed(self.seed, epoch, *(index for (_, index), _ in addressed)))
        return self.collate([sample for _, sample in addressed])

    def __call__(self, addressed: list[_AddressedSample]) -> Any:
        with seeded_everything() as reseed:
            return self.collect(addressed, reseed)


class _WorkerInit:
    """Ends a DataLoader process with its parent, which may die by SIGKILL; then calls the user's ``worker_init_fn``."""

    def __init__(self, user: Callable[[int], None] | None) -> None:
        self.user = user
        self.owner = os.getpid()  # with a fork server the parent is that server, which would outlive the owner

    def __call__(self, worker_id: int) -> None:
        if os.getppid() == self.owner:
            die_with_parent()
        threading.Thread(target=self._end_with_owner, name="recycle-owner-watch", daemon=True).start()
        if self.user is not None:
            self.user(worker_id)

    def _end_with_owner(self) -> None:
        while True:
            try:
                os.kill(self.owner, 0)
            except ProcessLookupError:
                os._exit(0)
            time.sleep(0.5)


def die_with_parent() -> None:
    """Asks the kernel to kill this process when the one that started it dies (Linux; elsewhere does nothing)."""
    try:
        libc = ctypes.CDLL(None)
        libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    except (OSError, AttributeError):
        return  # no prctl on this system: the process ends when its pipes close


class MicrobatchLoader:
    """The steps of an epoch, and the data of their micro-batches.

    Iterating yields a :class:`StepHandle` per step; Lightning counts with those. :meth:`fetch` gets the data.

    Args:
        dataloader: the user's, for a map-style dataset; its ``batch_size`` is per pipeline.
        grid: D, S and M.
        pipeline: of this worker; its micro-batches are prefetched.
        seed: of the run.
        prefetch: whether this worker's stage needs data at all.
        batch_pipelines: number of pipelines that ``batch_size`` was chosen for, if not the grid's: the global batch
            stays what it was when a training goes on with fewer pipelines.
        evaluation: keep a trailing incomplete global batch, and make micro-batches of consecutive samples, as even as
            they can be; some may be empty.
        batches_per_step: how many batches of the DataLoader each pipeline takes for one step (gradient accumulation).

    Attributes:
        prepare: called with a collated batch and a seed that belongs to it, before anybody sees it: moves it to the
            device.

    Raises:
        UnsupportedFeatureError: for an IterableDataset or a custom batch sampler.
        ConfigurationError: if the batch of a training cannot be split into M micro-batches.
    """

    def __init__(
        self,
        dataloader: Any,
        grid: Grid,
        pipeline: int,
        seed: int,
        prefetch: bool = True,
        batch_pipelines: int | None = None,
        evaluation: bool = False,
        batches_per_step: int = 1,
    ) -> None:
        pipelines = batch_pipelines or grid.pipelines
        check_dataloader(dataloader, None if evaluation else grid.global_microbatches // pipelines // batches_per_step)
        self.evaluation = evaluation
        self.grid = grid
        self.dataset = dataloader.dataset
        self.first_step = 0  # of the next iteration: not 0 when training goes on in the middle of an epoch
        self.sampler = self  # Lightning calls sampler.set_epoch() at the start of each epoch
        batch_size, self._user_sampler = batching_of(dataloader)
        assert batch_size is not None
        self.batch_size = batch_size
        self.batches_per_step = batches_per_step
        self.global_batch_size = batch_size * pipelines * batches_per_step
        self.prepare: Callable[[Any, int], Any] | None = None
        self.dataloader_idx = 0  # among several loaders of an evaluation
        # Lightning wraps the batch sampler for prediction; its callbacks read there which samples a batch had.
        self.batch_sampler = getattr(dataloader, "batch_sampler", None)
        self._dataloader = dataloader
        self._pipeline = pipeline
        self._seed = seed
        self._prefetch = prefetch
        self._addressed = _Addressed(self.dataset, seed)
        self._collate = _Collate(dataloader.collate_fn, seed)
        self._epoch = 0
        self._orders: dict[int, Sequence[int]] = {}
        self._fetched: dict[tuple[int, int, Microbatch], Any] = {}
        self._prefetcher: Iterator[tuple[tuple[int, int, Microbatch], Any]] | None = None
        self._prefetched_to: tuple[int, int, Microbatch] | None = None
        num_samples = self._num_samples = len(self._user_sampler)
        self._num_steps = num_samples // self.global_batch_size
        if evaluation and not _drops_last(dataloader):
            self._num_steps = -(-num_samples // self.global_batch_size)
        elif self._num_steps == 0 and not evaluation:
            raise ConfigurationError(
                f"The training data has {num_samples} samples, fewer than one global batch of {grid.pipelines}"
                " pipelines x"
                f" batch_size={self.batch_size}. Use a smaller batch_size or fewer pipelines."
            )

    @property
    def unused_samples(self) -> int:
        """How many samples of an epoch no step has."""
        return max(0, self._num_samples - self._num_steps * self.global_batch_size)

    # ------------------------------------------------------------------ what Lightning sees

    def __len__(self) -> int:
        """Steps per epoch."""
        return int(self._num_steps)

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[StepHandle]:
        self._prefetcher = self._prefetched_to = None
        if hasattr(self.batch_sampler, "_batch_sampler"):
            self.batch_sampler.seen_batch_indices = []  # type: ignore[union-attr]
        # The epoch is read at the first step: Lightning creates the iterator before it sets the epoch.
        return (self._handle(index) for index in range(self.first_step, self._num_steps))

    def _handle(self, index: int) -> StepHandle:
        seen = getattr(self.batch_sampler, "seen_batch_indices", None)
        if seen is not None:
            first = index * self.global_batch_size
            order = self._order(self._epoch)
            seen.append([int(i) for i in order[first : first + self.global_batch_size]])
        return StepHandle(self, self._epoch, index)

    # ------------------------------------------------------------------ what the executor sees

    def begin_step(self, handle: StepHandle) -> None:
        """Forgets what was read for earlier steps and reads this worker's own micro-batches of this one."""
        current = (handle.epoch, handle.index)
        self._fetched = {key: value for key, value in self._fetched.items() if key[:2] >= current}
        self._read_own(handle)

    def read_ahead(self, handle: StepHandle) -> None:
        """Reads this worker's own micro-batches of the step after ``handle``; called when there is time."""
        if handle.index + 1 < self._num_steps:
            self._read_own(StepHandle(self, handle.epoch, handle.index + 1))

    def _read_own(self, handle: StepHandle) -> None:
        if self._prefetch and self._dataloader.num_workers == 0:
            own = (Microbatch(self._pipeline, m) for m in range(self.grid.microbatches))
            keys = [(handle.epoch, handle.index, microbatch) for microbatch in own]
            if any(key not in self._fetched and self._positions(*key[1:]) for key in keys):
                self._read(keys)

    def fetch(self, handle: StepHandle, microbatch: Microbatch) -> Any:
        """Returns the collated micro-batch; asking again, as a redone step does, gives the same.

        What is returned is the caller's, and layers may change it in place: a second time it is read again.
        """
        key = (handle.epoch, handle.index, microbatch)
        if key not in self._fetched:
            own = self._prefetch and microbatch.pipeline == self._pipeline and self._dataloader.num_workers > 0
            if not own or not self._take_prefetched(key):
                self._read([key])
        return self._prepared(self._fetched.pop(key), handle, global_index(self.grid, microbatch))

    def read_batch(self, handle: StepHandle) -> Any:
        """The whole global batch of ``handle``, collated as one."""
        first = handle.index * self.global_batch_size
        order = self._order(handle.epoch)
        addresses = [(handle.epoch, int(order[first + i])) for i in range(self.samples_in(handle.index))]
        with seeded_everything() as reseed:
            data = self._collate.collect(self._addressed.read(addresses, reseed), reseed)
        return self._prepared(data, handle, -1)

    def _prepared(self, data: Any, handle: StepHandle, index: int) -> Any:
        if self.prepare is None:
            return data
        return self.prepare(data, derive_seed(self._seed, handle.epoch, handle.index, index))

    def samples_in(self, step: int) -> int:
        """Number of samples of the global batch of a step; that of the last one in an evaluation may be smaller."""
        first = step * self.global_batch_size
        return min(first + self.global_batch_size, self._num_samples) - first

    def addresses(self, epoch: int, step: int, microbatch: Microbatch) -> list[tuple[int, int]]:
        """The samples of a micro-batch, as (epoch, dataset index)."""
        order = self._order(epoch)
        return [(epoch, int(order[position])) for position in self._positions(step, microbatch)]

    def _positions(self, step: int, microbatch: Microbatch) -> range:
        """The places of a micro-batch's samples in the sampler's order."""
        index, count = global_index(self.grid, microbatch), self.grid.global_microbatches
        first = step * self.global_batch_size
        end = min(first + self.global_batch_size, self._num_samples)
        if not self.evaluation:
            return range(first + index, end, count)
        size = end - first
        return range(first + size * index // count, first + size * (index + 1) // count)

    def num_samples(self, handle: StepHandle, microbatch: Microbatch) -> int:
        """How many samples a micro-batch has; in evaluation that may be none."""
        return len(self._positions(handle.index, microbatch))

    def close(self) -> None:
        """Ends the prefetching processes."""
        self._prefetcher = None
        self._fetched.clear()

    # ------------------------------------------------------------------ inside

    def _read(self, keys: Sequence[tuple[int, int, Microbatch]]) -> None:
        """Reads micro-batches in this process; together, because saving the generators' state costs most of it."""
        with seeded_everything() as reseed:
            for key in keys:
                if key not in self._fetched and self._positions(*key[1:]):
                    samples = self._addressed.read(self.addresses(*key), reseed)
                    self._fetched[key] = self._collate.collect(samples, reseed)

    def _order(self, epoch: int) -> Sequence[int]:
        """The sampler's order in ``epoch``, the same on every worker and for every grid."""
        if epoch not in self._orders:
            sampler = self._user_sampler
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
            with seeded_everything() as reseed:
                reseed(derive_seed(self._seed, epoch))
                if isinstance(sampler, SequentialSampler):
                    order: Sequence[int] = range(len(sampler))
                elif (
                    type(sampler) is RandomSampler
                    and not sampler.replacement
                    and sampler.num_samples == len(self.dataset)
                ):
                    order = torch.randperm(len(self.dataset)).tolist()
                else:
                    order = list(sampler)
            self._orders = {epoch: order}
        return self._orders[epoch]

    def _take_prefetched(self, key: tuple[int, int, Microbatch]) -> bool:
        """Moves what is prefetched up to ``key`` into the cache; False if ``key`` lies behind what was."""
        epoch, step, _ = key
        if self._prefetched_to is None or self._prefetched_to[0] < epoch:
            self._start_prefetching(epoch, step)
        assert self._prefetcher is not None
        if self._prefetched_to is not None and key <= self._prefetched_to:
            return False
        for found, data in self._prefetcher:
            self._fetched[found] = data
            self._prefetched_to = found
            if found == key:
                return True
        return False

    def _start_prefetching(self, epoch: int, first_step: int) -> None:
        own = [Microbatch(self._pipeline, m) for m in range(self.grid.microbatches)]
        steps = range(first_step, self._num_steps)
        keys = [(epoch, step, mb) for step in steps for mb in own if self._positions(step, mb)]
        user = self._dataloader
        loader = DataLoader(
            self._addressed,
            batch_sampler=_Batches(self, keys),
            num_workers=user.num_workers,
            collate_fn=self._collate,
            timeout=user.timeout,
            worker_init_fn=_WorkerInit(user.worker_init_fn),
            multiprocessing_context=user.multiprocessing_context,
            prefetch_factor=user.prefetch_factor,
        )
        self._prefetched_to = None
        self._prefetcher = zip(keys, loader, strict=False)


class _Batches:
    """A batch sampler over the micro-batches ``keys``."""

    def __init__(self, loader: MicrobatchLoader, keys: list[tuple[int, int, Microbatch]]) -> None:
        self._loader, self._keys = loader, keys

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        return (self._loader.addresses(*key) for key in self._keys)


def batching_of(dataloader: DataLoader[Any]) -> tuple[int | None, Any]:
    """(batch size, sampler) of a DataLoader; None for one whose batches are not consecutive samples of its sampler."""
    if dataloader.batch_size is not None:
        return dataloader.batch_size, dataloader.sampler
    batch_sampler = dataloader.batch_sampler
    if (
        type(getattr(batch_sampler, "_batch_sampler", batch_sampler)) is BatchSampler
    ):  # as it is, or Lightning's wrapper
        return int(batch_sampler.batch_size), batch_sampler.sampler  # type: ignore[union-attr]
    return None, None


def _drops_last(dataloader: DataLoader[Any]) -> bool:
    batch_sampler = dataloader.batch_sampler
    return bool(getattr(getattr(batch_sampler, "_batch_sampler", batch_sampler), "drop_last", False))


def check_dataloader(dataloader: Any, microbatches: int | None) -> None:
    """Raises the errors of :class:`MicrobatchLoader` that need no worker; ``microbatches``: M, None in evaluation."""
    if not isinstance(dataloader, DataLoader):
        raise UnsupportedFeatureError(
            f"The data is a {type(dataloader).__name__}; give one torch.utils.data.DataLoader over a map-style"
            " dataset, so that any worker can fetch any micro-batch."
        )
    if isinstance(dataloader.dataset, IterableDataset):
        raise UnsupportedFeatureError(
            f"{type(dataloader.dataset).__name__} is an IterableDataset: its samples have no address, so a survivor"
            " could not"
            " fetch those of a dead worker. Use a map-style dataset (__getitem__ and __len__)."
        )
    batch_size, sampler = batching_of(dataloader)
    if isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
        raise UnsupportedFeatureError(
            f"The DataLoader's {type(sampler).__name__}(num_replicas={sampler.num_replicas}, rank={sampler.rank}) gives"
            " this process a part of the data; the strategy shares the data out itself, and every worker must know all"
            " of its order. Use shuffle=True or a sampler over the whole dataset."
        )
    if batch_size is None:
        raise UnsupportedFeatureError(
            "The DataLoader has a batch_sampler of its own or no batching; give batch_size (per pipeline) and, if"
            " you like,"
            " a sampler."
        )
    if microbatches is not None and batch_size % microbatches:
        divisors = [m for m in range(1, batch_size + 1) if batch_size % m == 0]
        raise ConfigurationError(
            f"batch_size={batch_size} (per pipeline) is not divisible into num_microbatches={microbatches}."
            f" Use a batch_size that is a multiple of {microbatches}, or num_microbatches from {divisors}."
        )
