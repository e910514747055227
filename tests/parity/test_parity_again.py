"""A second fit of one Trainer draws on. That it goes on where the first one was is in the matrix of cases."""

from typing import Any

import torch
from support.models import GLOBAL_BATCH, Regression
from support.training import difference, trainer
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset


class Descent(Regression):
    """With an optimizer without a state, which a second fit would begin anew."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_second_fit_draws_other_numbers_than_the_first():
    """Randomness is numbered by the step: runs of one and four steps draw what one of five does."""
    alike = TensorDataset(torch.ones(5 * GLOBAL_BATCH, 8).double(), torch.ones(5 * GLOBAL_BATCH, 1).double())

    def train(*until: int) -> dict[str, Tensor]:
        module, run = Descent(dropout=0.5).double(), trainer(2, 1, max_steps=1)
        for steps in until:
            run.fit_loop.epoch_loop.max_steps = steps
            run.fit(module, DataLoader(alike, batch_size=GLOBAL_BATCH // 2))
        return module.state_dict()

    assert difference(train(5), train(1, 5)) == 0.0
