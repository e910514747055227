"""A module that measures and logs in every way that Lightning allows."""

from collections.abc import Callable
from typing import Any

import lightning as L
import torch
import torchmetrics
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.connectors.logger_connector.fx_validator import _FxValidator
from same_script import CLASSES, Classifier
from torch import Tensor
from torchmetrics.text import Perplexity

ACCURACY = {"task": "multiclass", "num_classes": CLASSES}


class Metered(Classifier):
    """Logs numbers and torchmetrics objects from the hooks that see outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.train_accuracy = torchmetrics.Accuracy(**ACCURACY)
        self.train_mean = torchmetrics.MeanMetric()
        self.accuracy = torchmetrics.Accuracy(**ACCURACY)
        self.perplexity = Perplexity()
        self.mean = torchmetrics.MeanMetric()
        self.collection = torchmetrics.MetricCollection({
            "precision": torchmetrics.Precision(average="macro", **ACCURACY),
            "recall": torchmetrics.Recall(average="macro", **ACCURACY),
            "auroc": torchmetrics.AUROC(**ACCURACY),  # keeps all outputs: its state is concatenated
        }, prefix="collected_")  # fmt: skip
        self.by_hand = torchmetrics.Accuracy(**ACCURACY)

    def on_training_output(self, output: Tensor, target: Tensor) -> None:
        self.train_accuracy(output, target)
        self.log("train_accuracy", self.train_accuracy, on_step=True, on_epoch=True)
        self.train_mean.update(output.mean(), weight=len(output))
        self.log("train_mean", self.train_mean, on_step=False, on_epoch=True)
        self.log("out_mean", output.mean(), on_step=True, on_epoch=True, prog_bar=True)
        self.log("out_max", output.max(), on_step=False, on_epoch=True, reduce_fx="max")
        self.log("out_min", output.min(), on_step=False, on_epoch=True, reduce_fx="min")
        self.log("seen", float(len(output)), on_step=True, on_epoch=True, reduce_fx="sum", logger=False)

    def _evaluated(self, phase: str, output: Tensor, target: Tensor) -> None:
        self.accuracy(output, target)
        self.perplexity(output.unsqueeze(1).float(), target.unsqueeze(1))
        self.mean.update(output.square().mean(), weight=len(output))
        self.collection.update(output, target)
        self.by_hand.update(output, target)
        self.log_dict({f"{phase}_accuracy": self.accuracy, f"{phase}_perplexity": self.perplexity})
        self.log(f"{phase}_mean_metric", self.mean)
        self.log_dict(self.collection)
        self.log(f"{phase}_step_and_epoch", output.mean(), on_step=True, on_epoch=True, batch_size=len(output))
        self.log(f"{phase}_max", output.max(), reduce_fx="max")
        self.log(f"{phase}_min", output.min(), reduce_fx="min")
        self.log(f"{phase}_sum", output.sum(), reduce_fx="sum")

    def on_validation_output(self, output: Tensor, target: Tensor) -> None:
        super().on_validation_output(output, target)
        self._evaluated("val", output, target)

    def on_validation_epoch_end(self) -> None:
        self.log("val_accuracy_by_hand", self.by_hand.compute())
        self.by_hand.reset()

    def on_test_output(self, output: Tensor, target: Tensor) -> None:
        super().on_test_output(output, target)
        self._evaluated("test", output, target)

    def on_predict_output(self, output: Tensor) -> dict[str, Any]:
        return {"class": output.argmax(-1), "logits": (output, output.exp())}


LOGGING_HOOKS = sorted(
    name
    for name, allowed in _FxValidator.functions.items()
    if allowed is not None and name.startswith("on_") and hasattr(L.LightningModule, name)
)


class LogsEverywhere(Classifier):
    """Logs in every hook of the module where Lightning allows it; the value tells when."""


class LogsEverywhereToo(Callback):
    """The same for a callback's hooks."""


def _logging_hook(name: str, who: str) -> Callable[..., None]:
    def log(module: Any) -> None:
        value = torch.tensor(1.0 + module.trainer.global_step, dtype=torch.float64)
        module.log(f"{who}/{name}", value)
        if name.endswith("batch_end"):
            module.log(f"{who}/{name}/sum", value, on_step=True, on_epoch=True, reduce_fx="sum")

    def module_hook(self: Any, *args: Any, **kwargs: Any) -> None:
        log(self)

    def callback_hook(self: Any, trainer: Any, module: Any, *args: Any, **kwargs: Any) -> None:
        log(module)

    return module_hook if who == "module" else callback_hook


def log_in_hooks(kind: type, who: str = "module") -> None:
    """Gives the class hooks that log, wherever Lightning allows it."""
    for name in LOGGING_HOOKS:
        setattr(kind, name, _logging_hook(name, who))


log_in_hooks(LogsEverywhere)
log_in_hooks(LogsEverywhereToo, "callback")
