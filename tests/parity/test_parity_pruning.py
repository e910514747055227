"""``ModelPruning`` with one stage: the same parameters are masked as on one device, whoever dies or joins."""

from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelPruning
from support.growth import AwaitReplacement, rejoined
from support.training import difference, grid_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_recycle.callbacks import Fault
from lightning_recycle.model.layers import take_pruned_form

BATCH, EPOCHS = 24, 3  # of four steps


class Classifier(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)).double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.body(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def loader(batch: int) -> DataLoader[Any]:
    x = torch.randn(BATCH * 4, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch)


def on_grid(pruning: ModelPruning, faults: list[Fault] | None = None) -> tuple[L.Trainer, dict[str, Tensor]]:
    callbacks = [pruning, AwaitReplacement([9])]
    run = grid_trainer(2, 1, faults or [], {"max_restarts": 10}, callbacks=callbacks, max_epochs=EPOCHS)
    model = Classifier()
    run.fit(model, loader(BATCH // 2))
    return run, model.state_dict()


def test_what_is_pruned_at_random_does_not_depend_on_failures():
    def pruning() -> ModelPruning:
        return ModelPruning("random_unstructured", amount=0.3, make_pruning_permanent=False)

    undisturbed = on_grid(pruning())[1]
    run, weights = on_grid(pruning(), [Fault("kill", 0, 0, step=6)])  # it leads, and its replacement has drawn nothing
    assert rejoined(run) == [(0, 0)]
    assert difference(weights, undisturbed) < 1e-10
    assert 0 < float(weights["body.0.weight_mask"].mean()) < 0.5


def test_a_module_takes_the_form_of_a_state_dict():
    plain, masked = Classifier(), Classifier()
    before = [id(parameter) for parameter in plain.parameters()]
    nn.utils.prune.l1_unstructured(masked.body[0], "weight", amount=0.5)
    state = masked.state_dict()
    take_pruned_form(plain, state)
    plain.load_state_dict(state)
    assert difference(plain.state_dict(), state) == 0
    take_pruned_form(plain, Classifier().state_dict())
    assert set(plain.state_dict()) == set(Classifier().state_dict())
    assert sorted(map(id, plain.parameters())) == sorted(before)
