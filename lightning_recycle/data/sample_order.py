"""Order of an epoch's samples: drawn, compared between workers, and drawn again.

A :class:`SamplerState` is taken before the order of an epoch is drawn, so that a replacement or a resumed run draws the
same. It travels in checkpoints with the sampler's generators and plain values, without datasets and modules. Digests
depend on tensors, arrays, numbers and texts; of any other object only its type counts, since equal objects may have
different pickles.
"""

from __future__ import annotations

import hashlib
import random
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_recycle.errors import ConfigurationError
from lightning_recycle.tensor_memory import memory_of
from lightning_recycle.torch_internals import tree_leaves


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


def different(name: str, what: str) -> str:
    """Error message for data that differ between workers."""
    return (
        f"The workers have different data: the {what} differ. {name} must be the same in every process. Seed"
        " divisions and shuffles of the data, such as np.random.default_rng(0) or"
        " random_split(..., generator=torch.Generator().manual_seed(0)), and let nothing in it depend on the time, the"
        " process or the order of a set. Workers import the script: what it sets under `if __name__ == '__main__':`,"
        " such as the seed of a library, they do not have; set it at the top of the script."
    )


def compare(facts: Iterable[Sequence[Mapping[str, Any]]]) -> None:
    """Compares the workers' facts of each loader; ConfigurationError if they differ.

    None is not compared.
    """
    every = list(facts)
    if len({len(loaders) for loaders in every}) > 1:
        raise ConfigurationError(different("What returns the DataLoaders", "numbers of DataLoaders"))
    for said in zip(*every, strict=True):
        for name in dict.fromkeys(name for own in said for name in own):
            kind, owner = name.split(" of ")
            if any(name not in own for own in said):
                raise ConfigurationError(different(owner, f"classes of what gives the {kind}"))
            known = {own[name] for own in said if own[name] is not None}
            if len(known) > 1:
                raise ConfigurationError(different(owner, name))


_PLAIN = (type(None), bool, int, float, str, bytes)
_CONTAINERS = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque}
_NOT_ITS_OWN: Any = (Dataset, DataLoader, nn.Module, type, ModuleType, FunctionType, MethodType)
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
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
                _set_generator(current, encoded)  # in place: others may share it
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
    known = (*_PLAIN, *_CONTAINERS.values(), dict, Tensor, np.ndarray, *_GENERATORS)
    if isinstance(value, known) or hasattr(type(value), "__next__") or _is_foreign(value):
        return False
    return hasattr(value, "__dict__")


def _digest(value: Any) -> bytes | None:
    """A digest of a large tensor, array or list of numbers; None for any other value."""
    if isinstance(value, Tensor):
        value = value.detach().cpu().numpy() if value.dtype is not torch.bfloat16 else None
    elif isinstance(value, list) and len(value) * 8 > _LARGE:
        value = _as_array(value)
    if not isinstance(value, np.ndarray) or value.dtype.hasobject or value.nbytes <= _LARGE:
        return None
    return hashlib.blake2b(np.ascontiguousarray(value).data, digest_size=16).digest()


def _as_array(values: list[Any]) -> np.ndarray[Any, Any] | None:
    kind = type(values[0])
    if kind not in (int, float) or any(type(value) is not kind for value in values):
        return None
    try:
        return np.array(values, np.int64 if kind is int else np.float64)
    except OverflowError:
        return None


def _encode(value: Any) -> Any:
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Tensor):
        return {"tensor": value.detach().cpu().clone()}
    if isinstance(value, (np.ndarray, np.generic)) and not value.dtype.hasobject and value.dtype.kind in "biuf":
        kind = "number" if isinstance(value, np.generic) else "array"
        words = torch.frombuffer(bytearray(value.tobytes()) or bytearray(1), dtype=torch.uint8)[: value.nbytes]
        return {kind: words, "dtype": value.dtype.str, "shape": list(value.shape)}
    if isinstance(value, torch.Generator):
        return {"torch.Generator": value.get_state(), "device": str(value.device)}
    if isinstance(value, np.random.Generator):
        return {"numpy.Generator": _encode(value.bit_generator.state), "kind": type(value.bit_generator).__name__}
    if isinstance(value, np.random.RandomState):
        return {"numpy.RandomState": _encode(value.get_state())}
    if isinstance(value, random.Random):
        return {"random.Random": _encode(value.getstate())}
    if type(value) is list and len(value) * 8 > _LARGE and (array := _as_array(value)) is not None:
        return {"long": torch.from_numpy(array)}
    if type(value) is dict:
        return {"dict": [[_encode(key), _encode(item)] for key, item in value.items()]}
    for name, container in _CONTAINERS.items():
        if type(value) is container:
            return {name: [_encode(item) for item in value]}
    raise _Unknown


def _decode(encoded: Any, current: Any = None) -> Any:
    """The decoded value; ``current``: the value that it replaces."""
    if not isinstance(encoded, dict):
        return encoded
    ((kind, content), *rest) = encoded.items()
    if kind == "tensor":
        return content.to(current.device).clone() if isinstance(current, Tensor) else content.clone()
    if kind in ("array", "number"):
        options: dict[str, Any] = dict(rest)
        array = np.frombuffer(content.numpy().tobytes(), options["dtype"]).reshape(options["shape"]).copy()
        return array[()] if kind == "number" else array
    if kind in _MAKE:
        generator = _MAKE[kind](dict(rest))
        _set_generator(generator, encoded)
        return generator
    if kind == "long":
        return content.tolist()
    if kind == "dict":
        return {_decode(key): _decode(item) for key, item in content}
    if kind == "deque":
        return deque(map(_decode, content), maxlen=getattr(current, "maxlen", None))
    return _CONTAINERS[kind](map(_decode, content))


_MAKE: dict[str, Any] = {
    "torch.Generator": lambda options: torch.Generator(options["device"]),
    "numpy.Generator": lambda options: np.random.Generator(getattr(np.random, options["kind"])()),
    "numpy.RandomState": lambda _: np.random.RandomState(),
    "random.Random": lambda _: random.Random(),
}


def _set_generator(generator: Any, encoded: dict[str, Any]) -> None:
    kind, content = next(iter(encoded.items()))
    if kind == "torch.Generator":
        generator.set_state(content)
    elif kind == "numpy.Generator":
        generator.bit_generator.state = _decode(content)
    elif kind == "numpy.RandomState":
        generator.set_state(_decode(content))
    else:
        generator.setstate(_decode(content))


_EXACT = (bool, int, float, complex, str, bytes, type(None))


def add_sample(digest: int, sample: Any) -> int:
    """The digest (63 bits) of the samples of ``digest`` (0: none) and ``sample``."""
    found = hashlib.blake2b(digest.to_bytes(8, "little"), digest_size=8)
    for leaf in tree_leaves(sample):
        found.update(type(leaf).__qualname__.encode())
        if isinstance(leaf, Tensor):
            found.update(f"{leaf.dtype}{tuple(leaf.shape)}".encode())
            found.update(_tensor_bytes(leaf))
        elif isinstance(leaf, (np.ndarray, np.generic)):
            found.update(f"{leaf.dtype}{leaf.shape}".encode())
            if not leaf.dtype.hasobject:
                found.update(leaf.tobytes())
        elif isinstance(leaf, _EXACT):
            found.update(repr(leaf).encode())
    return int.from_bytes(found.digest(), "little") >> 1


def _tensor_bytes(tensor: Tensor) -> Any:
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return b""
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return memory_of(tensor).numpy()
