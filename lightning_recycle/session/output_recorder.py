"""Records of hooks that see outputs: logs and metrics, the same on every worker.

The user's hooks (``on_validation_output`` and the like) see the output of one micro-batch, on one worker. Calls of
``self.log``, gains of torchmetrics objects and side effects on other attributes are *recorded* there, travel through
the coordinator, and are *replayed* on all workers in the order of the micro-batches, so callbacks decide alike. Logged
values are combined by ``reduce_fx``, metric states by their ``dist_reduce_fx``. Metrics outside of module, callbacks
and data module count one worker's micro-batches: their ``compute()`` is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities.data import dim_zero_cat, dim_zero_max, dim_zero_mean, dim_zero_min, dim_zero_sum
from torchmetrics.wrappers import MetricTracker, Running
from torchmetrics.wrappers.abstract import WrapperMetric

from lightning_recycle.errors import ConfigurationError, UnsupportedFeatureError, suggestion
from lightning_recycle.model.recorded_module import RecordedModule
from lightning_recycle.session.microbatch_changes import Effect, MicrobatchChanges, put_together, taken_apart
from lightning_recycle.session.object_graph import metric_parts
from lightning_recycle.tensor_memory import from_host, on_device, pack_tensors, to_cpu, to_host, unpack_tensors

MetricStates: TypeAlias = dict[str, Any]
"""The accumulated states of a torchmetrics object, with its caches, by name."""


@dataclass(frozen=True)
class _MetricValue:
    """Stands for a metric that was logged: its name in the module."""

    path: str


@dataclass(frozen=True)
class _Number:
    """A number that was logged, and the dtype of its tensor."""

    value: float
    dtype: torch.dtype


@dataclass(frozen=True)
class LoggerCall:
    """A call of a logger or its experiment, such as ``experiment.add_image``.

    ``path``: attributes and (keys,) that lead from the logger to the called method.
    """

    logger: int
    path: tuple[Any, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass
class Recording:
    """Record of a hook that saw the output of one micro-batch.

    ``logs``: (name, value, keyword arguments) of each ``self.log``. ``metrics``: by path, states after this micro-batch
    alone. ``changes``: side effects on other attributes of the module that reach all workers.
    """

    samples: int = 0
    logs: tuple[tuple[str, Any, dict[str, Any]], ...] = ()
    metrics: dict[str, MetricStates] = field(default_factory=dict)
    result: Any = None
    changes: tuple[Effect, ...] = ()


_EMPTY = Recording()


class OutputRecorder:
    """Records what hooks do with an output (logs, metrics), and replays it elsewhere.

    ``shared``: whether several workers run the hooks. ``on_logger_call``: receives, on every worker, the calls of the
    first micro-batch of a step that has any.
    """

    def __init__(
        self,
        module: RecordedModule,
        microbatch_changes: MicrobatchChanges,
        shared: bool = True,
        on_logger_call: Callable[[LoggerCall], None] = lambda call: None,
    ) -> None:
        self._module, self.microbatch_changes, self._shared = module, microbatch_changes, shared
        self._newest: tuple[Any, dict[int, tuple[Any, list[Effect]]]] = None, {}
        self._found_for: tuple[Any, ...] = ()
        self._on_logger_call = on_logger_call
        self._find_metrics()

    @property
    def metrics(self) -> list[Metric]:
        self._follow_metrics()
        return list(self._metrics.values())

    def metrics_by_path(self) -> dict[str, Metric]:
        self._follow_metrics()
        return dict(self._metrics)

    def find_again(self) -> None:
        """Looks for metrics before the next recording or replay."""
        self._found_for = ()

    def _find_metrics(self) -> None:
        modules = dict(self._module.named_modules())
        self._module_metrics = {name for name, module in modules.items() if isinstance(module, Metric)}
        module_ids = set(map(id, modules.values()))
        found = metric_parts(self._module.trainer).items()
        modules |= {path: module for path, module in found if id(module) not in module_ids}
        self._metrics = {path: module for path, module in modules.items() if isinstance(module, Metric)}
        self._trackers = {path: module for path, module in modules.items() if isinstance(module, MetricTracker)}
        self._lengths = self._tracker_lengths()
        self._found_for = self._loop_and_epoch()
        _separate_metrics(modules.values())

    def _follow_metrics(self) -> None:
        if self._tracker_lengths() != self._lengths or self._loop_and_epoch() != self._found_for:
            self._find_metrics()

    def _loop_and_epoch(self) -> tuple[Any, ...]:
        """Differs in another epoch or loop, before which hooks may have made metrics."""
        trainer = self._module.trainer
        return trainer.state.fn, trainer.state.stage, trainer.current_epoch

    def _tracker_lengths(self) -> dict[str, int]:
        """How many metrics each tracker has; ``increment`` adds one."""
        return {name: len(tracker) for name, tracker in self._trackers.items()}

    # ------------------------------------------------------------------ on the worker that has the output

    def record(self, hook: Callable[..., Any], *args: Any, samples: int) -> bytes:
        """Calls ``hook(*args)`` and returns what it did, for :meth:`replay`."""
        with self.recording() as recording, torch.no_grad():
            recording.result = hook(*args)
        return self.dump(recording, samples)

    @contextmanager
    def recording(self) -> Iterator[Recording]:
        """Records what happens in the block, in the object that the context yields."""
        module, recording = self._module, Recording()
        self._follow_metrics()
        before = {path: metric_states(metric) for path, metric in self._metrics.items()}
        for metric in self._metrics.values():
            metric.reset()
        module.recorded_logs = []
        try:
            with self.microbatch_changes.noticed() as changes, _updated_metrics() as updated:
                yield recording
            if self._shared:
                self._refuse_shares(updated)
            recording.changes = tuple(changes)
            recording.logs = tuple(self._portable(*log) for log in module.recorded_logs)
            recording.metrics = {p: to_cpu(metric_states(m)) for p, m in self._metrics.items() if _has_gained(m)}
            for name, length in self._tracker_lengths().items():
                if length != self._lengths[name]:
                    raise UnsupportedFeatureError(
                        f"{name}.increment() was called in a step, or in a hook that sees outputs: other workers would"
                        " not have the new metric. Call it in a hook such as on_train_epoch_start."
                    )
        finally:
            module.recorded_logs = None
            for path, metric in self._metrics.items():
                set_metric_states(metric, before[path])

    def _refuse_shares(self, updated: Iterable[Metric]) -> None:
        """Makes ``compute()`` of unknown metrics of ``updated`` raise outside of steps."""
        found = set(map(id, self._metrics.values()))
        for metric in updated:
            if id(metric) not in found and not isinstance(metric.compute, _RefusedShare):
                metric.compute = _RefusedShare(metric, self._module)  # type: ignore[method-assign]

    def dump(self, recording: Recording, samples: int) -> bytes:
        """The record of a block, for :meth:`replay`; empty if nothing was recorded."""
        if recording.result is None and not (recording.logs or recording.metrics or recording.changes):
            return b""
        recorded = replace(recording, samples=samples, result=to_host(recording.result))
        try:
            return put_together(pack_tensors(recorded), b"")
        except Exception as error:
            raise UnsupportedFeatureError(
                f"A value that a hook or step of {type(self._module).__name__} returned, logged or put into attributes"
                f" cannot be sent to the other workers, which need it too: {error}. Use tensors, numbers, strings, and"
                " lists and dicts of them."
            ) from error

    def _portable(self, name: str, value: Any, kwargs: dict[str, Any]) -> tuple[str, Any, dict[str, Any]]:
        """A call of ``self.log`` as other workers can repeat it: metrics by their path."""
        if isinstance(value, Metric):
            path = next((path for path in self._module_metrics if self._metrics[path] is value), None)
            if path is None:
                raise ConfigurationError(
                    f"self.log({name!r}, {type(value).__name__}(...)): the metric must be an attribute of the module,"
                    " created in __init__."
                )
            return name, _MetricValue(path), kwargs
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ConfigurationError(
                f"self.log({name!r}, ...) got a tensor of shape {tuple(value.shape)}; log a single number."
            )
        if isinstance(value, LoggerCall):
            return name, value, kwargs
        number = torch.as_tensor(value)
        return name, _Number(number.item(), number.dtype), kwargs

    # ------------------------------------------------------------------ on every worker

    def repeat_changes(self, records: Mapping[int, bytes], on_step: bool) -> None:
        """Repeats the changes of a step's micro-batches to the module.

        Arguments as for :meth:`replay`; in training it is called before that: hooks within the step see the changes.
        """
        parts = self._parsed(records)
        self.microbatch_changes.repeat({i: [*record.changes, *found] for i, (record, found) in parts.items()}, on_step)

    def _parsed(self, records: Mapping[int, bytes]) -> dict[int, tuple[Any, list[Effect]]]:
        """The record and the changes of each micro-batch, in order."""
        if self._newest[0] is not records:
            apart = {index: taken_apart(data) for index, data in sorted(records.items())}
            self._newest = records, {i: (unpack_tensors(r) if r else _EMPTY, found) for i, (r, found) in apart.items()}
        return self._newest[1]

    def replay(self, records: Mapping[int, bytes], on_step: bool) -> StepOutputs:
        """Repeats the hooks' effects for the outputs of a whole step; returns results.

        ``records``: of :meth:`record`, by global micro-batch. ``on_step``: whether values are logged for the step by
        default.
        """
        if not on_step:
            self.repeat_changes(records, on_step)
        ordered = [record for record, _ in self._parsed(records).values()]
        self._follow_metrics()
        device = self._module.device
        logged = {
            value.path
            for record in ordered
            for _, value, kwargs in record.logs
            if isinstance(value, _MetricValue) and (on_step if kwargs["on_step"] is None else kwargs["on_step"])
        }
        for path, metric in self._metrics.items():
            gained = [record.metrics[path] for record in ordered if path in record.metrics]
            if gained:
                target = device if path in self._module_metrics else metric.device  # nothing moves it with the module
                add_states(
                    metric, path, [on_device(states, target) for states in gained], keep_step_value=path in logged
                )
        by_name: dict[str, list[tuple[Any, float]]] = {}
        arguments: dict[str, dict[str, Any]] = {}
        calls: dict[int, list[LoggerCall]] = {}
        for record in ordered:
            for name, value, kwargs in record.logs:
                if isinstance(value, LoggerCall):
                    calls.setdefault(id(record), []).append(value)
                    continue
                weight = kwargs["batch_size"] if kwargs["batch_size"] is not None else record.samples
                by_name.setdefault(name, []).append((value, float(weight)))
                arguments.setdefault(name, kwargs)
        for name, values in by_name.items():
            kwargs = {**arguments[name], "batch_size": int(sum(weight for _, weight in values)), "sync_dist": False}
            first = values[0][0]
            if isinstance(first, _MetricValue):
                kwargs["metric_attribute"] = first.path
                self._module.log(name, self._metrics[first.path], **kwargs)
            else:
                self._module.log(name, _reduce_logged(name, values, kwargs["reduce_fx"]).to(device), **kwargs)
        for call in next(iter(calls.values()), []):
            self._on_logger_call(call)
        values = [from_host(record.result, device) for record in ordered]
        return StepOutputs(values, [record.samples for record in ordered])


def _reduce_logged(name: str, values: Sequence[tuple[_Number, float]], reduce_fx: Any) -> Tensor:
    """A logged value over micro-batches, from (value, weight) of each."""
    kind = reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "")
    stacked = torch.tensor([number.value for number, _ in values], dtype=torch.float64)
    weights = torch.tensor([weight for _, weight in values], dtype=torch.float64)
    reductions: dict[str, Callable[[], Tensor]] = {
        "mean": lambda: (stacked * weights).sum() / weights.sum(),
        "avg": lambda: (stacked * weights).sum() / weights.sum(),
        "sum": stacked.sum,
        "max": stacked.max,
        "min": stacked.min,
    }
    combined = reductions.get(kind.lower())
    if combined is None:
        raise UnsupportedFeatureError(
            f"self.log({name!r}, reduce_fx={reduce_fx!r}): use 'mean', 'sum', 'min' or 'max', or a torchmetrics object."
            f"{suggestion(reduce_fx, reductions)}"
        )
    dtype = values[0][0].dtype
    return combined().to(dtype if dtype.is_floating_point else torch.get_default_dtype())


@dataclass(frozen=True)
class StepOutputs:
    """Values that the user's code returned per micro-batch, with sample counts."""

    values: list[Any]
    samples: list[int]

    def joined(self, divisions: Sequence[Sequence[range]] = ()) -> Any:
        """The outputs of all micro-batches joined into one.

        Numbers averaged over the samples, tensors and lists one after another, mappings and tuples item by item,
        anything else as a list of all. A micro-batch that returned None has no part in it. ``divisions``: of the batch
        by its loaders (:meth:`~lightning_recycle.data.step_sources.StepSource.divisions`): rows of tensors and items of
        lists that belong to samples get the order of the batch. Empty: micro-batches are consecutive samples.
        """
        some = [index for index, value in enumerate(self.values) if value is not None]
        samples = [self.samples[index] for index in some]
        return _join([self.values[index] for index in some], samples, _select_divisions(some, divisions))

    def predicted(self, alone: bool) -> Any:
        """All values as one prediction: as :meth:`joined`, but numbers and None are kept.

        ``alone``: whether batches have a single micro-batch: then its result is the prediction.
        """
        return self.values[0] if alone else _join(self.values, None)


def _join(outputs: Sequence[Any], samples: Sequence[int] | None, divisions: Sequence[Sequence[range]] = ()) -> Any:
    """``outputs`` as one; numbers are averaged over ``samples``, or kept."""
    if all(output is None for output in outputs):
        return None
    first = outputs[0]
    if all(isinstance(output, (Tensor, float, int)) and torch.as_tensor(output).ndim == 0 for output in outputs):
        return _stack(outputs) if samples is None else _mean(outputs, samples)
    if all(isinstance(output, Tensor) and output.ndim for output in outputs):
        if len({output.shape[1:] for output in outputs}) > 1:
            return list(outputs)
        rows, order = torch.cat(list(outputs)), _order_of_batch(outputs, divisions)
        return rows if order is None else rows[torch.tensor(order, dtype=torch.long, device=rows.device)]
    if all(isinstance(output, Mapping) for output in outputs):
        names = dict.fromkeys(key for output in outputs for key in output)
        return {name: _join_items(outputs, samples, divisions, name) for name in names}
    if isinstance(first, list) and all(isinstance(output, list) for output in outputs):
        joined_items, order = [item for output in outputs for item in output], _order_of_batch(outputs, divisions)
        return joined_items if order is None else [joined_items[index] for index in order]
    if isinstance(first, tuple) and all(isinstance(output, tuple) and len(output) == len(first) for output in outputs):
        items = [_join(items, samples, divisions) for items in zip(*outputs, strict=True)]
        return type(first)(*items) if hasattr(first, "_fields") else tuple(items)
    return list(outputs)


def _join_items(
    outputs: Sequence[Mapping[Any, Any]], samples: Sequence[int] | None, divisions: Sequence[Sequence[range]], key: Any
) -> Any:
    """The items of ``outputs`` under ``key``, where there are any."""
    present = [index for index, output in enumerate(outputs) if key in output]
    weights = samples and [samples[index] for index in present]
    return _join([outputs[index][key] for index in present], weights, _select_divisions(present, divisions))


def _select_divisions(indices: Sequence[int], divisions: Sequence[Sequence[range]]) -> list[list[range]]:
    return [[places[index] for index in indices] for places in divisions]


def _order_of_batch(outputs: Sequence[Any], divisions: Sequence[Sequence[range]]) -> list[int] | None:
    """The indices that bring the rows of all ``outputs`` into the batch's order.

    A sample may have several rows, the same number of each. With several loaders only one row per sample shows to which
    of them the rows belong. Of places that several parts have, as pipelines train on the same batches, the first part's
    count. None if that is their order already, or the rows do not belong to samples.
    """
    lengths = [len(output) for output in outputs]
    for places in divisions:
        rows = sum(lengths) // max(1, sum(map(len, places)))
        if rows == 0 or (rows > 1 and len(divisions) > 1) or lengths != [rows * len(piece) for piece in places]:
            continue
        first: dict[int, int] = {}
        for index, place in enumerate(place for piece in places for place in piece):
            first.setdefault(place, index)
        order = [first[place] * rows + row for place in sorted(first) for row in range(rows)]
        return None if order == list(range(sum(lengths))) else order
    return None


def _mean(outputs: Sequence[Any], samples: Sequence[int]) -> Tensor:
    first, values = outputs[0], torch.stack([torch.as_tensor(output).double() for output in outputs])
    weights = torch.tensor(samples, dtype=torch.float64, device=values.device)
    mean = (values * weights).sum() / weights.sum()
    return mean.to(first.dtype) if isinstance(first, Tensor) and first.is_floating_point() else mean


def _stack(outputs: Sequence[Any]) -> Any:
    return torch.stack(list(outputs)) if all(isinstance(output, Tensor) for output in outputs) else list(outputs)


# ---------------------------------------------------------------------- states of torchmetrics objects


_set_attribute = Metric.__setattr__
_watching: list[dict[int, Metric]] = []


def _set_watched(metric: Metric, name: str, value: Any) -> None:
    if _watching and name == "_update_count" and value:
        for updated in _watching:
            updated[id(metric)] = metric
    _set_attribute(metric, name, value)


Metric.__setattr__ = _set_watched  # type: ignore[method-assign, assignment]


@contextmanager
def _updated_metrics() -> Iterator[Iterable[Metric]]:
    """Lists all metrics of the process that are updated in the block."""
    updated: dict[int, Metric] = {}
    _watching.append(updated)
    try:
        yield updated.values()
    finally:
        _watching[:] = [other for other in _watching if other is not updated]  # blocks may overlap


class _RefusedShare:
    """``compute`` of a metric that has counted the micro-batches of one worker alone."""

    def __init__(self, metric: Metric, module: RecordedModule) -> None:
        self._metric, self._module, self._compute = metric, module, metric.compute

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._metric._update_count and not self._module.sees_one_microbatch:
            kind = type(self._metric).__name__
            raise ConfigurationError(
                f"{kind}.compute(): this metric, which steps update, is a global or is kept where its worker's share"
                " cannot be gathered, or was made in a step. Make it in __init__ and keep it as an attribute of the"
                " module, itself or in a list, dict or object there."
            )
        return self._compute(*args, **kwargs)


def _separate_metrics(parts: Iterable[nn.Module]) -> None:
    """Lets each metric of ``parts`` have states of its own, and count its updates."""
    for part in parts:
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


# Metrics of torchmetrics that work on whole batches alone, and the remedy.
_INSEPARABLE = {
    "MinMaxMetric": "it keeps extremes of what it computed. Log the metric inside it, and take the extremes in a"
    " hook such as on_validation_epoch_end.",
    "BootStrapper": "it draws samples of the whole batch. Log the metric inside it, or keep predictions and targets in"
    " CatMetric, and draw from these in a hook such as on_validation_epoch_end.",
    "NormalizedRootMeanSquaredError": "torchmetrics does not put more than two parts together. Log"
    " MeanSquaredError(squared=False), and divide it in a hook such as on_validation_epoch_end.",
}


def _state_names(metric: Metric) -> tuple[str, ...]:
    if isinstance(metric, Running):
        return (*metric._defaults, "_num_vals_seen")
    return () if isinstance(metric, WrapperMetric) else tuple(metric._defaults)  # the metrics inside have the states


def _has_gained(metric: Metric) -> bool:
    if isinstance(metric, Running):
        return bool(metric._num_vals_seen)
    if isinstance(metric, WrapperMetric):
        _, *inner = metric.modules()
        return any(_has_gained(module) for module in inner if isinstance(module, Metric))
    return bool(metric._update_count)


def add_states(metric: Metric, path: str, gained: Sequence[MetricStates], keep_step_value: bool) -> None:
    """Adds what ``metric`` gained in a step."""
    before = metric_states(metric)
    if isinstance(metric, Running):
        set_metric_states(metric, _advance_window(metric, path, before, gained))
        return
    if reason := _INSEPARABLE.get(type(metric).__name__):
        raise UnsupportedFeatureError(
            f"The metric {path} ({type(metric).__name__}) cannot be put together from parts of a batch: {reason}"
        )
    if isinstance(metric, WrapperMetric):
        return
    step = reduce(partial(_merge_states, metric, path), gained)
    value = before["_forward_cache"]
    if any(states["_forward_cache"] is not None for states in gained):  # otherwise it was updated without a value
        value = None
        if keep_step_value:
            set_metric_states(metric, {**step, "_computed": None})
            value = metric.compute()
    set_metric_states(metric, _merge_states(metric, path, before, step) if before["_update_count"] else step)
    metric._forward_cache = value
    metric._computed = None


def _advance_window(metric: Running, path: str, before: MetricStates, gained: Sequence[MetricStates]) -> MetricStates:
    """States of a window that moves once per update of a step, not per micro-batch."""
    states, window, base = dict(before), metric.window, metric.base_metric
    updates = max(states["_num_vals_seen"] for states in gained)
    for update in range(max(0, updates - window), updates):
        microbatch_states = [
            {**{key: gained_states[f"{key}_{update % window}"] for key in base._defaults}, "_update_count": 1}
            for gained_states in gained
            if update < gained_states["_num_vals_seen"]
        ]
        step = reduce(partial(_merge_states, base, path), microbatch_states)
        slot = (before["_num_vals_seen"] + update) % window
        states.update({f"{key}_{slot}": step[key] for key in base._defaults})
    states["_num_vals_seen"] += updates
    states["_update_count"] += max(states["_update_count"] for states in gained)
    return {**states, "_forward_cache": None, "_computed": None}


def _merge_states(metric: Metric, path: str, states: MetricStates, added: MetricStates) -> MetricStates:
    """The states of ``metric`` after the updates behind ``states`` and ``added``.

    ``path``: its name, for the error. Raises UnsupportedFeatureError if a state has no known way to be combined.
    """
    counts = (states["_update_count"], added["_update_count"])
    merged: MetricStates = {"_update_count": sum(counts), "_forward_cache": None, "_computed": None}
    for name, reduction in metric._reductions.items():
        x, y = states[name], added[name]
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
                f" {reduction!r}: how to combine its values of parts of a batch is unknown. Give add_state"
                " dist_reduce_fx='sum', 'mean', 'max', 'min' or 'cat', or a function for which the order does not"
                " matter in which parts are put together."
            )
    return merged


def _is_associative(reduction: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> bool:
    """Whether parts can be combined one after another, unlike means."""

    def of(a: Tensor, b: Tensor) -> Tensor:
        return reduction(torch.stack([a, b]))

    left, right = of(of(x, y), y), of(x, of(y, y))
    return left.shape == right.shape == x.shape and torch.allclose(left, right, rtol=1e-4, equal_nan=True)
