"""Whatever fails, the weights equal those of a plain loop in one process."""

import copy
import functools
from typing import Any

import pytest
import torch
from support.growth import happened
from support.models import AutoEncoder, Noisy, Regression, dataset
from support.sampling import sampled
from support.training import TOLERANCE, difference, exact_fit, failures, fit, plain_loop
from torch import Tensor, nn

from lightning_recycle.callbacks import Fault

GRIDS = [(1, 1), (2, 1), (1, 2), (2, 2), (3, 2), (2, 3)]


@pytest.mark.parametrize(("pipelines", "stages"), sampled(GRIDS, 1, rest=pytest.mark.long))
def test_weights_equal_a_plain_loop_on_every_grid(pipelines, stages):
    assert exact_fit(Regression().double(), pipelines, stages).global_step == 10


@functools.cache
def with_dropout_on_one_worker(seed: int) -> dict[str, Tensor]:
    model = Regression(dropout=0.5).double()
    fit(model, 1, 1, data=Noisy(), strategy={"seed": seed})
    return model.state_dict()


@pytest.mark.parametrize(("pipelines", "stages"), sampled([(2, 2), (3, 2), (2, 3)], 1, rest=pytest.mark.long))
def test_dropout_and_augmentation_do_not_depend_on_grid_or_failure(pipelines, stages):
    model = Regression(dropout=0.5).double()
    faults = [Fault("kill", 0, 0, step=3, at="backward_weight")]
    fit(model, pipelines, stages, faults, data=Noisy(), strategy={"seed": 7})
    assert difference(model.state_dict(), with_dropout_on_one_worker(7)) < TOLERANCE
    assert difference(with_dropout_on_one_worker(8), with_dropout_on_one_worker(7)) > 1e-3  # it is really random


@pytest.mark.long
def test_layer_specs_train_like_modules_built_in_one_process():
    model = Regression(specs=True)
    model.materialize(seed=3)
    expected = plain_loop(model.double(), dataset())
    lazy = Regression(specs=True).double()
    assert not list(lazy.layers[0].parameters())  # not built in this process
    fit(lazy, 2, 2, [Fault("kill", 1, 0, step=5)], strategy={"seed": 3})
    assert difference(lazy.state_dict(), expected) < TOLERANCE


def test_precision_64_trains_a_float32_module_in_double():
    model = Regression()
    expected = plain_loop(copy.deepcopy(model).double(), dataset())
    fit(model, 2, 2, [Fault("kill", 1, 1, step=5)], precision="64-true")
    assert difference(model.state_dict(), expected) < TOLERANCE


@pytest.mark.parametrize(("grid", "faults", "clip"), sampled([
    ((2, 2), [], None),
    ((1, 3), [], 0.05),
    ((2, 2), [Fault("kill", 0, 0, 3, at="reduce", when="after")], None),
    ((2, 2), [Fault("kill", 1, 1, 3, at="reduce")], 0.05),
    ((2, 2), [Fault("kill", 0, 1, 4, at="optimizer"), Fault("kill", 1, 0, 4, at="backward_weight")], None),
    ((2, 2), [Fault("kill", 0, 1, 4, at="optimizer", when="after")], None),
    ((2, 3), [Fault("kill", 1, 1, 2), Fault("kill", 0, 2, 5, at="reduce")], None),
], 1, rest=pytest.mark.long), ids=str)  # fmt: skip
def test_a_weight_that_two_stages_share_trains_as_one_parameter(grid, faults, clip):
    model = AutoEncoder().double()
    small = {"bucket_cap_mb": 1e-4} if faults else {}  # the tied weight's is one of several
    run = exact_fit(model, *grid, faults, gradient_clip_val=clip, strategy=small)
    assert sorted(failures(run)) == sorted((f.pipeline, f.stage) for f in faults)
    assert not run.strategy.schedules[0].problem.technique.staggered
    assert torch.equal(model.state_dict()["layers.0.weight"], model.state_dict()["layers.5.weight"])


class Turning(nn.Module):
    """Multiplies by complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.full((16,), 1 + 0.5j, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.factor).imag + x


class Complex(Regression):
    def configure_pipeline(self) -> list[Any]:
        first, *layers = super().configure_pipeline()
        return [first, Turning(), *layers]


@pytest.mark.parametrize(("grid", "options"), sampled([
    ((2, 2), {}),
    ((3, 1), {"strategy": {"verify": 1.0, "checksum_every": 1}}),
    ((3, 1), {"gradient_clip_val": 0.05}),
    ((2, 2), {"gradient_clip_val": 0.05}),
], 1, rest=pytest.mark.long))  # fmt: skip
def test_complex_parameters_train_whatever_looks_at_gradients_and_states(grid, options):
    run = exact_fit(Complex().double(), *grid, [Fault("kill", 1, 0, step=4)], **options)
    assert failures(run) == [(1, 0)]
    assert not any(happened(run, kind) for kind in ("corruption", "disputed", "incomparable", "not_finite"))
