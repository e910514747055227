"""The model of the template: a classifier that gets its network, optimizer and schedule from the configuration."""

from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torchmetrics import MaxMetric, MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score


class DenseNet(nn.Module):
    """Fully connected layers."""

    def __init__(self, input_size: int = 64, width: int = 64, output_size: int = 10) -> None:
        super().__init__()
        self.model = nn.Sequential(
            nn.Flatten(), nn.Linear(input_size, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()
        )
        self.head = nn.Linear(width, output_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.model(x))  # type: ignore[no-any-return]


class Classifier(L.LightningModule):
    """Classifies images.

    Args:
        net: images -> scores of the classes.
        optimizer: parameters -> optimizer.
        scheduler: optimizer -> learning-rate schedule; None for none.
        compile: whether to compile the network.
    """

    def __init__(
        self,
        net: nn.Module,
        optimizer: Callable[..., torch.optim.Optimizer],
        scheduler: Callable[..., Any] | None = None,
        compile: bool = False,
    ) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False, ignore=["net"])
        self.net = net
        self.criterion = nn.CrossEntropyLoss()
        self.train_loss = MeanMetric()
        scores = MetricCollection({"acc": MulticlassAccuracy(10, average="micro"), "f1": MulticlassF1Score(10)})
        self.val_scores, self.test_scores = scores.clone(prefix="val/"), scores.clone(prefix="test/")
        self.val_acc_best = MaxMetric()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)  # type: ignore[no-any-return]

    def setup(self, stage: str) -> None:
        if self.hparams["compile"] and stage == "fit":
            self.net = torch.compile(self.net)  # type: ignore[assignment]

    def on_train_start(self) -> None:
        self.val_scores.reset()  # of the sanity check
        self.val_acc_best.reset()

    def model_step(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """(loss, scores, classes) of a batch."""
        x, y = batch
        output = self(x)
        return self.criterion(output, y), output, y

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss, _, _ = self.model_step(batch)
        self.train_loss(loss)
        self.log("train/loss", self.train_loss, on_step=False, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        loss, output, y = self.model_step(batch)
        self.val_scores.update(output, y)
        self.log("val/loss", loss, on_step=False, on_epoch=True, prog_bar=True, sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        scores = self.val_scores.compute()
        self.log_dict(scores, prog_bar=True)
        self.val_scores.reset()
        self.val_acc_best(scores["val/acc"])
        self.log("val/acc_best", self.val_acc_best.compute(), sync_dist=True, prog_bar=True)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        loss, output, y = self.model_step(batch)
        self.test_scores(output, y)
        self.log("test/loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        self.log_dict(self.test_scores, on_step=False, on_epoch=True)

    def configure_optimizers(self) -> Any:
        assert self.trainer.model is not None
        optimizer = self.hparams["optimizer"](params=self.trainer.model.parameters())
        if self.hparams["scheduler"] is None:
            return {"optimizer": optimizer}
        scheduler = self.hparams["scheduler"](optimizer=optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val/loss"}}
