"""When the leader dies its successor's bar, monitors and loggers go on, whatever was under way, without a traceback."""

import csv
import re
from pathlib import Path

import pytest
from same_script import LEADER, STEPS_PER_EPOCH
from support.scripts import output_of
from takeover_script import CASES, SEPARATOR

pytestmark = pytest.mark.long

SAMPLED = {"TQDM-fit-validation-4", "Rich-fit-forward-2", "Rich-test-batch-1"}


@pytest.fixture(scope="module")
def sampled_outputs(tmp_path_factory) -> tuple[Path, dict[str, str]]:
    """What the sampled cases print; one process for all of them."""
    folder = tmp_path_factory.mktemp("sampled")
    return folder, run_cases(folder, sorted(SAMPLED))


def run_cases(folder: Path, cases: list[str]) -> dict[str, str]:
    output = output_of(Path(__file__).parent / "takeover_script.py", folder, *cases, timeout=280)
    return dict(zip(cases, output.replace("\r", "\n").split(SEPARATOR)[1:], strict=True))


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case in SAMPLED else [pytest.mark.exhaustive]) for case in CASES]
)
def test_a_new_leader_goes_on_showing_and_logging(tmp_path, case, request):
    bar, entry, *_ = case.split("-")
    if case in SAMPLED:
        folder, outputs = request.getfixturevalue("sampled_outputs")
    else:
        folder, outputs = tmp_path, run_cases(tmp_path, [case])
    output = outputs[case]
    assert "Traceback" not in output, output
    assert f"lost workers: [{LEADER}]" in output or "lost workers: [(0, 1)]" in output, output
    if entry == "fit":
        last = output.rsplit("Epoch 1", 1)[1]
        assert "4/4" in last, output
        assert re.search(r"train_loss[=:]\s*\d\.\d{3}", last), last
        with open(folder / case / "logs" / "version_0" / "metrics.csv") as file:
            rows = list(csv.DictReader(file))
        steps = [int(row["step"]) for row in rows if row["train_loss"]]
        assert steps == list(range(2 * STEPS_PER_EPOCH)), "a row is missing or there twice"
        measured = [row for row in rows if row.get("train/device/batches_per_sec")]
        assert int(measured[-1]["step"]) == 2 * STEPS_PER_EPOCH - 1, "the monitor stopped"
    elif bar == "Rich":
        assert {"validate": "Validation", "test": "Testing", "predict": "Predicting"}[entry] in output
