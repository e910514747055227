"""Where two nested values differ, in words."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def differences(one: Any, other: Any, tolerance: float, where: str = "") -> Iterator[str]:
    """Each difference, with its place; floats are the same within ``tolerance``.

    It is relative above 1; all else must be equal.
    """
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        one, other = one.cpu(), other.cpu()
        if one.shape != other.shape or one.dtype != other.dtype:
            yield f"{where}: {one.dtype} {tuple(one.shape)} != {other.dtype} {tuple(other.shape)}"
        elif not torch.equal(one, other):
            difference = float((one.detach().double() - other.detach().double()).abs().max())
            scale = max(1.0, float(one.detach().double().abs().max()))
            if not difference <= tolerance * scale:
                values = f" ({one.item()} != {other.item()})" if one.numel() == 1 else ""
                yield f"{where}: differs by {difference}{values}"
    elif isinstance(one, Mapping) and isinstance(other, Mapping):
        if set(one) != set(other):
            yield f"{where}: only one has {sorted(map(repr, set(one) ^ set(other)))}"
        for key in one:
            if key in other:
                yield from differences(one[key], other[key], tolerance, f"{where}[{key!r}]")
    elif isinstance(one, Sequence) and isinstance(other, Sequence) and not isinstance(one, str):
        for index, (a, b) in enumerate(zip(one, other, strict=False)):
            yield from differences(a, b, tolerance, f"{where}[{index}]")
        if len(one) != len(other):
            more = f"{one[len(other) :]} {other[len(one) :]}"
            yield f"{where}: {len(one)} items != {len(other)} items: {more}"
    elif isinstance(one, float) and isinstance(other, float):
        close = math.isclose(one, other, rel_tol=tolerance, abs_tol=tolerance)
        if not close and not (math.isnan(one) and math.isnan(other)):
            yield f"{where}: {one} != {other}"
    elif (type(one), one) != (type(other), other):
        yield f"{where}: {one!r} != {other!r}"
