"""Lose the leader, stop, and continue on another grid, with the same result: half a minute on two cores.

    python examples/resume_on_another_grid.py                     # about 30 seconds; keeps nothing
    python examples/resume_on_another_grid.py --directory runs    # keeps the checkpoints there

A small GPT in float64 trains on 2 x 2 workers and writes checkpoints. Its leader is killed; the others continue, and
the run stops in the middle of an epoch. From its last checkpoint it resumes with 1 x 2 workers and with a single one,
and from the checkpoint at the end of the first epoch with plain Lightning on one device (which begins an epoch's data
anew wherever it resumes). All must end with the weights of an undisturbed run; otherwise the exit code is 1.
"""

import argparse
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_recycle import ReCycleStrategy
from lightning_recycle.callbacks import Fault, FaultInjectionCallback

from gpt import GPT
from stdlib_text import ByteWindows, read_stdlib

CONTEXT = 16
GLOBAL_BATCH, GLOBAL_MICROBATCHES = 8, 4
STEPS_PER_EPOCH, STEPS = 6, 12
KILLED_AT, STOPPED_AFTER = 4, 8
TOLERANCE = 1e-10


@dataclass(frozen=True)
class Row:
    """One run.

    Args:
        name: Description of the run.
        steps: First and last step that it made, counted from 1.
        lost: (pipeline, stage) of the workers that it lost.
        difference: Largest difference of its final weights from the uninterrupted run; None if it stopped early.
    """

    name: str
    steps: tuple[int, int]
    lost: Sequence[tuple[int, int]]
    difference: float | None


def compare(directory: Path) -> list[Row]:
    """Make all runs; their checkpoints are in folders of ``directory``."""
    whole, _ = _train(directory / "uninterrupted", 2, 2)
    leader = Fault("kill", pipeline=0, stage=1, step=KILLED_AT, at="backward_input")
    stopped = directory / "stopped"
    _, lost = _train(stopped, 2, 2, steps=STOPPED_AFTER, faults=[leader])
    mid_epoch, end_of_epoch = (str(stopped / f"step={step}.ckpt") for step in (STOPPED_AFTER, STEPS_PER_EPOCH))
    rows = [
        Row("2 x 2, uninterrupted", (1, STEPS), (), None),
        Row("2 x 2, the leader is killed; stopped", (1, STOPPED_AFTER), lost, None),
    ]
    for name, stages, checkpoint in (
        ("1 x 2, resumed", 2, mid_epoch),
        ("1 x 1, resumed", 1, mid_epoch),
        ("one device, plain Lightning, resumed", None, end_of_epoch),
    ):
        weights, lost = _train(directory / name.replace(" ", "_"), 1, stages, checkpoint=checkpoint)
        first = (STEPS_PER_EPOCH if checkpoint == end_of_epoch else STOPPED_AFTER) + 1
        rows.append(Row(name, (first, STEPS), lost, _difference(weights, whole)))
    return rows


def _train(
    directory: Path,
    pipelines: int,
    stages: int | None,
    steps: int = STEPS,
    faults: Sequence[Fault] = (),
    checkpoint: str | None = None,
) -> tuple[dict[str, Tensor], list[tuple[int, int]]]:
    """Weights and lost workers of a run on ``pipelines`` x ``stages`` workers; None: one device, Lightning alone."""
    L.seed_everything(1, verbose=False)
    strategy = "auto" if stages is None else ReCycleStrategy(stages, GLOBAL_MICROBATCHES // pipelines)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=pipelines * (stages or 1),
        strategy=strategy,
        precision="64-true",
        max_steps=steps,
        max_epochs=-1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=directory,
        callbacks=[
            _Quiet(),
            # One at every second step, thus also one at the end of the first epoch and one at the end of the run.
            ModelCheckpoint(directory, "{step}", every_n_train_steps=2, save_top_k=-1),
            FaultInjectionCallback(faults),
        ],
    )
    # In order: shuffled, plain Lightning would draw another order.
    text = read_stdlib(STEPS_PER_EPOCH * GLOBAL_BATCH * CONTEXT + 1)
    loader = DataLoader(ByteWindows(text, CONTEXT), batch_size=GLOBAL_BATCH // pipelines)
    # Without dropout: plain Lightning draws other masks. Between grids it would be the same.
    model = GPT(width=32, blocks=2, heads=2, context=CONTEXT, dropout=0.0)
    trainer.fit(model, loader, ckpt_path=checkpoint)
    history = getattr(trainer.strategy, "history", [])
    return model.state_dict(), [event.worker for event in history if event.kind == "failure"]


def _difference(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """The largest one between two sets of weights with the same names."""
    if a.keys() != b.keys():
        raise RuntimeError(f"the runs have different weights: {sorted(a.keys() ^ b.keys())}")
    return max(float((a[name] - b[name]).abs().max()) for name in a)


class _Quiet(L.Callback):
    """Silences hardware notes and the like, in the worker processes too."""

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        _quieten()


def _quieten() -> None:
    for name in ("lightning.pytorch", "lightning_recycle"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")


def render(rows: Sequence[Row]) -> Table:
    """A line for each run."""
    table = Table("run", "steps", "lost workers", "largest difference", title="The same training")
    for row in rows:
        table.add_row(
            row.name,
            f"{row.steps[0]} to {row.steps[1]}",
            ", ".join(map(str, row.lost)) or "-",
            "-" if row.difference is None else f"{row.difference:.1e}",
        )
    table.caption = "difference: of a weight after the last step, from the uninterrupted run; float64"
    return table


def _all_equal(rows: Sequence[Row]) -> bool:
    return all(row.difference < TOLERANCE for row in rows if row.difference is not None)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, help="where checkpoints are kept; by default nowhere")
    options = parser.parse_args(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the workers share the cores of this machine
    _quieten()
    with tempfile.TemporaryDirectory() as temporary:
        rows = compare(options.directory or Path(temporary))
    Console().print(render(rows))
    return 0 if _all_equal(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
