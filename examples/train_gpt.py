"""Train a byte-level GPT and lose a worker on the way: three minutes on two cores.

    python examples/train_gpt.py                                  # 2 pipelines x 2 stages, one worker killed half-way
    python examples/train_gpt.py faults=kill_leader trainer.max_steps=100
    python examples/train_gpt.py experiment=demo                  # with and without failure, rejoin, restart: a table
    python examples/train_gpt.py strategy=single_device           # the same module in one process
    python examples/train_gpt.py sample.length=200                # with a text by the trained model; half a minute more
    python examples/train_gpt.py -m planner=heuristic,highs faults=none,kill_one,mtbf  # a sweep, a folder for each job

The configuration is in ``conf/``. A run writes metrics.csv, model.pt and pictures of its schedules to its output
directory, prints a report, and returns the final loss, which a sweeper can optimize.
"""

from pathlib import Path

import hydra
import lightning as L
from hydra.utils import instantiate
from omegaconf import DictConfig
from rich.console import Console

from comparison import compare, render_comparison
from hydra_job import build_trainer, prepare, run_as_command, run_job, show_report
from report import WINDOW


def train(config: DictConfig) -> float | None:
    """Run one job and print its report; returns the mean loss of the last steps, if any was logged."""
    directory = prepare(config)
    console = Console()
    if config.compare:
        runs = compare(config, directory, console)
        reported = next((run for run in runs if run.name == "failure"), runs[0])
        loss = _show(config, reported.trainer, reported.directory, console, f"Report of the run: {reported.name}")
        console.print(render_comparison([run.measured for run in runs]))
        return loss
    model = instantiate(config.model)
    trainer = build_trainer(config)
    trainer.fit(model, instantiate(config.data))
    if config.sample.length:
        text = model.generate(config.sample.prompt.encode(), config.sample.length, config.sample.temperature)
        console.rule("A sample of the trained model")
        console.print(text.decode(errors="replace"), markup=False, highlight=False)
    return _show(config, trainer, directory, console)


def _show(
    config: DictConfig, trainer: L.Trainer, directory: Path, console: Console, title: str = "Report"
) -> float | None:
    tokens = config.data.batch_size * config.data.context
    losses = show_report(trainer, directory, console, tokens, loss_unit="nats per byte", unit="tokens", title=title)
    return losses.last if losses else None


@hydra.main(version_base=None, config_path="pkg://lightning_recycle.conf", config_name="train_gpt")
def main(config: DictConfig) -> float | None:
    """The command line."""
    return run_job(train, config, f"mean loss of the last {WINDOW} steps")


if __name__ == "__main__":
    run_as_command(main)
