"""A member of a position is killed at any collective, or outside of a step."""

import itertools
from typing import Any

import pytest
import sharded
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from support.sampling import sampled
from support.training import TOLERANCE

COLLECTIVES = {1: 9, 2: 5}
"""Of a member in a step, by the number of stages: those of the layers, and the meeting before."""


def every_collective() -> list[Any]:
    places = itertools.product((1, 2), (0, 1, 2, 3), range(sharded.STEPS), ("before", "after"))
    return [
        (stages, rank, step, number, when)
        for stages, rank, step, when in places
        for number in range(COLLECTIVES[stages])
    ]


@pytest.mark.parametrize("stages", [pytest.param(1, marks=pytest.mark.long), 2])
def test_the_matrix_holds_every_collective(stages, tmp_path):
    sharded.fit(sharded.Piped(), (2, stages, 2), sharded.AtCollective(1, 1, None, report=tmp_path / "seen"))
    assert int((tmp_path / "seen").read_text()) == COLLECTIVES[stages]


@pytest.mark.parametrize(("stages", "rank", "step", "number", "when"), sampled(every_collective(), 1))
def test_a_kill_at_a_collective_of_the_layers(stages, rank, step, number, when):
    sharded.exact_fit(sharded.Piped(), (2, stages, 2), sharded.AtCollective(rank, step, number, when))


# ---------------------------------------------------------------------- outside of steps


STARTS = [sharded.AtHook(1, "setup"), sharded.AtHook(2, "on_fit_start"), sharded.AtHook(3, "on_train_start")]
IN_VALIDATION = [sharded.AtHook(1, "on_validation_batch_start", 3), sharded.AtHook(0, "on_validation_batch_end", 5)]
IN_CHECKPOINT = [
    sharded.AtPoint(0, "checkpoint", 2),
    sharded.AtHook(3, "on_save_checkpoint"),
    sharded.AtHook(0, "on_save_checkpoint", 1),
]
LATER = [sharded.AtPoint(1, "end", sharded.STEPS), sharded.AtPoint(0, "validation", 2)]
OUTSIDE = [*STARTS, *IN_VALIDATION, *IN_CHECKPOINT, *LATER]


@pytest.mark.parametrize(("victim", "grid"), [
    *sampled([(victim, sharded.TENSOR) for victim in OUTSIDE], 1, rest=pytest.mark.long),
    *(pytest.param(victim, sharded.FSDP, marks=pytest.mark.long) for victim in OUTSIDE),
    *(pytest.param(victim, sharded.BOTH, marks=pytest.mark.exhaustive) for victim in OUTSIDE),
], ids=sharded.name)  # fmt: skip
def test_a_kill_outside_of_steps(victim, grid, tmp_path):
    """Checkpoints that are to be written in the background are waited for."""
    keep = ModelCheckpoint(tmp_path, save_top_k=-1, every_n_train_steps=2, save_last=True)
    checks = {"enable_checkpointing": True, "validates": True, "val_check_interval": 2}
    sharded.exact_fit(sharded.Ordinary(), grid, keep, victim, **checks, strategy={"background": grid != sharded.TENSOR})
    expected = sharded.plain_loop(sharded.parts_of(grid))
    stored = torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"]
    assert max(float((stored[f"model.{n}"] - p).abs().max()) for n, p in expected.named_parameters()) < TOLERANCE
