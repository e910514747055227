"""Every row of docs/trainer_flags.md holds for an ordinary LightningModule, in one stage and in two, whoever dies.

A case is one script, which Lightning runs on one device. All that it leaves behind there (weights, metrics, rows,
files, hooks, states, the attributes of the Trainer) must be what each run on a grid leaves: one that nothing disturbs,
one with a member killed, one with the leader killed. To run all of them:
``make test-exhaustive ARGS=tests/parity/test_parity_ordinary_matrix.py``.
"""

import functools
import inspect
import itertools
import re
import tempfile
from pathlib import Path

import lightning as L
import pytest
import same_script as same
from lightning.pytorch import callbacks as pl_callbacks
from ordinary_callbacks import CALLBACKS
from ordinary_data import DATA
from ordinary_flags import FLAGS
from ordinary_loggers import LOGGERS
from ordinary_refusals import REFUSALS, check
from ordinary_runs import KILLS, Case, all_differences, on_a_grid, on_one_device, victim
from support.sampling import sampled

CASES: dict[str, Case] = {**FLAGS, **CALLBACKS, **LOGGERS, **DATA}
MATRIX = [
    (name, stages, kind) for name, case in CASES.items() for stages, kind in itertools.product(case.stages, KILLS)
]
NO_CASE = {"`model_registry`"}  # a service, which is not touched
PAGE = (Path(__file__).parents[2] / "docs" / "trainer_flags.md").read_text()
ROWS = [
    [name, *(cell.strip() for cell in cells)]
    for line in PAGE.splitlines()
    if line.startswith("| ") and not line.startswith(("| flag", "| callback", "| feature"))
    for names, *cells in [re.split(r"(?<!\\)\|", line)[1:-1]]
    for name in names.strip().split("; ")
]
for names in re.findall(r"\nAs on one device: (.+?)\.\n(?:\n|$)", PAGE, re.DOTALL):
    ROWS += [[name, "as on one device", ""] for name in " ".join(names.split()).split("; ")]
NO_CALLBACKS_OF_A_RUN = {"Callback", "Checkpoint", "ProgressBar", "SpikeDetection", "BackboneFinetuning"}


@functools.cache
def judge(name: str) -> same.Run:
    """What the script leaves behind on one device."""
    return on_one_device(CASES[name], Path(tempfile.mkdtemp()))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("name", "stages", "kind"), sampled(MATRIX, 4))
def test_an_ordinary_module_is_as_on_one_device(name, stages, kind, tmp_path):
    case, one = CASES[name], judge(name)
    grid = on_a_grid(case, stages, kind, tmp_path)
    for run in (one, grid):
        assert case.claim(run), f"{name} did not do what it says"
    found = all_differences(case, one, grid, victim(stages, kind))
    assert not found, "\n".join(found)


@pytest.mark.filterwarnings("ignore:.*experimental.*", "ignore:.*nodes.*")
@pytest.mark.parametrize(("name", "stages"), [(n, stages) for n, case in REFUSALS.items() for stages in case.stages])
def test_what_is_refused_is_refused_before_anything_starts(name, stages, tmp_path, monkeypatch):
    check(REFUSALS[name], stages, False, tmp_path, monkeypatch)


def test_every_row_of_the_page_has_a_case():
    rows = {row[0] for row in ROWS} - NO_CASE
    with_cases = {row for case in (*CASES.values(), *REFUSALS.values()) for row in case.rows}
    assert with_cases == rows


def test_what_the_page_refuses_is_refused_and_the_rest_is_run():
    status = {row[0]: row[1] for row in ROWS}
    refused = {row for case in REFUSALS.values() for row in case.rows}
    run = {row for case in CASES.values() for row in case.rows}
    assert {row for row in status if status[row] == "refused"} <= refused - run
    assert {row for row in status if status[row] in ("supported", "as on one device")} <= run


@pytest.mark.parametrize("flag", list(inspect.signature(L.Trainer.__init__).parameters)[1:])
def test_every_flag_of_the_trainer_is_in_the_table(flag):
    assert any(f"`{flag}`" in row[0] for row in ROWS)


@pytest.mark.parametrize("name", sorted(set(pl_callbacks.__all__) - NO_CALLBACKS_OF_A_RUN))
def test_every_callback_of_lightning_is_in_the_table(name):
    assert any(re.search(rf"`{name}[`(]", row[0]) for row in ROWS)
