"""What the micro-batches of a manual step leave in the module is theirs alone, wherever in its tree it is."""

from typing import Any

import lightning as L
import numpy as np
import torch
from torch import nn

from lightning_recycle.session.change_tracker import ValueTree
from lightning_recycle.session.manual_steps import MicrobatchState


class Counts(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.kept: dict[str, Any] = {"seen": [[0]], "array": np.zeros(2), "mean": torch.zeros(2)}
        self.net[0].calls, self.total = 0, torch.zeros(())

    def change(self) -> None:
        self.net[0].calls += 1
        self.net.eval()
        self.net[1].running_mean += 1
        self.kept["seen"][0].append(1)
        self.kept["array"] += 1
        self.kept["mean"] += 1
        self.kept["new"] = self.total = self.total + 1
        self.automatic_optimization = False
        self.net[0].weight.grad = torch.ones(2, 2)

    def values(self) -> list[Any]:
        linear, norm = self.net
        numbers = [linear.calls, norm.training, self.automatic_optimization, len(self.kept["seen"][0]), len(self.kept)]
        tensors = [norm.running_mean[0], self.kept["array"][0], self.kept["mean"][0], self.total]
        return [*numbers, linear.weight.grad is None, *map(float, tensors)]


BEFORE, AFTER = [0, True, True, 1, 3, True, 0, 0, 0, 0], [1, False, False, 2, 4, False, 1, 1, 1, 1]


def test_each_micro_batch_begins_alike_and_what_the_first_leaves_remains():
    module = Counts()
    objects = [module.kept, module.kept["seen"][0], module.kept["array"], module.kept["mean"]]
    tree = ValueTree(module)
    states = [MicrobatchState(module, tree, [], torch.device("cpu"), list, first=n == 0) for n in range(2)]
    for state in states:
        with state:
            assert module.values() == BEFORE
            module.change()
    with states[0]:
        assert module.values() == AFTER
        module.change()
    with states[1]:
        assert module.values() == AFTER
    states[0].remain()
    assert module.net[0].calls == 2
    assert module.net[1].running_mean[0] == 2
    now = [module.kept, module.kept["seen"][0], module.kept["array"], module.kept["mean"]]
    assert all(one is other for one, other in zip(objects, now, strict=True))
