"""What a run prints: the summary shows the whole model, bars are drawn by the leader alone, nothing is repeated."""

import re
from pathlib import Path

import pytest
from printing_script import SEPARATOR
from same_script import Run
from support.scripts import output_of

pytestmark = pytest.mark.long

ONE, GRID = "one", "grid"
DEFAULTS, PLAIN = 0, 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("printed")


@pytest.fixture(scope="module")
def printed(folder) -> dict[str, list[str]]:
    """What each script printed on one device and on the grid, all processes of it."""
    output = output_of(Path(__file__).parent / "printing_script.py", folder, timeout=280)
    outputs = output.replace("\r", "\n").split(SEPARATOR)[1:]
    return {ONE: outputs[:2], GRID: outputs[2:]}


def rows(text: str) -> list[list[str]]:
    """The cells of all lines that are rows of a table, numbers to 12 digits: sums may differ in their last ones."""
    found = [[rounded(cell.strip()) for cell in re.split("[|│┃]", line)[1:-1]] for line in text.splitlines()]
    return [cells for cells in found if len(cells) > 1]


def rounded(cell: str) -> str:
    return f"{float(cell):.12g}" if re.fullmatch(r"\d+\.\d{6,}", cell) else cell


def totals(text: str) -> list[str]:
    wanted = ("params", "FLOPs", "Modules in")
    return sorted(line.strip() for line in text.splitlines() if any(w in line for w in wanted) and "|" not in line)


@pytest.mark.parametrize("script", [DEFAULTS, PLAIN], ids=["RichModelSummary", "ModelSummary"])
def test_the_model_summary_shows_the_whole_model(printed, script):
    one, grid = printed[ONE][script], printed[GRID][script]
    assert any("484" in cells for cells in rows(one)), one
    assert any("484" in line for line in totals(one)), one
    assert rows(one) == rows(grid)
    assert totals(one) == totals(grid)


def test_the_model_summary_knows_sizes_of_layers_that_exist_as_recipes(printed):
    [linear] = [cells for cells in rows(printed[GRID][PLAIN]) if "layers.2" in cells]
    assert "[2, 16]" in linear


@pytest.mark.parametrize(("script", "bar"), [(DEFAULTS, "Epoch 0/0 "), (PLAIN, "Epoch 0: 100%")], ids=["Rich", "TQDM"])
def test_the_progress_bar_ends_full_and_shows_the_logged_values(printed, script, bar):
    shown = []
    for name in (ONE, GRID):
        last = printed[name][script].rsplit(bar, 1)[1]
        assert "4/4" in last
        shown.append(re.findall(r"(train|val)_loss[=:]\s*(\d\.\d{3})", last))
    assert [key for key, _ in shown[0]] == ["train", "val"]
    assert shown[0] == shown[1]


def test_the_table_of_validate_is_printed_once(printed):
    one, grid = ([row for row in rows(printed[name][PLAIN]) if "val_loss" in row] for name in (ONE, GRID))
    assert len(one) == 1
    assert one == grid


@pytest.mark.parametrize("words", ["`Trainer.fit` stopped", "GPU available", "Trainable params"])
def test_no_worker_repeats_what_another_prints(printed, words):
    for script in (DEFAULTS, PLAIN):
        assert printed[ONE][script].count(words) == printed[GRID][script].count(words) == 1, printed[GRID][script]


def test_nothing_fails_quietly(printed):
    assert "Traceback" not in "".join(printed[GRID])


def test_the_default_folders_and_files_are_those_of_one_device(printed, folder):
    one, grid = (Run(None, None, folder / name / "defaults").files() for name in (ONE, GRID))
    assert "lightning_logs/version_0/checkpoints/epoch=0-step=4.ckpt" in one
    assert [file for file in one if "tfevents" not in file] == [file for file in grid if "tfevents" not in file]
    assert len(one) == len(grid)
    assert Run(None, None, folder / ONE / "plain").files() == Run(None, None, folder / GRID / "plain").files() == []
