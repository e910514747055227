"""Checks cost a thousandth of the time, and find a wrong bit."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from lightning_recycle.control.protocol.messages import Checked
from lightning_recycle.model.layers import Tie
from lightning_recycle.runtime.stage_bundle import StageTies
from lightning_recycle.runtime.verification import FIRST_INTERVAL, StateChecks, copies_differ, sums_of_copies

OPTIMIZERS = [
    lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
    lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=2),
    lambda parameters: torch.optim.Adafactor(parameters, lr=0.1),
]


def trained(make: object, steps: int, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).to(dtype)
    optimizer = make(model.parameters())

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value: torch.Tensor = model(torch.ones(3, 4, dtype=dtype)).square().mean()
        value.backward()
        return value

    for _ in range(steps):
        optimizer.step(loss)
    return model, optimizer


def check(model: nn.Module, optimizer: torch.optim.Optimizer) -> Checked:
    return StateChecks("cpu:0", 1).check(0, model, [optimizer])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", OPTIMIZERS)
def test_a_wrong_bit_of_parameters_or_optimizer_states_is_seen(make, dtype):
    right, wrong = trained(make, 3, dtype), trained(make, 3, dtype)
    assert check(*right) == check(*wrong)
    with torch.no_grad():
        next(wrong[0].parameters()).view(-1)[0] *= 2
    assert check(*right).sums["parameters"] != check(*wrong).sums["parameters"]
    assert check(*right).sums["optimizer state"] == check(*wrong).sums["optimizer state"]
    state = next(iter(wrong[1].state.values()))
    next(value for value in state.values() if isinstance(value, torch.Tensor)).add_(1)
    assert check(*right).sums["optimizer state"] != check(*wrong).sums["optimizer state"]


def clock(times: Iterator[float]) -> object:
    return lambda: next(times)


def test_as_many_checks_as_take_a_thousandth_of_the_time():
    model, optimizer = trained(OPTIMIZERS[0], 1)
    # Each check takes 0.02 s; the steps between the first two take 0.1 s each, and then 40 s.
    checks = StateChecks("cpu:0", None, clock(iter([0.0, 0.02, 5.02, 5.04, 45.04, 45.06])))
    asked = [checks.check(step, model, [optimizer]).interval for step in (0, 50, 51)]
    assert asked == [FIRST_INTERVAL, 200, 1]
    assert StateChecks("cpu:0", 7, clock(iter([0.0, 1.0]))).check(0, model, [optimizer]).interval == 7


def test_a_check_is_after_the_announced_steps_or_never():
    model, optimizer = trained(OPTIMIZERS[0], 1)
    checks, off = StateChecks("cpu:0", None), StateChecks("cpu:0", 0)
    for one in (checks, off):
        one.announce(3)
        one.announce(5)
    assert [step for step in range(8) if checks.is_due(step)] == [3, 5]
    assert not any(off.is_due(step) for step in range(8))
    checks.check(3, model, [optimizer])
    assert [step for step in range(8) if checks.is_due(step)] == [5]


@pytest.mark.parametrize(
    ("weights", "names"),
    [((1.0, 1.0, 1.0, 1.0), False), ((1.0, 1.0, 2.0, 2.0), True), ((1.0, 1.0, 1.0, 2.0), False)],
    ids=["none", "one stage", "one worker"],
)
def test_copies_that_a_hook_has_changed_on_one_stage_are_named(weights, names):
    """A worker that differs from its peer is another matter."""
    first, second = "embed.weight", "head.weight"
    ties = (Tie((first, second), ((0, first), (1, second))),)
    found = []
    for weight, stage in zip(weights, (0, 0, 1, 1), strict=True):
        parameters = {(first, second)[stage]: torch.full((3,), weight), "own": torch.full((3,), float(stage))}
        found.append((stage, sums_of_copies(StageTies(ties, stage), parameters)))
    text = copies_differ(found)
    assert ("a copy of embed.weight, and" in text) == names
    assert bool(text) == names
