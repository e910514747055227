"""What a new leader takes over from the old one: the progress bar and the loggers' files."""

from __future__ import annotations

import csv

import lightning.pytorch as pl
from lightning.pytorch.loggers import CSVLogger

__all__ = ["keep_metrics_files", "show_progress_bar"]


def show_progress_bar(trainer: pl.Trainer) -> None:
    """Lets the progress bar of a new leader take over where the old leader's ended."""
    bar = trainer.progress_bar_callback
    if bar is None:
        return
    bar.enable()
    bar.on_train_start(trainer, trainer.lightning_module)
    bar.on_train_epoch_start(trainer, trainer.lightning_module)


def keep_metrics_files(trainer: pl.Trainer) -> None:
    """Makes the CSV loggers of a new leader append: on its first use ``CSVLogger`` deletes what the old leader
    wrote.
    """
    for logger in trainer.loggers:
        if isinstance(logger, CSVLogger) and logger._experiment is None:
            path = f"{logger.log_dir}/metrics.csv"
            try:
                with open(path, newline="") as file:
                    written = file.read()
            except FileNotFoundError:
                continue  # nothing was written yet
            writer = logger.experiment
            with open(path, "w", newline="") as file:
                file.write(written)
            writer.metrics_keys = next(csv.reader(written.splitlines()), [])
