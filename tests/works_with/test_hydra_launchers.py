"""A sweep's jobs train the same weights, started by launchers of Hydra: undisturbed, and with a worker replaced."""

import os
from pathlib import Path

import pytest
import small_training as small
import torch
from support.scripts import output_of

pytestmark = pytest.mark.long

HERE = Path(__file__).parent


@pytest.mark.parametrize("launcher", ["joblib", "submitit_local"])
def test_hydra_launcher(launcher, tmp_path):
    pytest.importorskip(f"hydra_plugins.hydra_{launcher.partition('_')[0]}_launcher")
    path = os.pathsep.join([str(HERE), os.environ["PYTHONPATH"]])  # a job of submitit imports the script by its name
    options = ["-m", f"hydra/launcher={launcher}", f"hydra.sweep.dir={tmp_path}", "killed=false,true"]
    output_of(HERE / "hydra_script.py", *options, env={"PYTHONPATH": path}, cwd=tmp_path)
    undisturbed, replaced = (torch.load(tmp_path / job / "weights.pt") for job in "01")
    assert small.difference(undisturbed, replaced) < small.TOLERANCE
