"""Train a byte-level GPT on the sources of Python's standard library, and lose a worker on the way.

    python examples/train_gpt.py                                  # 2 pipelines x 2 stages, one worker killed half-way
    python examples/train_gpt.py faults=kill_leader trainer.max_steps=100
    python examples/train_gpt.py strategy=single_device           # the same module in one process
    python examples/train_gpt.py -m faults=none,kill_one          # a sweep, one output directory per job

The configuration is in ``conf/``. A run writes metrics.csv, model.pt and pictures of its schedules to its output
directory, prints a report, and returns the final loss, which a sweeper can optimize.
"""

import os
from pathlib import Path

import hydra
import lightning as L
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig
from rich.console import Console

from report import find_failures, find_phases, read_losses, render, summarize_losses, write_pictures

__all__ = ["main", "train"]


def train(config: DictConfig) -> float | None:
    """Run one job and print its report; returns the mean loss of the last steps, if any was logged."""
    # Read by the libraries of the worker processes when these start; with the default, each would take all cores.
    os.environ["OMP_NUM_THREADS"] = str(config.threads_per_worker)
    directory = Path(config.output_dir)

    L.seed_everything(config.seed)
    model = instantiate(config.model)
    data = instantiate(config.data)
    trainer = build_trainer(config)
    trainer.fit(model, data)

    torch.save(model.state_dict(), directory / "model.pt")
    history = getattr(trainer.strategy, "history", [])
    schedules = getattr(trainer.strategy, "schedules", [])
    failures = find_failures(history)
    metrics = Path(getattr(trainer.logger, "log_dir", None) or directory) / "metrics.csv"
    losses = summarize_losses(read_losses(metrics), failures[0].step if failures else None)
    pipelines = schedules[0].grid.pipelines if schedules else 1
    tokens_per_step = pipelines * config.data.batch_size * config.data.context

    console = Console()
    if config.sample.length:
        text = model.generate(config.sample.prompt.encode(), config.sample.length, config.sample.temperature)
        console.rule("A sample of the trained model")
        console.print(text.decode(errors="replace"), markup=False, highlight=False)
    console.rule("Report")
    console.print(render(losses, failures, find_phases(history, schedules), tokens_per_step))
    for path in (metrics, directory / "model.pt", *write_pictures(schedules, directory)):
        console.print(f"wrote {path}", soft_wrap=True, highlight=False)
    return losses.last if losses else None


def build_trainer(config: DictConfig) -> L.Trainer:
    """The Trainer with everything it is made of."""
    callbacks = [instantiate(callback, _convert_="all") for callback in config.callbacks.values()]
    if config.faults.faults:
        callbacks.append(instantiate(config.faults, _convert_="all"))
    trainer: L.Trainer = instantiate(
        config.trainer,
        strategy=instantiate(config.strategy, _convert_="all"),
        logger=instantiate(config.logger),
        callbacks=callbacks,
        _convert_="all",
    )
    return trainer


@hydra.main(version_base=None, config_path="../conf", config_name="train_gpt")
def main(config: DictConfig) -> float | None:
    """The command line."""
    return train(config)


if __name__ == "__main__":
    main()
