"""Bits that flip without an error: the worker that holds or computes them is named, and the run goes on without it."""

import os
import time
from typing import Any

import lightning as L
import pytest
from support.checks import checked_microbatch
from support.growth import happened
from support.models import Regression, dataset
from support.sampling import sampled
from support.training import TOLERANCE, difference, exact_fit, fit, plain_loop
from torch import Tensor, nn

from lightning_recycle.callbacks import Fault
from lightning_recycle.control.monitoring.history import Event


def corruptions(run: L.Trainer) -> list[Event]:
    return happened(run, "corruption")


def evicted(run: L.Trainer) -> list[Any]:
    return [event.worker for event in happened(run, "evicted")]


def test_a_flipped_bit_of_a_parameter_is_found_at_the_next_check_and_its_worker_is_evicted():
    fault = Fault("bitflip", 1, 0, step=3, target="parameter")
    run = fit(Regression().double(), 3, 1, [fault], strategy={"checksum_every": 2}, max_steps=9)
    (found,) = corruptions(run)
    assert (found.worker, found.details["kind"], found.details["then"]) == ((1, 0), "parameters", "evicted")
    assert found.details["since"] < 3 <= found.step <= 5
    assert found.details["device"] == "cpu:1"
    assert evicted(run) == [(1, 0)]
    assert len(happened(run, "step")) == 9


# ---------------------------------------------------------------------- computations

VERIFY = {"verify": 1.0, "checksum_every": 1}
CHECKED = {pipelines: checked_microbatch(3, pipelines) for pipelines in (2, 3)}


@pytest.mark.parametrize("grid", [(3, 1), pytest.param((2, 2), marks=pytest.mark.long)])
def test_who_computes_the_same_agrees_bit_by_bit(grid):
    model, other = Regression(dropout=0.5).double(), Regression(dropout=0.5).double()
    run = fit(model, *grid, [Fault("kill", 1, 0, step=4)], strategy=VERIFY)
    assert corruptions(run) == happened(run, "disputed") == []
    assert not happened(run, "incomparable")
    fit(other, 1, 1)
    assert difference(model.state_dict(), other.state_dict()) < TOLERANCE


@pytest.mark.parametrize(("fault", "kind"), sampled([
    (Fault("bitflip", 1, 0, 3, microbatch=CHECKED[3], target="activation"), "output"),
    (Fault("bitflip", 1, 0, 3, "backward_weight", when="after", microbatch=CHECKED[3], target="gradient"),
     "weight gradient"),
    (Fault("bitflip", 1, 0, step=3, target="matmul", every=2), "weight gradient"),
], 1, rest=pytest.mark.long))  # fmt: skip
def test_a_wrong_result_is_not_committed_and_its_worker_is_evicted(fault, kind):
    run = exact_fit(Regression().double(), 3, 1, [fault], strategy={**VERIFY, "max_restarts": 10})
    (found,) = corruptions(run)
    assert not happened(run, "restarting"), "its device is wrong"
    assert (found.worker, found.step, found.details["proof"]) == ((1, 0), 3, "computation")
    assert kind in found.details["kind"]
    assert evicted(run) == [(1, 0)]


@pytest.mark.parametrize("every", sampled([2, 3, 5, 7], 1, rest=pytest.mark.long))
def test_a_device_that_errs_elsewhere_each_time_is_not_taken_for_layers_that_do(every):
    faults = [Fault("bitflip", 1, 0, step=0, target="matmul", every=every)]
    run = fit(Regression().double(), 3, 1, faults, strategy=VERIFY)
    assert [(event.worker, event.details["proof"]) for event in corruptions(run)] == [((1, 0), "computation")]
    assert evicted(run) == [(1, 0)]
    assert not happened(run, "incomparable")


@pytest.mark.long
def test_of_two_the_one_that_does_not_get_its_own_result_again_was_wrong():
    fault = Fault("bitflip", 0, 0, step=3, microbatch=CHECKED[2], target="activation", bit=20)
    run = exact_fit(Regression().double(), 2, 1, [fault], strategy=VERIFY)
    assert [(event.worker, event.step) for event in corruptions(run)] == [((0, 0), 3)]
    assert evicted(run) == [(0, 0)]


class Hesitating(nn.Module):
    """Hands on what it is given, after a while in a forward that is none of the step's own."""

    def __init__(self) -> None:
        super().__init__()
        self.left = 0

    def forward(self, x: Tensor) -> Tensor:
        self.left -= 1
        if self.left < 0:
            time.sleep(0.3)
        return x


class Late(Regression):
    """Later stages are ready to step long before the first one has checked anything."""

    def configure_pipeline(self) -> list[Any]:
        return [Hesitating(), *super().configure_pipeline()]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if isinstance(self.layers[0], Hesitating):
            self.layers[0].left = 4  # micro-batches of a worker


@pytest.mark.long
@pytest.mark.parametrize("staggered", [True, False])
@pytest.mark.parametrize("wrong", [(1, 0), (1, 1)])
def test_no_stage_keeps_what_it_made_of_a_wrong_result_of_another_one(wrong, staggered):
    model, right = Late().double(), Regression().double()
    fault = Fault("bitflip", *wrong, step=3, target="matmul", every=1)
    run = fit(model, 3, 2, [fault], strategy={**VERIFY, "staggered": staggered, "rebalance": "never"}, max_steps=6)
    assert [(event.worker, event.step) for event in corruptions(run)] == [(wrong, 3)]
    values = zip(model.state_dict().values(), plain_loop(right, dataset(), steps=6).values(), strict=True)
    assert max(float((ours - theirs).abs().max()) for ours, theirs in values) < TOLERANCE


def test_a_message_that_is_damaged_on_its_way_is_sent_again():
    run = exact_fit(Regression().double(), 2, 2, [Fault("bitflip", 0, 0, step=3, target="message")])
    (disturbance,) = happened(run, "disturbance")
    assert "is damaged" in disturbance.details["cause"]
    assert corruptions(run) == evicted(run) == []


class Drawing(nn.Module):
    """Draws from nowhere that anybody knows of."""

    def forward(self, x: Tensor) -> Tensor:
        return x + int.from_bytes(os.urandom(1), "little") / 1e3


class Unrepeatable(Regression):
    def configure_pipeline(self) -> list[Any]:
        layers = super().configure_pipeline()
        return [*layers[:2], Drawing(), *layers[2:]]


def test_a_layer_that_is_not_deterministic_is_named_and_computations_are_not_compared():
    run = fit(Unrepeatable().double(), 3, 1, strategy=VERIFY)
    (event,) = happened(run, "incomparable")
    assert "layer 2 (Drawing)" in event.details["cause"]
    assert corruptions(run) == []
