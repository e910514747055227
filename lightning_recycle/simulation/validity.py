"""Checks of settings, with one kind of message. Internal to ``simulation``."""

from __future__ import annotations

import math

from lightning_recycle.errors import ConfigurationError

__all__ = ["at_least", "fraction", "whole"]


def whole(owner: str, name: str, value: object, least: int = 0) -> int:
    """``value``, an integer of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigurationError(f"{owner}({name}={value!r}): give an integer of at least {least}.")
    return value


def at_least(owner: str, name: str, value: object, least: float = 0.0, *, above: bool = False) -> float:
    """``value``, a finite number of at least (or above) ``least``."""
    fine = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not fine or value < least or (above and value == least):  # type: ignore[operator]
        raise ConfigurationError(
            f"{owner}({name}={value!r}): give a finite number {'above' if above else 'of at least'} {least:g}."
        )
    return float(value)  # type: ignore[arg-type]


def fraction(owner: str, name: str, value: object) -> float:
    """``value``, a number from 0 to 1."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise ConfigurationError(f"{owner}({name}={value!r}): give a number from 0 to 1.")
    return float(value)
