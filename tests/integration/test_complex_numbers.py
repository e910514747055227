"""Complex parameters train as on one device, whatever looks at gradients and states."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.models import Regression, dataset
from support.sampling import sampled
from support.training import TOLERANCE, failures, fit, plain_loop
from torch import Tensor, nn

from lightning_recycle.callbacks import Fault


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


@pytest.mark.parametrize(
    ("grid", "options"),
    sampled(
        [
            ((2, 2), {}),
            ((3, 1), {"strategy": {"verify": 1.0, "checksum_every": 1}}),
            ((3, 1), {"gradient_clip_val": 0.05}),
            ((2, 2), {"gradient_clip_val": 0.05}),
        ],
        2,
        rest=pytest.mark.long,
    ),
)
def test_complex_parameters(grid: tuple[int, int], options: dict[str, Any]) -> None:
    model = Complex().double()
    expected = plain_loop(model, dataset(), clip_norm=options.get("gradient_clip_val"))
    run = fit(model, *grid, [Fault("kill", 1, 0, step=4)], **options)
    assert failures(run) == [(1, 0)]
    assert not [e for e in run.strategy.history if e.kind in ("corruption", "disputed", "incomparable", "not_finite")]
    assert max(float((model.state_dict()[name] - value).abs().max()) for name, value in expected.items()) < TOLERANCE
