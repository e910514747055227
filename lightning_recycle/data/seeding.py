"""Which data is read without a random number, so that no generator has to be seeded for it.

Only code that is known is judged: datasets of torch that hold tensors, and torch's own collate function. To seed the
generators of Python, NumPy and torch for a sample, and to restore them, takes longer than to read it from a tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor
from torch.utils.data import ConcatDataset, StackDataset, Subset, TensorDataset, default_collate

from lightning_recycle.randomness import seeded_everything

__all__ = ["draws_nothing", "seeded_for"]


def draws_nothing(dataset: Any, collate: Callable[[list[Any]], Any]) -> bool:
    """Whether reading samples of ``dataset`` and collating them can draw nothing from any generator."""
    return collate is default_collate and _holds_tensors(dataset)


def _holds_tensors(dataset: Any) -> bool:
    """Whether the samples of ``dataset`` are rows of tensors; subclasses may have code of the user's."""
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
    """:func:`~lightning_recycle.randomness.seeded_everything`, or a context that yields None where nothing is drawn."""
    return nullcontext if draws_nothing(dataset, collate) else seeded_everything
