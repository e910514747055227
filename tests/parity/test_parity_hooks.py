"""The leader's hooks come in the order, with the arguments and at the progress of one device."""

from datetime import timedelta
from typing import Any

import lightning as L
import pytest
import same_script as same
from lightning.pytorch.callbacks import Callback, Timer
from support.sampling import sampled

NOT_CALLED = {
    "on_exception",  # nothing fails
    "on_load_checkpoint",  # nothing is resumed
    "on_validation_model_zero_grad",
}


class KeepsDiaryOfData(L.LightningDataModule):
    """Writes down the hooks of a data module."""

    def __init__(self, session: same.Session) -> None:
        super().__init__()
        self.data, self.book = session.data, same.Book(session.root / "diary", "data")

    def _note(self, hook: str, *args: Any) -> None:
        self.book.note(self.trainer, hook, *args)

    def prepare_data(self) -> None:
        self._note("prepare_data")

    def setup(self, stage: str) -> None:
        self._note("setup", stage)

    def teardown(self, stage: str) -> None:
        self._note("teardown", stage)

    def train_dataloader(self) -> Any:
        self._note("train_dataloader")
        return self.data.training()

    def val_dataloader(self) -> Any:
        self._note("val_dataloader")
        return [self.data.validation(), self.data.loader(5, seed=3)]

    def state_dict(self) -> dict[str, Any]:
        self._note("state_dict")
        return {"answer": 42}


def fitted(session: same.Session) -> None:
    module = same.KeepsDiary()
    module.book = same.Book(session.root / "diary", "module")
    trainer = session.trainer(
        max_epochs=2, val_check_interval=2, enable_checkpointing=True, callbacks=[session.diary()]
    )
    session.run.module = module
    trainer.fit(module, datamodule=KeepsDiaryOfData(session))


runs = same.runs_of(fitted)


@pytest.mark.parametrize(("who", "hooks"), [("callback", same.CALLBACK_HOOKS), ("module", same.MODULE_HOOKS)])
def test_every_worker_runs_the_hooks_of_one_device(runs, who, hooks):
    one, grid = (run.diary(who) for run in runs)
    assert {hook for hook, _, _ in one} >= {h for h in hooks if "test" not in h and "predict" not in h} - NOT_CALLED
    same.assert_same(one, grid)
    others = [entry for entry in grid if entry[0] != "prepare_data"]  # which is once on each machine
    assert len(grid) - len(others) == (who == "module")
    for rank in set(range(same.PIPELINES * same.STAGES)) - {same.LEADER}:
        same.assert_same(others, runs[1].diary(who, rank), where=f"rank {rank}")


def test_the_hooks_of_the_data_module_are_those_of_one_device(runs):
    one, grid = (run.diary("data") for run in runs)
    assert [hook for hook, _, _ in one] == [
        "prepare_data",
        "setup",
        "val_dataloader",  # the sanity check comes first
        "train_dataloader",
        *["state_dict"] * 4,  # a checkpoint after each validation
        "teardown",
    ]
    same.assert_same(one, grid)


def evaluated(session: same.Session) -> None:
    module = same.KeepsDiary()
    module.book = same.Book(session.root / "diary", "module")
    trainer = session.trainer(callbacks=[session.diary()])
    session.run.module = module
    getattr(trainer, session.root.parent.name)(module, [session.data.validation(), session.data.loader(5, seed=3)])


@pytest.mark.parametrize("entry", sampled(["validate", "test", "predict"], 1, rest=pytest.mark.long))
def test_the_hooks_of_an_evaluation_are_those_of_one_device(tmp_path, entry):
    one, grid = same.run_both(evaluated, tmp_path / entry)
    phase = "validation" if entry == "validate" else entry
    diary = one.diary("callback")
    assert {f"on_{phase}_{when}" for when in ("start", "batch_start", "batch_end", "epoch_end", "end")} < {
        hook for hook, _, _ in diary
    }
    same.assert_same(diary, grid.diary("callback"))
    same.assert_same(one.diary("module"), grid.diary("module"))


class Restored(Callback):
    """Notes what it knows when a fit starts."""

    known = "nothing"
    known_in_fit_start = ""

    def state_dict(self) -> dict[str, Any]:
        return {"known": "what the checkpoint says"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.known = state["known"]

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self.known_in_fit_start = self.known


def resumed(session: same.Session) -> None:
    path = session.root / "first.ckpt"
    first = session.fit(same.Classifier(), max_epochs=1, callbacks=[Restored(), Timer("00:01:00:00")])
    first.save_checkpoint(path)
    module, restored = same.Classifier(), Restored()
    trainer = session.trainer(max_epochs=3, callbacks=[restored, Timer(timedelta(microseconds=1))])
    session.run.module = module
    trainer.fit(module, session.data.training(), ckpt_path=path, weights_only=False)
    session.run.results["known"] = restored.known_in_fit_start


def test_what_a_checkpoint_restores_is_there_when_a_fit_starts(tmp_path):
    one, grid = same.run_both(resumed, tmp_path)
    assert one.results == grid.results == {"known": "what the checkpoint says"}
    assert one.progress == grid.progress == (1, 4)  # the timer's time was up
    same.assert_same(one.weights, grid.weights)
