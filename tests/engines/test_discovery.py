"""What a worker finds in its environment, and what is wrong with it."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_recycle.control.network.addresses import machine_name
from lightning_recycle.engines.discovery import discover
from lightning_recycle.errors import ConfigurationError

HERE = Path(__file__).parent
PACKAGE = HERE.parents[1] / "lightning_recycle"
KEY = "a secret of 16 bytes or more"
MINIMAL = {"RECYCLE_COORDINATOR": "10.0.0.1:29400", "RECYCLE_KEY": KEY}


def test_a_process_without_a_coordinator_takes_part_in_nobodys_run() -> None:
    assert discover({"RECYCLE_KEY": KEY, "LOCAL_RANK": "nonsense"}) is None


def test_everything_is_found() -> None:
    places = {"RECYCLE_NODE": "n7", "RECYCLE_HOST": "10.0.0.7", "LOCAL_RANK": "3", "RECYCLE_ENGINE": "slurm"}
    found = discover({**MINIMAL, **places, "SLURM_LOCALID": "1"})
    assert found is not None
    assert (found.engine, found.coordinator, found.key) == ("slurm", ("10.0.0.1", 29400), KEY.encode())
    assert (found.node, found.host, found.device, found.device_from) == ("n7", "10.0.0.7", 3, "LOCAL_RANK")
    assert KEY not in repr(found)


def test_what_nobody_said_has_a_default() -> None:
    found = discover(MINIMAL)
    assert found is not None
    assert (found.engine, found.node, found.host, found.device) == ("hand", machine_name({}), None, 0)
    slurm = discover({**MINIMAL, "SLURM_LOCALID": "2"})
    assert slurm is not None
    assert slurm.device == 2


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"RECYCLE_COORDINATOR": ""}, "RECYCLE_COORDINATOR=''"),
        ({"RECYCLE_KEY": ""}, "RECYCLE_KEY is not set"),
        ({"LOCAL_RANK": "-1"}, "LOCAL_RANK='-1'"),
        ({"SLURM_LOCALID": "first"}, "SLURM_LOCALID='first'"),
    ],
)
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
        timeout=60,
    )
    assert done.returncode == 1
    assert "LOCAL_RANK=4 does not fit Trainer(devices=4)" in done.stderr


def test_no_other_module_reads_these_variables() -> None:
    readers: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                readers.setdefault(node.value, set()).add(path.name)
    for name in ("RECYCLE_NODE", "RECYCLE_HOST", "LOCAL_RANK", "SLURM_LOCALID"):
        assert readers[name] <= {"addresses.py", "discovery.py", *ENGINES}, name
    assert readers["RECYCLE_COORDINATOR"] <= {"discovery.py", *ENGINES}
    assert readers["RECYCLE_KEY"] | readers["RECYCLE_KEY_FILE"] <= {"keys.py", *ENGINES}


ENGINES = {path.name for path in (PACKAGE / "engines").glob("*.py")} | {"ray_crew.py"}
"""What sets them for others."""
