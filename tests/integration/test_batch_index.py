"""Hooks of a PipelineModule that ask for ``batch_idx`` and ``dataloader_idx`` get those of one device."""

from typing import Any

import lightning as L
import pytest
import torch
from support.models import GLOBAL_BATCH, Regression, dataset
from support.training import TOLERANCE, difference, on_one_device, trainer
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_recycle import PipelineModule
from lightning_recycle.callbacks import Fault
from lightning_recycle.model.recorded_module import BatchIndices, call_at, call_here

pytestmark = pytest.mark.long

EPOCH = 4  # steps


class Indexed(Regression):
    """Everything that it does depends on the index of the batch, or of the DataLoader."""

    def split_batch(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return x + 0.1 * batch_idx, y

    def loss(self, output: Tensor, target: Tensor, *, batch_idx: int, dataloader_idx: int = 7) -> Tensor:
        return super().loss(output, target) * (1 + batch_idx) + dataloader_idx

    def on_training_output(self, output: Tensor, target: Tensor, batch_idx: int) -> None:
        self.log("largest", float(batch_idx), reduce_fx="max", on_step=False, on_epoch=True)
        self.log("smallest", float(batch_idx), reduce_fx="min", on_step=False, on_epoch=True)

    def on_training_loss(self, loss: Tensor, batch_idx: int = -1) -> None:
        super().on_training_loss(loss)
        self.log("step", float(batch_idx))

    def on_test_output(self, output: Tensor, target: Tensor, batch_idx: int, dataloader_idx: int) -> None:
        super().on_test_output(output, target)
        self.log("place", 10.0 * dataloader_idx + batch_idx)

    def predict_input(self, batch: Any, dataloader_idx: int) -> Any:
        return batch[0] + dataloader_idx

    def on_predict_output(self, output: Tensor, batch_idx: int, dataloader_idx: int) -> Tensor:
        return output + 100 * batch_idx + 1000 * dataloader_idx


def everything(run: L.Trainer, model: PipelineModule, batch: int) -> dict[str, Any]:
    loader = DataLoader(dataset(72), batch)
    run.fit(model, DataLoader(dataset(), batch), [loader, loader])
    fitted = {name: float(value) for name, value in run.callback_metrics.items() if "recycle" not in name}
    tested = run.test(model, [loader, loader], verbose=False)
    predicted = run.predict(model, [loader, loader])
    return {"weights": model.state_dict(), "fitted": fitted, "tested": tested, "predicted": predicted}


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    run = on_one_device(max_epochs=2, limit_train_batches=EPOCH)
    found = everything(run, Indexed().double(), GLOBAL_BATCH)
    assert (found["fitted"]["smallest"], found["fitted"]["largest"]) == (0, EPOCH - 1)
    assert found["tested"][1]["place/dataloader_idx_1"] == 11
    return found


@pytest.mark.parametrize("faults", [[], [Fault("kill", 1, 1, step=5)]], ids=["", "kill"])
def test_what_depends_on_the_index_of_the_batch_is_that_of_one_device(alone, faults):
    run = trainer(2, 2, faults, max_epochs=2, max_steps=-1, limit_train_batches=EPOCH)
    found = everything(run, Indexed().double(), GLOBAL_BATCH // 2)
    assert difference(found["weights"], alone["weights"]) < TOLERANCE
    assert found["fitted"] == pytest.approx(alone["fitted"], rel=1e-6)
    for ours, theirs in zip(found["tested"], alone["tested"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6)
    for ours, theirs in zip(found["predicted"], alone["predicted"], strict=True):
        assert torch.allclose(torch.cat(ours), torch.cat(theirs), rtol=0, atol=TOLERANCE)


def test_only_what_a_signature_names_is_given():
    indices = BatchIndices(3, 1)
    assert call_at(indices, lambda x: x, 5) == 5
    assert call_at(indices, lambda x, batch_idx=0: (x, batch_idx), 5) == (5, 3)
    assert call_at(indices, lambda x, *, dataloader_idx, batch_idx: (dataloader_idx, batch_idx), 5) == (1, 3)
    assert call_at(indices, lambda x, **options: options, 5) == {}  # they are the hook's own
    assert call_at(indices, lambda: call_here(lambda batch_idx: batch_idx)) == 3
    assert call_here(lambda batch_idx=9: batch_idx) == 9
