"""docs/trainer_flags.md names every flag of the Trainer and every callback, each with a test that exists."""

import inspect
import re
from pathlib import Path

import lightning as L
import pytest
from lightning.pytorch import callbacks as pl_callbacks

HERE = Path(__file__).parent
PAGE = (HERE.parents[1] / "docs" / "trainer_flags.md").read_text()
ROWS = [
    [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
    for line in PAGE.splitlines()
    if line.startswith("| ") and not line.startswith(("| flag", "| callback", "| feature"))
]
NO_CALLBACKS_OF_A_RUN = {"Callback", "Checkpoint", "ProgressBar", "SpikeDetection", "BackboneFinetuning"}


@pytest.mark.parametrize("row", [row for row in ROWS if "`model_registry`" not in row[0]], ids=lambda row: row[0])
def test_the_test_of_a_row_exists(row: list[str]) -> None:
    found = re.fullmatch(r"`(\w+)::(.+)`", row[3])
    assert found, row
    file, name = found.groups()
    source = (HERE / f"test_parity_{file}.py").read_text()
    assert f"def {name}(" in source if name.startswith("test_") else f'"{name}' in source or f'{name}"' in source, row


@pytest.mark.parametrize("flag", list(inspect.signature(L.Trainer.__init__).parameters)[1:])
def test_every_flag_of_the_trainer_is_in_the_table(flag: str) -> None:
    assert any(f"`{flag}`" in row[0] for row in ROWS)


@pytest.mark.parametrize("name", sorted(set(pl_callbacks.__all__) - NO_CALLBACKS_OF_A_RUN))
def test_every_callback_of_lightning_is_in_the_table(name: str) -> None:
    assert any(re.search(rf"`{name}[`(]", row[0]) for row in ROWS)


def test_what_the_table_calls_refused_is_refused_by_a_test() -> None:
    refused = [row for row in ROWS if row[1].startswith("refused")]
    assert len(refused) >= 3  # or the table was not read
    assert all(row[3].startswith("`refused::") for row in refused)
