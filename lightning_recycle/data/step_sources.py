"""The steps of an epoch as Lightning's loops see them, and the sources of data.

A step takes a *global batch*: ``batch_size`` samples of each pipeline. Pipeline d gets its samples d, d+D, d+2D, ...,
as with a DistributedSampler, and micro-batch m of that pipeline every M-th of these. So the composition of the global
micro-batch g = m * D + d depends only on D * M: with the same number of micro-batches, every grid computes the same
sums and draws the same dropout.

Several DataLoaders: Lightning's ``CombinedLoader`` combines addresses as it combines batches. A micro-batch of such a
:class:`CombinedStep` combines that micro-batch of each loader, so a loader's samples are divided as if it were alone.
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

from torch import Tensor
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_recycle.data.dataloaders import batching_of, check_combination, check_dataloader
from lightning_recycle.errors import UnsupportedFeatureError
from lightning_recycle.planning.grid import Grid, Microbatch, global_index
from lightning_recycle.randomness import derive_seed, seeded_everything
from lightning_recycle.torch_internals import tree_leaves, tree_map, version_of

_SETTINGS = inspect.signature(DataLoader).parameters.keys()
Address: TypeAlias = tuple[int, Any]
"""(seed of the round, index); the index is an integer, or a list of integers to read at once."""

AddressedSample: TypeAlias = tuple[Address, Any]
"""(address, sample)."""


def numbers_of(index: Any) -> Iterable[int]:
    """The integers of an index."""
    return map(int, index) if isinstance(index, list) else (index,)


class StepHandle:
    """Address of the batch of a step, which loops and hooks see instead of the data.

    Callbacks that look into the batch find the whole global batch, read here on the first access. ``kept``: what hooks
    that convert it have changed, as (attributes, name, before, after), once they have run.
    """

    __slots__ = ("_data", "_seen", "epoch", "index", "kept", "loader")  # hooks can set nothing else

    def __init__(self, loader: StepSource, epoch: int, index: int) -> None:
        self.loader, self.epoch, self.index = loader, epoch, index
        self.kept: list[tuple[dict[str, Any], str, Any, Any]] | None = None
        self._data: tuple[Any] | None = None
        self._seen: list[tuple[Any, int]] = []  # what it held when it was read

    @property
    def num_samples(self) -> int:
        return self.loader.samples_in(self)

    def read(self) -> Any:
        """The whole global batch by the user's collate function, on the device."""
        if self._data is None:
            self._data = (self.loader.read_batch(self),)
            self._seen = _contents(self._data)
        return self._data[0]

    def refuse_changes(self) -> None:
        """Raises UnsupportedFeatureError if hooks have changed what they have read."""
        if self._data is None:
            return
        seen, now = ([(id(leaf), writes) for leaf, writes in each] for each in (self._seen, _contents(self._data)))
        if seen != now:
            raise UnsupportedFeatureError(_CHANGED)

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple.__getitem__, ((self.read(),), 0)  # what keeps a batch is sent with that

    def __setitem__(self, key: Any, value: Any) -> None:
        raise UnsupportedFeatureError(_CHANGED)

    def __getitem__(self, key: Any) -> Any:
        return self.read()[key]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in vars(StepHandle):  # of a copy that is being made; what read() raises
            raise AttributeError(name)
        return getattr(self.read(), name)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(lambda value: value.read() if isinstance(value, cls) else value, (args, kwargs or {}))
        return function(*args, **kwargs)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.read())

    def __len__(self) -> int:
        return len(self.read())


_CHANGED = (
    "A hook has changed the batch, which steps do not see: each reads its own micro-batch. Change it in"
    " on_after_batch_transfer(batch, dataloader_idx), in the step, or in the dataset."
)


def _contents(data: Any) -> list[tuple[Any, int]]:
    """The leaves of ``data``, with the number of writes to tensors."""
    leaves = tree_leaves(data)
    return [(x, version_of(x) if isinstance(x, Tensor) and not x.is_inference() else 0) for x in leaves]


class Collate:
    """The user's collate function, seeded by the samples and the epoch."""

    def __init__(self, collate: Callable[[list[Any]], Any], seed: int) -> None:
        self.collate, self.seed = collate, seed

    def collect(self, addressed: list[AddressedSample], reseed: Callable[[int], None] | None) -> Any:
        """The batch of these samples; ``reseed``: None if the function draws nothing."""
        epoch = addressed[0][0][0]
        if reseed is not None:
            reseed(derive_seed(self.seed, epoch, *(n for (_, index), _ in addressed for n in numbers_of(index))))
        return self.collate([sample for _, sample in addressed])

    def __call__(self, addressed: list[AddressedSample]) -> Any:
        with seeded_everything() as reseed:
            return self.collect(addressed, reseed)


class StepSource(ABC):
    """The executor's view of the data of a step.

    ``evaluation``: a step may be smaller than others, with empty micro-batches.

    Attributes:
        prepare: called first with collated data, its handle and seed; moves it to the device.
        dataloader_idx: index among several loaders of an evaluation that are read one after another.
    """

    prepare: Callable[[Any, StepHandle, int], Any] | None = None
    dataloader_idx = 0

    def __init__(self, grid: Grid, seed: int, evaluation: bool) -> None:
        self.grid, self.evaluation = grid, evaluation
        self._microbatches, self._seed = grid.global_microbatches, seed

    def fetch(self, handle: StepHandle, microbatch: Microbatch) -> Any:
        """The collated micro-batch, on the device, the same each time.

        The caller owns the result, and layers may change it in place.
        """
        return self._prepared(self.collate_microbatch(handle, microbatch), handle, global_index(self.grid, microbatch))

    def read_batch(self, handle: StepHandle) -> Any:
        return self._prepared(self.collate_batch(handle), handle, -1)

    def _prepared(self, data: Any, handle: StepHandle, index: int) -> Any:
        """``data`` on the device; ``index``: its micro-batch, -1 for the whole batch."""
        if self.prepare is None:
            return data
        return self.prepare(data, handle, derive_seed(self._seed, handle.epoch, handle.index, index))

    @abstractmethod
    def begin_step(self, handle: StepHandle) -> None:
        """The step of ``handle`` runs now; the previous one may still be requested."""

    @abstractmethod
    def read_ahead(self, handle: StepHandle) -> None:
        """Reads data of the step after ``handle``; called when there is time."""

    @abstractmethod
    def collate_microbatch(self, handle: StepHandle, microbatch: Microbatch) -> Any:
        """The micro-batch of :meth:`fetch` by the user's collate function."""

    @abstractmethod
    def collate_batch(self, handle: StepHandle) -> Any:
        """The batch of :meth:`read_batch` by the user's collate function."""

    @abstractmethod
    def samples_in(self, handle: StepHandle) -> int:
        """Number of samples of a global batch; an evaluation's last one may be smaller."""

    @abstractmethod
    def num_samples(self, handle: StepHandle, microbatch: Microbatch) -> int:
        """Number of samples in a micro-batch; may be 0 in evaluation."""

    @abstractmethod
    def divisions(self, handle: StepHandle, samples: Sequence[int] | None) -> list[list[range]]:
        """Places in :meth:`read_batch` of the samples of all micro-batches, by loader.

        For a training step, by global index, the same on every worker; a loader with unknown division has none.
        ``samples``: of each micro-batch, None if unknown.
        """

    def digest(self, handle: StepHandle) -> int:
        """Digest of all that was read up to this step; 0 where samples have addresses."""
        return 0

    def _by_index(self) -> list[Microbatch]:
        return sorted(self.grid.all_microbatches(), key=partial(global_index, self.grid))

    @property
    @abstractmethod
    def loaders(self) -> list[StepLoader]:
        """The loaders whose steps it has."""

    @property
    def can_read_again(self) -> bool:
        """Whether :meth:`read_again` is possible: not for a stream."""
        return not any(loader.only_forward for loader in self.loaders)

    def read_again(self) -> None:
        """Begins reading anew, with the same data, after an exception within a read."""
        for loader in self.loaders:
            loader.close()


class StepLoader(StepSource):
    """The steps of an epoch as Lightning sees them, from one of the user's loaders.

    Iterating yields a :class:`StepHandle` per step; Lightning counts with these.

    Args:
        batch_pipelines: number of pipelines for which ``batch_size`` was chosen, if not the grid's: the global batch
            stays the same when training continues with fewer pipelines.
        evaluation: whether to keep a trailing incomplete global batch and make micro-batches of consecutive samples, as
            even as possible; some may be empty.

    Attributes:
        only_forward: whether a step is found only by reading earlier ones.
        first_step: first step of the next iteration; not 0 while the training loop enters an epoch in its middle.
        end_step: the step before which the loop ends the epoch, at the latest.
    """

    only_forward = False

    def __init__(
        self, dataloader: Any, grid: Grid, seed: int, batch_pipelines: int | None = None, evaluation: bool = False
    ) -> None:
        super().__init__(grid, seed, evaluation)
        self.dataloader = dataloader
        self.batch_pipelines = batch_pipelines or grid.pipelines
        self.first_step = 0
        self.end_step: float = math.inf
        self._is_entering = True
        self._epoch = 0

    def __getattr__(self, name: str) -> Any:
        """Attributes of the user's loader, such as its sampler, for hooks and Lightning."""
        if name.startswith("_") or name in ("dataloader", "state_dict", "load_state_dict"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.dataloader, name)

    @override
    def __setattr__(self, name: str, value: Any) -> None:
        """Hooks set the settings of the user's loader, or get its error."""
        if name in _SETTINGS:
            setattr(self.dataloader, name, value)
        else:
            super().__setattr__(name, value)

    @property
    @override
    def loaders(self) -> list[StepLoader]:
        return [self]

    def set_epoch(self, epoch: int) -> None:
        """The next iterations are over ``epoch``, which Lightning sets for the sampler."""
        self._epoch = epoch

    def reseed(self, seed: int) -> None:
        self._seed = seed

    def enter_epoch(self, first_step: int, end_step: float) -> None:
        """The training loop is about to iterate from ``first_step`` to ``end_step``."""
        self.first_step, self.end_step = first_step, end_step
        self._is_entering = True

    def iterate_again(self) -> None:
        """Lightning replaces its iterator, which so far has only been created."""

    def entered(self) -> None:
        """The training loop has its iterator; hooks' iterators have passes of their own."""
        self.first_step, self._is_entering = 0, False

    def facts(self) -> dict[str, Any]:
        """Values that must be equal on all workers before an epoch; None: unknown here."""
        return {}

    @property
    def lost_state(self) -> list[str]:
        """The sampler's attributes that no checkpoint or replacement can have."""
        return []

    @abstractmethod
    def __iter__(self) -> Iterator[StepHandle]:
        """The steps of an epoch from :attr:`first_step`, as set at the call."""

    @abstractmethod
    def close(self) -> None:
        """Ends reading processes. The newest step can still be fetched."""


class SampleLoader(StepLoader):
    """The steps of a DataLoader, whose samples are divided among the micro-batches.

    Raises the errors of :func:`~lightning_recycle.data.dataloaders.check_dataloader`.
    """

    def __init__(self, dataloader: Any, grid: Grid, seed: int, **options: Any) -> None:
        super().__init__(dataloader, grid, seed, **options)
        check_dataloader(dataloader, None if self.evaluation else grid.global_microbatches // self.batch_pipelines)
        batch_size = batching_of(dataloader)[0] or 1  # a batch that is given counts as one sample
        self.global_batch_size = batch_size * self.batch_pipelines
        self._collate = Collate(self._collate_function, seed)

    @property
    def _collate_function(self) -> Callable[[list[Any]], Any]:
        return self.dataloader.collate_fn  # type: ignore[no-any-return]

    @override
    def enter_epoch(self, first_step: int, end_step: float) -> None:
        super().enter_epoch(first_step, end_step)
        self._collate.collate = self._collate_function  # a hook may have set another

    @override
    def reseed(self, seed: int) -> None:
        super().reseed(seed)
        self._collate.seed = seed

    @override
    def num_samples(self, handle: StepHandle, microbatch: Microbatch) -> int:
        return len(self._share(microbatch, self.samples_in(handle)))

    @override
    def divisions(self, handle: StepHandle, samples: Sequence[int] | None) -> list[list[range]]:
        size = self.samples_in(handle)
        return [[self._share(microbatch, size) for microbatch in self._by_index()]]

    def _share(self, microbatch: Microbatch, size: int) -> range:
        """The places of a micro-batch's samples within a global batch of ``size``."""
        index, count = global_index(self.grid, microbatch), self._microbatches
        if self.evaluation:
            return range(size * index // count, size * (index + 1) // count)
        return range(index, size, count)


def as_one_step(batch: Any) -> Any:
    """``batch``, or a :class:`StepHandle` for the steps of several loaders in it."""
    if isinstance(batch, StepHandle):
        return batch
    parts: list[Any] = [leaf for leaf in tree_leaves(batch) if leaf is not None]  # None: a loader that has ended
    if not parts or not isinstance(parts[0], StepHandle):
        return batch
    check_combination([part.loader.dataloader for part in parts])
    newest = max(part.index for part in parts)  # the longest loader has not begun again
    step = CombinedStep(tree_map(lambda part: part and _count_on(part, newest), batch))
    return StepHandle(step, parts[0].epoch, newest)


def _count_on(handle: StepHandle, newest: int) -> StepHandle:
    """The step of a loader that has begun again within the epoch, counted on."""
    loader = handle.loader
    assert isinstance(loader, StepLoader)
    if handle.index == newest:
        return handle
    length = len(loader)
    return StepHandle(loader, handle.epoch, newest // length * length + handle.index)


class CombinedStep(StepSource):
    """The data of one step of several loaders, in the user's structure.

    Where an evaluation has fewer samples of a loader than micro-batches, the whole step is one micro-batch: any other
    division leaves one of them without samples of that loader.
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
    def collate_microbatch(self, handle: StepHandle, microbatch: Microbatch) -> Any:
        if self._is_whole:
            return self.collate_batch(handle)
        return self._read_each(lambda part: part.loader.collate_microbatch(part, microbatch))

    @override
    def collate_batch(self, handle: StepHandle) -> Any:
        return self._read_each(lambda part: part.loader.collate_batch(part))

    def _read_each(self, read: Callable[[StepHandle], Any]) -> Any:
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

    @override
    def divisions(self, handle: StepHandle, samples: Sequence[int] | None) -> list[list[range]]:
        first, *others = self._handles
        found = first.loader.divisions(first, samples)
        for part in others:
            found += [places for places in part.loader.divisions(part, None) if places not in found]
        return found

    @property
    @override
    def loaders(self) -> list[StepLoader]:
        return [loader for part in self._handles for loader in part.loader.loaders]
