"""Values as JSON has them: objects, lists, texts, finite numbers, null."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from enum import Enum
from typing import Any

__all__ = ["plain"]


def plain(value: Any) -> Any:
    """``value`` with objects for dataclasses, lists for tuples, values for enums, and null for what is no number, such
    as a diverged loss; what JSON does not have at all becomes its text.
    """
    if isinstance(value, Enum):  # before the others: one of texts is a text
        return plain(value.value)
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if dataclasses.is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list, set, frozenset)):
        return [plain(item) for item in value]
    return str(value)
