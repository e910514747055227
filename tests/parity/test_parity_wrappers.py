"""torchmetrics' wrappers, through a Trainer with two workers and a kill: equal to one device, or refused by name."""

from collections.abc import Mapping
from typing import Any

import lightning as L
import pytest
import torch
from ordinary_runs import Kill, killing
from support.sampling import sampled
from support.training import grid_trainer, on_one_device
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric, Metric, MetricCollection, SumMetric
from torchmetrics.aggregation import RunningMean, RunningSum
from torchmetrics.classification import MulticlassAccuracy, MulticlassRecall
from torchmetrics.regression import MeanAbsoluteError, MeanSquaredError
from torchmetrics.wrappers import (
    BootStrapper,
    ClasswiseWrapper,
    MetricTracker,
    MinMaxMetric,
    MultioutputWrapper,
    MultitaskWrapper,
    Running,
)

from lightning_recycle.errors import UnsupportedFeatureError

CLASSES = 3


def accuracies() -> MetricCollection:
    """Metrics of one compute group, and another."""
    measures: dict[str, Any] = {
        "accuracy": MulticlassAccuracy(CLASSES),
        "recall": MulticlassRecall(CLASSES, average="macro"),
        "by_class": ClasswiseWrapper(MulticlassAccuracy(CLASSES, average=None)),
    }
    return MetricCollection(measures)


class Wrapped(L.LightningModule):
    """Updates wrappers in its steps, and keeps what they amount to after each epoch."""

    kill: Kill | None = None

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, CLASSES)).double()
        self.wrappers = nn.ModuleDict(
            {
                "classwise": ClasswiseWrapper(MulticlassAccuracy(CLASSES, average=None), labels=["a", "b", "c"]),
                "collection": accuracies(),
                "tasks": MultitaskWrapper({"one": accuracies(), "other": MulticlassAccuracy(CLASSES)}),
            }
        )
        self.outputs = nn.ModuleDict(
            {
                "outputs": MultioutputWrapper(MeanSquaredError(), CLASSES),
                "absolute": MultioutputWrapper(MeanAbsoluteError(), CLASSES),
            }
        )
        self.windows = nn.ModuleDict(
            {
                "sum": Running(SumMetric(), window=3),
                "mean": RunningMean(window=5),
                "called_sum": RunningSum(window=3),
                "called_mean": Running(MeanMetric(), window=3),
            }
        )
        self.tracked = nn.ModuleDict(
            {"tracker": MetricTracker(MulticlassAccuracy(CLASSES)), "trackers": MetricTracker(accuracies())}
        )
        self.tracked["tracked_outputs"] = MetricTracker(MultioutputWrapper(MeanSquaredError(), CLASSES), maximize=False)
        self.validated = MetricTracker(accuracies())
        self.found: list[dict[str, Any]] = []

    def on_train_epoch_start(self) -> None:
        for tracker in self.tracked.values():
            tracker.increment()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.kill is not None:
            self.kill.reached(self.trainer, "training", batch_idx)
        x, y = batch
        out = self.net(x)
        loss = nn.functional.cross_entropy(out, y)
        answers, hot = out.detach(), nn.functional.one_hot(y, CLASSES).double()
        for name, wrapper in self.wrappers.items():
            if name == "tasks":
                wrapper.update(dict.fromkeys(("one", "other"), answers), dict.fromkeys(("one", "other"), y))
            else:
                wrapper.update(answers, y)
        self.outputs["outputs"].update(answers, hot)
        self.outputs["absolute"](answers, hot)
        for name, window in self.windows.items():
            value = x.sum() if "sum" in name else x.mean()
            (window if "called" in name else window.update)(value)
        for name, tracker in self.tracked.items():
            tracker.update(answers, hot if name == "tracked_outputs" else y)
        return loss

    def on_validation_epoch_start(self) -> None:
        self.validated.increment()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated.update(self.net(batch[0]), batch[1])

    def on_validation_epoch_end(self) -> None:
        self.log_dict({f"best_{name}": value for name, value in self.validated.best_metric().items()})

    def on_train_epoch_end(self) -> None:
        metrics = {**self.wrappers, **self.outputs, **self.windows, **self.tracked}
        found = {name: metric.compute() for name, metric in metrics.items()}
        found |= {f"all_{name}": tracker.compute_all() for name, tracker in self.tracked.items()}
        found["best"] = self.tracked["tracker"].best_metric(return_step=True)
        for metric in (*self.wrappers.values(), *self.outputs.values()):
            metric.reset()
        self.found.append(found)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(module: L.LightningModule, workers: int, **strategy: Any) -> L.Trainer:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(48, 8, generator=generator, dtype=torch.float64)
    data = TensorDataset(x, torch.randint(CLASSES, (48,), generator=generator))
    loader = DataLoader(data, batch_size=8 // workers)
    options = {"max_epochs": 3, "num_sanity_val_steps": 0}
    grid = {"num_microbatches": 2, **strategy}
    trainer = on_one_device(**options) if workers == 1 else grid_trainer(workers, 1, (), grid, **options)
    with killing(getattr(module, "kill", None)):
        trainer.fit(module, loader, loader)
    return trainer


def flat(value: Any, path: str = "") -> dict[str, Any]:
    """The numbers in ``value``, by place."""
    if isinstance(value, Mapping):
        return {k: v for key, item in value.items() for k, v in flat(item, f"{path}.{key}").items()}
    if isinstance(value, list | tuple):
        return {k: v for key, item in enumerate(value) for k, v in flat(item, f"{path}.{key}").items()}
    return {path: torch.as_tensor(value).double()}


@pytest.fixture(scope="module")
def one_device() -> dict[str, Any]:
    module = Wrapped()
    trainer = fit(module, 1)
    return flat({"found": module.found, "logged": trainer.callback_metrics})


@pytest.mark.parametrize("restarts", sampled([False, True], 1, rest=pytest.mark.long), ids=["survivors", "replacement"])
@pytest.mark.parametrize("killed", sampled([0, 1], 1, rest=pytest.mark.long))
def test_wrappers_equal_those_of_one_device(killed, restarts, one_device, tmp_path):
    module = Wrapped()
    module.kill = Kill(killed, "training", 8, tmp_path / "killed")
    trainer = fit(module, 2, max_restarts=10 if restarts else 0)
    assert [event.kind for event in trainer.strategy.history].count("failure") == 1
    found = flat({"found": module.found, "logged": trainer.callback_metrics})
    found = {name: value for name, value in found.items() if "recycle/" not in name}
    assert found.keys() == one_device.keys()
    wrong = {
        name: (found[name], value)
        for name, value in one_device.items()
        if not torch.allclose(found[name], value, rtol=1e-5, atol=1e-6, equal_nan=True)
    }
    assert not wrong
    assert [len(tracker) for tracker in module.tracked.values()] == [4, 4, 4]


class Refused(L.LightningModule):
    def __init__(self, metric: Metric | MetricCollection) -> None:
        super().__init__()
        self.net, self.metric = nn.Linear(8, 1).double(), metric

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.metric.update(self.net(batch[0])[:, 0], batch[1])
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize(("metric", "path"), [
    (MinMaxMetric(MeanSquaredError()), "metric"),
    (BootStrapper(MeanSquaredError()), "metric"),
    (MetricCollection({"a": MeanAbsoluteError(), "b": BootStrapper(MeanSquaredError())}), "metric.b"),
], ids=["MinMaxMetric", "BootStrapper", "in a collection"])  # fmt: skip
def test_wrappers_that_need_whole_batches_are_refused_by_name(metric, path):
    name = type(metric["b"] if isinstance(metric, MetricCollection) else metric).__name__
    with pytest.raises(UnsupportedFeatureError, match=rf"The metric {path} \({name}\)"):
        fit(Refused(metric), 2)


class Increments(Refused):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 0:
            self.metric.increment()
        return super().training_step(batch, batch_idx)


def test_a_tracker_that_grows_in_a_step_is_refused():
    tracker: Any = MetricTracker(MeanSquaredError(), maximize=False)
    with pytest.raises(UnsupportedFeatureError, match=r"metric\.increment\(\) was called in a step"):
        fit(Increments(tracker), 2)
