"""A script that an engine starts several times trains once, or not at all."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_recycle.engines.copies import check_copies
from lightning_recycle.errors import ConfigurationError

HERE = Path(__file__).parent
SCRIPT = ["train.py", "--lr", "0.1"]
TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "RANK": "0"}
SRUN = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4"}


@pytest.mark.parametrize(
    ("environ", "command"),
    [
        (TORCHRUN, "recycle-run --nproc-per-node=4 train.py --lr 0.1"),
        (
            {**TORCHRUN, "LOCAL_WORLD_SIZE": "2"},
            "recycle-run --nproc-per-node=2 train.py --lr 0.1, on each machine with RECYCLE_COORDINATOR=HOST:PORT of a"
            " recycle-coordinator",
        ),
        (SRUN, "srun recycle-run python train.py --lr 0.1"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "recycle-run --nproc-per-node=2 train.py --lr 0.1"),
        ({"PMI_SIZE": "2"}, "recycle-run --nproc-per-node=2 train.py --lr 0.1"),
    ],
)
def test_one_of_several_processes_without_a_run_is_refused_with_the_right_command(
    environ: dict[str, str], command: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        check_copies(environ, SCRIPT)
    assert str(caught.value).endswith(f"Use instead: {command}")


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {**TORCHRUN, "WORLD_SIZE": "1"},
        {"WORLD_SIZE": "4"},  # whose it is, nobody knows
        {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"},  # a batch script
        {**SRUN, "SLURM_STEP_NUM_TASKS": "1"},  # srun --pty bash
        {"PMI_SIZE": "1"},
    ],
)
def test_a_script_that_is_alone_is_left_alone(environ: dict[str, str]) -> None:
    check_copies(environ, SCRIPT)


@pytest.mark.long
def test_under_torchrun_nothing_is_trained_twice(tmp_path: Path) -> None:
    """Each of its processes ends with the command to use, before it starts a worker or writes anything."""
    output = tmp_path / "weights"
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "engine_script.py", str(output)],
        cwd=HERE,
        env={**os.environ, "DEVICES": "2"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 1
    assert f"recycle-run --nproc-per-node=2 engine_script.py {output}" in done.stderr
    assert "rank" not in done.stdout
    assert not output.exists()
