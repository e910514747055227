"""Optimizers of torch that step all parameters at once, with a tensor as counter: as exact as others, whoever dies."""

from typing import Any

import pytest
import torch
from support.growth import AwaitReplacement, rejoined
from support.models import Regression
from support.training import committed_steps, exact_fit
from torch import nn

from lightning_recycle.callbacks import Fault
from lightning_recycle.session.gradient_clipping import RepeatableStep
from lightning_recycle.session.manual_steps import OptimizerState

pytestmark = pytest.mark.long

KINDS: dict[str, Any] = {
    "fused AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "fused AdamW, amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True, fused=True),
    "fused Adam": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1, fused=True),
    "fused SGD": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, fused=True),
    "fused Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, fused=True),
    "foreach AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "learning rate as a tensor": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2), fused=True),
}


class Fused(Regression):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)


def steps(kind: str) -> tuple[torch.optim.Optimizer, nn.Module]:
    """An optimizer after two steps, and its module with other gradients."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)).double()
    optimizer: torch.optim.Optimizer = KINDS[kind](module.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        module(torch.randn(4, 5, dtype=torch.float64)).square().sum().backward()
        if _ < 2:
            optimizer.step()
    return optimizer, module


def weights(module: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in module.parameters()]


def halve(module: nn.Module) -> None:
    for p in module.parameters():
        p.grad = p.grad * 0.5


def snapshot(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for state in optimizer.state.values():
        found += [torch.as_tensor(value).clone() for value in state.values() if value is not None]
    return found


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(one, other) for one, other in zip(a, b, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_speculative_step_is_made_again(kind):
    expected, module = steps(kind)
    halve(module)
    expected.step()
    wanted, states = weights(module), snapshot(expected)

    optimizer, module = steps(kind)
    before, newest = weights(module), RepeatableStep()
    newest.keep([optimizer])
    optimizer.step()
    with torch.no_grad():
        for p, old in zip(module.parameters(), before, strict=True):
            p.copy_(old)
    newest.repeat([optimizer], 0.5, lambda: None)
    assert equal(weights(module), wanted)
    assert equal(snapshot(optimizer), states)


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_is_rewound_more_than_once(kind):
    optimizer, _ = steps(kind)
    before, kept = snapshot(optimizer), OptimizerState(optimizer, None)
    for _ in range(2):
        optimizer.step()
        assert not equal(snapshot(optimizer), before)
        kept.rewind()
        assert equal(snapshot(optimizer), before)


def test_a_replacement_gets_the_counters_too():
    faults = [Fault("kill", 1, 1, step=1)]
    run = exact_fit(Fused().double(), 2, 2, faults, strategy={"max_restarts": 10}, callbacks=[AwaitReplacement([4])])
    assert rejoined(run) == [(1, 1)]
    assert committed_steps(run) == list(range(10))
