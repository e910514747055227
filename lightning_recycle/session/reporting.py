"""Lightning's callbacks and loggers that report on a run, on one stage's worker.

Callbacks get what they expect of one device where a stage or a shared batch would mislead them. On a new leader, those
that only the leader shows go on where the old leader's were.

Only the leader's loggers write. The others keep the rows until the leader has applied a later step, after its loggers
have flushed; a new leader writes the rest. At most the rows of the newest two steps can be written twice; in files of
``CSVLogger`` they are recognised. Calls of a logger in a step, which may run again, are recorded, and those of one
micro-batch are made once, when the step is applied.
"""

from __future__ import annotations

import csv
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import (
    BasePredictionWriter,
    ModelSummary,
    RichProgressBar,
    ThroughputMonitor,
)
from lightning.pytorch.loggers import CSVLogger, Logger
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.apply_func import apply_to_collection
from rich.console import Console
from torch import Tensor

from lightning_recycle.files import write_atomically
from lightning_recycle.model.parts import ModelParts
from lightning_recycle.model.recorded_module import RecordedModule
from lightning_recycle.session.output_recorder import LoggerCall
from lightning_recycle.session.worker_context import WorkerCollectives, WorkerContext

_EVALUATIONS = {  # stage -> its name in hooks
    RunningStage.SANITY_CHECKING: "validation",
    RunningStage.VALIDATING: "validation",
    RunningStage.TESTING: "test",
    RunningStage.PREDICTING: "predict",
}


def show_whole_run(trainer: pl.Trainer, parts: ModelParts, collectives: WorkerCollectives) -> None:
    """Prepares the callbacks and loggers of a worker."""
    grid = collectives.grid
    if grid.stages > 1 and trainer.enable_autolog_hparams:
        _draw_whole_graph(trainer, parts)
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, ModelSummary) and trainer.state.fn == TrainerFn.FITTING:
            _summarize_whole_model(callback, trainer, parts)
        elif isinstance(callback, ThroughputMonitor):
            _measure_grid_as_one_device(callback, grid.num_workers)
        elif isinstance(callback, BasePredictionWriter):
            for name in ("write_on_batch_end", "write_on_epoch_end"):
                setattr(callback, name, _write_on_leader(collectives, getattr(callback, name)))


def keep_reports_apart(trainer: pl.Trainer) -> None:
    """Makes the profiler name its report after this worker's device."""
    profiler = trainer.profiler  # type: ignore[attr-defined]
    profiler.setup = partial(_set_up_profiler, type(profiler).setup.__get__(profiler), trainer.local_rank)


def _set_up_profiler(setup: Callable[..., None], rank: int, stage: Any, local_rank: Any, log_dir: Any) -> None:
    setup(stage=stage, local_rank=rank, log_dir=log_dir)


def _summarize_whole_model(callback: ModelSummary, trainer: pl.Trainer, parts: ModelParts) -> None:
    callback.__dict__.pop("_summary", None)  # of the previous run
    summary: Any = None
    with _without_storage(parts, "The model summary shows no input and output sizes") as whole:
        summary = callback._summary(trainer, whole)
    if summary is None:
        whole.example_input_array = None
        summary = callback._summary(trainer, whole)
    taken_summary = _TakenSummary(summary)
    callback._summary = lambda *_: taken_summary  # type: ignore[method-assign, assignment]


class _TakenSummary:
    """The contents of a summary now: when Lightning shows it, layers may be gone."""

    def __init__(self, summary: Any) -> None:
        rows = summary._get_summary_data()
        self._get_summary_data = lambda: rows
        for name in ("total_parameters", "trainable_parameters", "model_size", "total_training_modes", "total_flops"):
            setattr(self, name, getattr(summary, name))


def _draw_whole_graph(trainer: pl.Trainer, parts: ModelParts) -> None:
    """Gives loggers the graph of the model while all layers are there."""
    for logger in trainer.loggers:
        if not is_overridden("log_graph", logger, Logger) or not getattr(logger, "_log_graph", True):  # TensorBoard's
            continue
        with _without_storage(parts, f"{type(logger).__name__} gets no graph") as whole:
            type(logger).log_graph(logger, whole)
        logger.log_graph = lambda *_, **__: None  # type: ignore[method-assign] # it has the graph


@contextmanager
def _without_storage(parts: ModelParts, without: str) -> Iterator[Any]:
    """The whole model without values; warns if ``forward()`` cannot do without."""
    whole = parts.without_storage()
    try:
        yield whole
    except Exception as error:  # the user's forward() on example_input_array may read values, and there are none
        if whole is parts.module:  # there are: it raises on one device, too
            raise
        rank_zero_warn(
            f"{without}: {type(parts.module).__name__} cannot run its example_input_array without storage"
            f" ({type(error).__name__}: {error})."
        )


def _measure_grid_as_one_device(monitor: ThroughputMonitor, num_workers: int) -> None:
    """Makes rates those of all devices together: a step's batch is the global one."""
    for throughput in monitor._throughputs.values():
        throughput.world_size = 1
        if throughput.available_flops is not None:
            throughput.available_flops *= num_workers


def _write_on_leader(collectives: WorkerCollectives, write: Callable[..., None]) -> Callable[..., None]:
    """Lets the leader alone write predictions, which all workers have."""
    write = getattr(write, "prepared", write)  # in the previous run

    @wraps(write)
    def write_once(*args: Any, **kwargs: Any) -> None:
        collectives.by_leader("predictions", partial(write, *args, **kwargs))

    write_once.prepared = write  # type: ignore[attr-defined]
    return write_once


def keep_monitors_going(trainer: pl.Trainer) -> None:
    """Starts the throughput monitors of a new leader, which count from now on."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        for stage in callback._throughputs if isinstance(callback, ThroughputMonitor) else ():
            if stage not in callback._t0s:
                callback._t0s[stage] = time.perf_counter()
                callback._batches[stage] = callback._samples[stage] = callback._lengths[stage] = 0


def show_cursor(trainer: pl.Trainer) -> None:
    """Shows the cursor that a ``RichProgressBar`` of a killed worker has hidden."""
    if isinstance(trainer.progress_bar_callback, RichProgressBar):
        Console().show_cursor()


def show_progress_bar(trainer: pl.Trainer, dataloader_idx: int = 0) -> None:
    """Continues the progress bar of the old leader on a new one.

    The bar of other workers is disabled: it has seen all hooks and shown nothing. Hooks that begin current work run
    again.
    """
    bar, module = trainer.progress_bar_callback, trainer.lightning_module
    if bar is None:
        return
    bar.enable()
    if bar._trainer is None or trainer.state.stage is None:
        return  # nothing has begun yet, or everything is over
    fitting = trainer.state.fn == TrainerFn.FITTING
    if trainer.sanity_checking:
        bar.on_sanity_check_start(trainer, module)
    elif fitting and trainer.fit_loop.epoch_progress.current.ready:
        bar.on_train_start(trainer, module)
        bar.on_train_epoch_start(trainer, module)
    phase = _EVALUATIONS.get(trainer.state.stage)
    if phase is not None:
        bar.reset_dataloader_idx_tracker()
        getattr(bar, f"on_{phase}_start")(trainer, module)
        getattr(bar, f"on_{phase}_batch_start")(trainer, module, None, 0, dataloader_idx)


class LogRelay:
    """Calls loggers on the leader; other workers keep the newest rows to take over."""

    def __init__(self, context: WorkerContext, module: RecordedModule, version: Callable[[], int]) -> None:
        self._collectives, self._module, self._version = context.collectives, module, version
        self._loggers = list(context.trainer.loggers)
        self._log = [logger.log_metrics for logger in self._loggers]
        self._log_hyperparams = [logger.log_hyperparams for logger in self._loggers]
        self._rows: deque[tuple[int, int, Callable[[], None], _Cells | None]] = deque()
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

    def _on_metrics(self, index: int, metrics: dict[str, float], step: int | None = None, **options: Any) -> None:
        if self._module.recorded_logs is not None:
            _record(self._module, index, ("log_metrics",), metrics, step, **options)
            return
        cells = None if step is None else {(step, name) for name in metrics}
        self._write(index, partial(self._log[index], metrics, step, **options), cells)

    def on_call(self, call: LoggerCall) -> None:
        """Makes a call that a step has recorded, or keeps it for a take-over."""
        function = partial(_call, self._loggers[call.logger], call)
        self._write(call.logger, function, None) if call.path[0] == "experiment" else function()

    def _write(self, index: int, write: Callable[[], None], cells: _Cells | None) -> None:
        """Calls ``write``, which fills ``cells``, or keeps it for a take-over."""
        if self._collectives.is_leader:
            write()
            _flush(self._loggers[index])
            return
        while self._rows and self._rows[0][0] <= self._written:
            self._rows.popleft()
        self._rows.append((self._version(), index, write, cells))

    def _on_hyperparams(self, index: int, *args: Any, **kwargs: Any) -> None:
        if self._module.recorded_logs is not None:
            _record(self._module, index, ("log_hyperparams",), *args, **kwargs)
            return
        self._hyperparams[index] = (args, kwargs)
        self._log_hyperparams[index](*args, **kwargs)  # Lightning's own does nothing except on the leader

    def take_over(self) -> None:
        logged_cells = [keep_file(logger) for logger in self._loggers]
        for index, (args, kwargs) in self._hyperparams.items():
            self._log_hyperparams[index](*args, **kwargs)
        for step, index, write, cells in self._rows:
            if step > self._written and not (cells is not None and cells <= logged_cells[index]):
                write()
        self._rows.clear()
        for logger in self._loggers:
            logger.save()
            _flush(logger)


class _RecordedExperiment:
    """Stands for a logger's experiment in a step: calls are recorded and return None."""

    def __init__(self, record: Any, path: tuple[Any, ...] = ("experiment",)) -> None:
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
        index = next((index for index, other in enumerate(loggers) if other is logger), None)
        if index is None or module.recorded_logs is None:
            return real(logger)
        return _RecordedExperiment(partial(_record, module, index))

    experiment.real = real  # type: ignore[attr-defined]
    cls.experiment = property(experiment)  # type: ignore[attr-defined]


def _record(module: RecordedModule, index: int, path: tuple[Any, ...], *args: Any, **kwargs: Any) -> None:
    """Records a call in a step of the logger with this index."""
    assert module.recorded_logs is not None
    args, kwargs = apply_to_collection((args, kwargs), Tensor, lambda t: t.detach().cpu().clone())
    module.recorded_logs.append(("", LoggerCall(index, path, args, kwargs), {}))


def _call(logger: Logger, call: LoggerCall) -> None:
    called: Any = logger
    for step in call.path:
        called = called[step[0]] if isinstance(step, tuple) else getattr(called, step)
    called(*call.args, **call.kwargs)


def _flush(logger: Logger) -> None:
    if isinstance(logger, CSVLogger):
        logger.save()
    flush = getattr(getattr(logger, "experiment", None), "flush", None)
    if callable(flush):
        flush()


# (step, name of the metric) of each value in a file.
_Cells = set[tuple[int, str]]


def keep_file(logger: Logger) -> _Cells:
    """Makes a logger append to a file of another process; returns the cells in it.

    A CSV logger deletes the previous leader's rows on its first use; a writer that the launching process used does not
    know the columns.
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
