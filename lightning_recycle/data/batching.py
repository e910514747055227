"""Batching of a user's DataLoader, and the errors for unusable ones.

Any worker must be able to get any sample, even a second time. So the data has addresses (a map-style dataset, or an
IterableDataset with indices), or it is a *stream*: dataset, iterator or loader have ``state_dict`` and
``load_state_dict``, or reading again gives the same samples. Torch's tensor datasets with torch's own collate function
are read without seeding the generators, which would take longer than a read.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    IterDataPipe,
    Sampler,
    SequentialSampler,
    StackDataset,
    Subset,
    TensorDataset,
    default_collate,
)

from lightning_recycle.arguments import is_integer
from lightning_recycle.errors import ConfigurationError, UnsupportedFeatureError
from lightning_recycle.randomness import seeded_everything
from lightning_recycle.torch_internals import tree_leaves


def is_stateful(thing: Any) -> bool:
    """Whether ``thing`` can save and load its state."""
    return callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))


def is_stream(dataloader: Any) -> bool:
    """Whether a DataLoader's data can only be read from the start."""
    dataset = getattr(dataloader, "dataset", None)
    return isinstance(dataset, IterableDataset) and not (
        type(dataset).__getitem__ is not Dataset.__getitem__ and hasattr(type(dataset), "__len__")
    )


def promises_nothing(dataloader: DataLoader[Any]) -> bool:
    """Whether a stream has no state and is not said to give the same samples again."""
    dataset = dataloader.dataset
    if is_stateful(dataset) or is_stateful(dataloader):
        return False
    if inspect.isgeneratorfunction(getattr(type(dataset), "__iter__", None)):
        return True
    try:
        return not is_stateful(iter(copy.deepcopy(dataset)))  # a copy, since to begin may change it
    except Exception:  # it holds what cannot be copied: nothing can be said before it is read
        return True


def yields_batches(loader: Any) -> bool:
    """Whether ``loader`` can only be iterated over, and yields whole batches.

    No DataLoader, or one with ``batch_size=None`` over a stream.
    """
    if not isinstance(loader, DataLoader):
        return True
    return is_stream(loader) and loader.batch_size is None and loader.batch_sampler is None


class AllReplicas(Sampler[int]):
    """The samples of all replicas of a DistributedSampler, taken in turns.

    With as many replicas as pipelines, each pipeline gets its replica's samples. Without ``repeats``, samples repeated
    for equal replicas are left out.
    """

    def __init__(self, sampler: DistributedSampler[Any], repeats: bool) -> None:
        self._sampler = sampler
        self._keeps = len(sampler) * sampler.num_replicas
        if not repeats and type(sampler) is DistributedSampler and not sampler.drop_last:
            self._keeps = len(sampler.dataset)  # type: ignore[arg-type]

    def set_epoch(self, epoch: int) -> None:
        self._sampler.set_epoch(epoch)

    def __len__(self) -> int:
        return self._keeps

    def __iter__(self) -> Iterator[int]:
        if type(self._sampler) is DistributedSampler:  # drawing the order once is enough: as the share of one replica
            whole = copy.copy(self._sampler)
            whole.rank, whole.num_replicas, whole.num_samples = 0, 1, whole.total_size
            return iter(list(whole)[: self._keeps])
        shares = []
        for rank in range(self._sampler.num_replicas):
            share = copy.copy(self._sampler)
            share.rank = rank
            shares.append(list(share))
        return iter([index for indices in zip(*shares, strict=True) for index in indices])


def batching_of(dataloader: DataLoader[Any], evaluation: bool = False) -> tuple[int | None, Any]:
    """(batch size, sampler over all data) of a DataLoader.

    Without a batch size the sampler yields each batch's indices, or the index of a sample that is a batch. An
    IterableDataset with indices is read in their order.
    """
    if dataloader.batch_size is not None:
        if isinstance(dataloader.dataset, IterableDataset):  # PyTorch's own sampler for these counts endlessly
            return dataloader.batch_size, SequentialSampler(dataloader.dataset)  # type: ignore[arg-type]
        return dataloader.batch_size, _of_all_data(dataloader.sampler, evaluation)
    batch_sampler = dataloader.batch_sampler
    if (
        type(getattr(batch_sampler, "_batch_sampler", batch_sampler)) is BatchSampler
    ):  # as it is, or Lightning's wrapper
        return int(batch_sampler.batch_size), _of_all_data(batch_sampler.sampler, evaluation)  # type: ignore[union-attr]
    if batch_sampler is None:
        return None, _of_all_data(dataloader.sampler, evaluation)
    return None, getattr(batch_sampler, "_batch_sampler", batch_sampler)


def _of_all_data(sampler: Any, evaluation: bool) -> Any:
    if isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
        return AllReplicas(sampler, repeats=not evaluation)
    return sampler


def batch_size_of(loader: Any) -> int | None:
    """The batch size of any loader, if it can be known before."""
    if isinstance(loader, DataLoader):
        return batching_of(loader)[0] if loader.batch_sampler is not None or loader.batch_size is not None else None
    return samples_in(loader[0]) if is_sequence(loader) and len(loader) else None


def is_sequence(loader: Any) -> bool:
    """Whether any item of ``loader`` can be read at any time."""
    return isinstance(loader, (Sequence, Tensor))


def samples_in(batch: Any) -> int:
    """The number of samples of a batch as Lightning counts them."""
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor):
            return 1 if leaf.ndim == 0 else len(leaf)
    return 1


def drops_last(dataloader: DataLoader[Any]) -> bool:
    """Whether a trailing incomplete batch is to be dropped."""
    batch_sampler = dataloader.batch_sampler
    return bool(getattr(getattr(batch_sampler, "_batch_sampler", batch_sampler), "drop_last", False))


def check_dataloader(dataloader: Any, microbatches: int | None, by_default: bool = False) -> None:
    """Raises the errors of a DataLoader that can be found without a worker.

    ``microbatches``: M in training, None in evaluation; ``by_default``: chosen before the batch size was known.
    UnsupportedFeatureError for data that cannot be read again, and user-defined batches; ConfigurationError if a
    training batch cannot be split into M micro-batches, or it is no data at all.
    """
    if not isinstance(dataloader, (Iterable, Tensor)) and not hasattr(dataloader, "__getitem__"):
        raise ConfigurationError(
            f"The data is {dataloader!r}, which cannot be iterated over; give a torch.utils.data.DataLoader, or another"
            " iterable of batches."
        )
    if yields_batches(dataloader):
        return
    if is_stream(dataloader):
        _check_stream(dataloader, training=microbatches is not None)
    elif isinstance(dataloader.dataset, IterableDataset) and getattr(dataloader.dataset, "shuffle", None) is True:
        raise UnsupportedFeatureError(
            f"{type(dataloader.dataset).__name__}(shuffle=True) shuffles in its own iterator, which is not used, as its"
            " samples are read by index. Set shuffle=False, and let the DataLoader shuffle:"
            " torch.utils.data.DataLoader(torch.utils.data.Subset(dataset, range(len(dataset))), shuffle=True, ...)."
        )
    batch_size, sampler = batching_of(dataloader)
    if is_integer(getattr(sampler, "num_replicas", None), 2) or is_integer(
        getattr(getattr(sampler, "sampler", None), "num_replicas", None), 2
    ):
        raise UnsupportedFeatureError(
            f"The DataLoader's {type(sampler).__name__}(num_replicas={sampler.num_replicas}) gives this process a part"
            " of the data; the strategy divides the data itself, and every worker must know its whole order. Use"
            " shuffle=True, torch's DistributedSampler or a class derived from it, or a sampler over the whole dataset."
        )
    if microbatches is not None and batch_size is not None and batch_size % microbatches:
        divisors = [m for m in range(1, batch_size + 1) if batch_size % m == 0]
        default = ", the default where data modules and hooks give the data" if by_default else ""
        raise ConfigurationError(
            f"batch_size={batch_size} (per pipeline) is not divisible by num_microbatches={microbatches}{default}. Use"
            f" a batch_size that is a multiple of {microbatches}, or ReCycleStrategy(num_microbatches=...) from"
            f" {divisors}."
        )


def check_combination(dataloaders: Sequence[Any]) -> None:
    """Raises UnsupportedFeatureError if one of several loaders is a stream."""
    for dataloader in dataloaders if len(dataloaders) > 1 else ():
        if is_stream(dataloader) or (yields_batches(dataloader) and not is_sequence(dataloader)):
            name = type(getattr(dataloader, "dataset", dataloader)).__name__
            raise UnsupportedFeatureError(
                f"{name} only goes forward, and cannot be combined with other DataLoaders, where a step may be the"
                " first of a further round. Use a DataLoader of a dataset with __getitem__() and __len__(), or let one"
                " IterableDataset yield what belongs together."
            )


def _check_stream(dataloader: DataLoader[Any], training: bool) -> None:
    dataset = dataloader.dataset
    name = type(dataset).__name__
    if isinstance(dataset, IterDataPipe):
        raise UnsupportedFeatureError(
            f"The data is an IterDataPipe ({name}), which needs a DataLoader that knows how to divide it among"
            " processes. Wrap it in an IterableDataset, or use a map-style dataset."
        )
    if training and dataloader.persistent_workers and is_stateful(dataset):
        raise UnsupportedFeatureError(
            f"persistent_workers=True makes {name} start the next epoch wherever its processes have read ahead"
            " to, which cannot be repeated. Leave it False (each epoch then begins with the dataset as it was given),"
            " or use num_workers=0 (it continues where it stopped)."
        )


def draws_nothing(dataset: Any, collate: Callable[[list[Any]], Any]) -> bool:
    """Whether reading and collating samples of ``dataset`` draws no random number."""
    return collate is default_collate and _holds_tensors(dataset)


def _holds_tensors(dataset: Any) -> bool:
    """Whether the samples of ``dataset`` are rows of tensors."""
    kind = type(dataset)
    if kind is TensorDataset:
        return all(type(tensor) is Tensor for tensor in dataset.tensors)
    if kind is Subset:
        return _holds_tensors(dataset.dataset)
    if kind is ConcatDataset:
        return all(map(_holds_tensors, dataset.datasets))
    if kind is StackDataset:
        parts = dataset.datasets.values() if isinstance(dataset.datasets, dict) else dataset.datasets
        return all(map(_holds_tensors, parts))
    return False


def seeded_for(dataset: Any, collate: Callable[[list[Any]], Any]) -> Callable[[], AbstractContextManager[Any]]:
    """``seeded_everything``, or a context of None where nothing is drawn."""
    return nullcontext if draws_nothing(dataset, collate) else seeded_everything
