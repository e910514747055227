"""Several DataLoaders at once: what Lightning combines of their steps is one step.

Lightning's ``CombinedLoader`` decides which steps go together; it combines addresses as it combines batches. A
micro-batch of the combination is the combination of that micro-batch of each loader, so a loader's samples are divided
as if it were alone, and the loaders may have different batch sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils._pytree import tree_leaves, tree_map
from typing_extensions import override

from lightning_recycle.data.batching import check_combination
from lightning_recycle.data.steps import StepHandle, StepLoader, StepSource
from lightning_recycle.planning.grid import Microbatch, global_index

__all__ = ["CombinedStep", "as_one_step"]


def as_one_step(batch: Any) -> Any:
    """``batch``, or if it holds the addresses of several steps, a :class:`StepHandle` of all of them as one."""
    if isinstance(batch, StepHandle):
        return batch
    parts: list[Any] = [leaf for leaf in tree_leaves(batch) if leaf is not None]  # None: a loader that has ended
    if not parts or not isinstance(parts[0], StepHandle):
        return batch
    check_combination([part.loader.dataloader for part in parts])
    newest = max(part.index for part in parts)  # the longest loader has not begun again
    step = CombinedStep(tree_map(lambda part: part and _continued(part, newest), batch))
    return StepHandle(step, parts[0].epoch, newest)


def _continued(part: StepHandle, newest: int) -> StepHandle:
    """The step of a loader that has begun again within the epoch, counted on."""
    loader = part.loader
    assert isinstance(loader, StepLoader)
    if part.index == newest:
        return part
    length = len(loader)
    return StepHandle(loader, part.epoch, newest // length * length + part.index)


class CombinedStep(StepSource):
    """The data of one step of several loaders.

    Where an evaluation has fewer samples of one of them than micro-batches, all of the step is one micro-batch: no
    other division leaves none of them without samples of that loader.

    Args:
        parts: the step of each loader, or None, in the structure that the user gave the loaders.
    """

    def __init__(self, parts: Any) -> None:
        self._parts = parts
        self._handles: list[StepHandle] = [part for part in tree_leaves(parts) if part is not None]
        first = self._handles[0].loader
        super().__init__(first.grid, first._seed, first.evaluation)
        self.prepare = first.prepare
        sizes = [handle.num_samples for handle in self._handles]
        self._is_whole = self.evaluation and min(sizes) < self.grid.global_microbatches

    @override
    def begin_step(self, handle: StepHandle) -> None:
        for part in self._handles:
            part.loader.begin_step(part)

    @override
    def read_ahead(self, handle: StepHandle) -> None:
        for part in self._handles:
            part.loader.read_ahead(part)

    @override
    def collated(self, handle: StepHandle, microbatch: Microbatch) -> Any:
        if self._is_whole:
            return self.collated_whole(handle)
        return self._of_each(lambda part: part.loader.collated(part, microbatch))

    @override
    def collated_whole(self, handle: StepHandle) -> Any:
        return self._of_each(lambda part: part.loader.collated_whole(part))

    def _of_each(self, read: Callable[[StepHandle], Any]) -> Any:
        return tree_map(lambda part: None if part is None else read(part), self._parts)

    @override
    def samples_in(self, handle: StepHandle) -> int:
        """As Lightning sees it: the size of the first batch in the combination."""
        return self._handles[0].num_samples

    @override
    def num_samples(self, handle: StepHandle, microbatch: Microbatch) -> int:
        if self._is_whole:
            return 0 if global_index(self.grid, microbatch) else self.samples_in(handle)
        return self._handles[0].loader.num_samples(self._handles[0], microbatch)

    @property
    @override
    def loaders(self) -> list[StepLoader]:
        return [loader for part in self._handles for loader in part.loader.loaders]

    @property
    @override
    def can_read_again(self) -> bool:
        return all(part.loader.can_read_again for part in self._handles)

    @override
    def read_again(self) -> None:
        for part in self._handles:
            part.loader.read_again()
