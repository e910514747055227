"""Streams of Hugging Face's ``datasets``, whose states hold less than those of other streams.

Their ``IterableDataset`` (version 5.2)

- returns to a loaded state at the beginning of later passes, too, if they have its epoch number;
- ignores it if they have another one, which the user sets;
- leaves the samples in a shuffle buffer out of its state, and refills the buffer.

So a state is reset before the next pass (``load_state_dict(None)``: as it was made), the epoch number is part of the
place in the data, and a dataset with a shuffle buffer is read again up to its place, which gives the same samples.
No pass depends on earlier ones.

Must not import ``datasets``, which users of other data do not have.

Private names used: ``_ex_iterable``, and that shuffle buffers are ``BufferShuffledExamplesIterable`` in its
``ex_iterable`` or ``ex_iterables``.
"""

from __future__ import annotations

from typing import Any

__all__ = ["has_shuffle_buffer", "is_huggingface"]


def is_huggingface(dataset: Any) -> bool:
    """Whether ``dataset`` is an ``IterableDataset`` of ``datasets``."""
    return any(kind.__module__ == "datasets.iterable_dataset" for kind in type(dataset).__mro__)


def has_shuffle_buffer(dataset: Any) -> bool:
    """Whether samples wait in a buffer of ``dataset``, so that its state does not say where it is."""
    return _holds_buffer(dataset._ex_iterable)


def _holds_buffer(examples: Any) -> bool:
    if type(examples).__name__ == "BufferShuffledExamplesIterable":
        return True
    sources = [*getattr(examples, "ex_iterables", ()), getattr(examples, "ex_iterable", None)]
    return any(_holds_buffer(source) for source in sources if source is not None)
