"""Classify handwritten digits and lose a worker on the way: half a minute on two cores.

    pip install '.[examples]'
    python examples/train_vision.py                                # 2 pipelines x 2 stages, one worker killed half-way
    python examples/train_vision.py faults=node                    # a node with two workers is lost
    python examples/train_vision.py strategy=single_device         # the same module in one process
    python examples/train_vision.py -m model.width=8,16,32 model.learning_rate=1e-3,3e-3

The configuration is in ``conf/``, the same groups as for ``train_gpt.py``. A run writes metrics.csv, model.pt and
pictures of its schedules to its output directory, prints a report, and returns the last value of ``objective``, here
the validation loss, which a sweeper can optimize.
"""

import hydra
import lightning as L
from hydra.utils import instantiate
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from lightning_recycle import ConfigurationError

from hydra_job import build_trainer, find_metrics, prepare, run_as_command, run_job, show_report
from report import read_losses


def train(config: DictConfig) -> float:
    """Run one job and print its report; returns the last value of ``config.objective``.

    Raises:
        ConfigurationError: The model does not log ``config.objective``.
    """
    directory = prepare(config)
    model = instantiate(config.model)
    trainer = build_trainer(config)
    trainer.fit(model, instantiate(config.data))

    console = Console()
    show_report(trainer, directory, console, config.data.batch_size, loss_unit="nats", unit="images")
    _show_validation(trainer, console)
    if config.objective not in trainer.callback_metrics:
        raise ConfigurationError(
            f"objective={config.objective} was not logged: choose one of"
            f" {', '.join(sorted(trainer.callback_metrics)) or 'none (nothing was logged)'}."
        )
    return float(trainer.callback_metrics[config.objective])


def _show_validation(trainer: L.Trainer, console: Console) -> None:
    metrics = find_metrics(trainer)
    losses, accuracies = (read_losses(metrics, name) for name in ("val_loss", "val_accuracy"))
    if accuracies:
        table = Table("step", "loss (nats)", "accuracy", title="Validation")
        for step, accuracy in sorted(accuracies.items()):
            table.add_row(str(step + 1), f"{losses[step]:.3f}", f"{100 * accuracy:.1f}%")
        console.print(table)


@hydra.main(version_base=None, config_path="pkg://lightning_recycle.conf", config_name="train_vision")
def main(config: DictConfig) -> float | None:
    """The command line."""
    return run_job(train, config, config.objective)


if __name__ == "__main__":
    run_as_command(main)
