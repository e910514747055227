"""Activations of many megabytes: a worker that dies is mostly in the middle of a message."""

from typing import Any

import pytest
import torch
from support.growth import happened
from support.models import GLOBAL_BATCH, Regression, dataset
from support.training import exact_fit, failures
from torch import Tensor, nn

from lightning_recycle.callbacks import Fault

pytestmark = pytest.mark.long

STEPS = 4
TIMES = 65_536
"""16 MB of float64 for the two samples of a micro-batch, each way."""


class Widen(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.repeat(1, TIMES)


class Narrow(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.view(len(x), TIMES, 16).mean(1)


class Wide(Regression):
    """Two stages with a wide cut between them."""

    def configure_pipeline(self) -> list[Any]:
        torch.manual_seed(0)
        return [nn.Linear(8, 16), Widen(), Narrow(), nn.Linear(16, 1)]


@pytest.mark.parametrize(
    "fault",
    [
        Fault("kill", 0, 0, step=2, at="forward", when="after"),
        Fault("kill", 1, 1, step=2, at="backward_input", when="after"),
    ],
    ids=["activation", "gradient"],
)
def test_a_worker_killed_in_the_middle_of_a_message_holds_nobody_up(fault: Fault) -> None:
    """Gloo hands what is to be sent to a thread of its own: right after an operation it is under way."""
    run = exact_fit(Wide().double(), 2, 2, [fault], data=dataset(GLOBAL_BATCH * STEPS), max_steps=STEPS)
    assert failures(run) == [(fault.pipeline, fault.stage)]
    assert not happened(run, "disturbance")
    (recovered,) = happened(run, "recovered")
    assert recovered.seconds < 4  # shorter than any timeout in which it could have been waited for
