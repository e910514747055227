"""Parameters that change in several stages, and gradients that no optimizer has."""

import itertools
from typing import Any

import lightning as L
import pytest
import torch
from support.sampling import sampled
from support.training import TOLERANCE, difference, grid_trainer, on_one_device
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_recycle import UnsupportedFeatureError
from lightning_recycle.callbacks import Fault

pytestmark = pytest.mark.long

BATCH, SAMPLES, EPOCHS = 8, 48, 2


def points() -> TensorDataset:
    x = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return TensorDataset(x, (x.sum(1) > 0).long())


class Chain(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2)).double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.03, weight_decay=0.1)


class Changes(Chain):
    """Exchanges a weight of the chain in a hook, or gets a parameter beside it."""

    def __init__(self, change: str, hook: str) -> None:
        super().__init__()
        self.change = change
        setattr(self, hook, self._change)

    def _change(self) -> None:
        group, new = self.optimizers().optimizer.param_groups[0], nn.Parameter(torch.ones(2, 16).double())
        if self.change == "beside":
            self.beside = new
            group["params"] += [new]
        elif (old := getattr(self.net[4], "weight", None)) is not None:  # a layer of this stage
            self.net[4].weight = new
            group["params"] = [new if p is old else p for p in group["params"]]


@pytest.mark.parametrize("hook", ["on_train_start", "on_train_epoch_start"])
@pytest.mark.parametrize(("change", "words"), [("exchange", r"net\.4\.weight"), ("beside", "beside")])
def test_several_stages_refuse_new_parameters_by_name(change, words, hook):
    run = grid_trainer(2, 2, (), {"num_microbatches": 2}, max_epochs=EPOCHS)
    with pytest.raises(UnsupportedFeatureError, match=words):
        run.fit(Changes(change, hook), DataLoader(points(), BATCH // 2))


class HeadAlone(Chain):
    """The optimizer has the last layer; the others get gradients, too."""

    def __init__(self, hook: bool) -> None:
        super().__init__()
        self.hook = hook

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.net.parameters() if self.hook else ():
            if parameter.grad is not None:
                parameter.grad.mul_(2)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net[4].parameters() if hasattr(self.net[4], "weight") else [], lr=0.3)


@pytest.mark.parametrize(
    ("stages", "accumulate", "hook", "is_killed"),
    sampled(itertools.product((1, 2), (1, 2), (False, True), (False, True)), 4, seed=2),
)
def test_only_gradients_that_the_optimizer_has_are_clipped(stages, accumulate, hook, is_killed):
    alone, model = HeadAlone(hook), HeadAlone(hook)
    settings = {"max_epochs": EPOCHS, "accumulate_grad_batches": accumulate, "gradient_clip_val": 0.05}
    on_one_device(**settings).fit(alone, DataLoader(points(), BATCH))
    faults = [Fault("kill", 1, 0, step=4)] if is_killed else []
    run = grid_trainer(2, stages, faults, {"num_microbatches": 2}, **settings)
    run.fit(model, DataLoader(points(), BATCH // 2))
    assert difference(model.state_dict(), alone.state_dict()) < TOLERANCE
