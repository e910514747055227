"""Where the trained model is after fit: in the launching process, small or large, or where it was trained."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from support.models import GLOBAL_BATCH, Regression, dataset
from support.scripts import consolidated
from support.training import difference, exact_fit, fit, plain_loop
from support.waiting import PATIENCE
from test_workers_from_outside import spare, train
from torch.utils.data import DataLoader

from lightning_recycle import UnsupportedFeatureError
from lightning_recycle.callbacks import Fault
from lightning_recycle.launch import launcher, run_preparation, run_results
from lightning_recycle.session.configuration import Gathering, ResultRoute

pytestmark = pytest.mark.long

HERE = Path(__file__).parent
STEPS = 4


@pytest.mark.parametrize(("wanted", "local", "small", "large"), [
    ("auto", True, ResultRoute.MESSAGES, ResultRoute.FILES),
    (True, True, ResultRoute.MESSAGES, ResultRoute.FILES),
    ("auto", False, ResultRoute.MESSAGES, ResultRoute.STAYS),
    (True, False, ResultRoute.MESSAGES, ResultRoute.MESSAGES),
    (False, True, ResultRoute.STAYS, ResultRoute.STAYS),
    (False, False, ResultRoute.STAYS, ResultRoute.STAYS),
])  # fmt: skip
def test_how_results_come_home(wanted, local, small, large):
    gathering = Gathering(wanted, 1000, local)
    assert (gathering.route(999), gathering.route(1000)) == (small, large)
    assert gathering.depends_on_size or small is large


@pytest.fixture
def read(monkeypatch) -> list[Path]:
    """The files from which results were read; every result is large."""
    found: list[Path] = []
    true_read = run_results.StageResultFile.read

    def noted(part: run_results.StageResultFile) -> run_results.StageResult:
        found.append(part.path)
        return true_read(part)

    monkeypatch.setattr(run_results.StageResultFile, "read", noted)
    monkeypatch.setattr(run_preparation, "FILE_BYTES", 0)
    return found


def optimizer_tensors(run: Any) -> list[torch.Tensor]:
    states = run.strategy.optimizers[0].state_dict()["state"].values()
    return [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]


@pytest.mark.parametrize("faults", [[], [Fault("kill", 0, 1, at="end")]], ids=["undisturbed", "killed at the end"])
def test_what_is_large_comes_home_in_files_and_is_the_same(read, monkeypatch, faults):
    model = Regression().double()
    run = exact_fit(model, 2, 2, faults)
    assert len(read) == 2
    assert not read[0].parent.exists()
    assert run.strategy.missing_weights is run.strategy.missing_optimizers is None
    monkeypatch.setattr(run_preparation, "FILE_BYTES", 1 << 40)
    again = Regression().double()
    other = fit(again, 2, 2)
    assert len(read) == 2
    assert difference(model.state_dict(), again.state_dict()) < 1e-10
    pairs = list(zip(optimizer_tensors(run), optimizer_tensors(other), strict=True))
    assert pairs
    assert all(torch.allclose(one, two, atol=1e-10, rtol=0) for one, two in pairs)
    assert run.callback_metrics.keys() == other.callback_metrics.keys()


def test_where_files_cannot_be_written_the_result_comes_in_messages(read, monkeypatch):
    @contextmanager
    def nowhere() -> Iterator[str]:
        yield "/dev/null/results"

    monkeypatch.setattr(launcher, "_folder_for_results", nowhere)
    exact_fit(Regression().double(), 2, 2)
    assert not read


def test_weights_that_stay_are_in_the_checkpoints_and_nothing_else_is_taken_for_them(tmp_path, caplog):
    model = Regression().double()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    checkpoints = ModelCheckpoint(dirpath=tmp_path, save_last=True, every_n_train_steps=1)
    faults = [Fault("kill", 1, 0, step=2)]
    strategy = {"gather_result": False, "save_distributed_checkpoint": True}
    callbacks = [checkpoints]
    run = fit(model, 2, 2, faults, max_steps=STEPS, strategy=strategy, callbacks=callbacks, enable_checkpointing=True)
    assert difference(model.state_dict(), before) == 0
    assert "not the trained one" in caplog.text
    assert "stay in the workers" in run.strategy.missing_weights
    assert run.global_step == STEPS
    data = DataLoader(dataset(GLOBAL_BATCH), batch_size=GLOBAL_BATCH // 2)
    with pytest.raises(UnsupportedFeatureError, match=r"gather_result=True"):
        run.save_checkpoint(tmp_path / "mine.ckpt")
    with pytest.raises(UnsupportedFeatureError, match=r"ckpt_path='best'"):
        run.validate(model, data, verbose=False)
    (trained,) = run.validate(model, data, ckpt_path="last", verbose=False)
    weights = consolidated(checkpoints.last_model_path, tmp_path / "weights.ckpt")
    state = torch.load(weights, weights_only=False)["state_dict"]
    assert difference(state, plain_loop(Regression().double(), dataset(), STEPS)) < 1e-10
    model.load_state_dict(state)
    assert run.validate(model, data, verbose=False) == [trained]


@pytest.mark.long
def test_a_worker_that_was_started_by_hand_keeps_its_stage_and_says_so(port):
    script = (
        "from test_workers_from_outside import train\n"
        "if __name__ == '__main__':\n"
        "    model, run = train(strategy={'gather_result': False})\n"
        "    print('stays', run.strategy.missing_weights is not None)\n"
        "    try:\n"
        "        run.fit(model)\n"
        "    except Exception as error:\n"
        "        print(type(error).__name__, error)\n"
    )
    with spare(port, script=script) as process:
        model, run = train(Fault("kill", 1, 0, step=2), strategy={"gather_result": False})
        output, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors
    assert "stays True" in output
    assert "UnsupportedFeatureError After fit this Regression is one stage of the model" in output
    assert run.strategy.missing_weights is not None
    assert difference(model.state_dict(), Regression().double().state_dict()) == 0
    assert os.environ["RECYCLE_LISTEN"]
