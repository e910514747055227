"""What a run prints: the summary shows the whole model, bars are drawn by the leader alone, nothing is repeated."""

import re
from pathlib import Path

import pytest
from printing_script import SEPARATOR
from support.scripts import output_of

pytestmark = pytest.mark.long

ONE, GRID = "one", "grid"
DEFAULTS, PLAIN = 0, 1


@pytest.fixture(scope="module")
def printed(tmp_path_factory) -> dict[str, list[str]]:
    """What each script printed on one device and on the grid, all processes of it."""
    folder = tmp_path_factory.mktemp("printed")
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


@pytest.mark.parametrize("script", [DEFAULTS, PLAIN], ids=["Rich", "plain text"])
def test_tables_are_those_of_one_device_and_no_worker_repeats_another(printed, script):
    """The summary shows the whole model; validate prints its table once."""
    one, grid = printed[ONE][script], printed[GRID][script]
    assert any("484" in cells for cells in rows(one)), one
    assert any("484" in line for line in totals(one)), one
    assert len([row for row in rows(one) if "val_loss" in row]) == (script == PLAIN)
    assert (rows(one), totals(one)) == (rows(grid), totals(grid))
    for words in ("`Trainer.fit` stopped", "GPU available", "Trainable params"):
        assert one.count(words) == grid.count(words) == 1, grid
    assert "Traceback" not in grid


def test_the_model_summary_knows_sizes_of_layers_that_exist_as_recipes(printed):
    [linear] = [cells for cells in rows(printed[GRID][PLAIN]) if "layers.2" in cells]
    assert "[2, 16]" in linear
