"""The values in a module's tree: what a block changes is found, taken back and told; other writes are refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_recycle.errors import UnsupportedFeatureError
from lightning_recycle.session import change_tracker
from lightning_recycle.session.change_tracker import ValueTree, name_of
from lightning_recycle.session.microbatch_changes import MicrobatchChanges


class Averaged(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 4).double()
        self.target = copy.deepcopy(self.net).requires_grad_(False)
        self.register_buffer("rows", torch.zeros(4, 4))
        self.row, self.count, self.kept = self.rows[1], 0, {"a": [1, 2]}


def assign(mean: Tensor, weight: Tensor) -> None:
    mean.data = mean.data * 0.75 + weight.data * 0.25


def write_data(mean: Tensor, weight: Tensor) -> None:
    mean.data.mul_(0.75).add_(weight.data, alpha=0.25)


def steps(module: Averaged, effects: MicrobatchChanges, change: Callable[[int], Any], number: int) -> None:
    """Steps of two micro-batches on one worker."""
    for _ in range(number):
        effects.begin_step(0)
        records = {}
        for index in (0, 1):
            with effects.microbatch(index) as made:
                change(index)
            records[index] = made.effects
        effects.ends_step()
        effects.repeat(records, on_step=True)


@pytest.mark.parametrize("average", [assign, write_data])
def test_an_average_of_a_bias_that_moves_late_counts_once(average: Callable[[Tensor, Tensor], None]) -> None:
    module = Averaged()
    effects = MicrobatchChanges(module, microbatches=2)

    def change(index: int) -> None:
        for mean, weight in zip(module.target.parameters(), module.net.parameters(), strict=True):
            average(mean, weight)

    module.net.weight.data.add_(1.0)
    steps(module, effects, change, 5)
    before = module.target.bias.clone()
    module.net.bias.data.add_(1.0)
    steps(module, effects, change, 1)
    assert torch.equal(module.target.bias, before * 0.75 + module.net.bias.detach() * 0.25)


def test_a_view_and_its_base_change_together() -> None:
    module = Averaged()
    row, rows = module.row, module.rows

    def change(index: int) -> None:
        module.row += 1
        assert module.rows.sum() == 4 * module.row[0]

    steps(module, MicrobatchChanges(module, microbatches=2), change, 5)
    assert module.rows.sum() == 20
    assert module.row is row
    assert module.rows is rows


def test_a_write_among_more_than_can_be_compared_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(change_tracker, "_WATCHED_BYTES", -1000)
    monkeypatch.setattr(change_tracker, "_ALWAYS_COPIED_BYTES", -1)
    module = Averaged()
    effects = MicrobatchChanges(module, microbatches=2)
    for _ in range(4):
        steps(module, effects, lambda index: None, 1)
    with pytest.raises(UnsupportedFeatureError, match=r"target\.weight .*was written in a training step"):
        steps(module, effects, lambda index: module.target.weight.mul_(2.0), 1)


def test_a_block_that_raises_leaves_nothing() -> None:
    module = Averaged()
    tree = ValueTree(module)
    tree.absorb()
    tree.begin({})
    module.count += 1
    module.kept["a"].append(3)
    module.target.weight.data.zero_()
    del module.row
    tree.abandon()
    assert (module.count, module.kept) == (0, {"a": [1, 2]})
    assert torch.equal(module.target.weight, module.net.weight)
    assert module.row is not None


class Slotted:
    __slots__ = ("__secret", "level", "unset")

    def __init__(self) -> None:
        self.level, self.__secret = 1, 1

    def change(self) -> None:
        self.level, self.unset, self.__secret = 2, 2, 2

    def seen(self) -> tuple[Any, ...]:
        return self.level, hasattr(self, "unset"), self.__secret, getattr(self, "extra", None)


class WithDict(Slotted):
    """Has slots and a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = 1

    def change(self) -> None:
        super().change()
        self.extra, self.further = 2, 2


@pytest.mark.parametrize("kind", [Slotted, WithDict])
def test_attributes_in_slots_are_taken_back(kind: type[Slotted]) -> None:
    module = Averaged()
    module.kept["c"] = kind()
    before = module.kept["c"].seen()
    tree = ValueTree(module)
    tree.absorb()
    tree.begin({})
    module.kept["c"].change()
    tree.abandon()
    assert module.kept["c"].seen() == before
    assert not hasattr(module.kept["c"], "further")


def test_what_other_code_changes_is_told() -> None:
    module = Averaged()
    tree = ValueTree(module)
    tree.absorb()
    module.count = 5
    module.kept["b"] = 1
    module.rows.add_(1)
    names = {name_of(place) for place in tree.absorb()}
    assert names == {"count", "kept.b", "rows", "row"}
    assert tree.absorb() == []


def test_a_parameter_that_is_thawed_is_trained_from_then_on() -> None:
    module = Averaged()
    effects = MicrobatchChanges(module, microbatches=2)
    steps(module, effects, lambda index: None, 1)
    module.target.weight.requires_grad_(True)
    weight = module.target.weight

    def change(index: int) -> None:
        assert module.target.weight is weight
        assert module.target.bias is not bias

    bias = module.target.bias
    steps(module, effects, change, 1)
    with pytest.raises(UnsupportedFeatureError, match=r"target\.weight requires a gradient"):
        steps(module, effects, lambda index: weight.data.zero_(), 1)


def test_thawing_in_a_step_is_refused() -> None:
    module = Averaged()
    with pytest.raises(UnsupportedFeatureError, match=r"target\.\w+\.requires_grad was set"):
        steps(module, MicrobatchChanges(module, microbatches=2), lambda index: module.target.requires_grad_(True), 1)


def test_a_tensor_in_a_tuple_is_refused_if_it_is_written() -> None:
    module = Averaged()
    module.pair = torch.zeros(2), torch.ones(2)
    with pytest.raises(UnsupportedFeatureError, match=r"the tuple pair was written"):
        steps(module, MicrobatchChanges(module, microbatches=2), lambda index: module.pair[0].add_(1), 1)
