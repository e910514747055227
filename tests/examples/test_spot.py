"""Instances that come, leave and vanish, in a small version of the example."""

import re
from pathlib import Path

import pytest
from support.scripts import output_of

SCRIPT = Path(__file__).parents[2] / "examples" / "spot.py"


@pytest.mark.long
def test_three_instances_come_and_go_and_the_losses_are_those_of_one_device(tmp_path):
    """The script itself compares the losses."""
    trace, picture = tmp_path / "trace.csv", tmp_path / "spot.svg"
    rows = [f"0,add,{node}" for node in "abc"] + [f"20000,remove,{node}" for node in "abc"]
    trace.write_text("\n".join(rows))
    times = ("--hours", 20 / 3600, "--minutes", 1 / 60)
    said = output_of(SCRIPT, "--trace", trace, *times, "--most", 3, "--output", picture, cwd=tmp_path)
    assert "Instances: 3 came, 2 left, 1 vanished." in said
    assert re.search(r"at most [0-9e.+-]+ from one device's", said)
    assert picture.read_text().count("<svg") == 1
