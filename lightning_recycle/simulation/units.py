"""Durations as people write them: ``30min``, ``6h``, ``1.5 d``, or a number of seconds.

Inside the simulator, time is a whole number of nanoseconds (*ticks*), so sums are exact.
"""

from __future__ import annotations

import math
import re
from dataclasses import fields

from lightning_recycle.arguments import is_number
from lightning_recycle.errors import ConfigurationError

Duration = float | int | str
"""Seconds, or a number with a unit: ms, s, min, h, d."""

TICKS_PER_SECOND = 1_000_000_000

_UNITS = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_PATTERN = re.compile(r"\s*([0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def as_seconds(name: str, value: Duration, *, positive: bool = False) -> float:
    """``value`` in seconds.

    Args:
        name: name of the setting, for the error.
        value: seconds, or text such as ``"30min"``.
        positive: whether 0 is refused.

    Raises:
        ConfigurationError: when it is not a duration, negative or not finite.
    """
    seconds = math.nan
    if isinstance(value, str):
        match = _PATTERN.fullmatch(value)
        if match and match[2].lower() in _UNITS:
            seconds = float(match[1]) * _UNITS[match[2].lower()]
    elif is_number(value):
        seconds = float(value)
    if not math.isfinite(seconds) or seconds < 0 or (positive and seconds == 0):
        least = "above 0" if positive else "of at least 0"
        raise ConfigurationError(f"{name}={value!r}: give a duration {least}, e.g. 90, '30min' or '6h'.")
    return seconds


def keep_seconds(settings: object, *names: str, positive: bool = False) -> None:
    """Replace the durations ``names`` of a frozen dataclass by seconds.

    None stays None where the field allows it.

    Raises:
        ConfigurationError: as for :func:`as_seconds`.
    """
    optional = {field.name for field in fields(settings) if "None" in str(field.type)}  # type: ignore[arg-type]
    for name in names:
        value = getattr(settings, name)
        if value is not None or name not in optional:
            seconds = as_seconds(f"{type(settings).__name__}({name})", value, positive=positive)
            object.__setattr__(settings, name, seconds)


def as_ticks(seconds: float) -> int:
    """Seconds in whole nanoseconds, rounded."""
    return round(seconds * TICKS_PER_SECOND)
