"""Modules that know nothing of pipelines train as on one device, in one stage."""

import copy
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from support.growth import AwaitReplacement, rejoined
from support.sampling import sampled
from support.training import difference, failures, grid_trainer, on_one_device
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_recycle import ReCycleError
from lightning_recycle.callbacks import Fault

BATCH = 24
STEPS = 6  # of an epoch
EPOCHS = 2


class Classifier(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(8, 16), nn.Tanh())
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = self(batch[0])
        return {"loss": nn.functional.cross_entropy(output, batch[1]), "predicted": output.argmax(1)}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)}


def data(samples: int = BATCH * STEPS + 7) -> TensorDataset:
    x = torch.randn(samples, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return TensorDataset(x, (x.sum(1) > 0).long() + (x[:, 0] > 0).long())


def on_grid(pipelines: int, faults: Any = (), strategy: Any = None, **kwargs: Any) -> L.Trainer:
    return grid_trainer(pipelines, 1, faults, strategy, **{"max_epochs": EPOCHS, **kwargs})


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


class LogsImages(Classifier):
    """Logs an image, and asks where to save another one."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        Path(self.trainer.log_dir or "nowhere", f"{batch_idx}.png").touch()
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
    assert {path.name for path in tmp_path.rglob("*.png")} == {f"{step}.png" for step in range(9)}
    assert len(written) <= 9 + 2 * (pipeline == 0)  # a new leader repeats what the lost one may not have flushed


class PredictsAnything(Classifier):
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return batch_idx if batch_idx < 2 else None


@pytest.mark.parametrize(
    ("pipelines", "expected"), sampled([(1, [0, 1, None]), (2, [[0, 0], [1, 1], None])], 1, rest=pytest.mark.long)
)
def test_predictions_may_be_anything(pipelines, expected):
    loader = DataLoader(data(24), 8 // pipelines)
    assert on_grid(pipelines).predict(PredictsAnything().double(), loader) == expected


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
