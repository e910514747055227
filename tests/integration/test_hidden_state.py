"""Hidden states of a recurrent network, by place in the batch; more kinds are in test_drawn_modules.py."""

from typing import Any

import lightning as L
import pytest
import torch
from support.growth import AwaitReplacement, rejoined
from support.training import difference, failures, grid_trainer, on_one_device
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_recycle.callbacks import Fault

BATCH = 12
STEPS = 6  # of an epoch


class Recurrent(L.LightningModule):
    """Reads long sequences in parts; begins each epoch afresh."""

    def __init__(self, automatic: bool = True) -> None:
        super().__init__()
        self.automatic_optimization = automatic
        torch.manual_seed(0)
        self.lstm, self.head = nn.LSTM(2, 5, batch_first=True), nn.Linear(5, 1)
        self.hidden: Any = None

    def on_train_epoch_start(self) -> None:
        self.hidden = None

    def forward(self, x: Tensor) -> Tensor:
        output, hidden = self.lstm(x, self.hidden)
        self.hidden = tuple(part.detach() for part in hidden)
        return self.head(output)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = nn.functional.mse_loss(self(x), y)
        self.log("loss", loss, on_epoch=True)
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.05)


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH * STEPS, 3, 2, generator=generator, dtype=torch.float64)
    return TensorDataset(x, x.sum(2, keepdim=True).cumsum(1))


@pytest.mark.parametrize(("automatic", "replaced"), [(False, False), (True, True)], ids=["manual", "replaced"])
def test_each_place_of_the_batch_has_a_state_of_its_own(automatic, replaced):
    """On one device each row of the state is that of its sample's place in the batch."""
    theirs, ours = Recurrent(automatic).double(), Recurrent(automatic).double()
    on_one_device(max_epochs=2).fit(theirs, DataLoader(data(), BATCH))
    faults = [Fault("kill", 1, 0, step=1 if replaced else 3, at="forward" if replaced else "reduce")]
    options = {"num_microbatches": 2, "max_restarts": 10 if replaced else 0}
    run = grid_trainer(2, 1, faults, options, max_epochs=2, callbacks=[AwaitReplacement([4])] if replaced else [])
    run.fit(ours, DataLoader(data(), BATCH // 2))
    assert failures(run) == [(1, 0)]
    assert rejoined(run) == [(1, 0)] * replaced
    assert difference(ours.state_dict(), theirs.state_dict()) < 1e-10
