"""The script that runs Lightning's own tests, on a checkout of four tests."""

import json
import subprocess
import sys

import lightning_suite
import pytest
from lightning_suite import Comparison, Outcome, explained, page, read, read_reasons, run, table, write_page

TESTS = """
import os

import pytest
from lightning.pytorch import Trainer


def test_of_the_default():
    assert type(Trainer(accelerator="cpu", logger=False).strategy).__name__ == "ReCycleStrategy"


def test_that_ends_the_process():
    os._exit(3)


@pytest.mark.parametrize("strategy", ["auto", "spawned"])
def test_that_fails(strategy):
    raise ValueError("as it should")


def test_that_is_skipped():
    pytest.skip()
"""


@pytest.mark.long
def test_each_test_has_an_outcome_whatever_the_others_do(tmp_path):
    part = tmp_path / "checkout" / "tests" / "tests_pytorch" / "loops"
    part.mkdir(parents=True)
    (part / "test_some.py").write_text(TESTS)
    interrupted = {"test": "tests_pytorch/loops/test_some.py::test_that_is_skipped"}
    (tmp_path / "loops-recycle.jsonl").write_text(json.dumps(interrupted) + "\n")
    found = run(tmp_path / "checkout", "loops", "recycle", tmp_path, seconds=120)
    assert {name.removeprefix("loops/test_some.py::"): outcome.outcome for name, outcome in found.items()} == {
        "test_of_the_default": "passed",
        "test_that_ends_the_process": "failed",
        "test_that_fails[auto]": "failed",  # what spawns is the same whatever the default is
        "test_that_is_skipped": "skipped",
    }
    assert "as it should" in found["loops/test_some.py::test_that_fails[auto]"].message
    assert read(tmp_path / "loops-recycle.jsonl") == found


def test_tests_that_hang_are_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(lightning_suite, "_START_SECONDS", 0.1)
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
    assert lightning_suite._wait(process, tmp_path / "notes", seconds=0.1) < 0


THERE = {"a.py::one": Outcome("passed"), "a.py::two[x]": Outcome("passed"), "a.py::three": Outcome("failed")}
HERE = {"a.py::one": Outcome("passed"), "a.py::two[x]": Outcome("failed", "why"), "a.py::three": Outcome("passed")}


def test_only_what_passes_there_counts():
    comparison = Comparison.of("loops", THERE, HERE)
    assert comparison.lost == ["a.py::two[x]"]
    assert table([comparison], "other")[2:] == ["| loops | 2 | 1 | 50.0 % | 2 |", "| all | 2 | 1 | 50.0 % | 2 |"]


def test_a_page_groups_what_is_lost_by_reason(tmp_path):
    reasons = read_reasons("# It is so.\na.py::two\n\n# It is not.\na.py::four\n")
    assert explained(["a.py::two[x]", "b.py::five"], reasons) == [("It is so.", ["a.py::two[x]"]), ("", ["b.py::five"])]
    path = tmp_path / "page.md"
    path.write_text("# How\n\n## Results\n\nold\n")
    write_page(path, page([Comparison.of("loops", THERE, HERE)], "other", reasons, "Today."))
    written = path.read_text()
    assert written.startswith("# How\n\n## Results\n\nToday.\n")
    assert "**It is so.**\n\n- `a.py::two[x]`\n" in written
    assert "old" not in written
