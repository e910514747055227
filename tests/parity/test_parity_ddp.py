"""A script written for DDP, with its batch size per process and its sync_dist, trains the same on a grid."""

from pathlib import Path
from typing import Any

import pytest
import torch
from same_script import Run, assert_same
from support.scripts import output_of

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def left(tmp_path_factory) -> dict[str, tuple[Any, Run]]:
    root = tmp_path_factory.mktemp("ddp")
    found = {}
    for name in ("ddp", "recycle"):
        (root / name).mkdir()
        output_of(Path(__file__).parent / "ddp_script.py", name, root / name, timeout=280)
        found[name] = (torch.load(root / name / "left.pt"), Run(None, None, root / name))
    return found


def test_the_weights_are_those_of_ddp(left):
    assert_same(left["ddp"][0][0], left["recycle"][0][0])


def test_epochs_and_steps_are_those_of_ddp(left):
    assert left["ddp"][0][2:] == left["recycle"][0][2:] == (2, 4)


@pytest.mark.parametrize("name", ["train_loss_epoch", "val_loss", "val_max"])
def test_a_synchronised_metric_is_that_of_ddp(left, name):
    assert_same(left["ddp"][0][1][name], left["recycle"][0][1][name])


def test_the_files_are_those_of_ddp(left):
    one, grid = (run.files() for _, run in left.values())
    assert "checkpoints/epoch=1-step=4.ckpt" in one
    assert one == grid
