"""Norms of gradients that hooks compute are those of the whole model."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import same_script as same
import torch
from lightning.pytorch.utilities import grad_norm
from support.sampling import sampled
from torch import Tensor, nn


class LogsNorms(same.Classifier):
    """As Lightning's documentation shows it, for the module and for one of its layers."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norms = grad_norm(self, norm_type=2)
        self.log_dict(norms)
        self.log("largest", grad_norm(self, "inf")["grad_inf_norm_total"])
        self.log("of_a_layer", grad_norm(self.layers[2], 1)["grad_1.0_norm_total"])
        self.folder.mkdir(exist_ok=True)
        with open(self.folder / str(os.getpid()), "a") as file:
            file.write(json.dumps({name: float(value) for name, value in norms.items()}) + "\n")


class LogsNormsOfTied(LogsNorms):
    """A weight that both stages hold counts once."""

    def configure_pipeline(self) -> list[Any]:
        torch.manual_seed(0)
        layers: list[Any] = [nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, same.CLASSES)]
        layers[2].weight = layers[0].weight
        return [layer.double() for layer in layers]


def logged(module: type[LogsNorms]) -> same.Script:
    def script(session: same.Session) -> None:
        session.fit(module(session.root / "norms"), max_epochs=2)

    return script


@pytest.mark.parametrize("staggered", sampled([True, False], 1, rest=pytest.mark.long))
@pytest.mark.parametrize("module", [LogsNorms, LogsNormsOfTied])
def test_grad_norm_is_that_of_one_device_on_every_worker(tmp_path, module, staggered):
    one = same.on_one_device(logged(module), tmp_path / "one")
    grid = same.on_a_grid(logged(module), tmp_path / "grid", staggered=staggered)
    assert "grad_2.0_norm_total" in one.metrics
    assert "grad_2.0_norm/layers.4.bias" in one.metrics
    same.assert_same(one.metrics, grid.metrics)
    same.assert_same(one.weights, grid.weights)
    found = [path.read_text().splitlines() for path in (grid.root / "norms").iterdir()]
    assert len(found) == same.PIPELINES * same.STAGES
    assert all(lines == found[0] for lines in found)


class NotANumber(nn.Module):
    """Adds zero, but the gradient of its parameter is NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(8, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x + (0.0 * self.scale).sqrt()


class HasNaN(same.Classifier):
    def configure_pipeline(self) -> list[Any]:
        return [NotANumber(), *super().configure_pipeline()]


def clipped_once(session: same.Session) -> None:
    session.fit(HasNaN(), max_steps=1, gradient_clip_val=0.1)


def test_clipping_by_a_norm_that_is_no_number_ruins_all_stages_as_on_one_device(tmp_path):
    one, grid = same.run_both(clipped_once, tmp_path)
    assert all(weight.isnan().all() for weight in one.weights.values())
    assert all(weight.isnan().all() for weight in grid.weights.values())
