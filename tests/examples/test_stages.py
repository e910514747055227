"""The ordinary module that is cut into stages: what its command prints, and that it loses a worker."""

import re
from pathlib import Path

import pytest
from support.scripts import output_of

ROOT = Path(__file__).parents[2]


@pytest.mark.long
def test_an_unmodified_gpt_trains_in_two_stages_and_loses_a_worker(tmp_path):
    script, environment = ROOT / "examples" / "unmodified_stages.py", {"OMP_NUM_THREADS": "1"}
    out = output_of(script, "--kill", "--epochs=1", env=environment, cwd=tmp_path)
    assert "1 failure" in out
    assert "Worker (0, 1) was lost" in out
    told = re.search(r"^Bits per byte: (\d\.\d+)$", out, re.MULTILINE)
    assert 2.0 < float(told[1]) < 5.5
