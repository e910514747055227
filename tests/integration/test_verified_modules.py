"""Computations of ordinary modules, and of machines of other kinds, are checked."""

import itertools
from dataclasses import replace
from typing import Any

import lightning as L
import pytest
import torch
from support.checks import checked_microbatch
from support.growth import happened
from support.models import Regression, dataset
from support.sampling import sampled
from support.streams import Stream
from support.training import TOLERANCE, difference, exact_fit, fit, plain_loop
from torch import Tensor, nn
from torchmetrics import MeanAbsoluteError

from lightning_recycle.callbacks import Fault
from lightning_recycle.runtime import verification

VERIFY = {"verify": 1.0, "checksum_every": 1}
WRONG = Fault("bitflip", 1, 0, step=3, microbatch=checked_microbatch(3, 3), target="activation")


def logged(run: L.Trainer) -> dict[str, float]:
    """What the module has logged."""
    return {name: float(value) for name, value in run.callback_metrics.items() if not name.startswith("recycle/")}


class Following(nn.Module):
    """With a buffer that each forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean()
        return x


class Ordinary(L.LightningModule):
    """Its step draws, logs, counts, collects, and changes a metric and buffers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Linear(8, 16), Following(), nn.Dropout(0.5), nn.Tanh(), nn.Linear(16, 8), nn.Linear(8, 1)
        )
        self.error = MeanAbsoluteError()
        self.samples, self.losses = 0, []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        output = self.net(x)
        loss = (output - y).square().mean()
        self.samples += len(x)
        self.losses.append(float(loss.detach()))
        self.error(output, y)
        self.log("error", self.error, on_epoch=True)
        self.log("loss_sum", loss, on_epoch=True, reduce_fx="sum")
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def but_the_mean(module: nn.Module) -> dict[str, Tensor]:
    """The state without a running mean, which counts what was computed of a step that ran again twice."""
    return {name: value for name, value in module.state_dict().items() if name != "net.1.mean"}


@pytest.mark.parametrize(
    ("grid", "killed"), sampled([((3, 1), False), ((3, 1), True), ((2, 2), True)], 1, rest=pytest.mark.long)
)
def test_a_step_of_an_ordinary_module_that_is_checked_leaves_nothing_behind(grid, killed):
    model, other = Ordinary().double(), Ordinary().double()
    faults = [Fault("kill", 0, grid[1] - 1, step=4)] if killed else []
    run = fit(model, *grid, faults, strategy=VERIFY)
    plain = fit(other, *grid, faults)
    assert not any(happened(run, kind) for kind in ("corruption", "disputed", "incomparable"))
    assert difference(but_the_mean(model), but_the_mean(other)) < TOLERANCE
    if not killed:
        assert difference(model.state_dict(), other.state_dict()) < TOLERANCE
    assert (model.samples, model.losses) == (other.samples, pytest.approx(other.losses, abs=1e-12))
    assert logged(run) == pytest.approx(logged(plain), abs=1e-12)


class Unlike(Regression):
    """Each pipeline, or each but the first, has machines of its own kind."""

    def __init__(self, kinds: dict[int, str]) -> None:
        super().__init__()
        self.kinds = kinds

    def on_fit_start(self) -> None:
        kind = self.kinds[self.trainer.strategy.worker.pipeline]
        verification._machine_digest = lambda: kind


@pytest.mark.parametrize("fault", sampled([WRONG, Fault("kill", 1, 0, step=3)], 1, rest=pytest.mark.long))
def test_a_machine_of_its_own_kind_finds_the_errors_that_do_not_come_again_itself(fault):
    run = exact_fit(Unlike({0: "a", 1: "b", 2: "c"}).double(), 3, 1, [fault], strategy=VERIFY)
    found = [
        (event.worker, "got something else twice" in event.details["cause"]) for event in happened(run, "corruption")
    ]
    assert found == ([((1, 0), True)] if fault is WRONG else [])
    assert [event.worker for event in happened(run, "evicted")] == [worker for worker, _ in found]


@pytest.mark.long
def test_machines_of_other_kinds_have_no_say():
    model, fault = (
        Unlike({0: "a", 1: "a", 2: "b", 3: "b"}).double(),
        replace(WRONG, microbatch=checked_microbatch(3, 4)),
    )
    run = exact_fit(model, 4, 1, [fault], strategy=VERIFY)
    assert [event.worker for event in happened(run, "corruption")] == [(1, 0)]


class Unsendable:
    def __init__(self, x: Tensor) -> None:
        self.x, self.function = x, lambda: x


class Take(nn.Module):
    def forward(self, given: Unsendable) -> Tensor:
        return given.x


class Given(Regression):
    """Gives its first layer something that cannot be sent."""

    def configure_pipeline(self) -> list[Any]:
        return [Take(), *super().configure_pipeline()]

    def split_batch(self, batch: Any) -> tuple[Any, Any]:
        return Unsendable(batch[0]), batch[1]


def test_what_cannot_be_sent_is_not_checked_and_the_run_goes_on():
    model = Given().double()
    expected = plain_loop(Regression().double(), dataset())
    run = fit(model, 2, 1, strategy=VERIFY)
    (event,) = happened(run, "incomparable")
    assert "cannot be sent" in event.details["cause"]
    weights = model.layers.state_dict().values()
    assert all((a - b).abs().max() < TOLERANCE for a, b in zip(weights, expected.values(), strict=True))


KINDS: dict[str, dict[str, Any]] = {
    "accumulation": {"accumulate_grad_batches": 2, "max_steps": 5},
    "stream": {"data": Stream(240)},
    "bf16": {"precision": "bf16-mixed"},
}


@pytest.mark.parametrize(("module", "kind"), sampled(itertools.product((Regression, Ordinary), KINDS), 1))
def test_a_broken_device_is_found_in_whatever_kind_of_training(module, kind):
    options = KINDS[kind]
    is_half = "precision" in options
    model, right = (module() if is_half else module().double() for _ in range(2))
    fault = Fault("bitflip", 1, 1, step=3, target="matmul", every=1)
    data = [(x.float(), y.float()) for x, y in dataset()] if is_half else None
    options = {"data": data, **options}
    run = fit(model, 3, 2, [fault], strategy=VERIFY, **options)
    assert [(event.worker, event.details["proof"]) for event in happened(run, "corruption")] == [
        ((1, 1), "computation")
    ]
    assert [event.worker for event in happened(run, "evicted")] == [(1, 1)]
    fit(right, 3, 2, **options)
    ours, theirs = ({n: v for n, v in one.state_dict().items() if n != "net.1.mean"} for one in (model, right))
    assert difference(ours, theirs) < (0.01 if is_half else TOLERANCE)
