"""Micro-batch data by address (epoch, step, d, m), readable by any worker.

Step t of an epoch covers a contiguous block of the sampler's order, which every worker knows. With ``num_workers`` > 0
a ``DataLoader`` prefetches the worker's own micro-batches in as many processes; otherwise they are read together: in
the first wait of the step before, or, of the first step, at its beginning. A lost worker's micro-batches are read when
needed.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import islice
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch.utils.data import DataLoader, Dataset, RandomSampler, SequentialSampler
from typing_extensions import override

from lightning_recycle.data.dataloaders import (
    SamplerState,
    add_sample,
    as_index,
    batching_of,
    compact,
    different,
    digest_of,
    drops_last,
    seeded_for,
)
from lightning_recycle.data.step_sources import Address, AddressedSample, SampleLoader, StepHandle, numbers_of
from lightning_recycle.errors import ConfigurationError, UnsupportedFeatureError
from lightning_recycle.planning.grid import Grid, Microbatch
from lightning_recycle.processes import die_with_parent, end_with
from lightning_recycle.randomness import derive_seed, seeded_everything
from lightning_recycle.torch_internals import show_dataset

_KEPT_ROUNDS = 2  # the current one, and the previous one, which others may have to redo


def _round_seed(epoch: int, round_index: int) -> int:
    """Seed of a round: the epoch for the first, a hash for later ones."""
    return derive_seed(epoch, round_index) if round_index else epoch


def identity_collate(batch: Any) -> Any:
    """A collate function where there is nothing to collate."""
    return batch


class _AddressedDataset(Dataset[Any]):
    """The user's dataset, with randomness that depends only on sample and epoch."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset, self.seed = dataset, seed

    def read(self, addresses: Sequence[Address], reseed: Callable[[int], None] | None) -> list[AddressedSample]:
        """The samples at ``addresses``; ``reseed``, if given, gets the seed of each."""
        samples = []
        for round_seed, index in addresses:
            if reseed is not None:
                reseed(derive_seed(self.seed, round_seed, *numbers_of(index)))
            samples.append(((round_seed, index), self.dataset[index]))
        return samples

    def __getitems__(self, addresses: Sequence[Address]) -> list[AddressedSample]:
        with seeded_everything() as reseed:
            return self.read(addresses, reseed)


def _begin_process(user: Callable[[int], None] | None, dataset: Any, owner: int, worker_id: int) -> None:
    """Ends a DataLoader process with ``owner``; calls the user's ``worker_init_fn``.

    ``get_worker_info()`` shows the user's ``dataset`` instead of this package's wrapper.
    """
    if os.getppid() == owner:  # with a fork server, the parent is that server, which would outlive the owner
        die_with_parent()
    end_with(owner, 0)
    show_dataset(dataset)
    if user is not None:
        user(worker_id)


def process_settings(user: DataLoader[Any], dataset: Any) -> dict[str, Any]:
    """Settings of a DataLoader whose processes are like those of the ``user``'s."""
    return {
        "timeout": user.timeout,
        "worker_init_fn": partial(_begin_process, user.worker_init_fn, dataset, os.getpid()),
        "multiprocessing_context": user.multiprocessing_context,
        "prefetch_factor": user.prefetch_factor,
    }


class MicrobatchLoader(SampleLoader):
    """The steps of an epoch of a dataset whose samples have indices.

    Further steps belong to further *rounds* through the data, each in its own order: where Lightning combines it with a
    longer loader, it begins again within the epoch. ``pipeline``: the worker's own, whose micro-batches are read ahead,
    in processes if the user's loader has any; ``prefetch``: False if this worker's stage needs no data.

    Raises UnsupportedFeatureError if batches are not consecutive samples of a sampler; ConfigurationError if a training
    batch cannot be split into M micro-batches, or there is no batch.
    """

    def __init__(
        self, dataloader: Any, grid: Grid, pipeline: int, seed: int, prefetch: bool = True, **options: Any
    ) -> None:
        super().__init__(dataloader, grid, seed, **options)
        self._user_sampler = batching_of(dataloader, self.evaluation)[1]
        self._batching = self._batch_settings()
        self._pipeline = pipeline
        self._prefetch = prefetch
        self._addressed_dataset = _AddressedDataset(self.dataset, seed)
        self._orders: dict[int, Sequence[Any]] = {}  # of the newest rounds
        self._drawn_rounds: tuple[int, int] | None = None  # the newest epoch with a drawn order, and its rounds
        self._order_is_reproducible = type(self._user_sampler) is SequentialSampler or self._permutes_by_seed
        self._sampler_state = SamplerState(None if self._order_is_reproducible else self._user_sampler)
        self._state_before: dict[str, Any] = {}  # the sampler's state before the first order of that epoch
        self._restored_state: dict[str, Any] | None = None
        self._probed_samples: tuple[list[Any], int] | None = None  # addresses of some samples, and their digest
        self._cache: dict[tuple[int, int, Microbatch], Any] = {}
        self._prefetcher: Iterator[tuple[tuple[int, int, Microbatch], Any]] | None = None
        self._newest_prefetched: tuple[int, int, Microbatch] | None = None
        self._prefetch_end = 0
        self._epoch_reader: tuple[int, list[Sequence[Address]], DataLoader[Any]] | None = None  # of an epoch
        num_samples = self._num_samples = self._count_samples()
        self._num_steps = num_samples // self.global_batch_size
        if self.evaluation and not self._drops_last:
            self._num_steps = -(-num_samples // self.global_batch_size)
        elif self._num_steps == 0 and not self.evaluation:
            remedy = "a smaller batch_size or fewer pipelines" if num_samples else "a dataset that is not empty"
            raise ConfigurationError(
                f"The training data has {num_samples} {self._unit}, fewer than one global batch of {grid.pipelines}"
                f" pipelines x batch_size={self.global_batch_size // self.batch_pipelines}. Use {remedy}."
            )

    _unit = "samples"

    @property
    def _seeding(self) -> Callable[[], AbstractContextManager[Any]]:
        return seeded_for(self.dataset, self._collate.collate)

    @property
    def _permutes_by_seed(self) -> bool:
        """Whether the order is a permutation that is drawn here, as torch's sampler would."""
        sampler = self._user_sampler
        covers_dataset = type(sampler) is RandomSampler and sampler.num_samples == len(self.dataset)
        return covers_dataset and not sampler.replacement and sampler.generator is None

    def _batch_settings(self) -> list[Any]:
        """Settings of torch's batch sampler that hooks may not change; [] for a user's."""
        if batching_of(self.dataloader)[0] is None:
            return []
        return [getattr(self.batch_sampler, name, None) for name in ("batch_size", "drop_last", "sampler")]

    def _count_samples(self) -> int:
        return len(self._user_sampler)

    @property
    def _drops_last(self) -> bool:
        return drops_last(self.dataloader)

    @property
    def left_out(self) -> str:
        """Samples that training leaves out of each epoch unasked, in words; "" for none."""
        left_over = self._num_samples - self._num_steps * self.global_batch_size
        if self.evaluation or left_over <= 0 or self._drops_last:
            return ""
        last = f"the last {left_over} of {self._num_samples} {self._unit}"
        return f"{last}, fewer than a global batch of {self.global_batch_size}"

    @override
    def reseed(self, seed: int) -> None:
        super().reseed(seed)
        self._addressed_dataset.seed = seed
        self._drawn_rounds = self._epoch_reader = None
        self._orders.clear()

    # ------------------------------------------------------------------ what Lightning sees

    def __len__(self) -> int:
        return int(self._num_steps)

    def __iter__(self) -> Iterator[StepHandle]:
        self._prefetcher = self._newest_prefetched = None
        if hasattr(self.batch_sampler, "_batch_sampler"):  # Lightning's, whose callbacks read what a batch had
            self.batch_sampler.seen_batch_indices = []
        # The epoch is read at the first step: Lightning creates the iterator before it sets the epoch.
        return (self._handle(index) for index in range(self.first_step, self._num_steps))

    def _handle(self, index: int) -> StepHandle:
        seen = getattr(self.batch_sampler, "seen_batch_indices", None)
        if seen is not None:
            seen.append([index for _, index in self._addresses(self._epoch, index)])
        return StepHandle(self, self._epoch, index)

    # ------------------------------------------------------------------ what the executor sees

    def begin_step(self, handle: StepHandle) -> None:
        """Drops the data of earlier steps; reads this worker's part if no process does."""
        current = (handle.epoch, handle.index)
        self._cache = {key: value for key, value in self._cache.items() if key[:2] >= current}
        self._read_own_pipeline(handle)

    def read_ahead(self, handle: StepHandle) -> None:
        if (handle.index + 1) % self._num_steps:
            self._read_own_pipeline(StepHandle(self, handle.epoch, handle.index + 1))

    def _read_own_pipeline(self, handle: StepHandle) -> None:
        """Reads all micro-batches of this worker's pipeline, if no process does."""
        if self._prefetch and self.dataloader.num_workers == 0:
            microbatches = [Microbatch(self._pipeline, m) for m in range(self.grid.microbatches)]
            self._fill_cache([(handle.epoch, handle.index, microbatch) for microbatch in microbatches])

    def collate_microbatch(self, handle: StepHandle, microbatch: Microbatch) -> Any:
        key = (handle.epoch, handle.index, microbatch)
        if key not in self._cache:
            is_prefetched = self._prefetch and microbatch.pipeline == self._pipeline and self.dataloader.num_workers > 0
            if not is_prefetched or not self._take_prefetched(key):
                self._fill_cache([key])
        return self._cache.pop(key)  # it is read again for each call: the caller owns it

    def collate_batch(self, handle: StepHandle) -> Any:
        return self._read_batches(handle.epoch, [self._addresses(handle.epoch, handle.index)])[0]

    def samples_in(self, handle: StepHandle) -> int:
        return self._step_size(handle.index)

    def addresses(self, epoch: int, step: int, microbatch: Microbatch) -> list[Address]:
        """The samples of a micro-batch, as (seed of the round, dataset index)."""
        round_seed, order = self._round_of(epoch, step)
        return [(round_seed, as_index(order[position])) for position in self._order_positions(epoch, step, microbatch)]

    def _addresses(self, epoch: int, step: int) -> list[Address]:
        """The samples of a global batch."""
        round_seed, order = self._round_of(epoch, step)
        first = step % self._num_steps * self.global_batch_size
        return [(round_seed, as_index(index)) for index in order[first : first + self._step_size(step)]]

    def _order_positions(self, epoch: int, step: int, microbatch: Microbatch) -> range:
        """Positions of a micro-batch's samples in the sampler's order."""
        first = step % self._num_steps * self.global_batch_size
        share = self._share(microbatch, self._step_size(step))
        return range(first + share.start, first + share.stop, share.step)

    def _step_size(self, step: int) -> int:
        """The number of samples of a step; that of batches where each sample is one."""
        first = step % self._num_steps * self.global_batch_size
        return min(first + self.global_batch_size, self._num_samples) - first

    def close(self) -> None:
        self._prefetcher = self._epoch_reader = None
        self._cache.clear()

    # ------------------------------------------------------------------ inside

    def _fill_cache(self, keys: Sequence[tuple[int, int, Microbatch]]) -> None:
        """Reads micro-batches together, because saving the generators' state dominates."""
        missing = {key: samples for key in keys if key not in self._cache and (samples := self.addresses(*key))}
        if missing:
            batches = self._read_batches(keys[0][0], [*missing.values()])
            self._cache.update(zip(missing, batches, strict=True))

    def _read_batches(self, epoch: int, groups: Sequence[Sequence[Address]]) -> list[Any]:
        """Reads and collates each of ``groups``.

        In this process; if the user has both worker processes and a ``worker_init_fn``, in a process that lives for the
        epoch.
        """
        if self.dataloader.num_workers == 0 or self.dataloader.worker_init_fn is None:
            with self._seeding() as reseed:
                return [self._collate.collect(self._addressed_dataset.read(group, reseed), reseed) for group in groups]
        if self._epoch_reader is None or self._epoch_reader[0] != epoch:
            queue: list[Sequence[Address]] = []
            self._epoch_reader = epoch, queue, self._reader_processes(epoch, queue, 1, persistent_workers=True)
        _, queue, reader = self._epoch_reader
        queue[:] = groups
        return list(reader)

    def _round_of(self, epoch: int, step: int) -> tuple[int, Sequence[Any]]:
        """The seed of the round of ``step``, and its sampler's order."""
        round_index = step // self._num_steps
        round_seed = _round_seed(epoch, round_index)
        if round_seed not in self._orders:
            drawn = self._drawn_rounds[1] if self._drawn_rounds is not None and self._drawn_rounds[0] == epoch else 0
            for earlier in range(drawn, round_index):  # a sampler with a state must draw them in turn
                self._draw_order(epoch, earlier)
            self._draw_order(epoch, round_index)
        return round_seed, self._orders[round_seed]

    def _draw_order(self, epoch: int, round_index: int) -> None:
        """Draws the order of round ``round_index`` of ``epoch`` from the user's sampler.

        The sampler and its generators have the state that they would have on one device; after a restart, the saved
        one.
        """
        sampler, round_seed = self._user_sampler, _round_seed(epoch, round_index)
        if self._batch_settings() != self._batching:
            raise UnsupportedFeatureError(
                "A hook changed batch_size, drop_last or sampler of the DataLoader's BatchSampler, from which the steps"
                " were counted. Change what its sampler holds, or give another DataLoader with"
                " reload_dataloaders_every_n_epochs."
            )
        if self._drawn_rounds is None or self._drawn_rounds[0] != epoch:
            if self._restored_state is not None:
                state, self._restored_state = self._restored_state, None
                is_same_epoch, reload = state["epoch"] == epoch, state.get("reload", 0)
                if is_same_epoch or not reload or epoch % reload:
                    self._sampler_state.load(state["before" if is_same_epoch else "after"])
                    if not is_same_epoch:
                        self._set_sampler_epoch(epoch)
            self._state_before = self._sampler_state.take()
        if not self.dataloader.persistent_workers or epoch == round_index == 0:
            self._draw_base_seed(sampler)
        with seeded_everything() as reseed:
            reseed(derive_seed(self._seed, round_seed))
            order: Sequence[Any]
            if type(sampler) is SequentialSampler:  # a subclass may have an order of its own
                order = range(len(sampler))
            elif self._permutes_by_seed:
                order = torch.randperm(len(self.dataset)).numpy()  # type: ignore[assignment]
            elif type(sampler) is RandomSampler and self.dataloader.num_workers == 0:
                # As on one device, which does not ask for more than the last sample: then it would draw once more.
                order = compact(list(islice(sampler, len(sampler))))
            else:
                order = compact(list(sampler))
        self._drawn_rounds = epoch, round_index + 1
        self._orders = {**dict(list(self._orders.items())[1 - _KEPT_ROUNDS :]), round_seed: order}

    def _set_sampler_epoch(self, epoch: int) -> None:
        """Sets the epoch of the user's sampler as Lightning does."""
        samplers = self.dataloader.sampler, getattr(self.dataloader.batch_sampler, "sampler", None)
        for sampler in {id(sampler): sampler for sampler in samplers}.values():
            if callable(set_epoch := getattr(sampler, "set_epoch", None)):
                set_epoch(epoch)

    @override
    def iterate_again(self) -> None:
        """Draws what one device's unused iterator does, before the first order."""
        if self._drawn_rounds is not None or self._order_is_reproducible:
            return
        self._draw_base_seed(self._user_sampler)
        ahead = (self.dataloader.prefetch_factor or 0) * self.dataloader.num_workers * self.batch_pipelines
        with seeded_everything():
            list(islice(iter(self.dataloader.batch_sampler or self.dataloader.sampler), ahead))

    def _draw_base_seed(self, sampler: Any) -> None:
        """Draws a DataLoader's base seed from its generator, as at the start of an epoch."""
        generator = self.dataloader.generator
        if generator is not None and generator is getattr(sampler, "generator", None):
            torch.empty((), dtype=torch.int64).random_(generator=generator)

    # ------------------------------------------------------------------ one order on all workers

    def order_state(self) -> dict[str, Any] | None:
        """The sampler's state, for a checkpoint; None if the epoch and the seed give it."""
        if self._drawn_rounds is None or self._order_is_reproducible:
            return self._restored_state
        return {"epoch": self._drawn_rounds[0], "before": self._state_before, "after": self._sampler_state.take()}

    def load_order_state(self, state: dict[str, Any] | None) -> None:
        """Restores :meth:`order_state` for the next order that is drawn.

        The order of the state's own epoch is drawn from its state before, a later one from its state after. Where the
        user gives another loader every ``state["reload"]`` epochs, its sampler begins as given.
        """
        if state is not None:
            self._restored_state, self._drawn_rounds = state, None
            self._orders.clear()

    def joining_state(self) -> dict[str, Any]:
        """The current epoch's orders, and the sampler's state, for a joining worker."""
        return {
            "orders": {} if self._order_is_reproducible else self._orders,
            "draws": self._drawn_rounds,
            "before": self._state_before,
            "restored": self._restored_state,
            "sampler": self._sampler_state.take(),
            "at_start": self._sampler_state.at_start,
            "probed": self._digest_samples_again(),
        }

    def _digest_samples_again(self) -> tuple[list[Any], int] | None:
        """Addresses and digest of the compared samples, read now: hooks may change them."""
        if self._probed_samples is not None and not self._samples_vary and not self._starts_slowly:
            addresses, self._probed_samples = self._probed_samples[0], None
            self._digest_samples(addresses)
        return None if self._samples_vary else self._probed_samples

    @property
    def _starts_slowly(self) -> bool:
        """Whether reading processes are not forked, and import everything again."""
        context = self.dataloader.multiprocessing_context or multiprocessing
        return bool(self.dataloader.num_workers > 0 and context.get_start_method() != "fork")

    def take_over(self, state: dict[str, Any]) -> None:
        """Takes over a :meth:`joining_state`; ConfigurationError if samples differ here."""
        self._orders, self._drawn_rounds = dict(state["orders"]), state["draws"] if state["orders"] else None
        self._state_before, self._restored_state = state["before"], state["restored"]
        self._sampler_state.load(state["sampler"])
        self._sampler_state.at_start = state["at_start"]
        probed = None if self._starts_slowly else state["probed"]  # the others wait meanwhile
        if probed is not None and self._digest_samples(probed[0]) not in (None, probed[1]):
            raise ConfigurationError(different(type(self.dataset).__name__, "samples in a replacement"))

    @property
    @override
    def lost_state(self) -> list[str]:
        return self._sampler_state.lost

    @override
    def facts(self) -> dict[str, Any]:
        round_seed, order = self._round_of(self._epoch, 0)
        facts: dict[str, Any] = {
            f"lengths of {type(self.dataset).__name__}": len(self.dataset) if hasattr(self.dataset, "__len__") else 0,
            f"orders of {type(self._user_sampler).__name__}": len(order)
            if self._order_is_reproducible
            else digest_of(order),
        }
        facts[f"samples of {type(self.dataset).__name__}"] = None  # unknown where nothing is read
        if self._prefetch and len(order):
            positions = sorted({0, len(order) // 2, len(order) - 1})
            addresses = [(round_seed, index) for place in positions for index in self._first_indices(order[place])]
            facts[f"samples of {type(self.dataset).__name__}"] = self._digest_samples(addresses)
        return facts

    def _first_indices(self, item: Any) -> list[Any]:
        """The index, or the first ones, of an item of the sampler's order."""
        return [as_index(item)]

    def _digest_samples(self, addresses: list[Any]) -> int | None:
        """A digest of the samples at ``addresses``; None where it would prove nothing.

        A dataset read in processes is read in one, once: it may open files there that no process may inherit. Draws
        from a dataset's own generator differ with each reading, and are not compared.
        """
        is_first_probe = self._probed_samples is None
        if self.dataloader.num_workers == 0:
            with self._seeding() as reseed:
                readings = [self._addressed_dataset.read(addresses, reseed) for _ in range(1 + is_first_probe)]
        elif is_first_probe:
            readings = list(self._reader_processes(0, [addresses, addresses], 1, collate_fn=identity_collate))
        else:
            return None
        digests = [add_sample(0, samples) for samples in readings]
        if len(set(digests)) > 1:
            self._samples_vary = True
            rank_zero_warn(
                f"{type(self.dataset).__name__} gives another sample when the same index is read again. A step that is"
                " redone after a failure, or a replacement, then sees other samples. Let it draw from the global"
                " generators of Python, NumPy or torch, which are seeded for each sample, and keep no generator of its"
                " own."
            )
        self._probed_samples = addresses, digests[0]
        return None if self._samples_vary else digests[0]

    # Whether a sample differs when read again.
    _samples_vary = False

    def _take_prefetched(self, key: tuple[int, int, Microbatch]) -> bool:
        """Reads on in the prefetcher up to ``key``; False if it has passed that already."""
        epoch, step, _ = key
        newest = self._newest_prefetched
        if newest is not None and key <= newest:
            return False
        if self._prefetcher is None or newest is None or newest[0] < epoch or step >= self._prefetch_end:
            self._start_prefetching(epoch, step)
        assert self._prefetcher is not None
        for read_key, data in self._prefetcher:
            self._cache[read_key] = data
            self._newest_prefetched = read_key
            if read_key == key:
                return True
        return False

    def _start_prefetching(self, epoch: int, first_step: int) -> None:
        microbatches = [Microbatch(self._pipeline, m) for m in range(self.grid.microbatches)]
        self._prefetch_end = (first_step // self._num_steps + 1) * self._num_steps
        steps = range(first_step, self._prefetch_end)
        keys = [(epoch, step, mb) for step in steps for mb in microbatches if self._order_positions(epoch, step, mb)]
        loader = self._reader_processes(epoch, (self.addresses(*key) for key in keys), self.dataloader.num_workers)
        self._newest_prefetched = None
        self._prefetcher = zip(keys, loader, strict=False)

    def _reader_processes(self, epoch: int, batches: Any, num_processes: int, **options: Any) -> DataLoader[Any]:
        return DataLoader(
            self._addressed_dataset,
            batch_sampler=batches,
            num_workers=num_processes,
            **process_settings(self.dataloader, self.dataset),
            # For the seeds of its processes. Drawn from the global generator, they would leave hooks with other draws
            # here than on workers that read nothing.
            generator=torch.Generator().manual_seed(derive_seed(self._seed, epoch)),
            **{"collate_fn": self._collate, **options},
        )
