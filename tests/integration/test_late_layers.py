"""``configure_pipeline()`` may need what ``setup()`` and the data module make."""

from typing import Any

import lightning as L
import pytest
import torch
from support.models import GLOBAL_BATCH, dataset
from support.sampling import sampled
from support.training import TOLERANCE, difference, on_one_device, trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_recycle import LayerSpec, PipelineModule
from lightning_recycle.callbacks import Fault


class Data(L.LightningDataModule):
    """Knows the number of outputs once it is set up; draws there, as ``random_split`` does."""

    def __init__(self, batch: int) -> None:
        super().__init__()
        self.batch, self.events = batch, []

    def prepare_data(self) -> None:
        self.events.append("prepared")

    def setup(self, stage: str) -> None:
        assert torch.rand(1) < 2
        self.outputs, self.opened = 1, (line for line in "what cannot be pickled")

    def train_dataloader(self) -> Any:
        return DataLoader(dataset(), self.batch)

    def val_dataloader(self) -> Any:
        return DataLoader(dataset(48), self.batch)


class Late(PipelineModule):
    def setup(self, stage: str) -> None:
        self.width = 16

    def configure_pipeline(self) -> list[Any]:
        first = nn.Linear(8, 8, dtype=torch.float64)  # drawn before the next line raises, and drawn again
        outputs = self.trainer.datamodule.outputs
        return [
            first,
            nn.Linear(8, self.width, dtype=torch.float64),
            LayerSpec(nn.Linear, self.width, self.width, dtype=torch.float64),
            LayerSpec(nn.Linear, self.width, outputs, dtype=torch.float64),
        ]

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def test_layers_that_setup_decides_on_train_as_on_one_device():
    expected, model, data = Late(), Late(), Data(GLOBAL_BATCH // 2)
    L.seed_everything(3, verbose=False)
    one = on_one_device(max_steps=5)
    one.fit(expected, datamodule=Data(GLOBAL_BATCH))
    L.seed_everything(3, verbose=False)
    strategy = {"partition": [1, 3], "seed": 3}
    run = trainer(2, 2, [Fault("kill", 1, 0, step=2)], strategy, max_steps=5, enable_model_summary=True)
    run.fit(model, datamodule=data)
    assert difference(model.state_dict(), expected.state_dict()) < TOLERANCE
    assert not hasattr(data, "opened")
    assert data.events == ["prepared"] * 2  # once to find the layers, once in the worker that is rank zero
    (again,) = run.validate(model, datamodule=data, verbose=False)
    (alone,) = one.validate(expected, datamodule=Data(GLOBAL_BATCH), verbose=False)
    assert again == pytest.approx(alone)


class Wrong(Late):
    def configure_pipeline(self) -> list[Any]:
        return [nn.Linear(8, self.widht)]


@pytest.mark.parametrize("devices", sampled([1, 2], 1, rest=pytest.mark.long))
def test_what_is_wrong_after_setup_too_is_raised_as_it_is(devices):
    run = on_one_device() if devices == 1 else trainer(1, 2)
    with pytest.raises(AttributeError, match="widht"):
        run.fit(Wrong(), datamodule=Data(GLOBAL_BATCH))
