"""The rows of what training steps return are those of the batch, as on one device."""

from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
from support.sampling import sampled
from support.training import failures, grid_trainer, on_one_device
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from lightning_recycle import PipelineModule
from lightning_recycle.callbacks import Fault

BATCH, STEPS = 16, 4


class Answer(NamedTuple):
    classes: Tensor
    names: list[str]


class Ordinary(L.LightningModule):
    """Returns tensors, lists, tuples and dicts with items per sample, and what belongs to no sample."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 6).double(), nn.ReLU(), nn.Linear(6, 4).double())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        output = self.layers(x)
        loss = functional.mse_loss(output, y)
        return self.returned(loss, output.detach(), y)

    def returned(self, loss: Tensor, output: Tensor, y: Tensor) -> dict[str, Any]:
        return {
            "loss": loss, "y": y.clone(), "rows": output, "two per sample": output.view(-1, 2),
            "nested": [{"error": e, "y": t} for e, t in zip((output - y).abs().mean(1), y, strict=True)],
            "answer": Answer(output.argmax(1), [f"{float(t[0]):.12f}" for t in y]), "mean": output.mean(),
        }  # fmt: skip

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert torch.equal(outputs["y"], batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Manual(Ordinary):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        returned = super().training_step(batch, batch_idx)
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(returned["loss"])
        optimizer.step()
        return {**returned, "loss": returned["loss"].detach()}


class Pipeline(PipelineModule):
    """Returns from a hook what the other one returns from its step."""

    def configure_pipeline(self) -> list[Any]:
        torch.manual_seed(0)
        return [nn.Linear(8, 6).double(), nn.ReLU(), nn.Linear(6, 4).double()]

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return functional.mse_loss(output, target)

    def on_training_output(self, output: Tensor, target: Tensor) -> Any:
        return {"rows": output.detach().clone(), "y": target.clone()}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert torch.equal(outputs["y"], batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Seen(L.Callback):
    """What a callback is given, and the error that it computes from outputs and batch."""

    def __init__(self) -> None:
        self.outputs: list[Any] = []
        self.errors: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.outputs.append(outputs)
        self.errors.append(float((outputs["rows"] - batch[1]).abs().mean()))

    def state_dict(self) -> dict[str, Any]:
        return {"outputs": self.outputs, "errors": self.errors}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(BATCH * STEPS, n, generator=generator, dtype=torch.float64) for n in (8, 4))
    return TensorDataset(x, y)


def alone(module: L.LightningModule, loader: Any, **options: Any) -> Seen:
    seen = Seen()
    on_one_device(callbacks=[seen], max_epochs=1, **options).fit(module, loader)
    return seen


def on_grid(
    module: L.LightningModule, loader: Any, devices: int, faults: list[Fault], options: dict[str, Any], **trainer: Any
) -> Seen:
    seen = Seen()
    run = grid_trainer(devices, 1, faults, options, callbacks=[seen], max_epochs=1, **trainer)
    run.fit(module, loader)
    assert failures(run) == [(fault.pipeline, fault.stage) for fault in faults]
    return seen


def flat(outputs: Any) -> list[Any]:
    """The numbers and texts in ``outputs``, in order."""
    if isinstance(outputs, Tensor):
        return outputs.double().flatten().tolist()
    if isinstance(outputs, dict):
        return [item for name in sorted(outputs) for item in flat(outputs[name])]
    if isinstance(outputs, (list, tuple)):
        return [item for each in outputs for item in flat(each)]
    return [float(outputs)] if isinstance(outputs, (int, float)) else [outputs]


def assert_same(found: Seen, expected: Seen) -> None:
    assert len(expected.outputs) == STEPS
    assert found.errors == pytest.approx(expected.errors, abs=1e-10)
    ours, theirs = flat(found.outputs), flat(expected.outputs)
    assert len(ours) == len(theirs)
    assert [a for a in ours if isinstance(a, str)] == [b for b in theirs if isinstance(b, str)]
    numbers = [[value for value in each if not isinstance(value, str)] for each in (ours, theirs)]
    assert numbers[0] == pytest.approx(numbers[1], abs=1e-10)


GRIDS: dict[str, tuple[int, dict[str, Any]]] = {
    "4x1": (4, {"pipeline_parallel_size": 1}),
    "4x1, two each": (4, {"pipeline_parallel_size": 1, "num_microbatches": 2}),
    "2x2": (4, {"pipeline_parallel_size": 2}),
    "1x1": (1, {"num_microbatches": 4}),
}
KILLS = {1: [Fault("kill", 1, 0, step=1)], 2: [Fault("kill", 0, 1, step=1), Fault("kill", 1, 0, step=3)]}


CASES = [
    *((Ordinary, grid, True) for grid in ("4x1, two each", "2x2")),
    pytest.param(Ordinary, "4x1", True, marks=pytest.mark.long),
    *(pytest.param(Ordinary, grid, False, marks=pytest.mark.long) for grid in ("4x1", "4x1, two each", "2x2")),
    *sampled(
        [(Manual, "4x1", True), (Manual, "4x1, two each", True), (Manual, "1x1", False)], 1, rest=pytest.mark.long
    ),
    *sampled([(Pipeline, "4x1", True), (Pipeline, "2x2", True), (Pipeline, "1x1", False)], 1, rest=pytest.mark.long),
]


@pytest.mark.parametrize(("module", "grid", "kills"), CASES)
def test_rows_of_outputs_are_those_of_the_batch(module, grid, kills):
    devices, options = GRIDS[grid]
    stages = options.get("pipeline_parallel_size", 1)
    loader = DataLoader(data(), BATCH * stages // devices)
    found = on_grid(module(), loader, devices, KILLS[stages] if kills else [], options)
    expected = alone(Manual() if module is Manual else Ordinary(), DataLoader(data(), BATCH))
    if module is Pipeline:  # its hook returns less
        expected.outputs = [{name: outputs[name] for name in ("loss", "rows", "y")} for outputs in expected.outputs]
    assert_same(found, expected)


def test_rows_are_those_of_each_batch_that_is_accumulated():
    found = on_grid(Ordinary(), DataLoader(data(), 8), 2, KILLS[1], {"num_microbatches": 2}, accumulate_grad_batches=2)
    assert_same(found, alone(Ordinary(), DataLoader(data(), BATCH), accumulate_grad_batches=2))


class WithoutLoss(Ordinary):
    """Some steps return nothing."""

    seen: tuple[tuple[str, ...], ...] = ()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx % 2 else super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen = (*self.seen, tuple(outputs))


class Rows(L.LightningDataModule):
    """Writes down what ends the run."""

    def __init__(self, folder: Path, batch_size: int) -> None:
        super().__init__()
        self.folder, self.batch_size = folder, batch_size

    def train_dataloader(self) -> Any:
        return DataLoader(data(), self.batch_size)

    def on_exception(self, exception: BaseException) -> None:
        (self.folder / type(exception).__name__).touch()


class Fails(Ordinary):
    def on_train_epoch_end(self) -> None:
        raise KeyError("mine")


def test_steps_without_a_loss_have_no_outputs_and_a_data_module_learns_of_an_exception(tmp_path):
    one, grid = WithoutLoss(), WithoutLoss()
    on_one_device(max_epochs=1).fit(one, DataLoader(data(), BATCH))
    grid_trainer(2, 1, max_epochs=1).fit(grid, DataLoader(data(), BATCH // 2))
    assert grid.seen == one.seen
    with pytest.raises(KeyError, match="mine"):
        grid_trainer(2, 1, max_epochs=1).fit(Fails(), datamodule=Rows(tmp_path, BATCH // 2))
    assert [path.name for path in tmp_path.iterdir()] == ["KeyError"]
