"""Used by train_gpt.py and train_vision.py: from a Hydra configuration to a Trainer, with clear errors.

A mistake in the call (an unknown option, a fault outside the grid) ends the program with one line and exit code 2;
``RECYCLE_FULL_ERROR=1`` shows the traceback instead.
"""

import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import lightning as L
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from lightning_recycle.commands import bad_input_ends, run_application

from report import Losses, find_failures, find_phases, read_losses, render, summarize_losses, write_pictures


def prepare(config: DictConfig) -> Path:
    """Settle threads and seed of a job; returns its output directory, which exists then."""
    # Read by the libraries of the worker processes when these start; with the default, each would take all cores.
    os.environ["OMP_NUM_THREADS"] = str(config.threads_per_worker)
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(_is_about_the_run)
    L.seed_everything(config.seed)
    directory = Path(config.output_dir)
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def _is_about_the_run(record: logging.LogRecord) -> bool:
    """Whether a message of Lightning's is more than a tip or a list of devices, which it gives for each Trainer."""
    return not record.getMessage().startswith(("💡", "GPU available", "TPU available"))


def build_trainer(config: DictConfig, callbacks: Sequence[L.Callback] = ()) -> L.Trainer:
    """The Trainer with all its parts, and ``callbacks`` in addition."""
    configured = [instantiate(callback, _convert_="all") for callback in config.callbacks.values()]
    if any(config.faults.get(source) for source in ("faults", "mtbf", "trace")):
        configured.append(instantiate(config.faults, _convert_="all"))
    trainer: L.Trainer = instantiate(
        config.trainer,
        strategy=instantiate(config.strategy, _convert_="all"),
        logger=instantiate(config.logger) if config.logger else False,
        callbacks=[*configured, *callbacks],
        _convert_="all",
    )
    return trainer


def find_metrics(trainer: L.Trainer) -> Path:
    """The file that a CSVLogger of ``trainer`` writes; with other loggers there is none at that place."""
    return Path(getattr(trainer.logger, "log_dir", None) or trainer.default_root_dir) / "metrics.csv"


def show_report(
    trainer: L.Trainer,
    directory: Path,
    console: Console,
    units_per_pipeline: int,
    loss_unit: str,
    unit: str,
    title: str = "Report",
) -> Losses | None:
    """Print the report of a run and write its results; returns its losses, if any were logged.

    Args:
        trainer: The trainer, after its run.
        directory: Where the weights and the pictures of the schedules are written.
        console: Where the report is printed.
        units_per_pipeline: What a step processes in each pipeline, counted in ``unit``.
        loss_unit: Unit of the training loss.
        unit: Unit of what is processed.
        title: Title of the report.
    """
    history = getattr(trainer.strategy, "history", [])
    schedules = getattr(trainer.strategy, "schedules", [])
    failures = find_failures(history)
    metrics = find_metrics(trainer)
    losses = summarize_losses(read_losses(metrics))
    units = units_per_pipeline * (schedules[0].grid.pipelines if schedules else 1)
    console.rule(title)
    phases = find_phases(history, schedules)
    console.print(render(losses, failures, phases, units, loss_unit=loss_unit, unit=unit))
    weights = directory / "model.pt"
    torch.save(trainer.lightning_module.state_dict(), weights)
    for path in (*([metrics] if metrics.is_file() else []), weights, *write_pictures(schedules, directory)):
        console.print(f"wrote {path}", soft_wrap=True, highlight=False)
    return losses


_sweep: list[tuple[list[str], str, float | None]] = []
"""Overrides of each job of this process, its result and the result's name, for the table at the end of a sweep."""


def run_job(job: Callable[[DictConfig], float | None], config: DictConfig, result_name: str) -> float | None:
    """``job(config)``; bad input ends the program. To be called in the function that ``hydra.main`` decorates."""
    with bad_input_ends(_name()):
        result = job(config)
        _sweep.append((list(HydraConfig.get().overrides.task), result_name, result))
        return result


def run_as_command(application: Callable[[], object]) -> None:
    """Call ``application``, a function decorated with ``hydra.main``; after several jobs, print what they returned."""
    _sweep.clear()
    try:
        run_application(_name(), application)
    finally:
        if len(_sweep) > 1:
            Console().print(_render_sweep())


def _render_sweep() -> Table:
    names = " or ".join(dict.fromkeys(name for _, name, _ in _sweep))
    table = Table("job", "what differs", names, title="Sweep", title_justify="left")
    common = set.intersection(*(set(overrides) for overrides, _, _ in _sweep))
    for number, (overrides, _, result) in enumerate(_sweep):
        differs = " ".join(override for override in overrides if override not in common)
        table.add_row(str(number), differs, "-" if result is None else f"{result:.4f}")
    return table


def _name() -> str:
    return Path(sys.argv[0]).name
