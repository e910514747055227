"""The benchmarks of the control plane run."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize("name", ["control_plane.py", "regroup.py"])
def test_a_small_grid_is_measured(name: str) -> None:
    command = [sys.executable, str(BENCHMARKS / name), "--workers", "16"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^ +16 .*\d\.\d{3}", done.stdout, re.MULTILINE), done.stdout
