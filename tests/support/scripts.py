"""Scripts that a test starts as a user does."""

import contextlib
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

from support.waiting import PATIENCE

COORDINATOR = [sys.executable, "-m", "lightning_recycle.control.coordinator.standalone"]
"""``recycle-coordinator``, wherever the package is installed."""
RECYCLE_RUN = [sys.executable, "-m", "lightning_recycle.engines.recycle_run"]


@contextlib.contextmanager
def started(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A process with pipes for what it prints, killed at the end of the block."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def completed(command: Sequence[str | Path], **options: Any) -> subprocess.CompletedProcess[str]:
    """What ``command`` printed, and how it ended."""
    return subprocess.run(command, capture_output=True, text=True, **{"timeout": PATIENCE, **options})


def consolidated(folder: str | Path, file: Path) -> Path:
    """Lightning's command, run in this process, makes one checkpoint, ``file``, of the sharded one in ``folder``."""
    command = "lightning.pytorch.utilities.consolidate_checkpoint"
    with patch("sys.argv", [command, str(folder), "--output_file", str(file)]):
        runpy.run_module(command, run_name="__main__")
    return file


def output_of(
    script: Path, *arguments: object, code: int = 0, env: dict[str, str] | None = None, **options: Any
) -> str:
    """What ``script`` prints, errors included; it must end with exit code ``code``."""
    command = [sys.executable, str(script), *map(str, arguments)]
    environment = {**os.environ, **(env or {})}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(command, env=environment, check=False, **pipes, **options)
    assert done.returncode == code, done.stdout
    return str(done.stdout)
