"""What workers report of each applied step, so that peers that drift apart are detected.

Counters are the same on all workers, the optimizer's options on the workers of one stage. The bits of parameters and
optimizer states are compared now and then (:mod:`~lightning_recycle.session.state_checks`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

__all__ = ["optimizer_options"]

_MOST_OPTIONS = 64  # that are reported one by one


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
