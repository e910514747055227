"""Lightning's metrics of logged values stay where they are.

Lightning moves a metric to the device of each value that is logged in it, tensor by tensor, also when it is there:
two thirds of the time that ``self.log`` takes, and a part of every step.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultMetric
from torch import Tensor

__all__ = ["spare_moves"]

_move = _ResultMetric.to


def spare_moves() -> None:
    """Lets this process move such a metric only to another device. The result is the same."""
    _ResultMetric.to = _move_elsewhere  # type: ignore[assignment, method-assign]


def _move_elsewhere(metric: _ResultMetric, *args: Any, **kwargs: Any) -> _ResultMetric:
    value = getattr(metric, "value", None)  # of a torchmetrics object it is set later
    if isinstance(value, Tensor) and args == (value.device,) and not kwargs:
        return metric
    return _move(metric, *args, **kwargs)
