"""A user's DataLoader: its batches, the order of its samples, and its errors.

Any worker must be able to get any sample, even a second time. So the data has addresses (a map-style dataset, or an
IterableDataset with indices), or it is a *stream*: dataset, iterator or loader have ``state_dict`` and
``load_state_dict``, or reading again gives the same samples. Torch's tensor datasets with torch's own collate function
are read without seeding the generators, which would take longer than a read.

A :class:`SamplerState` is taken before the order of an epoch is drawn, so that a replacement or a resumed run draws the
same. It travels in checkpoints with the sampler's generators and plain values, without datasets and modules. Digests
depend on tensors, arrays, numbers and texts; of any other object only its type counts, since equal objects may have
different pickles.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import pickle
import random
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
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
from lightning_recycle.engines.worker_environment import is_started_by_hand
from lightning_recycle.errors import ConfigurationError, UnsupportedFeatureError
from lightning_recycle.randomness import GENERATORS, seeded_everything
from lightning_recycle.tensor_memory import checksum, memory_of
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
        return dataloader.batch_size, _cover_all_data(dataloader.sampler, evaluation)
    batch_sampler = dataloader.batch_sampler
    if (
        type(getattr(batch_sampler, "_batch_sampler", batch_sampler)) is BatchSampler
    ):  # as it is, or Lightning's wrapper
        return int(batch_sampler.batch_size), _cover_all_data(batch_sampler.sampler, evaluation)  # type: ignore[union-attr]
    if batch_sampler is None:
        return None, _cover_all_data(dataloader.sampler, evaluation)
    return None, getattr(batch_sampler, "_batch_sampler", batch_sampler)


def _cover_all_data(sampler: Any, evaluation: bool) -> Any:
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
    is_once = isinstance(dataloader, Generator)
    if is_once or not (isinstance(dataloader, (Iterable, Tensor)) or hasattr(dataloader, "__getitem__")):
        why = "can be iterated over only once, in one process" if is_once else "cannot be iterated over"
        raise ConfigurationError(
            f"The data is {dataloader!r}, which {why}; give a torch.utils.data.DataLoader, or another"
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
        *others, last = (str(m) for m in range(1, batch_size + 1) if batch_size % m == 0)
        fits = f"...) with {', '.join(others)} or {last}" if others else f"{last})"
        default = ", the default where data modules and hooks give the data" if by_default else ""
        raise ConfigurationError(
            f"batch_size={batch_size} (per pipeline) is not divisible by num_microbatches={microbatches}{default}. Use"
            f" a batch_size that is a multiple of {microbatches}, or ReCycleStrategy(num_microbatches={fits}."
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


def as_index(item: Any) -> Any:
    """An item of an order as ``__getitem__`` gets it: an integer, or a list of them."""
    if type(item) in (int, np.int64):
        return int(item)
    if isinstance(item, (list, tuple)) or (isinstance(item, (np.ndarray, Tensor)) and item.ndim):
        return [int(index) for index in item]
    return int(item)


def compact(order: list[Any]) -> Sequence[Any]:
    """``order`` as an array if it holds integers."""
    if all(type(index) is int for index in order):
        return np.array(order, np.int64)  # type: ignore[return-value]
    return order


def digest_of(order: Sequence[Any]) -> str:
    """A digest of an order's indices and their division into batches."""
    found = hashlib.blake2b(digest_size=8)
    if isinstance(order, (range, np.ndarray)):
        found.update(np.asarray(order, np.int64).data)
    else:
        for item in order:
            found.update(np.asarray(as_index(item), np.int64).tobytes() + b"|")
    return found.hexdigest()


def different(name: str, subject: str) -> str:
    """Error message for data that differ between workers."""
    if is_started_by_hand():
        remedy = "Call L.seed_everything(0) first: every worker runs the whole script."
    else:
        remedy = (
            "Workers import the script: what it sets under `if __name__ == '__main__':`, such as the seed of a"
            " library, they do not have; set it at the top of the script."
        )
    return (
        f"The workers have different data: the {subject} differ. {name} must be the same in every process. Seed"
        " divisions and shuffles of the data, such as np.random.default_rng(0) or"
        " random_split(..., generator=torch.Generator().manual_seed(0)), and let nothing in it depend on the time, the"
        f" process or the order of a set. {remedy}"
    )


def compare(facts: Iterable[Sequence[Mapping[str, Any]]]) -> None:
    """ConfigurationError if facts of a loader differ between workers; None fits all."""
    by_worker = list(facts)
    if len({len(loaders) for loaders in by_worker}) > 1:
        raise ConfigurationError(different("What returns the DataLoaders", "numbers of DataLoaders"))
    for reports in zip(*by_worker, strict=True):
        for name in dict.fromkeys(name for report in reports for name in report):
            kind, owner = name.split(" of ")
            if any(name not in report for report in reports):
                raise ConfigurationError(different(owner, f"classes of what gives the {kind}"))
            values = {report[name] for report in reports if report[name] is not None}
            if len(values) > 1:
                raise ConfigurationError(different(owner, name))


_PLAIN = (type(None), bool, int, float, str, bytes)
_CONTAINERS = (list, tuple, set, dict)
_NOT_ITS_OWN: Any = (Dataset, DataLoader, nn.Module, type, ModuleType, FunctionType, MethodType)
_GENERATORS = tuple(kind for kind, *_ in GENERATORS)
_LARGE = 1 << 16  # bytes; a larger value that has not changed since the start is in no state


class _Unknown(Exception):
    pass


class SamplerState:
    """Takes the state of a sampler, and restores it in place.

    Large values are in it only if changed since the start, by their digests ``at_start``. ``lost``: attributes with an
    iterator, as "Class.attribute", whose place cannot be restored.
    """

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self.lost: list[str] = []
        self.at_start: dict[str, bytes] = {}
        for path, (owner, name, value) in self._values():
            if hasattr(type(value), "__next__"):
                self.lost.append(f"{type(owner).__name__}.{name}")
            elif (digest := _digest(value)) is not None:
                self.at_start[path] = digest

    def take(self) -> dict[str, Any]:
        state = {}
        for path, (_, _, value) in self._values():
            try:
                if path not in self.at_start or _digest(value) != self.at_start[path]:
                    state[path] = _encode(value)
            except _Unknown:
                continue  # what it refers to, such as a function, is the receiver's own
        return state

    def load(self, state: dict[str, Any]) -> None:
        values = dict(self._values())
        owners = {"": self._sampler, **{prefix: owner for prefix, owner in self._owners() if prefix}}
        for path, encoded in state.items():
            prefix, dot, name = path.rpartition(".")
            owner = owners.get(prefix + dot)
            current = values[path][2] if path in values else None  # it may have been made when an order was drawn
            if isinstance(current, _GENERATORS):
                _set_generator(current, encoded[1])  # in place: others may share it
            elif owner is not None:
                vars(owner)[name] = _decode(encoded, current)

    def _owners(self) -> Iterator[tuple[str, Any]]:
        """The sampler and its objects, with the prefixes of their paths."""
        seen: set[int] = set()
        waiting = [("", self._sampler)]
        while waiting:
            prefix, owner = waiting.pop()
            if id(owner) in seen:
                continue
            seen.add(id(owner))
            yield prefix, owner
            own = getattr(owner, "__dict__", {}).items()
            waiting += [(f"{prefix}{name}.", value) for name, value in own if _is_object(value)]

    def _values(self) -> Iterator[tuple[str, tuple[Any, str, Any]]]:
        """Their attributes as (path, (owner, name, value))."""
        for prefix, owner in self._owners():
            for name, value in list(getattr(owner, "__dict__", {}).items()):
                if not _is_object(value) and not _is_foreign(value):
                    yield f"{prefix}{name}", (owner, name, value)


def _is_foreign(value: Any) -> bool:
    """Whether ``value`` belongs to the sampler's surroundings, not to itself."""
    return isinstance(value, _NOT_ITS_OWN) or type(value).__module__.split(".")[0] in ("lightning", "pytorch_lightning")


def _is_object(value: Any) -> bool:
    plain_types = (*_PLAIN, *_CONTAINERS, frozenset, deque, Tensor, np.ndarray, *_GENERATORS)
    if isinstance(value, plain_types) or hasattr(type(value), "__next__") or _is_foreign(value):
        return False
    return hasattr(value, "__dict__")


def _digest(value: Any) -> bytes | None:
    """A digest of a large tensor, array or list of plain values, else None."""
    if isinstance(value, list):
        is_wanted = 8 * len(value) > _LARGE and all(type(item) in _PLAIN for item in value)
        return hashlib.blake2b(pickle.dumps(value), digest_size=16).digest() if is_wanted else None
    if not isinstance(value, (Tensor, np.ndarray)) or value.nbytes <= _LARGE:
        return None
    if isinstance(value, Tensor):
        return checksum([value])
    return None if value.dtype.hasobject else hashlib.blake2b(np.ascontiguousarray(value).data, digest_size=16).digest()


_KINDS = ("array", "deque", "frozenset", "generator")
_ARRAY, _DEQUE, _FROZENSET, _GENERATOR = (f"lightning_recycle {kind}" for kind in _KINDS)
"""First items of tuples that stand for values which ``torch.load(weights_only=True)`` would refuse."""


def _encode(value: Any) -> Any:
    """``value`` as data for weights_only checkpoints; raises _Unknown for other types."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biuf":
        words = torch.frombuffer(bytearray(value.tobytes()) or bytearray(1), dtype=torch.uint8)[: value.nbytes]
        return _ARRAY, words, value.dtype.str, value.shape, isinstance(value, np.generic)
    for number, (kind, read, _) in enumerate(GENERATORS):
        if isinstance(value, kind):
            return _GENERATOR, _encode(read(value)), number, str(getattr(value, "device", ""))
    if type(value) is dict:
        return {_encode(key): _encode(item) for key, item in value.items()}
    if type(value) is deque:
        return _DEQUE, [_encode(item) for item in value], value.maxlen
    if type(value) is frozenset:
        return _FROZENSET, [_encode(item) for item in value]
    if type(value) in _CONTAINERS:
        return type(value)(map(_encode, value))
    raise _Unknown


def _decode(encoded: Any, current: Any = None) -> Any:
    """The decoded value; ``current``: the value that it replaces."""
    if isinstance(encoded, Tensor):
        return encoded.to(current.device if isinstance(current, Tensor) else "cpu", copy=True)
    if type(encoded) is dict:
        return {_decode(key): _decode(item) for key, item in encoded.items()}
    if type(encoded) not in _CONTAINERS:
        return encoded
    kind, *content = encoded if type(encoded) is tuple and encoded else (None,)
    if kind == _ARRAY:
        words, dtype, shape, is_number = content
        array = np.frombuffer(words.numpy().tobytes(), dtype).reshape(shape).copy()
        return array[()] if is_number else array
    if kind == _GENERATOR:
        state, number, device = content
        return _set_generator(_MAKE[GENERATORS[number][0]](state, device), state)
    if kind == _DEQUE:
        return deque(map(_decode, content[0]), content[1])
    if kind == _FROZENSET:
        return frozenset(map(_decode, content[0]))
    return type(encoded)(map(_decode, encoded))


# Functions that make generators for an encoded state, and the device of torch's.
_MAKE: dict[type[Any], Callable[[Any, str], Any]] = {
    torch.Generator: lambda state, device: torch.Generator(device),
    random.Random: lambda state, device: random.Random(),
    np.random.Generator: lambda state, device: np.random.Generator(getattr(np.random, state["bit_generator"])()),
    np.random.RandomState: lambda state, device: np.random.RandomState(),
}


def _set_generator(generator: Any, state: Any) -> Any:
    next(write for kind, _, write in GENERATORS if isinstance(generator, kind))(generator, _decode(state))
    return generator


_EXACT = (bool, int, float, complex, str, bytes, type(None))


def add_sample(digest: int, sample: Any) -> int:
    """The digest (63 bits) of the samples of ``digest`` (0: none) and ``sample``."""
    hashed = hashlib.blake2b(digest.to_bytes(8, "little"), digest_size=8)
    for leaf in tree_leaves(sample):
        hashed.update(type(leaf).__qualname__.encode())
        if isinstance(leaf, Tensor):
            hashed.update(f"{leaf.dtype}{tuple(leaf.shape)}".encode())
            hashed.update(_tensor_bytes(leaf))
        elif isinstance(leaf, (np.ndarray, np.generic)):
            hashed.update(f"{leaf.dtype}{leaf.shape}".encode())
            if not leaf.dtype.hasobject:
                hashed.update(leaf.tobytes())
        elif isinstance(leaf, _EXACT):
            hashed.update(repr(leaf).encode())
    return int.from_bytes(hashed.digest(), "little") >> 1


def _tensor_bytes(tensor: Tensor) -> Any:
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return b""
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return memory_of(tensor).numpy()
