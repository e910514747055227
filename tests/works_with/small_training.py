"""One small training, on one device and on two workers of which one is killed and replaced.

Data and models of other packages go through it; their weights must be those of one device. Workers import this module.
"""

from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from support.growth import AwaitReplacement, rejoined
from support.models import dataset
from support.training import TOLERANCE, difference, failures, grid_trainer, on_one_device
from torch import Tensor, nn

from lightning_recycle.callbacks import Fault

PIPELINES = 2
GLOBAL_BATCH = 12
STEPS = 4
"""Of an epoch."""
SAMPLES = GLOBAL_BATCH * STEPS
KILLED_AT, ENTERS_AT = 1, 6

Loader = Callable[[int], Any]
"""The loader for batches of a size."""


def as_rows() -> list[dict[str, Any]]:
    """The samples, as most formats keep them."""
    inputs, targets = dataset(SAMPLES)[:]
    return [{"x": x.tolist(), "y": y.tolist()} for x, y in zip(inputs, targets, strict=True)]


def as_tensors(row: dict[str, Any]) -> dict[str, Tensor]:
    return {name: torch.as_tensor(row[name], dtype=torch.float64) for name in "xy"}


class Perceptron(L.LightningModule):
    """An ordinary module, for batches that are dicts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = (self.layers(batch["x"]) - batch["y"]).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def train(run: L.Trainer, model: L.LightningModule, loader: Any, val: Any = None) -> dict[str, Tensor]:
    run.fit(model, loader, val)
    return model.state_dict()


def on_workers(loader: Loader, model: Any = Perceptron, killed: bool = False, **options: Any) -> tuple[Any, L.Trainer]:
    """The trained weights and the Trainer of a run on two workers, the second of which may be killed and replaced."""
    val = options.pop("val", lambda size: None)
    faults = [Fault("kill", 1, 0, KILLED_AT)] if killed else []
    callbacks = [*options.pop("callbacks", []), *([AwaitReplacement([ENTERS_AT])] if killed else [])]
    strategy = {"max_restarts": 1 if killed else 0, **options.pop("strategy", {})}
    run = grid_trainer(PIPELINES, 1, faults, strategy, max_epochs=2, callbacks=callbacks, **options)
    size = GLOBAL_BATCH // PIPELINES
    return train(run, model(), loader(size), val(size)), run


def check(loader: Loader, model: Any = Perceptron, judge: Loader | None = None, **options: Any) -> None:
    """The weights are those of one device, undisturbed and with a worker killed and replaced.

    Args:
        judge: the loader of the one device.
    """
    val = options.pop("val", lambda size: None)
    data = (judge or loader)(GLOBAL_BATCH), val(GLOBAL_BATCH)
    expected = train(on_one_device(max_epochs=2, **options), model(), *data)
    for killed in (False, True):
        weights, run = on_workers(loader, model, killed, val=val, **options)
        assert failures(run) == rejoined(run) == [(1, 0)] * killed
        assert difference(weights, expected) < TOLERANCE


def check_drawn(loader: Loader, model: Any = Perceptron, **options: Any) -> None:
    """The weights are those of the undisturbed run, for data whose random numbers are drawn by address."""
    expected, _ = on_workers(loader, model, **options)
    weights, run = on_workers(loader, model, killed=True, **options)
    assert failures(run) == rejoined(run) == [(1, 0)]
    assert difference(weights, expected) < TOLERANCE
