"""What cannot be supported is refused in the launching process, before a worker starts, with the value and a remedy."""

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.tuner import Tuner
from ordinary_refusals import REFUSALS, Refusal, check
from same_script import Classifier, Data, Session, assert_same, on_a_grid
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset

from lightning_recycle import UnsupportedFeatureError


class OwnTrainingStep(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return functional.cross_entropy(self(batch[0]), batch[1])


class OwnValidationStep(Classifier):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", 0.0)


class OwnTestStep(Classifier):
    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...


class OwnPredictStep(Classifier):
    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...


class OwnBackward(Classifier):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward()


class OwnZeroGrad(Classifier):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None: ...


class Manual(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


def fit(module: Callable[[], Any] = Classifier, **kwargs: Any) -> Callable[[Session], None]:
    def script(session: Session) -> None:
        session.fit(module(), **kwargs)

    return script


def in_loss(session: Session) -> None:
    session.fit(LogsInLoss(), max_steps=1)


class LogsInLoss(Classifier):
    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        loss = super().loss(output, target)
        self.log("inner", loss.detach())
        return loss


class Pairs(IterableDataset[Any]):
    """A stream."""

    def __iter__(self) -> Any:
        return iter(range(100))

    def state_dict(self) -> Any:
        return {}

    def load_state_dict(self, state: Any) -> None: ...


def combined_with_a_stream(session: Session) -> None:
    loaders = {"a": session.data.training(), "b": DataLoader(Pairs(), batch_size=4)}
    session.trainer(max_steps=1).fit(Classifier(), loaders)


class CombinedData(L.LightningDataModule):
    def __init__(self, data: Data) -> None:
        super().__init__()
        self.data = data

    def train_dataloader(self) -> Any:
        return [self.data.training(), DataLoader(Pairs(), batch_size=4)]


def combined_by_a_data_module(session: Session) -> None:
    session.trainer(max_steps=1).fit(Classifier(), datamodule=CombinedData(session.data))


def finds_a_rate(session: Session) -> None:
    Tuner(session.trainer(max_steps=1)).lr_find(Classifier(), session.data.training())


def finds_a_size(session: Session) -> None:
    Tuner(session.trainer(max_steps=1)).scale_batch_size(Classifier(), session.data.training())


OF_PIPELINES: dict[str, tuple[Callable[[Any], None], tuple[str, ...]]] = {
    "Tuner.lr_find": (finds_a_rate, ("LearningRateFinder", "Tuner.lr_find", "one device")),
    "Tuner.scale_batch_size": (finds_a_size, ("BatchSizeFinder", "Tuner.scale_batch_size", "one device")),
    "manual optimization": (fit(Manual), ("manual optimization", "automatic_optimization")),
    "training_step": (fit(OwnTrainingStep), ("OwnTrainingStep.training_step()", "on_training_output()")),
    "validation_step": (fit(OwnValidationStep), ("validation_step()", "on_validation_output()")),
    "test_step": (fit(OwnTestStep), ("test_step()", "on_test_output()")),
    "predict_step": (fit(OwnPredictStep), ("predict_step()", "on_predict_output()")),
    "backward": (fit(OwnBackward), ("OwnBackward.backward()", "schedule")),
    "optimizer_zero_grad": (fit(OwnZeroGrad), ("optimizer_zero_grad()", "zeroed")),
    "a stream among several loaders": (combined_with_a_stream, ("Pairs", "__getitem__()", "one IterableDataset")),
}

BY_A_WORKER: dict[str, tuple[Callable[[Session], None], list[str]]] = {
    "self.log in loss()": (in_loss, ["self.log('inner'", "on_training_output()"]),
    "a stream among several loaders of a data module": (combined_by_a_data_module, ["Pairs", "one IterableDataset"]),
}


@pytest.mark.filterwarnings("ignore:.*nodes.*", "ignore:.*experimental.*")
@pytest.mark.parametrize("name", [*REFUSALS, *OF_PIPELINES])
def test_it_is_refused_before_anything_starts(tmp_path, name, monkeypatch):
    monkeypatch.setenv("RECYCLE_LISTEN", "127.0.0.1:0")
    check(REFUSALS.get(name) or Refusal((), *OF_PIPELINES[name]), 2, True, tmp_path, monkeypatch)


@pytest.mark.parametrize("name", BY_A_WORKER)
def test_what_only_a_worker_sees_is_refused_in_the_launching_process_too(tmp_path, name):
    script, words = BY_A_WORKER[name]
    with pytest.raises(UnsupportedFeatureError) as caught:
        on_a_grid(script, tmp_path)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    "path", ["precision_plugin", "fit_loop", "fit_loop.epoch_loop", "fit_loop.epoch_loop.manual_optimization"]
)
def test_a_part_of_the_trainer_that_would_not_be_used_is_refused(path):
    run = L.Trainer(accelerator="cpu", devices=2, strategy="recycle", logger=False)
    part = attrgetter(path)(run)
    part.__class__ = type("Own", (type(part),), {"__module__": __name__})
    with pytest.raises(UnsupportedFeatureError, match=f"Own as trainer.{path}:"):
        run.fit(BoringModel())


@pytest.mark.parametrize(
    "callback", [OnExceptionCheckpoint("somewhere"), ModelCheckpoint("somewhere", save_on_exception=True)]
)
def test_nobody_tells_workers_from_outside_to_save(callback, tmp_path, monkeypatch):
    monkeypatch.setenv("RECYCLE_COORDINATOR", "127.0.0.1:1")
    monkeypatch.setenv("RECYCLE_KEY", "a secret of 16 bytes or more")
    with pytest.raises(UnsupportedFeatureError, match="started by hand"):
        on_a_grid(fit(callbacks=[callback], enable_checkpointing=True), tmp_path)


class NeedsSetup(Classifier):
    """Its optimizer depends on what exists in the workers only."""

    def setup(self, stage: str) -> None:
        self.file = open(__file__)  # noqa: SIM115

    def configure_optimizers(self) -> Any:
        assert self.file.readable()
        return super().configure_optimizers()

    def teardown(self, stage: str) -> None:
        self.file.close()


@pytest.mark.parametrize(
    ("module", "strategy", "reason"),
    [(Classifier, {"save_distributed_checkpoint": True}, "stay in the workers"), (NeedsSetup, {}, "'file'")],
)
def test_without_its_optimizers_the_launching_process_saves_weights_and_refuses_to_save_more(
    module, strategy, reason, tmp_path
):
    run = on_a_grid(fit(module, max_steps=1), tmp_path, **strategy)
    assert run.trainer.optimizers == []
    with pytest.raises(UnsupportedFeatureError, match="weights_only=True") as refusal:
        run.trainer.save_checkpoint(tmp_path / "all.ckpt")
    assert reason in str(refusal.value)
    run.trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    loaded = Classifier.load_from_checkpoint(tmp_path / "weights.ckpt")
    assert_same(loaded.state_dict(), run.weights)
    assert run.files() == ["weights.ckpt"]
