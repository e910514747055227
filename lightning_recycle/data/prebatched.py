"""Batches made by the user: a batch sampler, a dataset or iterable of batches.

**With addresses** (:class:`GivenBatchLoader`) a step takes one batch for each pipeline, in the sampler's order. In
training it is divided into M equal micro-batches; in an evaluation it is one.

**An iterable of batches** (:class:`BatchIterableLoader`): every pipeline takes each batch, as under DDP; an evaluation
computes it once. A worker reads again from the start of the epoch, so the iterable must give the same batches each
time. Global generators are seeded by (seed, epoch, number of the batch).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate, takewhile
from typing import Any

from torch import Tensor
from typing_extensions import override

from lightning_recycle.data.dataloaders import as_index, is_sequence, samples_in
from lightning_recycle.data.iterable_style import END, ForwardLoader
from lightning_recycle.data.map_style import MicrobatchLoader
from lightning_recycle.data.step_sources import Address, StepHandle
from lightning_recycle.errors import ConfigurationError, counted
from lightning_recycle.planning.grid import Grid, Microbatch, global_index
from lightning_recycle.randomness import derive_seed, seeded_everything
from lightning_recycle.torch_internals import tree_leaves, tree_map


def sliced(batch: Any, number: int, count: int) -> Any:
    """Part ``number`` of ``count`` of a batch (dimension 0), or ConfigurationError."""
    if count == 1:
        return batch
    for leaf in tree_leaves(batch):
        if leaf is not None and not (isinstance(leaf, Tensor) and leaf.ndim):
            raise ConfigurationError(
                f"A batch that is given as a whole holds an object of type {type(leaf).__name__}, so it cannot"
                f" be divided into num_microbatches={count} parts."
                " Use num_microbatches=1, or a DataLoader that batches samples."
            )
    lengths = {len(leaf) for leaf in tree_leaves(batch) if leaf is not None}
    if len(lengths) != 1 or next(iter(lengths)) % count:
        raise ConfigurationError(
            f"A batch that is given as a whole has tensors of lengths {sorted(lengths)}, so it cannot be divided into"
            f" num_microbatches={count} equal parts. Use num_microbatches=1, or a divisor of the length; if these"
            " are single samples, give a DataLoader with a batch_size."
        )
    size = next(iter(lengths)) // count
    return tree_map(lambda leaf: None if leaf is None else leaf[number * size : (number + 1) * size], batch)


def _convert_only(convert: Callable[[Any], Any], samples: list[Any]) -> Any:
    """Converts a sample that is a batch, as a DataLoader does without batching."""
    (sample,) = samples
    return convert(sample)


class GivenBatchLoader(MicrobatchLoader):
    """The steps of a DataLoader without a batch size: a sample is a batch here."""

    _unit = "batches"
    _drops_last = False

    def __init__(self, dataloader: Any, grid: Grid, pipeline: int, seed: int, **options: Any) -> None:
        super().__init__(dataloader, grid, pipeline, seed, **options)
        self._composes = dataloader.batch_sampler is not None  # otherwise a sample is a batch
        self._parts = 1 if self.evaluation else grid.global_microbatches // self.global_batch_size
        self._sizes: dict[tuple[int, int, Microbatch], int] = {}

    @property
    @override
    def _collate_function(self) -> Callable[[list[Any]], Any]:
        convert = super()._collate_function
        return convert if self.dataloader.batch_sampler is not None else partial(_convert_only, convert)

    @override
    def _count_samples(self) -> int:
        try:
            return len(self._user_sampler)
        except TypeError:  # a batch sampler need not know
            self._draw_order(0, 0)
            return len(self._orders[0])

    @override
    def __iter__(self) -> Iterator[StepHandle]:
        handles = super().__iter__()  # from the first step that is set now
        return handles if self.evaluation else takewhile(self._has_batches, handles)

    def _has_batches(self, handle: StepHandle) -> bool:
        """Whether the batch sampler has enough of them in this epoch."""
        order = self._round_of(handle.epoch, handle.index)[1]
        return len(order) >= (handle.index % self._num_steps + 1) * self.global_batch_size

    # ------------------------------------------------------------------ addresses

    @override
    def _order_positions(self, epoch: int, step: int, microbatch: Microbatch) -> range:
        index, skipped = global_index(self.grid, microbatch), step % self._num_steps * self.global_batch_size
        size = min(self._step_size(step), len(self._round_of(epoch, step)[1]) - skipped)
        batch = index if self.evaluation else index % self.global_batch_size
        if batch >= size:
            return range(0)
        return range(skipped + batch, skipped + batch + 1)

    @override
    def addresses(self, epoch: int, step: int, microbatch: Microbatch) -> list[Address]:
        if not self._composes:
            return super().addresses(epoch, step, microbatch)
        round_seed, order = self._round_of(epoch, step)
        samples = [index for position in self._order_positions(epoch, step, microbatch) for index in order[position]]
        if len(samples) % self._parts:
            raise ConfigurationError(
                f"{type(self._user_sampler).__name__} composed a batch of {counted(len(samples), 'sample')}, which"
                f" cannot be divided into num_microbatches={self._parts} equal parts. Use num_microbatches=1, or"
                f" batches of a multiple of {self._parts}."
            )
        return [(round_seed, int(index)) for index in samples[self._part_number(microbatch) :: self._parts]]

    @override
    def _addresses(self, epoch: int, step: int) -> list[Address]:
        if not self._composes:
            return super()._addresses(epoch, step)
        round_seed, order = self._round_of(epoch, step)
        first = step % self._num_steps * self.global_batch_size
        return [(round_seed, int(i)) for batch in order[first : first + self.global_batch_size] for i in batch]

    @override
    def _first_indices(self, item: Any) -> list[Any]:
        return [as_index(index) for index in list(item)[:1]] if self._composes else super()._first_indices(item)

    def _part_number(self, microbatch: Microbatch) -> int:
        return global_index(self.grid, microbatch) // self.global_batch_size

    # ------------------------------------------------------------------ data

    @override
    def begin_step(self, handle: StepHandle) -> None:
        self._sizes = {key: size for key, size in self._sizes.items() if key[0] == handle.epoch}
        super().begin_step(handle)

    @override
    def collate_microbatch(self, handle: StepHandle, microbatch: Microbatch) -> Any:
        data = super().collate_microbatch(handle, microbatch)
        if not self._composes:
            data = sliced(data, self._part_number(microbatch), self._parts)
            self._sizes[handle.epoch, handle.index, microbatch] = samples_in(data)
        return data

    @override
    def collate_batch(self, handle: StepHandle) -> Any:
        """Collated as one; a list of the pipelines' batches if a sample is a batch."""
        if self._composes:
            return super().collate_batch(handle)
        batches = self._read_batches(handle.epoch, [[at] for at in self._addresses(handle.epoch, handle.index)])
        return batches[0] if self.global_batch_size == 1 else batches

    @override
    def samples_in(self, handle: StepHandle) -> int:
        """The number of samples; that of batches if each sample is one."""
        return len(self._addresses(handle.epoch, handle.index))

    @override
    def num_samples(self, handle: StepHandle, microbatch: Microbatch) -> int:
        key = handle.epoch, handle.index, microbatch
        if not self._order_positions(*key):
            return 0
        if self._composes:
            return len(self.addresses(*key))
        if key not in self._sizes and self._prefetch:
            self._fill_cache([key])
            self._sizes[key] = samples_in(self._cache[key])
        return self._sizes.get(key, 1)

    @override
    def divisions(self, handle: StepHandle, samples: Sequence[int] | None) -> list[list[range]]:
        if self._composes:
            samples = [self.num_samples(handle, microbatch) for microbatch in self._by_index()]
        elif samples is None:
            return []  # a worker that reads no data does not know
        batches, parts = self.global_batch_size, self._parts
        sizes = [max(samples[batch::batches]) for batch in range(batches)]  # of each of a batch's parts
        starts = [0, *accumulate(size * parts for size in sizes)]
        ranges = []
        for index in range(len(samples)):
            part, batch = divmod(index, batches)
            start, size = starts[batch], sizes[batch]
            if self._composes:
                ranges.append(range(start + part, starts[batch + 1], parts))
            else:
                ranges.append(range(start + size * part, start + size * (part + 1)))
        return [ranges]


# ---------------------------------------------------------------------- iterables of batches


class BatchIterableLoader(ForwardLoader):
    """The steps of an epoch of an iterable that yields whole batches."""

    def __init__(self, dataloader: Any, grid: Grid, seed: int, **options: Any) -> None:
        super().__init__(dataloader, grid, seed, **options)
        self.only_forward = not is_sequence(dataloader)
        self._iterator: Iterator[Any] = iter(())

    # ------------------------------------------------------------------ what Lightning sees

    def __len__(self) -> int:
        """Raises TypeError if the length is unknown, as Lightning expects."""
        return len(self.dataloader)

    @override
    def __iter__(self) -> Iterator[StepHandle]:
        if not self.only_forward:
            return (StepHandle(self, self._epoch, index) for index in range(self.first_step, len(self)))
        return super().__iter__()

    # ------------------------------------------------------------------ what the executor sees

    @override
    def read_ahead(self, handle: StepHandle) -> None:
        if self.only_forward:
            super().read_ahead(handle)

    @override
    def collate_microbatch(self, handle: StepHandle, microbatch: Microbatch) -> Any:
        part, parts = global_index(self.grid, microbatch), self.grid.global_microbatches
        if self.evaluation:
            return self.collate_batch(handle)
        return copy.deepcopy(sliced(self._batch(handle), part // self.batch_pipelines, parts // self.batch_pipelines))

    @override
    def collate_batch(self, handle: StepHandle) -> Any:
        return copy.deepcopy(self._batch(handle))  # the caller may change it, and a redo needs it as it was

    @override
    def samples_in(self, handle: StepHandle) -> int:
        return samples_in(self._batch(handle))

    @override
    def num_samples(self, handle: StepHandle, microbatch: Microbatch) -> int:
        index, size = global_index(self.grid, microbatch), self.samples_in(handle)
        if self.evaluation:  # pipelines take turns
            return size if index == handle.index % self.grid.pipelines else 0
        return max(1, size * self.batch_pipelines // self.grid.global_microbatches)

    @override
    def divisions(self, handle: StepHandle, samples: Sequence[int] | None) -> list[list[range]]:
        size = self.num_samples(handle, Microbatch(0, 0))  # of each part; every pipeline has all of them
        parts = (index // self.batch_pipelines for index in range(self.grid.global_microbatches))
        return [[range(size * part, size * (part + 1)) for part in parts]]

    @override
    def close(self) -> None:
        self._iterator = iter(())

    # ------------------------------------------------------------------ inside

    def _batch(self, handle: StepHandle) -> Any:
        if not self.only_forward:
            with seeded_everything() as reseed:
                reseed(derive_seed(self._seed, handle.epoch, handle.index))
                return self.dataloader[handle.index % len(self)]
        return self._step(handle)

    @override
    def _begin_pass(self, epoch: int) -> None:
        with seeded_everything() as reseed:
            reseed(derive_seed(self._seed, epoch))
            self._iterator = iter(self.dataloader)
        super()._begin_pass(epoch)

    @override
    def _read_step(self) -> Any:
        with seeded_everything() as reseed:
            reseed(derive_seed(self._seed, self._pass_epoch or 0, self._next_step))
            return next(self._iterator, END)
