"""Workers find their run in the environment; a script that is started several times trains once, or not at all."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.waiting import PATIENCE

from lightning_recycle.control.network.addresses_and_keys import machine_name
from lightning_recycle.engines.worker_environment import check_copies, discover
from lightning_recycle.errors import ConfigurationError

HERE = Path(__file__).parent
PACKAGE = HERE.parents[1] / "lightning_recycle"
KEY = "a secret of 16 bytes or more"
MINIMAL = {"RECYCLE_COORDINATOR": "10.0.0.1:29400", "RECYCLE_KEY": KEY}


def test_a_process_without_a_coordinator_takes_part_in_nobodys_run() -> None:
    assert discover({"RECYCLE_KEY": KEY, "LOCAL_RANK": "nonsense"}) is None


def test_everything_is_found() -> None:
    places = {"RECYCLE_NODE": "n7", "RECYCLE_HOST": "127.0.0.7", "LOCAL_RANK": "3"}
    found = discover({**MINIMAL, **places, "SLURM_LOCALID": "1"})
    assert found is not None
    assert (found.coordinator, found.key) == (("10.0.0.1", 29400), KEY.encode())
    assert (found.node, found.host, found.device, found.device_from) == ("n7", "127.0.0.7", 3, "LOCAL_RANK")
    assert KEY not in repr(found)


def test_what_nobody_said_has_a_default() -> None:
    found = discover(MINIMAL)
    assert found is not None
    assert (found.node, found.host, found.device) == (machine_name({}), None, 0)
    slurm = discover({**MINIMAL, "SLURM_LOCALID": "2"})
    assert slurm is not None
    assert slurm.device == 2


@pytest.mark.parametrize(("variables", "words"), [
    ({"RECYCLE_COORDINATOR": ""}, "RECYCLE_COORDINATOR=''"),
    ({"RECYCLE_COORDINATOR": "10.0.0.1:0"}, "'10.0.0.1:0': the port must be one of 1 to 65535"),
    ({"RECYCLE_HOST": "192.0.2.1"}, "RECYCLE_HOST='192.0.2.1': no worker can listen there"),
    ({"RECYCLE_HOST": "127.0.0.1:80"}, "give an address of this machine, without a port"),
    ({"RECYCLE_KEY": ""}, "RECYCLE_KEY is not set"),
    ({"LOCAL_RANK": "-1"}, "LOCAL_RANK='-1'"),
    ({"SLURM_LOCALID": "first"}, "SLURM_LOCALID='first'"),
])  # fmt: skip
def test_what_cannot_be_right_is_an_error_that_names_it(variables: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        discover({**MINIMAL, **variables})


@pytest.mark.parametrize(
    ("mode", "content", "words"),
    [
        (0o600, KEY + "\n", None),
        (0o400, KEY, None),
        (0o640, KEY, r"others may read or write it \(mode 0640\).*chmod 600"),
        (0o604, KEY, "mode 0604"),
        (0o600, "guess me", "has 8 bytes"),
        (None, "", "cannot be read: No such file"),
    ],
)
def test_a_key_may_be_in_a_file_that_only_its_owner_reads(
    mode: int | None, content: str, words: str | None, tmp_path: Path
) -> None:
    path = tmp_path / "key"
    if mode is not None:
        path.write_text(content)
        path.chmod(mode)
    environ = {"RECYCLE_COORDINATOR": "h:1", "RECYCLE_KEY_FILE": str(path)}
    if words is None:
        found = discover(environ)
        assert found is not None
        assert found.key == KEY.encode()
        return
    with pytest.raises(ConfigurationError, match=words):
        discover(environ)


@pytest.mark.long
def test_a_device_that_the_trainer_does_not_have_is_an_error_at_once(tmp_path: Path) -> None:
    """It needs no coordinator: there is none at that address."""
    done = subprocess.run(
        [sys.executable, str(HERE / "engine_script.py"), str(tmp_path / "weights")],
        env={**os.environ, **MINIMAL, "RECYCLE_COORDINATOR": "127.0.0.1:9", "LOCAL_RANK": "4"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 1
    assert "LOCAL_RANK=4 does not fit Trainer(devices=4)" in done.stderr


def test_no_other_module_reads_these_variables() -> None:
    readers: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        if not any(part in text for part in ("RECYCLE_", "LOCAL_RANK", "SLURM_")):
            continue  # parsing takes long
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                readers.setdefault(node.value, set()).add(path.name)
    for name in ("RECYCLE_NODE", "RECYCLE_HOST", "LOCAL_RANK", "SLURM_LOCALID"):
        assert readers[name] <= {"addresses_and_keys.py", "worker_environment.py", *ENGINES}, name
    assert readers["RECYCLE_COORDINATOR"] <= {"worker_environment.py", *ENGINES}
    assert readers["RECYCLE_KEY"] | readers["RECYCLE_KEY_FILE"] <= {"addresses_and_keys.py", *ENGINES}


ENGINES = {path.name for path in (PACKAGE / "engines").glob("*.py")} | {"ray_workers.py"}
"""What sets them for others."""


# ---------------------------------------------------------------------- copies of a script


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
        timeout=PATIENCE,
    )
    assert done.returncode == 1
    assert f"recycle-run --nproc-per-node=2 engine_script.py {output}" in done.stderr
    assert "rank" not in done.stdout
    assert not output.exists()
