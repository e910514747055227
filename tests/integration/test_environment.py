"""Workers have the environment that the launching process had when their run started, whatever an earlier run had."""

import json
import os
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from support.growth import AwaitReplacement, Marks, Meanwhile, kill, mark_of, rejoined
from support.models import GLOBAL_BATCH, Regression, dataset
from support.scripts import output_of
from support.training import exact_fit

SCRIPT = Path(__file__).with_name("seed_sweep.py")


def sweep(*seeds: int) -> list[dict[str, Any]]:
    lines = output_of(SCRIPT, *seeds, env={"OMP_NUM_THREADS": "1"}).splitlines()
    return [json.loads(line.removeprefix("RUN ")) for line in lines if line.startswith("RUN ")]


@pytest.fixture(scope="module")
def runs() -> list[dict[str, Any]]:
    """Of the seeds 1, 2 and 1 in one process."""
    return sweep(1, 2, 1)


@pytest.mark.long
def test_each_run_has_its_own_seed_and_what_was_set_or_deleted_since_the_one_before(runs):
    """Also when its workers import the script."""
    first, second, first_again = (run["weights"] for run in runs)
    assert first != second
    assert first == first_again
    expected = {
        "set": ["1", "2", "1"], "at import": ["1", "2", "1"], "deleted": ["yes", None, None], "threads": [1, 2, 3],
    }  # fmt: skip
    for name, values in expected.items():
        assert [[worker[name] for worker in run["found"]] for run in runs] == [[value] * 2 for value in values], name


@pytest.mark.exhaustive
def test_a_run_of_a_seed_sweep_equals_one_of_a_fresh_process(runs):
    (fresh,) = sweep(2)
    assert runs[1]["weights"] == fresh["weights"]


class Finds(L.Callback):
    """Writes down a variable in each process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_fit_start(self, trainer: L.Trainer, *_: Any) -> None:
        path = self.folder / f"found-{trainer.global_rank}-{trainer.strategy.incarnation}"
        path.write_text(os.environ.get("OF_THE_RUN", "nothing"))


@pytest.mark.long
def test_a_replacement_has_the_environment_of_the_start_of_its_run(tmp_path, monkeypatch):
    steps = 40
    monkeypatch.setenv("OF_THE_RUN", "start")

    def strike(pid: int) -> None:
        os.environ["OF_THE_RUN"] = "later"
        kill(pid)

    with Meanwhile(lambda: mark_of(tmp_path, 1, 0), strike):
        data = dataset(GLOBAL_BATCH * steps)
        callbacks = [AwaitReplacement(range(20, steps), pace=0.1), Marks(tmp_path), Finds(tmp_path)]
        strategy = {"max_restarts": 10}
        run = exact_fit(Regression().double(), 2, 1, data=data, max_steps=steps, strategy=strategy, callbacks=callbacks)
    assert rejoined(run) == [(1, 0)]
    assert {path.name: path.read_text() for path in tmp_path.glob("found-*")} == dict.fromkeys(
        ("found-0-0", "found-1-0", "found-1-1"), "start"
    )


class Listens(Finds):
    """Starts a service when it is pickled, as the logger of wandb does, and says in a variable where that listens."""

    def __getstate__(self) -> dict[str, Any]:
        os.environ["OF_THE_RUN"] = "pickled"
        return vars(self)


def test_workers_have_what_pickling_has_added(tmp_path, monkeypatch):
    monkeypatch.setenv("OF_THE_RUN", "start")
    exact_fit(Regression().double(), 2, 1, max_steps=2, callbacks=[Listens(tmp_path)])
    assert [path.read_text() for path in tmp_path.glob("found-*")] == ["pickled"] * 2
