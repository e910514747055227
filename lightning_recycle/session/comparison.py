"""What workers report of each applied step, so that peers that drift apart are detected.

Counters are the same on all workers; the optimizer's options and the bits of the parameters are the same on the workers
of one stage, which step with the same reduced gradient. Buffers are not compared: each worker has its own
running statistics.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

__all__ = ["DIGEST_EVERY", "digest", "optimizer_options"]

DIGEST_EVERY = 50
"""Steps between two digests of the parameters; there is one more after each regroup."""

_MOST_OPTIONS = 64  # that are reported one by one
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def optimizer_options(optimizers: Iterable[Optimizer]) -> dict[str, float]:
    """The numbers among the options of all parameter groups, by name ("lr", "betas[1]", "lr of group 2").

    If there are many, the last ones are reported as one number.
    """
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    numbers: dict[str, float] = {}
    for index, group in enumerate(groups):
        which = f" of group {index}" if index else ""
        for key, value in group.items():
            if isinstance(value, (int, float)):  # nearly all of them
                numbers[f"{key}{which}"] = value
            elif key != "params":
                numbers.update((f"{name}{which}", number) for name, number in _numbers(str(key), value))
    if len(numbers) <= _MOST_OPTIONS:
        return numbers
    names = list(numbers)
    kept = {name: numbers[name] for name in names[:_MOST_OPTIONS]}
    kept["digest of the other options"] = hash(tuple(numbers[name] for name in names[_MOST_OPTIONS:]))
    return kept


def _numbers(name: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, (int, float)):
        yield name, value
    elif isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        yield name, value.item()
    elif isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            yield from _numbers(f"{name}[{index}]", item)


def digest(parameters: Iterable[nn.Parameter]) -> int:
    """A number that changes, almost certainly, with any bit of ``parameters``."""
    with torch.no_grad():
        sums = [_bits(parameter.detach()).sum(dtype=torch.int64) for parameter in parameters]
    found = 0
    for value in torch.stack(sums).tolist() if sums else ():  # one transfer from the device for all
        found = (found * 1_000_003 + value) % 2**61
    return found


def _bits(values: Tensor) -> Tensor:
    values = torch.view_as_real(values) if values.is_complex() else values
    return values.contiguous().view(_INTEGERS[values.element_size()])
