"""States of torchmetrics objects: read, restored, and added to the states of other parts of a batch.

A state is added by the reduction that it declares (``dist_reduce_fx``). Metrics that work on whole batches alone are
refused with the remedy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities.data import dim_zero_cat, dim_zero_max, dim_zero_mean, dim_zero_min, dim_zero_sum
from torchmetrics.wrappers import Running
from torchmetrics.wrappers.abstract import WrapperMetric

from lightning_recycle.errors import UnsupportedFeatureError

__all__ = ["MetricStates", "add_states", "has_gained", "metric_states", "separate_metrics", "set_metric_states"]

MetricStates = dict[str, Any]


def separate_metrics(module: nn.Module) -> None:
    """Lets each metric of ``module`` have states of its own, and count its updates."""
    for part in module.modules():
        if isinstance(part, Metric) and "update" not in vars(part):  # it came from another worker, without the counter
            part.__setstate__({})
        if isinstance(part, MetricCollection):  # metrics of a group share states
            part._enable_compute_groups = False
            part._groups = {i: [str(key)] for i, key in enumerate(part.keys(keep_base=True))}


def metric_states(metric: Metric) -> MetricStates:
    """The accumulated states of ``metric``, with its caches."""
    names = (*_state_names(metric), "_update_count", "_forward_cache", "_computed")
    # Some metrics extend lists in place.
    return {n: list(v) if isinstance(v := getattr(metric, n), list) else v for n in names}


def set_metric_states(metric: Metric, states: MetricStates) -> None:
    """Restores what :func:`metric_states` returned."""
    for name, value in states.items():
        setattr(metric, name, list(value) if isinstance(value, list) else value)


_INSEPARABLE = {
    "MinMaxMetric": "it keeps extremes of what it computed. Log the metric inside it, and take the extremes in a"
    " hook such as on_validation_epoch_end.",
    "BootStrapper": "it draws samples of the whole batch. Log the metric inside it, or keep predictions and targets in"
    " CatMetric, and draw from these in a hook such as on_validation_epoch_end.",
    "NormalizedRootMeanSquaredError": "torchmetrics does not put more than two parts together. Log"
    " MeanSquaredError(squared=False), and divide it in a hook such as on_validation_epoch_end.",
}
"""Metrics of torchmetrics that work on whole batches alone, and the remedy."""


def _state_names(metric: Metric) -> tuple[str, ...]:
    if isinstance(metric, Running):
        return (*metric._defaults, "_num_vals_seen")
    return () if isinstance(metric, WrapperMetric) else tuple(metric._defaults)  # the metrics inside have the states


def has_gained(metric: Metric) -> bool:
    """Whether ``metric`` was updated since its reset. Wrappers do not count, and some begin at 1."""
    if isinstance(metric, Running):
        return bool(metric._num_vals_seen)
    if isinstance(metric, WrapperMetric):
        _, *inner = metric.modules()
        return any(has_gained(module) for module in inner if isinstance(module, Metric))
    return bool(metric._update_count)


def add_states(metric: Metric, path: str, gained: Sequence[MetricStates], keep_step_value: bool) -> None:
    """Adds what ``metric`` gained in a step; with ``keep_step_value`` its step value becomes that of the step alone."""
    before = metric_states(metric)
    if isinstance(metric, Running):
        set_metric_states(metric, _moved_on(metric, path, before, gained))
        return
    if reason := _INSEPARABLE.get(type(metric).__name__):
        raise UnsupportedFeatureError(
            f"The metric {path} ({type(metric).__name__}) cannot be put together from parts of a batch: {reason}"
        )
    if isinstance(metric, WrapperMetric):
        return
    step = gained[0]
    for more in gained[1:]:
        step = _merged(metric, path, step, more)
    value = None
    if keep_step_value:
        set_metric_states(metric, {**step, "_computed": None})
        value = metric.compute()
    set_metric_states(metric, _merged(metric, path, before, step) if before["_update_count"] else step)
    metric._forward_cache = value
    metric._computed = None


def _moved_on(metric: Running, path: str, before: MetricStates, gained: Sequence[MetricStates]) -> MetricStates:
    """States of a window that moves on once for each update of a step, not of a micro-batch."""
    states, window, base = dict(before), metric.window, metric.base_metric
    updates = max(states["_num_vals_seen"] for states in gained)
    for update in range(max(0, updates - window), updates):
        parts = [
            {**{key: part[f"{key}_{update % window}"] for key in base._defaults}, "_update_count": 1}
            for part in gained
            if update < part["_num_vals_seen"]
        ]
        step = parts[0]
        for more in parts[1:]:
            step = _merged(base, path, step, more)
        place = (before["_num_vals_seen"] + update) % window
        states.update({f"{key}_{place}": step[key] for key in base._defaults})
    states["_num_vals_seen"] += updates
    states["_update_count"] += max(states["_update_count"] for states in gained)
    return {**states, "_forward_cache": None, "_computed": None}


def _merged(metric: Metric, path: str, a: MetricStates, b: MetricStates) -> MetricStates:
    counts = (a["_update_count"], b["_update_count"])
    merged: MetricStates = {"_update_count": sum(counts), "_forward_cache": None, "_computed": None}
    for name, reduction in metric._reductions.items():
        x, y = a[name], b[name]
        if (isinstance(x, list) and isinstance(y, list)) or reduction is dim_zero_sum:
            merged[name] = x + y
        elif reduction is dim_zero_mean:
            merged[name] = (x * counts[0] + y * counts[1]) / sum(counts)
        elif reduction is dim_zero_max:
            merged[name] = torch.maximum(x, y)
        elif reduction is dim_zero_min:
            merged[name] = torch.minimum(x, y)
        elif reduction is dim_zero_cat:
            merged[name] = torch.cat([torch.atleast_1d(x), torch.atleast_1d(y)])
        elif reduction is None and type(metric).compute.__module__.startswith("torchmetrics."):
            single = torch.as_tensor(metric._defaults[name]).ndim
            merged[name] = torch.cat([part if part.ndim > single else part[None] for part in (x, y)])
        elif callable(reduction) and _is_associative(reduction, x, y):
            merged[name] = reduction(torch.stack([x, y]))
        else:
            raise UnsupportedFeatureError(
                f"The metric {path} ({type(metric).__name__}) has the state {name!r}, whose dist_reduce_fx is"
                f" {reduction!r}: how to put together what it gains from parts of a batch is not known. Give add_state"
                " dist_reduce_fx='sum', 'mean', 'max', 'min' or 'cat', or a function for which the order does not"
                " matter in which parts are put together."
            )
    return merged


def _is_associative(reduction: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> bool:
    """Whether parts can be put together one after another (a mean of means is not the mean)."""

    def of(a: Tensor, b: Tensor) -> Tensor:
        return reduction(torch.stack([a, b]))

    left, right = of(of(x, y), y), of(x, of(y, y))
    return left.shape == right.shape == x.shape and torch.allclose(left, right, rtol=1e-4, equal_nan=True)
