"""Loggers that survive the leader: its successor writes what it had not written yet.

Only the leader's loggers write. All others keep what they were asked to log until the leader has applied a later step,
which it does after its loggers have flushed. When a worker becomes the leader, it writes what it still keeps. At most
the rows of the newest two steps can be written twice; in the files of ``CSVLogger`` they are recognised.
"""

from __future__ import annotations

import csv
import warnings
from collections import deque
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import CSVLogger, Logger

from lightning_recycle.files import write_atomically
from lightning_recycle.runtime.executor import Executor
from lightning_recycle.session.collectives import Collectives

__all__ = ["LogRelay", "keep_files"]


class LogRelay:
    """Stands between a Trainer and its loggers.

    Args:
        trainer: this worker's Trainer.
        collectives: this worker's collectives.
        executor: knows how many steps this worker has applied.
    """

    def __init__(self, trainer: pl.Trainer, collectives: Collectives, executor: Executor) -> None:
        self._collectives, self._executor = collectives, executor
        self._loggers = list(trainer.loggers)
        self._log = [logger.log_metrics for logger in self._loggers]
        self._log_hyperparams = [logger.log_hyperparams for logger in self._loggers]
        self._rows: deque[tuple[int, int, tuple[Any, ...], dict[str, Any]]] = deque()
        self._hyperparams: dict[int, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        for index, logger in enumerate(self._loggers):
            logger.log_metrics = partial(self._on_metrics, index)  # type: ignore[method-assign]
            logger.log_hyperparams = partial(self._on_hyperparams, index)  # type: ignore[method-assign]

    @property
    def _written(self) -> int:
        """The newest step that the leader is known to have applied: all rows before it are written."""
        return self._collectives.client.leader_applied

    def _on_metrics(self, index: int, *args: Any, **kwargs: Any) -> None:
        if self._collectives.leads:
            self._log[index](*args, **kwargs)
            _flush(self._loggers[index])
            return
        while self._rows and self._rows[0][0] <= self._written:
            self._rows.popleft()
        self._rows.append((self._executor.version, index, args, kwargs))

    def _on_hyperparams(self, index: int, *args: Any, **kwargs: Any) -> None:
        self._hyperparams[index] = (args, kwargs)
        self._log_hyperparams[index](*args, **kwargs)  # Lightning's own does nothing except on the leader

    def take_over(self) -> None:
        """Writes what the previous leader had not written; called when this worker has become the leader."""
        known = [_keep_file(logger) for logger in self._loggers]
        for index, (args, kwargs) in self._hyperparams.items():
            self._log_hyperparams[index](*args, **kwargs)
        for step, index, args, kwargs in self._rows:
            if step > self._written and not _is_known(known[index], *args, **kwargs):
                self._log[index](*args, **kwargs)
        self._rows.clear()
        for logger in self._loggers:
            logger.save()
            _flush(logger)


def keep_files(loggers: Iterable[Logger]) -> None:
    """Lets loggers that another process used before append to what they wrote."""
    for logger in loggers:
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


def _keep_file(logger: Logger) -> _Cells:
    """Makes a CSV logger append: on its first use it deletes the previous leader's rows, and a writer that comes from
    the launching process, which has used it, does not know the columns. Returns those rows.
    """
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
