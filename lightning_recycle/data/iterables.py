"""Data that can only be iterated over, and yields batches: any iterable, and DataLoaders that leave the batching to an
IterableDataset.

It has no samples that could be divided. So every pipeline takes each of its batches, as each process does under DDP; an
evaluation computes it once. Every worker iterates over all of it, and finds its place again from the start of the
epoch: an iterable must give the same batches each time, whatever the rank. What it draws from the global generators of
Python, NumPy and torch is seeded by (seed, epoch, number of the batch).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from typing_extensions import override

from lightning_recycle.data.batching import is_sequence, samples_in
from lightning_recycle.data.slices import sliced
from lightning_recycle.data.steps import StepHandle, StepLoader
from lightning_recycle.errors import UnsupportedFeatureError
from lightning_recycle.planning.grid import Grid, Microbatch, global_index
from lightning_recycle.randomness import derive_seed, seeded_everything

__all__ = ["BatchIterableLoader"]

_KEPT_STEPS = 3  # the current one, the previous one, which others may have to redo, and the next one


class BatchIterableLoader(StepLoader):
    """The steps of an epoch: one for each batch.

    Args:
        dataloader: the iterable.
        grid, seed, evaluation: as :class:`~lightning_recycle.data.steps.StepLoader`.
        batch_pipelines: as :class:`~lightning_recycle.data.steps.SampleLoader`.
    """

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
            yield from (StepHandle(self, self._epoch, index) for index in range(self.first_step, len(self)))
            return
        if not self._knows_epoch:  # without a length Lightning asks before it knows where training begins
            yield StepHandle(self, self._epoch, 0)
            return
        epoch, index = self._epoch, self.first_step
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

    @property
    @override
    def can_read_again(self) -> bool:
        return not self.only_forward

    @override
    def read_again(self) -> None:
        if self.only_forward:
            raise UnsupportedFeatureError(f"{type(self.dataloader).__name__} can only be iterated over.")

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
        """Reads as far as a batch; False if the pass ends before it."""
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
