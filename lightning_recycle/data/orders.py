"""The order of an epoch's samples: its indices, kept small, and the comparison of what workers have drawn."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
from torch import Tensor

from lightning_recycle.errors import ConfigurationError

__all__ = ["as_index", "compact", "compare", "different", "digest_of"]


def as_index(item: Any) -> Any:
    """An item of an order as the dataset's ``__getitem__`` gets it: an integer, or a list of integers."""
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
    found = blake2b(digest_size=8)
    if isinstance(order, (range, np.ndarray)):
        found.update(np.asarray(order, np.int64).data)
    else:
        for item in order:
            found.update(np.asarray(as_index(item), np.int64).tobytes() + b"|")
    return found.hexdigest()


def different(name: str, what: str) -> str:
    """The message of an error about data that are not the same on all workers."""
    return (
        f"The workers have different data: the {what} differ. {name} must be the same in every process. Seed what"
        " divides or shuffles the data, such as np.random.default_rng(0) or"
        " random_split(..., generator=torch.Generator().manual_seed(0)), and let nothing in it depend on the time, the"
        " process or the order of a set. Workers import the script: what it sets under `if __name__ == '__main__':`,"
        " such as the seed of a library, they do not have; set it at the top of the script."
    )


def compare(facts: Iterable[Sequence[Mapping[str, Any]]]) -> None:
    """Compares what the workers say of each of their loaders, by name; None is not compared.

    Raises:
        ConfigurationError: if they differ.
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
