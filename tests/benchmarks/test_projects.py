"""Models of public projects, compared with DDP."""

import re
import sys
from pathlib import Path

import pytest
from support.scripts import completed

ROOT = Path(__file__).parents[2]


@pytest.mark.exhaustive
def test_a_model_without_a_checkout_is_compared_with_ddp(tmp_path):
    """In a process of its own: the other side forks."""
    command = [sys.executable, "benchmarks/projects.py", str(tmp_path), "--only", "Hugging Face GPT-2", "--stages", "2"]
    done = completed(command, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found = re.search(r"^Hugging Face GPT-2, 2 stages: (\S+), (\S+)$", done.stdout, re.M)
    assert found is not None, done.stdout
    assert all(0 <= float(difference) < 1e-10 for difference in found.groups())
