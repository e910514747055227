"""A collated batch in equal parts, for batches that are given as they are."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from lightning_recycle.errors import ConfigurationError

__all__ = ["sliced"]


def sliced(batch: Any, number: int, count: int) -> Any:
    """Part ``number`` of ``count`` equal ones of a collated batch: of each tensor, along its first dimension.

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
