"""Scripts that a test starts as a user does."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

__all__ = ["output_of"]


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
