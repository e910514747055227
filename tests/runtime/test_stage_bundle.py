"""The parameters of the version before."""

from contextlib import suppress

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
        for is_interrupted in (False, True, False):  # a redo may be redone, and end with a new generation
            with suppress(KeyError), shadow.in_place():
                assert torch.equal(layer(x), before)
                if is_interrupted:
                    raise KeyError
            assert torch.equal(layer(x), after)
        expected.append(after)
    assert not torch.equal(expected[0], expected[1])
