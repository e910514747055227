"""A LightningModule that knows nothing of pipelines trains as on one device, with one stage, whoever dies."""

import copy
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from support.growth import AwaitReplacement, rejoined
from support.sampling import sampled
from support.training import difference, failures, grid_trainer, on_one_device
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import Accuracy

from lightning_recycle import ReCycleError, ReCycleStrategy
from lightning_recycle.callbacks import Fault

BATCH = 24
STEPS = 6  # of an epoch
EPOCHS = 2


class Classifier(L.LightningModule):
    """Logs values and metrics in all of Lightning's ways, and returns more than a loss."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(dropout))
        self.head = nn.Linear(16, 3)
        self.accuracy = Accuracy("multiclass", num_classes=3)
        self.validation_accuracy = Accuracy("multiclass", num_classes=3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        output = self(x)
        loss = nn.functional.cross_entropy(output, y)
        self.accuracy(output, y)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        self.log("train_accuracy", self.accuracy, on_step=False, on_epoch=True)
        self.log("largest", x.max(), on_step=False, on_epoch=True, reduce_fx="max")
        self.log("batch", float(batch_idx), on_step=False, on_epoch=True, reduce_fx="max")
        return {"loss": loss, "predicted": output.argmax(1)}

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        output = self(x)
        self.validation_accuracy.update(output, y)
        self.log_dict({"val_loss": nn.functional.cross_entropy(output, y)})
        self.log("val_accuracy", self.validation_accuracy)
        return output

    def test_step(self, batch: Any) -> None:
        self.log("test_loss", nn.functional.cross_entropy(self(batch[0]), batch[1]))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)}


class Returned(L.Callback):
    """What reaches a callback of the steps."""

    def __init__(self) -> None:
        self.training: list[Tensor] = []
        self.validation: list[Tensor] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.training.append(outputs["predicted"].cpu())

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.validation.append(outputs.detach().cpu())

    def state_dict(self) -> dict[str, Any]:
        return {"training": self.training, "validation": self.validation}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


def data(samples: int = BATCH * STEPS + 7) -> TensorDataset:
    x = torch.randn(samples, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return TensorDataset(x, (x.sum(1) > 0).long() + (x[:, 0] > 0).long())


def on_grid(pipelines: int, faults: Any = (), strategy: Any = None, **kwargs: Any) -> L.Trainer:
    return grid_trainer(pipelines, 1, faults, strategy, **{"max_epochs": EPOCHS, **kwargs})


def everything(trainer: L.Trainer, batch: int) -> dict[str, Any]:
    """Fits, tests and predicts; returns what a user sees of it."""
    model = Classifier().double()
    loader = DataLoader(data(), batch)
    trainer.fit(model, DataLoader(data(), batch, drop_last=True), loader)
    lost = failures(trainer) if isinstance(trainer.strategy, ReCycleStrategy) else []
    fitted = {n: float(v) for n, v in trainer.callback_metrics.items() if not n.startswith("recycle/")}
    tested = trainer.test(model, loader, verbose=False)
    predicted = torch.cat(trainer.predict(model, loader))
    metrics = {**fitted, **tested[0]}
    return {"weights": model.state_dict(), "metrics": metrics, "predicted": predicted, "lost": lost}


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert difference(found["weights"], expected["weights"]) < 1e-10
    assert found["metrics"] == pytest.approx(expected["metrics"], rel=1e-6)
    assert torch.allclose(found["predicted"], expected["predicted"], rtol=0, atol=1e-10)


@pytest.fixture(scope="module")
def alone() -> tuple[dict[str, Any], Returned]:
    returned = Returned()
    return everything(on_one_device(max_epochs=EPOCHS, callbacks=[returned]), BATCH), returned


@pytest.mark.parametrize("microbatches", sampled([None, 2], 1, rest=pytest.mark.long))
@pytest.mark.parametrize(
    "faults",
    sampled([[], [Fault("kill", 1, 0, step=3), Fault("kill", 2, 0, step=8)]], 1, rest=pytest.mark.long),
    ids=["", "kills"],
)
def test_all_that_a_user_sees_is_that_of_one_device(alone, microbatches, faults):
    expected, seen = alone
    returned = Returned()
    run = on_grid(3, faults, {"num_microbatches": microbatches}, callbacks=[returned])
    found = everything(run, BATCH // 3)
    assert_equal(found, expected)
    assert found["lost"] == [(fault.pipeline, 0) for fault in faults]
    ours, theirs = ([*each.training, *each.validation] for each in (returned, seen))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


@pytest.mark.long
def test_a_replacement_joins(alone):
    faults = [Fault("kill", 1, 0, step=3)]
    run = on_grid(2, faults, {"max_restarts": 10, "num_microbatches": 3}, callbacks=[AwaitReplacement([6])])
    model = Classifier().double()
    run.fit(model, DataLoader(data(), BATCH // 2, drop_last=True), DataLoader(data(), BATCH // 2))
    assert rejoined(run) == [(1, 0)]
    assert difference(model.state_dict(), alone[0]["weights"]) < 1e-10


@pytest.mark.long
def test_dropout_is_the_same_whoever_computes():
    def weights(faults: list[Fault]) -> dict[str, Tensor]:
        model = Classifier(dropout=0.5).double()
        on_grid(3, faults, {"num_microbatches": 2}).fit(model, DataLoader(data(), BATCH // 3, drop_last=True))
        return model.state_dict()

    assert difference(weights([]), weights([Fault("kill", 0, 0, step=2)])) < 1e-10


@pytest.mark.parametrize("sharded", sampled([False, True], 1, rest=pytest.mark.long))
def test_a_checkpoint_resumes_on_another_grid_and_on_one_device(alone, sharded, tmp_path):
    saves = ModelCheckpoint(tmp_path, save_top_k=-1, every_n_train_steps=4, filename="{step}")
    strategy = {"save_distributed_checkpoint": sharded}
    run = on_grid(3, strategy=strategy, enable_checkpointing=True, callbacks=[saves], max_epochs=1)
    run.fit(Classifier().double(), DataLoader(data(), BATCH // 3, drop_last=True), DataLoader(data(), BATCH // 3))
    path = tmp_path / "step=4.ckpt"
    resumed = Classifier().double()
    on_grid(2).fit(resumed, DataLoader(data(), BATCH // 2, drop_last=True), ckpt_path=path)
    assert difference(resumed.state_dict(), alone[0]["weights"]) < 1e-10
    if not sharded:
        assert set(torch.load(path, weights_only=True)["state_dict"]) == set(Classifier().state_dict())


def test_a_frozen_module_is_evaluated():
    model = Classifier().double().requires_grad_(False)
    loader = DataLoader(data(), 8)
    (ours,) = on_grid(2).validate(model, loader, verbose=False)
    (theirs,) = on_one_device().validate(model, DataLoader(data(), 16), verbose=False)
    assert {name: ours[name] for name in theirs} == pytest.approx(theirs)


class OwnBackward(Classifier):
    def backward(self, loss: Tensor) -> None:
        super().backward(2 * loss)


def test_the_users_backward_is_called():
    ours, theirs = OwnBackward().double(), OwnBackward().double()
    on_one_device(max_steps=3).fit(theirs, DataLoader(data(), BATCH, drop_last=True))
    on_grid(2, max_steps=3).fit(ours, DataLoader(data(), BATCH // 2, drop_last=True))
    assert difference(ours.state_dict(), theirs.state_dict()) < 1e-10
    assert difference(ours.state_dict(), Classifier().double().state_dict()) > 1e-3


class MeanTeacher(Classifier):
    """Its steps learn from an average that moves between forward and backward, when the last gradients are there."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.head).requires_grad_(False)
        self.seen: list[float] = []
        self.seen_at_start: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.seen_at_start.append(self.gradient_norm())

    def gradient_norm(self) -> float:
        gradient = self.head.bias.grad
        return 0.0 if gradient is None else float(gradient.norm())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, _ = batch
        distance = (self(x) - self.teacher(self.body(x).detach())).pow(2).mean()
        return super().training_step(batch, batch_idx)["loss"] + distance

    @torch.no_grad()
    def on_before_zero_grad(self, _: Any) -> None:
        self.seen.append(self.gradient_norm())
        for average, parameter in zip(self.teacher.parameters(), self.head.parameters(), strict=True):
            average.lerp_(parameter, 0.1 * (1 + self.seen[-1]))


@pytest.mark.parametrize("batches", [pytest.param(1, marks=pytest.mark.long), 2])
def test_gradients_are_zeroed_between_the_forward_and_the_backward(batches):
    """A replacement has those of the step before it came."""
    ours, theirs = MeanTeacher().double(), MeanTeacher().double()
    options: Any = {"max_epochs": EPOCHS, "accumulate_grad_batches": batches}
    on_one_device(**options).fit(theirs, DataLoader(data(), BATCH, drop_last=True))
    faults = [Fault("kill", 1, 0, step=2), Fault("kill", 0, 0, step=7)]
    run = on_grid(2, faults, {"max_restarts": 10}, callbacks=[AwaitReplacement([5 // batches])], **options)
    run.fit(ours, DataLoader(data(), BATCH // 2, drop_last=True))
    assert failures(run) == [(1, 0), (0, 0)]
    assert rejoined(run)[0] == (1, 0)
    assert difference(ours.state_dict(), theirs.state_dict()) < 1e-10
    assert ours.seen == pytest.approx(theirs.seen)
    assert ours.seen_at_start == pytest.approx(theirs.seen_at_start)


class WithBranches(Classifier):
    """Some parameters have no part in some steps, or in any."""

    def __init__(self) -> None:
        super().__init__()
        self.never, self.sometimes = nn.Linear(8, 3), nn.Linear(8, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        output = self(x) + (self.sometimes(x) if batch_idx % 2 else 0)
        return nn.functional.cross_entropy(output, y)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1)


def test_a_parameter_without_a_part_in_a_step_is_left_alone():
    torch.manual_seed(1)
    first = WithBranches().double()
    ours, theirs = copy.deepcopy(first), copy.deepcopy(first)
    on_one_device(max_epochs=EPOCHS).fit(theirs, DataLoader(data(), BATCH, drop_last=True))
    run = on_grid(3, [Fault("kill", 1, 0, step=3)])
    run.fit(ours, DataLoader(data(), BATCH // 3, drop_last=True))
    assert failures(run) == [(1, 0)]
    assert torch.equal(theirs.never.weight, first.never.weight)
    assert difference(ours.state_dict(), theirs.state_dict()) < 1e-10


class SkipsBatches(Classifier):
    """Leaves out some batches of the whole, and zeroes gradients in a way of its own."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)["loss"]
        return None if batch_idx % 3 == 1 else loss

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        super().optimizer_zero_grad(epoch, batch_idx, optimizer)


@pytest.mark.filterwarnings("ignore:.*returned .?None.*")
def test_a_step_without_a_loss_trains_nothing():
    ours, theirs = SkipsBatches().double(), SkipsBatches().double()
    on_one_device(max_epochs=EPOCHS).fit(theirs, DataLoader(data(), BATCH, drop_last=True))
    run = on_grid(3, [Fault("kill", 1, 0, step=3)], {"num_microbatches": 2})
    run.fit(ours, DataLoader(data(), BATCH // 3, drop_last=True))
    assert failures(run) == [(1, 0)]
    assert run.global_step == EPOCHS * STEPS
    assert difference(ours.state_dict(), theirs.state_dict()) < 1e-10


class SkipsSomeSamples(Classifier):
    """Has a loss for one half of a batch only, and not if it is whole."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) if float(batch[0][0, 0]) < 0 else None


@pytest.mark.filterwarnings("ignore:.*returned .?None.*")
def test_a_micro_batch_without_a_loss_adds_nothing():
    """As with accumulation: the mean is over all micro-batches, also over those that add nothing."""
    x = torch.linspace(-1, 1, 2, dtype=torch.float64)[:, None].repeat(1, 8)
    rows = TensorDataset(x.repeat(4, 1), torch.tensor([0, 1]).repeat(4))
    ours, theirs = SkipsSomeSamples().double(), SkipsSomeSamples().double()
    on_one_device(max_steps=4, accumulate_grad_batches=2).fit(theirs, DataLoader(rows, 1))
    on_grid(2, max_steps=4).fit(ours, DataLoader(rows, 1))
    assert difference(ours.state_dict(), theirs.state_dict()) < 1e-10


class SavesItsHead(Classifier):
    """Leaves what it does not train out of checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.body.requires_grad_(False)
        self.strict_loading = False

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {name: value for name, value in super().state_dict(*args, **kwargs).items() if "body" not in name}


def test_what_is_left_out_of_checkpoints_is_there_in_all_processes(tmp_path):
    ours, theirs = SavesItsHead().double(), SavesItsHead().double()
    for model in (ours, theirs):
        nn.init.constant_(model.body[0].weight, 0.1)  # as if it had been loaded from a file of its own
    on_one_device(max_epochs=EPOCHS).fit(theirs, DataLoader(data(), BATCH, drop_last=True))
    run = on_grid(2, [Fault("kill", 1, 0, step=3)], {"max_restarts": 10}, callbacks=[AwaitReplacement([6])])
    run.fit(ours, DataLoader(data(), BATCH // 2, drop_last=True))
    assert rejoined(run) == [(1, 0)]
    assert difference(nn.Module.state_dict(ours), nn.Module.state_dict(theirs)) < 1e-10
    run.save_checkpoint(tmp_path / "head.ckpt")
    saved = torch.load(tmp_path / "head.ckpt", weights_only=True)
    assert set(saved["state_dict"]) == {"head.weight", "head.bias"}


class SavesImages(Classifier):
    """Asks where to save images; and returns a number or nothing for a batch of a prediction."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        Path(self.trainer.log_dir or "nowhere", f"{batch_idx}.png").touch()
        return super().training_step(batch, batch_idx)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return batch_idx if batch_idx < 2 else None


@pytest.mark.long
def test_a_step_knows_where_to_save_images(tmp_path):
    model = SavesImages().double()
    run = on_grid(2, [Fault("kill", 0, 0, step=1)], max_epochs=1, default_root_dir=tmp_path)
    run.fit(model, DataLoader(data(), BATCH // 2, drop_last=True))
    assert failures(run) == [(0, 0)]
    assert {path.name for path in tmp_path.glob("*.png")} == {f"{step}.png" for step in range(STEPS)}


class LogsImages(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.logger.experiment.add_image("seen", torch.rand(3, 2, 2), self.global_step)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("pipeline", sampled([0, 1], 1, rest=pytest.mark.long))  # the leader, and another
def test_an_image_of_a_step_is_written_once(tmp_path, pipeline):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = TensorBoardLogger(tmp_path, name="board", version=0)
    faults = [Fault("kill", pipeline, 0, 2, at="reduce")]
    on_grid(2, faults, logger=logger, max_epochs=1).fit(LogsImages().double(), DataLoader(data(), 8, drop_last=True))
    accumulator = EventAccumulator(logger.log_dir, size_guidance={"images": 0}).Reload()
    written = [image.step for image in accumulator.Images("seen")]
    assert sorted(set(written)) == list(range(9))
    assert len(written) <= 9 + 2 * (pipeline == 0)  # a new leader repeats what the lost one may not have flushed


@pytest.mark.parametrize(
    ("pipelines", "expected"), sampled([(1, [0, 1, None]), (2, [[0, 0], [1, 1], None])], 1, rest=pytest.mark.long)
)
def test_predictions_may_be_anything(pipelines, expected):
    loader = DataLoader(data(24), 8 // pipelines)
    assert on_grid(pipelines).predict(SavesImages().double(), loader) == expected


def test_the_launching_process_reads_data_and_checkpoints_as_one_device(tmp_path):
    def connected(pipelines: int) -> L.Trainer:
        run = on_grid(pipelines)
        run.strategy.connect(model)
        run._data_connector.attach_data(model, train_dataloaders=DataLoader(data(), BATCH))
        return run

    model = Classifier().double()
    weights, path = copy.deepcopy(model.state_dict()), tmp_path / "some.ckpt"
    run = connected(1)
    run.fit_loop.setup_data()
    assert run.num_training_batches == STEPS + 1
    run.save_checkpoint(path)
    nn.init.zeros_(model.head.weight)
    checkpoint = run.strategy.load_checkpoint(path, weights_only=False)
    run.strategy.load_model_state_dict(checkpoint)
    assert difference(model.state_dict(), weights) == 0
    with pytest.raises(ReCycleError, match="2 pipelines"):
        connected(2).fit_loop.setup_data()


class OfTwoLoaders(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = sum(nn.functional.cross_entropy(self(x), y) for x, y in batch.values())
        self.log("train_loss", loss, on_epoch=True)
        return loss


def test_two_loaders_and_accumulation_are_those_of_one_device_when_a_worker_dies_between_two_batches():
    def loaders(batch: int) -> Any:
        return {"a": DataLoader(data(), batch, drop_last=True), "b": DataLoader(data(2 * BATCH), batch // 2)}

    options = {"max_epochs": EPOCHS, "accumulate_grad_batches": 4}
    ours, theirs = OfTwoLoaders().double(), OfTwoLoaders().double()
    alone = on_one_device(**options)
    alone.fit(theirs, loaders(BATCH))
    run = on_grid(3, [Fault("kill", 1, 0, step=2), Fault("kill", 0, 0, step=9)], **options)
    run.fit(ours, loaders(BATCH // 3))
    assert failures(run) == [(1, 0), (0, 0)]
    assert run.global_step == alone.global_step == 2 * EPOCHS
    assert difference(ours.state_dict(), theirs.state_dict()) < 1e-10
    found, expected = run.callback_metrics, alone.callback_metrics
    assert {name: float(found[name]) for name in expected} == pytest.approx({n: float(v) for n, v in expected.items()})


# ---------------------------------------------------------------------- what cannot work is told


class LogsText(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("told", "by mistake")


class LossByName(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"error": self(batch[0]).sum()}


class VectorLoss(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0])


class Gathers(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.all_gather(self(batch[0])).mean()


class Searches(Classifier):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1)


class ReadsItself(Classifier):
    def training_step(self, dataloader_iter: Any) -> Any:
        return next(dataloader_iter)


class ValidatesByItself(Classifier):
    def validation_step(self, dataloader_iter: Any) -> Any:
        return next(dataloader_iter)


@pytest.mark.parametrize(("model", "words"), [
    (LogsText, ["`self.log(told, by mistake)` was called", "`str` values"]),
    (LossByName, ["LossByName.training_step()", "a dict without a loss", "'loss'"]),
    (VectorLoss, ["training_step() returned", "shape (8, 3)", ".mean()"]),
    (Gathers, ["all_gather", "on_train_batch_end"]),
    (Searches, ["LBFGS", "several times", "automatic_optimization = False"]),
    (ReadsItself, ["dataloader_iter", "(batch, batch_idx)"]),
    (ValidatesByItself, ["validation_step(dataloader_iter)", "(batch, batch_idx)"]),
])  # fmt: skip
def test_what_cannot_work_is_refused_by_name(model, words):
    with pytest.raises(ReCycleError) as caught:
        on_grid(2).fit(model().double(), DataLoader(data(), 8, drop_last=True))
    assert all(word in str(caught.value) for word in words), caught.value
