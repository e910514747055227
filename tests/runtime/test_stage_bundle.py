"""The parameters of the version before."""

import pytest
import torch
from torch import nn

from lightning_recycle.runtime.stage_bundle import Shadow


def test_a_stage_that_is_ahead_computes_with_the_parameters_of_the_version_before_and_goes_on_with_the_new():
    torch.manual_seed(0)
    layer, x = nn.Linear(3, 2), torch.randn(4, 3)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    shadow = Shadow(list(layer.parameters()))
    expected = []
    for _ in range(3):
        before = layer(x).detach()
        shadow.update()
        layer(x).sum().backward()
        optimizer.step()
        after = layer(x).detach()
        for _ in range(2):  # a redo may be redone
            with shadow.in_place():
                assert torch.equal(layer(x), before)
            assert torch.equal(layer(x), after)
        expected.append(after)
    assert not torch.equal(expected[0], expected[1])


def test_the_new_parameters_come_back_when_the_redo_is_interrupted():
    layer = nn.Linear(1, 1, bias=False)
    shadow = Shadow(list(layer.parameters()))
    with torch.no_grad():
        layer.weight.fill_(5.0)

    def interrupted() -> None:
        with shadow.in_place():
            raise RuntimeError("a new generation")

    with pytest.raises(RuntimeError, match="generation"):
        interrupted()
    assert layer.weight.item() == 5.0
