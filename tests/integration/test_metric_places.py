"""A torchmetrics object is whole wherever a user keeps it, or refused by name."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import lightning as L
import pytest
import torch
from support.growth import AwaitReplacement, rejoined
from support.training import grid_trainer, on_one_device
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanAbsoluteError, MeanSquaredError, Metric, MetricCollection

from lightning_recycle import ConfigurationError, UnsupportedFeatureError
from lightning_recycle.callbacks import Fault

BATCH, STEPS, EPOCHS = 24, 6, 2
GLOBAL = MeanAbsoluteError()


class Holder:
    def __init__(self) -> None:
        self.metric = MeanAbsoluteError()


@dataclass
class Record:
    metrics: dict[str, Metric] = field(default_factory=lambda: {"mae": MeanAbsoluteError()})


class Keeper(L.Callback):
    def __init__(self) -> None:
        self.metrics = [MeanAbsoluteError()]


class Data(L.LightningDataModule):
    def __init__(self, batch: int) -> None:
        super().__init__()
        self.batch, self.metrics = batch, (MeanAbsoluteError(),)

    def train_dataloader(self) -> Any:
        x = torch.randn(BATCH * STEPS, 8, generator=torch.Generator().manual_seed(1))
        return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), self.batch)

    val_dataloader = train_dataloader


class Model(L.LightningModule):
    """Has metrics at all places that can be found."""

    def __init__(self, by_hand: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = not by_hand
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 1))
        self.attribute = MeanAbsoluteError()
        self.list = [MeanAbsoluteError()]
        self.dict = {"mae": MeanAbsoluteError()}
        self.nested = {"train": [(MeanAbsoluteError(),)]}
        self.holder, self.record = Holder(), Record()
        self.collections = [MetricCollection([MeanAbsoluteError(), MeanSquaredError()])]
        self.made: list[Metric] = []
        self.checks = [MeanAbsoluteError()]
        self.history: list[dict[str, float]] = []

    def places(self) -> Mapping[str, Any]:
        keeper = next(c for c in self.trainer.callbacks if isinstance(c, Keeper))
        return {
            "attribute": self.attribute, "list": self.list[0], "dict": self.dict["mae"],
            "nested": self.nested["train"][0][0], "object": self.holder.metric, "dataclass": self.record.metrics["mae"],
            "collection": self.collections[0], "made in a hook": self.made[-1], "callback": keeper.metrics[0],
            "data module": self.trainer.datamodule.metrics[0],
        }  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any) -> Tensor:
        x, y = batch
        output = self(x)
        loss = nn.functional.mse_loss(output, y)
        for metric in self.places().values():
            metric.update(output.detach(), y)
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def validation_step(self, batch: Any) -> None:
        self.checks[0](self(batch[0]), batch[1])

    def on_validation_epoch_end(self) -> None:
        self.log("checked", self.checks[0].compute())
        self.checks[0].reset()

    def on_train_epoch_start(self) -> None:
        self.made.append(MeanAbsoluteError())

    def on_train_epoch_end(self) -> None:
        self.history.append(values(self.places()))
        self.log_dict(self.history[-1])
        if not self.current_epoch:
            for metric in self.places().values():
                metric.reset()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def values(places: Mapping[str, Any]) -> dict[str, float]:
    found = {}
    for place, metric in places.items():
        value = metric.compute()
        parts = value if isinstance(value, dict) else {"": value}
        found |= {f"{place} {name}".strip(): float(part) for name, part in parts.items()}
    return found


def seen(run: L.Trainer, model: Model) -> dict[str, Any]:
    """What the hooks saw in each epoch, what was logged, and what the objects of this process hold after the fit."""
    logged = {name: float(value) for name, value in run.callback_metrics.items() if not name.startswith("recycle/")}
    found = {"first": model.history[0], "last": model.history[1], "logged": logged, "after": values(model.places())}
    return {f"{when}: {name}": value for when, each in found.items() for name, value in each.items()}


@cache
def on_one() -> dict[str, Any]:
    run, model = on_one_device(max_epochs=EPOCHS, callbacks=[Keeper()]), Model()
    run.fit(model, datamodule=Data(BATCH))
    return seen(run, model)


def on_grid(stages: int, faults: Any = (), **kwargs: Any) -> L.Trainer:
    options = {"num_microbatches": 2, "max_restarts": 10}
    return grid_trainer(2, stages, faults, options, **{"max_epochs": EPOCHS, **kwargs})


@pytest.mark.parametrize(
    ("stages", "by_hand"),
    [pytest.param(1, False, marks=pytest.mark.long), (1, True), (2, False)],
    ids=["2x1", "by hand", "2x2"],
)
def test_a_metric_is_whole_wherever_it_is_kept_also_after_a_replacement(stages, by_hand):
    run = on_grid(stages, [Fault("kill", 1, stages - 1, step=2)], callbacks=[Keeper(), AwaitReplacement([4])])
    model = Model(by_hand)
    run.fit(model, datamodule=Data(BATCH // 2))
    assert rejoined(run) == [(1, stages - 1)]
    assert seen(run, model) == pytest.approx(on_one(), rel=1e-5)


class OfTheScript(Model):
    def places(self) -> Mapping[str, Any]:
        return {"global": GLOBAL}


class MadeInAStep(Model):
    def places(self) -> Mapping[str, Any]:
        self.late: dict[str, Metric]
        if not hasattr(self, "late"):
            self.late = {}
        return {"late": self.late.setdefault("mae", MeanAbsoluteError())}


@pytest.mark.parametrize("stages", [1, pytest.param(2, marks=pytest.mark.long)])
@pytest.mark.parametrize(("model", "message"), [
    (OfTheScript, r"MeanAbsoluteError\.compute\(\).*attribute of the module"),
    (MadeInAStep, r"late .*a MeanAbsoluteError is made in the step; make it in __init__\(\)"),
])  # fmt: skip
def test_a_share_is_refused_by_name(model, message, stages):
    with pytest.raises((ConfigurationError, UnsupportedFeatureError), match=message):
        on_grid(stages, num_sanity_val_steps=0).fit(model(), datamodule=Data(BATCH // 2))


class ForValuesOfBatches(Model):
    """Uses a global as a function, whose values are logged."""

    def places(self) -> Mapping[str, Any]:
        return {}

    def training_step(self, batch: Any) -> Tensor:
        self.log("now", GLOBAL(self(batch[0]), batch[1]), on_step=False, on_epoch=True)
        return super().training_step(batch)


def test_values_of_batches_need_no_place():
    logged = []
    for run, batch in ((on_one_device(max_epochs=1), BATCH), (on_grid(1, max_epochs=1), BATCH // 2)):
        run.fit(ForValuesOfBatches(), datamodule=Data(batch))
        logged.append(float(run.callback_metrics["now"]))
    assert logged[1] == pytest.approx(logged[0], rel=1e-5)
