"""What a training step keeps for the next one is its own, whoever computes the next one."""

import itertools
from typing import Any

import lightning as L
import pytest
import torch
from support.growth import AwaitReplacement, rejoined
from support.sampling import sampled
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


class OneTensor(Recurrent):
    """Its state is one tensor from the beginning, and a hook clears it in place."""

    def __init__(self, automatic: bool = True) -> None:
        super().__init__(automatic)
        self.cell = nn.GRUCell(2, 5)
        del self.hidden
        self.register_buffer("hidden", torch.zeros(1, 5), persistent=False)

    def on_train_epoch_start(self) -> None:
        self.hidden.zero_()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.hidden.expand(len(x), 5) if len(self.hidden) == 1 else self.hidden
        outputs = []
        for part in x.unbind(1):
            hidden = self.cell(part, hidden)
            outputs.append(hidden)
        self.hidden = hidden.detach()
        return self.head(torch.stack(outputs, 1))


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH * STEPS, 3, 2, generator=generator, dtype=torch.float64)
    return TensorDataset(x, x.sum(2, keepdim=True).cumsum(1))


def on_grid(model: Any, faults: Any = (), strategy: Any = None, **kwargs: Any) -> L.Trainer:
    trainer = grid_trainer(2, 1, faults, {"num_microbatches": 2, **(strategy or {})}, max_epochs=2, **kwargs)
    trainer.fit(model, DataLoader(data(), BATCH // 2))
    return trainer


def expected(model: L.LightningModule) -> L.LightningModule:
    """On one device each row of the state is that of its sample's place in the batch."""
    on_one_device(max_epochs=2).fit(model, DataLoader(data(), BATCH))
    return model


@pytest.mark.parametrize(
    ("kind", "automatic", "dies"), sampled(itertools.product([Recurrent, OneTensor], [True, False], [True, False]), 1)
)
def test_each_place_of_the_batch_has_a_state_of_its_own(kind, automatic, dies):
    faults = [Fault("kill", 1, 0, step=3, at="reduce")] if dies else []
    theirs, ours = expected(kind(automatic).double()), kind(automatic).double()
    assert failures(on_grid(ours, faults)) == [(fault.pipeline, 0) for fault in faults]
    assert difference(ours.state_dict(), theirs.state_dict()) < 1e-10


def test_a_replacement_gets_the_states():
    theirs, ours = expected(Recurrent().double()), Recurrent().double()
    run = on_grid(ours, [Fault("kill", 1, 0, step=1)], {"max_restarts": 10}, callbacks=[AwaitReplacement([4])])
    assert rejoined(run) == [(1, 0)]
    assert difference(ours.state_dict(), theirs.state_dict()) < 1e-10
