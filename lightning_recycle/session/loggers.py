"""Loggers that survive the leader: a successor writes the missing rows.

Only the leader's loggers write. All others keep what they were asked to log until the leader has applied a later step,
which it does after its loggers have flushed. When a worker becomes the leader, it writes what it still keeps. At most
the rows of the newest two steps can be written twice; in files of ``CSVLogger`` and TensorBoard they are recognised.

A step may run several times, for several micro-batches or again after a failure. Its calls of ``logger.experiment`` are
recorded, and those of one micro-batch are made once, when the step is applied.
"""

from __future__ import annotations

import csv
import warnings
from collections import deque
from collections.abc import Iterable, Mapping
from functools import partial, wraps
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_recycle.files import write_atomically
from lightning_recycle.model.recording import RecordedModule
from lightning_recycle.runtime.executor.executor import Executor
from lightning_recycle.session.collectives import WorkerContext
from lightning_recycle.session.outputs import LoggerCall


class LogRelay:
    """Stands between a Trainer and its loggers."""

    def __init__(self, context: WorkerContext, executor: Executor, module: RecordedModule) -> None:
        self._collectives, self._executor = context.collectives, executor
        self._loggers = list(context.trainer.loggers)
        self._log = [logger.log_metrics for logger in self._loggers]
        self._log_hyperparams = [logger.log_hyperparams for logger in self._loggers]
        self._rows: deque[tuple[int, int, Any, tuple[Any, ...], dict[str, Any]]] = deque()
        self._hyperparams: dict[int, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        for index, logger in enumerate(self._loggers):
            logger.log_metrics = partial(self._on_metrics, index)  # type: ignore[method-assign]
            logger.log_hyperparams = partial(self._on_hyperparams, index)  # type: ignore[method-assign]
        for cls in {type(logger) for logger in self._loggers}:
            _record_calls(cls, self._loggers, module)

    @property
    def _written(self) -> int:
        """The newest step that the leader has surely applied, with all rows before it."""
        return self._collectives.client.member.leader_applied

    def _on_metrics(self, index: int, *args: Any, **kwargs: Any) -> None:
        if self._collectives.is_leader:
            self._log[index](*args, **kwargs)
            _flush(self._loggers[index])
            return
        self._keep(index, None, args, kwargs)

    def on_call(self, call: LoggerCall) -> None:
        """Makes a call that a step has recorded, or keeps it for a take-over."""
        if self._collectives.is_leader:
            _call(self._loggers[call.logger], call)
            _flush(self._loggers[call.logger])
        else:
            self._keep(call.logger, call, (), {})

    def _keep(self, index: int, call: LoggerCall | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        while self._rows and self._rows[0][0] <= self._written:
            self._rows.popleft()
        self._rows.append((self._executor.version, index, call, args, kwargs))

    def _on_hyperparams(self, index: int, *args: Any, **kwargs: Any) -> None:
        self._hyperparams[index] = (args, kwargs)
        self._log_hyperparams[index](*args, **kwargs)  # Lightning's own does nothing except on the leader

    def take_over(self) -> None:
        """Writes what the previous leader had not written."""
        known = [_keep_file(logger) for logger in self._loggers]
        for index, (args, kwargs) in self._hyperparams.items():
            self._log_hyperparams[index](*args, **kwargs)
        for step, index, call, args, kwargs in self._rows:
            if call is not None:
                if step > self._written and not _was_called(known[index], call):
                    _call(self._loggers[index], call)
            elif step > self._written and not _is_known(known[index], *args, **kwargs):
                self._log[index](*args, **kwargs)
        self._rows.clear()
        for logger in self._loggers:
            logger.save()
            _flush(logger)


class _RecordedExperiment:
    """Stands for a logger's experiment in a step: calls are recorded and return None."""

    def __init__(self, record: Any, path: tuple[Any, ...] = ()) -> None:
        self._record, self._path = record, path

    def __getattr__(self, name: str) -> _RecordedExperiment:
        if name.startswith("__"):
            raise AttributeError(name)
        return _RecordedExperiment(self._record, (*self._path, name))

    def __getitem__(self, key: Any) -> _RecordedExperiment:
        return _RecordedExperiment(self._record, (*self._path, (key,)))

    def __setitem__(self, key: Any, value: Any) -> None:
        self._record((*self._path, "__setitem__"), key, value)

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self._record(self._path, *args, **kwargs)


def _record_calls(cls: type[Logger], loggers: list[Logger], module: RecordedModule) -> None:
    """Lets loggers of a class show a recorded experiment to steps of ``module``."""
    shown = getattr(cls, "experiment", None)
    if not isinstance(shown, property) or shown.fget is None:
        return
    real = getattr(shown.fget, "real", shown.fget)

    @wraps(real)
    def experiment(logger: Logger) -> Any:
        index = next((index for index, one in enumerate(loggers) if one is logger), None)
        if index is None or module.recorded_logs is None:
            return real(logger)

        def record(path: tuple[Any, ...], *args: Any, **kwargs: Any) -> None:
            assert module.recorded_logs is not None
            args, kwargs = apply_to_collection((args, kwargs), Tensor, lambda t: t.detach().cpu().clone())
            module.recorded_logs.append(("", LoggerCall(index, path, args, kwargs), {}))

        return _RecordedExperiment(record)

    experiment.real = real  # type: ignore[attr-defined]
    cls.experiment = property(experiment)  # type: ignore[attr-defined]


def _call(logger: Logger, call: LoggerCall) -> None:
    called: Any = logger.experiment  # type: ignore[attr-defined]
    for step in call.path:
        called = called[step[0]] if isinstance(step, tuple) else getattr(called, step)
    called(*call.args, **call.kwargs)


def keep_files(loggers: Iterable[Logger]) -> None:
    """Lets loggers that another process used before append to what they wrote."""
    for logger in loggers:
        if isinstance(logger, CSVLogger):
            _keep_file(logger)


def _flush(logger: Logger) -> None:
    """Flushes the logger's writer to its file, if it can."""
    if isinstance(logger, CSVLogger):
        logger.save()
    flush = getattr(getattr(logger, "experiment", None), "flush", None)
    if callable(flush):
        flush()


_Cells = set[tuple[int, str]]
"""(step, name of the metric) of each value in a file."""


def _is_known(known: _Cells, metrics: Mapping[str, Any], step: int | None = None, **_: Any) -> bool:
    return step is not None and all((step, name) in known for name in metrics)


def _was_called(known: _Cells, call: LoggerCall) -> bool:
    """Whether a call such as ``add_image(tag, image, global_step)`` is in a file."""
    tag = call.kwargs.get("tag", call.args[0] if call.args else None)
    step = call.kwargs.get("global_step", call.args[2] if len(call.args) > 2 else None)
    return not known.isdisjoint({(step, tag), (step, f"{tag}/text_summary")})


def _cells_on_board(logger: TensorBoardLogger) -> _Cells:
    """The values that the previous leader has written for TensorBoard."""
    try:
        from tensorboard.backend.event_processing.event_file_loader import (
            EventFileLoader,
        )
    except ImportError:  # tensorboardX writes, and nothing here can read
        return set()
    return {
        (event.step, value.tag)
        for path in Path(logger.log_dir).glob("events.out.tfevents.*")
        for event in EventFileLoader(str(path)).Load()
        for value in event.summary.value
    }


def _keep_file(logger: Logger) -> _Cells:
    """Makes a logger append to its file, and returns the cells in it.

    A CSV logger deletes the previous leader's rows on its first use, and a writer from the launching process, which has
    used it, does not know the columns.
    """
    if isinstance(logger, TensorBoardLogger):
        return _cells_on_board(logger)
    if not isinstance(logger, CSVLogger):
        return set()
    path = Path(logger.log_dir) / "metrics.csv"
    try:
        written = path.read_text()
    except FileNotFoundError:
        return set()  # nothing was written yet
    if not written.endswith("\n"):
        written = written[: written.rfind("\n") + 1]  # the leader died in the middle of a line
    with warnings.catch_warnings():  # that all rows will be deleted: they are kept
        warnings.filterwarnings("ignore", message="Experiment logs directory .* exists and is not empty")
        writer = logger.experiment
    write_atomically(path, written)
    rows = list(csv.DictReader(written.splitlines()))
    writer.metrics_keys = list(rows[0]) if rows else next(csv.reader(written.splitlines()), [])
    return {(int(row["step"]), name) for row in rows for name, value in row.items() if value not in ("", None)}
