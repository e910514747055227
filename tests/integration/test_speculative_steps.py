"""Clipping by norm with the staggered optimizer: stages speculate that nothing is clipped, to the same bits.

A parameter of the first layer has a large gradient when the data says so. The stage that holds it knows that at once,
and the others speculate wrongly, unless the step before has warned them.
"""

import itertools
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from support.growth import AwaitReplacement, rejoined
from support.models import GLOBAL_BATCH, STEPS
from support.sampling import sampled
from support.training import committed_steps, difference, failures, fit
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightning_recycle import PipelineModule
from lightning_recycle.callbacks import Fault

pytestmark = pytest.mark.long

CLIP = 3.0
SURPRISES = (3, 6, 7)
"""Steps with a large gradient in the first layer."""


def data(surprises: tuple[int, ...] = SURPRISES, steps: int = STEPS) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(steps * GLOBAL_BATCH, 9, generator=generator, dtype=torch.float64)
    x[:, 8] = 0.1
    for step in surprises:
        x[step * GLOBAL_BATCH : (step + 1) * GLOBAL_BATCH, 8] = 1e5
    return TensorDataset(x, x[:, :8].sum(1, keepdim=True) / 4)


class First(nn.Linear):
    """A linear layer of all columns but one, with a parameter for that."""

    def __init__(self) -> None:
        super().__init__(8, 16)
        self.alone = nn.Parameter(torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[:, :8]) + 1e-3 * torch.tanh(self.alone) * x[:, 8:]


class Surprised(PipelineModule):
    def configure_pipeline(self) -> list[Any]:
        torch.manual_seed(0)
        layers = [First(), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh()]
        return [layer.double() for layer in (*layers, nn.Linear(16, 1))]

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().mean()

    def on_training_output(self, output: Tensor, target: Tensor) -> None:
        self.log("mean_output", output.mean(), on_step=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Looks(Surprised):
    """Somebody may look at parameters between steps."""

    def on_train_batch_end(self, *_: Any) -> None: ...


def train(model: Surprised, grid: tuple[int, int], faults: Any = (), surprises: Any = SURPRISES, **kwargs: Any) -> Any:
    return fit(model, *grid, faults, data(surprises), gradient_clip_val=CLIP, **kwargs)


def undone(run: L.Trainer) -> list[int]:
    return [event.step for event in run.strategy.history if event.kind == "undone"]


def bits(model: nn.Module) -> dict[str, bytes]:
    return {name: value.numpy().tobytes() for name, value in model.state_dict().items()}


@pytest.fixture(scope="module")
def waiting() -> dict[tuple[int, int], Surprised]:
    """What a barrier before each step makes of the module, by grid."""
    found = {}
    for grid in ((2, 2), (1, 3)):
        found[grid] = Surprised()
        assert not undone(train(found[grid], grid, strategy={"staggered": False}))
    return found


def rows(folder: Path) -> list[str]:
    (path,) = folder.rglob("metrics.csv")
    return [line for line in path.read_text().splitlines() if line]


def test_a_corrected_step_is_logged_once_with_what_it_was(tmp_path):
    logged = {}
    for staggered in (True, False):
        logger = CSVLogger(tmp_path / str(staggered), flush_logs_every_n_steps=1)
        monitor = LearningRateMonitor("step")
        options = {"logger": logger, "log_every_n_steps": 1, "callbacks": [monitor]}
        run = train(Surprised(), (2, 2), strategy={"staggered": staggered, "run_metrics": False}, **options)
        assert bool(undone(run)) is staggered
        logged[staggered] = rows(tmp_path / str(staggered))
    assert logged[True] == logged[False]
    assert len(logged[True]) >= STEPS


@pytest.mark.parametrize("grid", [(2, 2), (1, 3)])
def test_wrong_speculations_are_corrected_bit_by_bit(waiting, grid):
    """And their steps are seen once."""
    model = Surprised()
    run = train(model, grid)
    assert bits(model) == bits(waiting[grid])
    assert undone(run), "no speculation was wrong: the test is about nothing"
    assert set(undone(run)) <= set(SURPRISES)
    assert 7 not in undone(run), "the step before was clipped, and yet somebody speculated"
    assert committed_steps(run) == list(range(STEPS))
    assert run.strategy.schedules[0].problem.technique.staggered


KILLS = [
    (worker, step, at)
    for worker, step, at in itertools.product(
        ((0, 0), (0, 1), (1, 0), (1, 1)), (3, 4), ("forward", "backward_weight", "reduce", "optimizer")
    )
]


@pytest.mark.parametrize(("worker", "step", "at"), sampled(KILLS, 3))
def test_weights_are_the_same_after_a_kill_around_a_wrong_speculation(waiting, worker, step, at):
    model = Surprised()
    run = train(model, (2, 2), [Fault("kill", *worker, step=step, at=at)])
    assert difference(model.state_dict(), waiting[2, 2].state_dict()) < 1e-10
    assert failures(run) == [worker]
    assert committed_steps(run) == list(range(STEPS))


def test_checkpoints_and_replacements_hold_no_speculative_step(waiting, tmp_path):
    model = Surprised()
    saving = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    faults = [Fault("kill", 1, 1, step=1)]
    run = train(model, (2, 2), faults, strategy={"max_restarts": 10}, callbacks=[AwaitReplacement([4])])
    assert rejoined(run) == [(1, 1)]
    assert difference(model.state_dict(), waiting[2, 2].state_dict()) < 1e-10
    saved = Surprised()
    train(saved, (2, 2), callbacks=[saving], enable_checkpointing=True)
    assert bits(saved) == bits(waiting[2, 2])
    barrier = Surprised()
    train(barrier, (2, 2), max_steps=4, strategy={"staggered": False})
    state = torch.load(tmp_path / "step=4.ckpt", weights_only=True)["state_dict"]
    assert difference(state, barrier.state_dict()) == 0.0


def test_no_step_is_speculative_where_somebody_may_look(waiting):
    model = Looks()
    run = train(model, (2, 2))
    assert bits(model) == bits(waiting[2, 2])
    assert not undone(run)
    assert not run.strategy.schedules[0].problem.technique.staggered
