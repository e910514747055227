"""Tensors that steps write: averages count once, also if their bits change late; other writes are refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_recycle.errors import UnsupportedFeatureError
from lightning_recycle.session import slot_values
from lightning_recycle.session.slot_values import Write, WrittenTensors


class Averaged(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 4).double()
        self.target = copy.deepcopy(self.net).requires_grad_(False)


def assign(mean: Tensor, weight: Tensor) -> None:
    mean.data = mean.data * 0.75 + weight.data * 0.25


def write_data(mean: Tensor, weight: Tensor) -> None:
    mean.data.mul_(0.75).add_(weight.data, alpha=0.25)


def steps(module: Averaged, written: WrittenTensors, average: Callable[[Tensor, Tensor], None], number: int) -> None:
    """Steps of two micro-batches on one worker."""
    for _ in range(number):
        records: dict[int, list[Write]] = {}
        for slot in (0, 1):
            effects: list[Any] = []
            with written.in_place(slot, effects):
                for mean, weight in zip(module.target.parameters(), module.net.parameters(), strict=True):
                    average(mean, weight)
            records[slot] = effects
        written.take(records)


@pytest.mark.parametrize("average", [assign, write_data])
def test_an_average_of_a_bias_that_moves_late_counts_once(average: Callable[[Tensor, Tensor], None]) -> None:
    module = Averaged()
    written = WrittenTensors(module)
    module.net.weight.data.add_(1.0)
    steps(module, written, average, 3)
    before = module.target.bias.clone()
    module.net.bias.data.add_(1.0)
    steps(module, written, average, 1)
    assert torch.equal(module.target.bias, before * 0.75 + module.net.bias.detach() * 0.25)


def test_a_write_among_more_than_can_be_compared_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_values, "_WATCHED_BYTES", -1000)
    module = Averaged()
    with pytest.raises(UnsupportedFeatureError, match=r"target\.weight was written in training_step\(\)"):
        steps(module, WrittenTensors(module), assign, 1)
