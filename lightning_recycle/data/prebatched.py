"""Data that comes in batches, from a batch sampler, a dataset or an iterable.

- :class:`GivenBatchLoader`: batches with addresses; a step takes one for each pipeline, in the sampler's order. In
  training a pipeline's batch is divided into M equal micro-batches; in an evaluation it is one.
- :class:`BatchIterableLoader`: any iterable, and DataLoaders that leave the batching to an IterableDataset. Every
  pipeline takes each of its batches, as under DDP; an evaluation computes it once. Every worker iterates over all of
  it, and finds its place again from the start of the epoch: it must give the same batches each time. Random numbers
  from the global generators are seeded by (seed, epoch, number of the batch).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

from torch import Tensor
from typing_extensions import override

from lightning_recycle.data.batching import is_sequence, samples_in
from lightning_recycle.data.map_style import MicrobatchLoader
from lightning_recycle.data.sample_order import as_index
from lightning_recycle.data.steps import Address, Collate, StepHandle, StepLoader
from lightning_recycle.errors import ConfigurationError, UnsupportedFeatureError
from lightning_recycle.planning.grid import Grid, Microbatch, global_index
from lightning_recycle.randomness import derive_seed, seeded_everything
from lightning_recycle.torch_internals import tree_leaves, tree_map


def sliced(batch: Any, number: int, count: int) -> Any:
    """Part ``number`` of ``count`` equal parts of a batch, along the first dimension.

    Raises:
        ConfigurationError: if it is not clear how to divide it.
    """
    if count == 1:
        return batch
    for leaf in tree_leaves(batch):
        if leaf is not None and not (isinstance(leaf, Tensor) and leaf.ndim):
            raise ConfigurationError(
                f"A batch that is given as a whole holds a {type(leaf).__name__}, so it cannot be divided into"
                f" num_microbatches={count} parts. Use num_microbatches=1, or a DataLoader that batches samples."
            )
    lengths = {len(leaf) for leaf in tree_leaves(batch) if leaf is not None}
    if len(lengths) != 1 or next(iter(lengths)) % count:
        raise ConfigurationError(
            f"A batch that is given as a whole has tensors of lengths {sorted(lengths)}, so it cannot be divided into"
            f" num_microbatches={count} equal parts. Use num_microbatches=1, or a divisor of the length."
        )
    size = next(iter(lengths)) // count
    return tree_map(lambda leaf: None if leaf is None else leaf[number * size : (number + 1) * size], batch)


class _OfOne:
    """Converts a sample that is a batch, as a DataLoader does without batching."""

    def __init__(self, convert: Callable[[Any], Any]) -> None:
        self.convert = convert

    def __call__(self, samples: list[Any]) -> Any:
        (sample,) = samples
        return self.convert(sample)


class GivenBatchLoader(MicrobatchLoader):
    """The steps of a DataLoader without a batch size: a sample is a batch here."""

    _unit = "batches"
    _drops_last = False

    def __init__(self, dataloader: Any, grid: Grid, pipeline: int, seed: int, **options: Any) -> None:
        super().__init__(dataloader, grid, pipeline, seed, **options)
        self._composes = dataloader.batch_sampler is not None  # otherwise a sample is a batch
        self._parts = 1 if self.evaluation else grid.global_microbatches // self.global_batch_size
        self._sizes: dict[tuple[int, int, Microbatch], int] = {}
        if not self._composes:
            self._collate = Collate(_OfOne(dataloader.collate_fn), seed)

    @override
    def _count(self) -> int:
        try:
            return len(self._user_sampler)
        except TypeError:  # a batch sampler need not know
            self._draw(0, 0)
            return len(self._orders[0])

    @override
    def __iter__(self) -> Iterator[StepHandle]:
        for handle in super().__iter__():
            if not self.evaluation and self._missing(handle):
                return  # the batch sampler has fewer in this epoch
            yield handle

    def _missing(self, handle: StepHandle) -> bool:
        order = self._round(handle.epoch, handle.index)[1]
        return len(order) < (handle.index % self._num_steps + 1) * self.global_batch_size

    # ------------------------------------------------------------------ addresses

    @override
    def _positions(self, epoch: int, step: int, microbatch: Microbatch) -> range:
        number = global_index(self.grid, microbatch)
        size = min(self._size(step), len(self._round(epoch, step)[1]) - step % self._num_steps * self.global_batch_size)
        batch = number if self.evaluation else number % self.global_batch_size
        if batch >= size:
            return range(0)
        first = step % self._num_steps * self.global_batch_size + batch
        return range(first, first + 1)

    @override
    def addresses(self, epoch: int, step: int, microbatch: Microbatch) -> list[Address]:
        if not self._composes:
            return super().addresses(epoch, step, microbatch)
        number, order = self._round(epoch, step)
        samples = [index for position in self._positions(epoch, step, microbatch) for index in order[position]]
        if len(samples) % self._parts:
            raise ConfigurationError(
                f"{type(self._user_sampler).__name__} composed a batch of {len(samples)} samples, which cannot be"
                f" divided into num_microbatches={self._parts} equal parts. Use num_microbatches=1, or batches of a"
                f" multiple of {self._parts}."
            )
        return [(number, int(index)) for index in samples[self._part(microbatch) :: self._parts]]

    @override
    def _addresses(self, epoch: int, step: int) -> list[Address]:
        if not self._composes:
            return super()._addresses(epoch, step)
        number, order = self._round(epoch, step)
        first = step % self._num_steps * self.global_batch_size
        return [(number, int(i)) for batch in order[first : first + self.global_batch_size] for i in batch]

    @override
    def _at(self, item: Any) -> list[Any]:
        return [as_index(index) for index in list(item)[:1]] if self._composes else super()._at(item)

    def _part(self, microbatch: Microbatch) -> int:
        return global_index(self.grid, microbatch) // self.global_batch_size

    # ------------------------------------------------------------------ data

    @override
    def begin_step(self, handle: StepHandle) -> None:
        self._sizes = {key: size for key, size in self._sizes.items() if key[0] == handle.epoch}
        super().begin_step(handle)

    @override
    def collated(self, handle: StepHandle, microbatch: Microbatch) -> Any:
        data = super().collated(handle, microbatch)
        if not self._composes:
            data = sliced(data, self._part(microbatch), self._parts)
            self._sizes[handle.epoch, handle.index, microbatch] = samples_in(data)
        return data

    @override
    def collated_whole(self, handle: StepHandle) -> Any:
        """Collated as one; a list of the pipelines' batches if a sample is a batch."""
        if self._composes:
            return super().collated_whole(handle)
        batches = self._collected(handle.epoch, [[at] for at in self._addresses(handle.epoch, handle.index)])
        return batches[0] if self.global_batch_size == 1 else batches

    @override
    def samples_in(self, handle: StepHandle) -> int:
        """The number of samples; that of batches if each sample is one."""
        return len(self._addresses(handle.epoch, handle.index))

    @override
    def num_samples(self, handle: StepHandle, microbatch: Microbatch) -> int:
        key = handle.epoch, handle.index, microbatch
        if not self._positions(*key):
            return 0
        if self._composes:
            return len(self.addresses(*key))
        if key not in self._sizes and self._prefetch:
            self._read([key])
            self._sizes[key] = samples_in(self._fetched[key])
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
        found = []
        for index in range(len(samples)):
            part, batch = divmod(index, batches)
            start, size = starts[batch], sizes[batch]
            if self._composes:
                found.append(range(start + part, starts[batch + 1], parts))
            else:
                found.append(range(start + size * part, start + size * (part + 1)))
        return [found]


_KEPT_STEPS = 3  # the current one, the previous one, which others may have to redo, and the next one


class BatchIterableLoader(StepLoader):
    """The steps of an epoch: one for each batch."""

    def __init__(
        self, dataloader: Any, grid: Grid, seed: int, batch_pipelines: int | None = None, evaluation: bool = False
    ) -> None:
        super().__init__(dataloader, grid, seed, evaluation)
        self.only_forward = not is_sequence(dataloader)
        self._pipelines = batch_pipelines or grid.pipelines
        self._iterator: Iterator[Any] = iter(())
        self._pass: int | None = None  # the epoch that it belongs to
        self._next = 0  # its next batch
        self._kept: dict[tuple[int, int], Any] = {}
        self._knows_epoch = evaluation

    # ------------------------------------------------------------------ what Lightning sees

    def __len__(self) -> int:
        """Raises TypeError if the iterable does not know, as Lightning expects."""
        return len(self.dataloader)

    @override
    def enter_epoch(self, first_step: int, end_step: float) -> None:
        super().enter_epoch(first_step, end_step)
        self._knows_epoch = True

    @override
    def __iter__(self) -> Iterator[StepHandle]:
        if not self.only_forward:
            return (StepHandle(self, self._epoch, index) for index in range(self.first_step, len(self)))
        if not self._is_entering:
            other = type(self)(self.dataloader, self.grid, self._seed, self._pipelines, evaluation=True)
            other.prepare = self.prepare
            return other._steps_from(self._epoch, 0)
        if not self._knows_epoch:  # without a length Lightning asks before it knows where training begins
            return iter([StepHandle(self, self._epoch, 0)])
        return self._steps_from(self._epoch, self.first_step)

    def _steps_from(self, epoch: int, index: int) -> Iterator[StepHandle]:
        if self.evaluation or epoch != self._pass:
            self._begin_pass(epoch)
        while self._reaches(epoch, index):
            yield StepHandle(self, epoch, index)
            index += 1

    # ------------------------------------------------------------------ what the executor sees

    @override
    def begin_step(self, handle: StepHandle) -> None:
        pass

    @override
    def read_ahead(self, handle: StepHandle) -> None:
        if self.only_forward and handle.epoch == self._pass and handle.index + 1 < self.end_step:
            self._reaches(handle.epoch, handle.index + 1)

    @override
    def collated(self, handle: StepHandle, microbatch: Microbatch) -> Any:
        part, parts = global_index(self.grid, microbatch), self.grid.global_microbatches
        if self.evaluation:
            return self.collated_whole(handle)
        return copy.deepcopy(sliced(self._batch(handle), part // self._pipelines, parts // self._pipelines))

    @override
    def collated_whole(self, handle: StepHandle) -> Any:
        return copy.deepcopy(self._batch(handle))  # the caller may change it, and a redo needs it as it was

    @override
    def samples_in(self, handle: StepHandle) -> int:
        return samples_in(self._batch(handle))

    @override
    def num_samples(self, handle: StepHandle, microbatch: Microbatch) -> int:
        number, size = global_index(self.grid, microbatch), self.samples_in(handle)
        if self.evaluation:  # pipelines take turns
            return size if number == handle.index % self.grid.pipelines else 0
        return max(1, size * self._pipelines // self.grid.global_microbatches)

    @override
    def divisions(self, handle: StepHandle, samples: Sequence[int] | None) -> list[list[range]]:
        size = self.num_samples(handle, Microbatch(0, 0))  # of each part; every pipeline has all of them
        parts = (index // self._pipelines for index in range(self.grid.global_microbatches))
        return [[range(size * part, size * (part + 1)) for part in parts]]

    @override
    def close(self) -> None:
        self._iterator = iter(())

    # ------------------------------------------------------------------ inside

    def _batch(self, handle: StepHandle) -> Any:
        key = handle.epoch, handle.index
        if not self.only_forward:
            with seeded_everything() as reseed:
                reseed(derive_seed(self._seed, *key))
                return self.dataloader[handle.index % len(self)]
        if key not in self._kept and (handle.epoch != self._pass or not self._reaches(*key)):
            raise UnsupportedFeatureError(
                f"Batch {handle.index} of epoch {handle.epoch} of {type(self.dataloader).__name__}, which can only be"
                f" iterated over, is gone: the newest {_KEPT_STEPS} are kept. Look into a batch in the hooks of its own"
                " step."
            )
        return self._kept[key]

    def _begin_pass(self, epoch: int) -> None:
        with seeded_everything() as reseed:
            reseed(derive_seed(self._seed, epoch))
            self._iterator = iter(self.dataloader)
        self._pass, self._next = epoch, 0

    def _reaches(self, epoch: int, index: int) -> bool:
        if (epoch, index) in self._kept and self._next > index:
            return True
        with seeded_everything() as reseed:
            while self._next <= index:
                reseed(derive_seed(self._seed, epoch, self._next))
                try:
                    batch = next(self._iterator)
                except StopIteration:
                    return False
                self._kept.pop((epoch, self._next), None)  # of an earlier evaluation
                self._kept[epoch, self._next] = batch
                self._next += 1
                while len(self._kept) > _KEPT_STEPS:
                    del self._kept[next(iter(self._kept))]
        return (epoch, index) in self._kept
