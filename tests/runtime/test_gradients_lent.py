"""Gradients that hooks change are copies: what peers may ask for stays as it was reduced."""

import pytest
import torch
from torch import nn

from lightning_recycle.runtime.stage.gradients import GradientBuffers


def buffers(lends_copies: bool) -> tuple[nn.Linear, GradientBuffers]:
    layer = nn.Linear(3, 2)
    gradients = GradientBuffers([*layer.parameters()], torch.device("cpu"), lends_copies=lends_copies)
    gradients.begin(4)
    layer(torch.ones(1, 3)).sum().backward()
    return layer, gradients


@pytest.mark.parametrize("lends_copies", [False, True])
def test_what_is_lent_may_be_changed(lends_copies: bool) -> None:
    layer, gradients = buffers(lends_copies)
    gradients.hand_over(4)
    assert layer.weight.grad is not None
    assert torch.equal(layer.weight.grad, torch.ones(2, 3))
    layer.weight.grad.mul_(3.0)
    kept = gradients.of_parameter(layer.weight, 4)
    assert torch.equal(kept, torch.full((2, 3), 1.0 if lends_copies else 3.0))
    gradients.hand_over(4, again=True)
    assert torch.equal(layer.weight.grad, torch.full((2, 3), 3.0)), "what was changed stays changed for hooks"


def test_once_somebody_has_changed_them_copies_are_lent() -> None:
    layer, gradients = buffers(lends_copies=False)
    gradients.hand_over(4)
    gradients.look_for_changes()
    assert layer.weight.grad is gradients.of_parameter(layer.weight, 4)
    layer.weight.grad.mul_(3.0)
    gradients.look_for_changes()
    gradients.begin(5)
    layer(torch.ones(1, 3)).sum().backward()
    gradients.hand_over(5)
    layer.weight.grad.zero_()
    assert torch.equal(gradients.of_parameter(layer.weight, 5), torch.ones(2, 3))
    assert len(gradients.tensors()) == 3


def test_a_gradient_that_nothing_wrote_is_none_in_a_copy_too() -> None:
    layer = nn.Linear(3, 2)
    gradients = GradientBuffers([*layer.parameters()], torch.device("cpu"), lends_copies=True)
    gradients.begin(4)
    layer.weight.sum().backward()
    gradients.hand_over(4)
    assert layer.bias.grad is None
    assert layer.weight.grad is not None
    gradients.begin(5)
    assert layer.weight.grad is gradients.of_parameter(layer.weight, 5)
