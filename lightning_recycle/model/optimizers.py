"""Optimizers given as factories: an adapted model has no ``configure_optimizers`` of its own.

A worker's optimizer sees the parameters of its stage, which exist only in the worker; so users pass a way to make an
optimizer, not an optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from torch import nn
from torch.optim import Optimizer

from lightning_recycle.errors import ConfigurationError

__all__ = ["OptimizerFactory", "check_factory", "make_optimizers"]

OptimizerFactory: TypeAlias = Callable[..., Any] | tuple[Callable[..., Any], Callable[..., Any]]
"""Parameters -> optimizer or (optimizer, scheduler); or the pair (parameters -> optimizer, optimizer -> scheduler)."""

_EXAMPLE = "functools.partial(torch.optim.AdamW, lr=1e-3)"


def check_factory(factory: object) -> None:
    """Raises ConfigurationError unless ``factory`` is an :data:`OptimizerFactory`."""
    if isinstance(factory, Optimizer):
        raise ConfigurationError(
            f"optimizer={type(factory).__name__}(...) is an optimizer; each stage makes its own from its parameters:"
            f" pass a function that makes one, such as {_EXAMPLE}."
        )
    parts = factory if isinstance(factory, tuple) else (factory,)
    if len(parts) > 2 or not parts or not all(callable(part) for part in parts):
        raise ConfigurationError(
            f"optimizer={factory!r}: pass a function from parameters to an optimizer, such as {_EXAMPLE}, or a pair"
            " of that and a function from the optimizer to a scheduler."
        )


def make_optimizers(factory: OptimizerFactory, parameters: Iterable[nn.Parameter]) -> dict[str, Any]:
    """Makes what ``configure_optimizers`` returns.

    Returns:
        ``{"optimizer": ...}``, and ``"lr_scheduler"`` if there is one (stepped once per epoch, unless the factory gives
        Lightning's dictionary with an ``interval``).

    Raises:
        ConfigurationError: unless the factory returns an optimizer, or an optimizer and a scheduler.
    """
    make_optimizer, *make_scheduler = factory if isinstance(factory, tuple) else (factory,)
    made = make_optimizer(list(parameters))
    parts = list(made) if isinstance(made, (tuple, list)) else [made]
    if not parts or len(parts) + len(make_scheduler) > 2 or not isinstance(parts[0], Optimizer):
        raise ConfigurationError(
            f"The optimizer factory returned {made!r}; it must return an optimizer, or (optimizer, scheduler) if no"
            " scheduler factory is given."
        )
    parts += [make(parts[0]) for make in make_scheduler]
    return dict(zip(("optimizer", "lr_scheduler"), parts, strict=False))
