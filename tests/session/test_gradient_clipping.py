"""Lightning's and torch's functions for norms of gradients, in a process that holds one stage."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities import grad_norm
from lightning.pytorch.utilities.grads import grad_norm as the_same
from torch import nn

from lightning_recycle.errors import UnsupportedFeatureError
from lightning_recycle.session.gradient_clipping import called_once, complete_norms


@pytest.fixture
def model() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)).double()
    model(torch.ones(1, 3, dtype=torch.float64)).square().sum().backward()
    return model


@pytest.fixture
def stages(model) -> Iterator[None]:
    """This process is the first of two stages; the second one, which has one more layer, is played."""
    other = nn.Linear(2, 2).double()
    other.weight.grad, other.bias.grad = torch.full_like(other.weight, 2.0), torch.zeros_like(other.bias)

    def gather(name: str, part: Callable[[], Any]) -> list[Any]:
        theirs = {f"2.{n}": p.grad.norm() for n, p in other.named_parameters() if p.grad is not None}
        return [part(), [(name, f"grad_2.0_norm/{name}", norm) for name, norm in theirs.items()]]

    complete_norms(gather, {id(p): name for name, p in model.named_parameters()})
    yield
    complete_norms(None)


def test_every_reference_to_the_function_sees_all_stages(model, stages):
    norms = grad_norm(model, 2)
    assert list(norms) == [
        f"grad_2.0_norm/{n}" for n in ("0.weight", "0.bias", "1.weight", "1.bias", "2.weight", "2.bias")
    ] + ["grad_2.0_norm_total"]
    own = [p.grad.norm() for p in model.parameters() if p.grad is not None]
    torch.testing.assert_close(norms["grad_2.0_norm_total"], torch.stack([*own, torch.tensor(4.0).double()]).norm())
    assert the_same(model, "2") == norms


def test_afterwards_it_is_lightnings_own_again(model):
    complete_norms(lambda name, part: [part()])
    complete_norms(None)
    assert len(grad_norm(model, 2)) == 5


def test_clipping_by_the_norm_of_a_stage_is_told_once(model, stages):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert [str(w.message).count("sees the gradients of one stage") for w in caught] == [1]


# ---------------------------------------------------------------------- closures


class Steps(torch.optim.SGD):
    """Changes something, in one of several ways, before it calls its closure."""

    def __init__(self, parameters: Any, how: str) -> None:
        self.how = how
        super().__init__(parameters, lr=0.1)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any]) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"] if self.how == "moves" else ():
            parameter.add_(0.0)
        for parameter in self.param_groups[0]["params"] if self.how == "moves data" else ():
            parameter.data.add_(1.0)
        if self.how == "drops gradients":
            self.zero_grad()
        if self.how == "calls twice":
            closure()
        super().step(closure)


@pytest.mark.parametrize("has_gradients", [False, True])
@pytest.mark.parametrize("how", ["moves", "moves data", "drops gradients", "calls twice", "calls first"])
def test_a_closure_is_called_once_and_before_anything_is_changed(model, how, has_gradients):
    optimizer = Steps(model.parameters(), how)
    once = called_once(lambda: 1.0, "a step", optimizer, has_gradients=has_gradients)
    if how == "calls first" or (how == "drops gradients" and not has_gradients):  # those come with the closure
        optimizer.step(once)
        return
    words = "several times" if how == "calls twice" else "changes the parameters or their gradients before"
    with pytest.raises(UnsupportedFeatureError, match=f"^In a step, the optimizer .*{words}"):
        optimizer.step(once)
