"""A training that submitit runs, here on this machine; ``make test-slurm`` is about SLURM itself."""

import sys
from pathlib import Path

import pytest
import torch
from support.models import GLOBAL_BATCH, Regression, dataset
from support.scripts import output_of
from support.training import difference, plain_loop

ROOT = Path(__file__).parents[2]
STEPS = 4


@pytest.mark.long
def test_submitit_runs_a_training_of_four_workers(tmp_path):
    pytest.importorskip("submitit", reason="needs submitit: pip install '.[examples]'")
    script, trained = ROOT / "tests/engines/engine_script.py", tmp_path / "trained.pt"
    folder = ["--cluster", "local", "--folder", tmp_path / "jobs"]
    output_of(ROOT / "examples/submit.py", *folder, "--", sys.executable, script, trained, STEPS)
    expected = plain_loop(Regression().double(), dataset(GLOBAL_BATCH * STEPS), STEPS)
    assert difference(torch.load(trained), expected) < 1e-10
