"""Weights that an early and a late stage share: one parameter on one device, equal copies on a grid."""

from typing import Any

import pytest
import torch
from support.models import Decode, Encode
from support.sampling import sampled
from support.training import exact_fit, failures
from torch import Tensor, nn

from lightning_recycle import PipelineModule
from lightning_recycle.callbacks import Fault


class AutoEncoder(PipelineModule):
    def configure_pipeline(self) -> list[nn.Module]:
        torch.manual_seed(0)
        encode = Encode(6, 8, 3)
        return [encode, nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 6), nn.Tanh(), Decode(encode)]

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


@pytest.mark.parametrize(
    ("grid", "faults", "clip"),
    sampled(
        [
            ((2, 2), [], None),
            ((1, 3), [], 0.05),
            ((2, 2), [Fault("kill", 0, 0, 3, at="reduce", when="after")], None),
            ((2, 2), [Fault("kill", 1, 1, 3, at="reduce")], 0.05),
            ((2, 2), [Fault("kill", 0, 1, 4, at="optimizer"), Fault("kill", 1, 0, 4, at="backward_weight")], None),
            ((2, 2), [Fault("kill", 0, 1, 4, at="optimizer", when="after")], None),
            ((2, 3), [Fault("kill", 1, 1, 2), Fault("kill", 0, 2, 5, at="reduce")], None),
        ],
        3,
        rest=pytest.mark.long,
    ),
    ids=str,
)
def test_copies_on_two_stages_train_as_one_parameter(
    grid: tuple[int, int], faults: list[Fault], clip: float | None
) -> None:
    model = AutoEncoder().double()
    small = {"bucket_cap_mb": 1e-4} if faults else {}  # the tied weight's is one of several
    run = exact_fit(model, *grid, faults, gradient_clip_val=clip, strategy=small)
    assert sorted(failures(run)) == sorted((f.pipeline, f.stage) for f in faults)
    assert not run.strategy.schedules[0].problem.technique.staggered
    assert torch.equal(model.state_dict()["layers.0.weight"], model.state_dict()["layers.5.weight"])
