"""A NaN is the model's only if a peer gets it, too; otherwise the user never sees it."""

from typing import Any

import lightning as L
import pytest
import torch
from support.models import Regression, dataset
from support.sampling import sampled
from support.training import TOLERANCE, committed_steps, difference, fit, plain_loop
from torch import Tensor, nn

STEP = 4


def told(run: L.Trainer) -> list[tuple[int, str]]:
    return [(event.step, event.details["then"]) for event in run.strategy.history if event.kind == "not_finite"]


def corruptions(run: L.Trainer) -> list[tuple[Any, int, str]]:
    return [(e.worker, e.step, e.details["proof"]) for e in run.strategy.history if e.kind == "corruption"]


class Passing(nn.Module):
    """Hands on what it is given, but NaN in its next ``wrong`` forwards; or its gradients, with ``backwards``."""

    wrong = 0  # of the class: an attribute of the layer would begin anew when the forward is computed again

    def __init__(self, backwards: bool) -> None:
        super().__init__()
        self.backwards = backwards

    def forward(self, x: Tensor) -> Tensor:
        Passing.wrong -= 1
        if Passing.wrong < 0:
            return x
        if self.backwards:
            x = x * 1.0
            x.register_hook(lambda grad: grad * torch.nan)
            return x
        return x * torch.nan


class Wrong(Regression):
    """From step 4 on its last stage makes NaN in ``forwards`` forwards, on the worker ``who`` or on all."""

    def __init__(self, who: tuple[int, int] | None, forwards: int, backwards: bool = False) -> None:
        super().__init__()
        self.who, self.forwards, self.backwards = who, forwards, backwards

    def configure_pipeline(self) -> list[Any]:
        *layers, last = super().configure_pipeline()
        return [*layers, Passing(self.backwards), last]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        worker = self.trainer.strategy.worker
        if batch_idx == STEP and self.who in (None, (worker.pipeline, worker.stage)):
            for layer in self.layers:
                if isinstance(layer, Passing):
                    Passing.wrong = self.forwards


def test_one_that_does_not_come_again_leaves_nothing_behind():
    model = Wrong((1, 1), 1).double()
    expected = plain_loop(model, dataset())
    run = fit(model, 2, 2)
    assert told(run) == [(STEP, "inspected"), (STEP, "gone")]
    assert corruptions(run) == []
    assert committed_steps(run) == list(range(10))
    assert difference(model.state_dict(), expected) < TOLERANCE


@pytest.mark.parametrize("backwards", sampled([False, True], 1, rest=pytest.mark.long))
def test_a_device_that_makes_them_is_evicted_because_its_peer_does_not(backwards):
    model = Wrong((1, 1), 1000, backwards).double()
    expected = plain_loop(model, dataset())
    run = fit(model, 2, 2, gradient_clip_val=1e3)  # steps are speculative
    assert corruptions(run) == [((1, 1), STEP, "computation")]
    assert [event.worker for event in run.strategy.history if event.kind == "evicted"] == [(1, 1)]
    assert difference(model.state_dict(), expected) < TOLERANCE


def test_the_models_own_is_the_users_and_asked_for_once():
    model = Wrong(None, 1000).double()
    run = fit(model, 2, 2, max_steps=8)
    assert told(run) == [(STEP, "inspected"), (STEP, "kept")]
    assert corruptions(run) == []
    assert committed_steps(run) == list(range(8))
    assert all(bool(torch.isnan(value).any()) for value in model.state_dict().values())
