"""Cases of docs/trainer_flags.md for an ordinary module: loggers, and what is logged."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
import same_script as same
import torch
from collecting import Collecting
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import grad_norm
from metered import LOGGING_HOOKS, LogsEverywhereToo, Metered, log_in_hooks
from metered import LogsEverywhere as PipelineLogsEverywhere
from ordinary_flags import fits
from ordinary_runs import Case, Ordinary, Session, WithExample, board, csv_rows, to_both
from torch import Tensor, nn
from torchmetrics import AUROC, F1Score, MaxMetric, MeanMetric, MetricCollection

from lightning_recycle import LayerSpec


class LogsNorms(Ordinary):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(grad_norm(self, norm_type=2))


class PipelineLogsNorms(same.Classifier):
    """Logs norms of the module and of a layer, on all workers; stages share a weight."""

    def configure_pipeline(self) -> list[Any]:
        torch.manual_seed(0)
        layers: list[Any] = [nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, same.CLASSES)]
        layers[2].weight = layers[0].weight
        return [layer.double() for layer in layers]

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norms = grad_norm(self, norm_type=2)
        self.log_dict(norms)
        self.log("largest", grad_norm(self, "inf")["grad_inf_norm_total"])
        self.log("of_a_layer", grad_norm(self.layers[2], 1)["grad_1.0_norm_total"])
        for kind in ("max", "min"):
            total = torch.as_tensor(norms["grad_2.0_norm_total"])
            self.log(f"{kind}_of_workers", self.trainer.strategy.reduce(total, reduce_op=kind))


class Collects(Ordinary):
    """Evaluates what its steps have collected in attributes at the end of an epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Tensor] = []
        self.trained: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        returned = super().training_step(batch, batch_idx)
        self.trained.append(returned["predicted"])
        return returned

    def on_train_epoch_end(self) -> None:
        self.log("trained", torch.cat(self.trained).double().std())
        self.trained.clear()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        output = super().validation_step(batch, batch_idx)
        self.outputs.append(output)
        return output

    def on_validation_epoch_end(self) -> None:
        self.log("median", torch.cat(self.outputs).median(), sync_dist=True)
        self.outputs.clear()


class LogsEverywhere(Ordinary):
    """Logs in its steps, in Lightning's ways, and in every hook where that is allowed."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        returned = super().training_step(batch, batch_idx)
        x = batch[0]
        reduced = {"mean": x.mean(), "sum": float(len(x)), "min": x.min(), "max": x.max()}
        for reduction, value in reduced.items():
            self.log(reduction, value, on_step=False, on_epoch=True, reduce_fx=reduction)
        self.log("weighted", batch[0].mean(), on_step=False, on_epoch=True, batch_size=len(batch[0]))
        self.log("silent", returned["loss"], logger=False, prog_bar=True)
        self.log_dict({"a/one": returned["loss"].detach(), "a/two": 2.0}, on_step=True, on_epoch=False)
        return returned


log_in_hooks(LogsEverywhere)


def logs_everywhere(session: Session) -> None:
    fits(LogsEverywhere, PipelineLogsEverywhere, callbacks=lambda root: [LogsEverywhereToo()])(session)


EVERYWHERE = {
    f"{who}/{hook}"
    for who in ("module", "callback")
    for hook in LOGGING_HOOKS
    if "test" not in hook and "predict" not in hook
}


class Measures(Ordinary):
    """Metrics of each kind: in a collection, with a state that is a list, and in a list of modules."""

    def __init__(self) -> None:
        super().__init__()
        kinds = {"f1": F1Score, "auroc": AUROC}
        made = {name: kind("multiclass", num_classes=same.CLASSES) for name, kind in kinds.items()}
        self.measures = MetricCollection(made, prefix="val_")
        self.means = nn.ModuleList([MeanMetric(), MaxMetric()])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        returned = super().training_step(batch, batch_idx)
        for name, metric in zip(("mean_x", "max_x"), self.means, strict=True):
            metric(batch[0])
            self.log(name, metric, on_step=True, on_epoch=True)
        return returned

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        output = super().validation_step(batch, batch_idx)
        self.measures.update(output.softmax(1), batch[1])
        self.log_dict(self.measures)
        return output


MEASURED = {"val_f1", "val_auroc", "max_x_epoch"}
METERED = {
    "train_accuracy_step", "train_accuracy_epoch", "train_mean", "out_mean_step", "out_mean_epoch", "out_max",
    "out_min", "seen_step", "seen_epoch", "val_loss", "val_accuracy", "val_accuracy_by_hand", "val_perplexity",
    "val_mean_metric", "collected_precision", "collected_recall", "collected_auroc", "val_step_and_epoch_epoch",
    "val_max", "val_min", "val_sum",
}  # fmt: skip


def measured(session: Session) -> None:
    """In all phases, also of a small batch and of several loaders."""
    fits(Measures, Metered)(session)
    module, trainer, data, results = session.run.module, session.run.trainer, session.data, session.run.results
    results["fit"] = session.run.metrics
    results["validate"] = trainer.validate(module, data.validation(), verbose=False)
    results["test"] = trainer.test(module, [data.validation(), data.loader(3, seed=3)], verbose=False)
    trainer.predict(module, data.validation(), return_predictions=False)
    results["predict"] = trainer.predict(module, [data.validation(), data.loader(3, seed=3)])


class Service(Logger):
    """A logger of a service: keeps what it is told in a file, as those do that cannot be installed here."""

    def __init__(self, root: Path) -> None:
        self.path = root / "service.log"

    @property
    def name(self) -> str:
        return "service"

    @property
    def version(self) -> str:
        return "0"

    def _note(self, *what: Any) -> None:
        if L.pytorch.utilities.rank_zero_only.rank == 0:
            with self.path.open("a") as file:
                file.write(f"{what}\n")

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self._note("hyperparameters")

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self._note(step, {name: round(value, 9) for name, value in metrics.items()})

    def log_graph(self, model: Any, input_array: Any = None) -> None:
        self._note("graph")

    def save(self) -> None:
        """What it keeps is in the file."""

    def after_save_checkpoint(self, checkpoint_callback: ModelCheckpoint) -> None:
        self._note("checkpoint", Path(checkpoint_callback.best_model_path).name)

    def finalize(self, status: str) -> None:
        self._note("finalize", status)


class PipelineOfRecipes(same.Classifier):
    """With an example; no worker builds the layers of other stages."""

    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = torch.zeros(2, 8, dtype=torch.float64)

    def configure_pipeline(self) -> list[Any]:
        widths = [(8, 16), (16, same.CLASSES)]
        return [LayerSpec(nn.Linear, *width, dtype=torch.float64) for width in widths]


def told(session: Session) -> None:
    fits(
        trainer=lambda root: {"logger": [Service(root), CSVLogger(root, name="csv", version=0)]},
        callbacks=lambda root: [ModelCheckpoint(root / "saved", every_n_train_steps=2)],
        enable_checkpointing=True,
    )(session)
    lines = (session.root / "service.log").read_text().splitlines()
    session.run.results["told"] = sorted(set(lines))  # a new leader may tell the rows of the newest steps again


def to_board_with_graph(root: Path) -> dict[str, Any]:
    return {"logger": TensorBoardLogger(root, name="board", version=0, log_graph=True)}


def layers_in_the_graph(run: same.Run) -> set[str]:
    """The linear layers in the graph that the TensorBoard logger wrote."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(run.root / "board" / "version_0"))
    accumulator.Reload()
    return {part for node in accumulator.Graph().node for part in node.name.split("/") if part.startswith("Linear")}


def with_graph(session: Session) -> None:
    fits(WithExample, PipelineOfRecipes, trainer=to_board_with_graph)(session)
    session.run.results["layers"] = sorted(layers_in_the_graph(session.run))


LOGGERS: dict[str, Case] = {
    "CSVLogger": Case(("`CSVLogger`",), fits(log_every_n_steps=2), lambda run: len(csv_rows(run)) > 5),
    "TensorBoardLogger": Case(("`TensorBoardLogger`",), fits(trainer=to_both),
        lambda run: len(board(run)["train_loss_step"]) == 8),
    "TensorBoardLogger with the graph": Case(("`TensorBoardLogger`",), with_graph,
        lambda run: len(run.results["layers"]) >= 2),
    "a logger of a service": Case(("`CSVLogger`", "`logger`, `callbacks`"), told,
        lambda run: any("finalize" in line for line in run.results["told"])),
    "self.log in steps and hooks": Case(("`self.log`, `self.log_dict`", "the same metrics on every worker"),
        logs_everywhere, lambda run: {name.removesuffix("_epoch") for name in run.metrics} >= EVERYWHERE),
    "outputs collected in attributes": Case(("outputs collected in attributes",), fits(Collects, Collecting),
        lambda run: "trained" in run.metrics and any("median" in name for name in run.metrics), at=("validation", 1)),
    "grad_norm": Case(("`grad_norm` in hooks",), fits(LogsNorms, PipelineLogsNorms),
        lambda run: "grad_2.0_norm_total" in run.metrics),
    "torchmetrics": Case(("torchmetrics as attributes",), measured,
        lambda run: (METERED if isinstance(run.module, Metered) else MEASURED) <= run.results["fit"].keys(),
        differs=("module collection", "module by_hand._update_count")),
}  # fmt: skip
