"""Outputs that a module collects in its attributes are whole on every worker, as they are on one device."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import same_script as same
from collecting import Collecting
from lightning.pytorch.callbacks import Callback
from support.growth import AwaitReplacement
from support.sampling import sampled

from lightning_recycle.callbacks import Fault, FaultInjectionCallback


class NotesMetrics(Callback):
    """Every worker writes down what it logged in each epoch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_epoch_start(self, trainer: Any, *_: Any) -> None:
        self._note(trainer)

    def on_train_end(self, trainer: Any, *_: Any) -> None:
        self._note(trainer)

    def _note(self, trainer: Any) -> None:
        self.folder.mkdir(exist_ok=True)
        seen = {k: float(v) for k, v in trainer.callback_metrics.items() if not k.startswith("recycle/")}
        rank = getattr(trainer.strategy, "grid_rank", 0)
        with open(self.folder / f"{rank}-{os.getpid()}", "a") as file:
            file.write(json.dumps(seen, sort_keys=True) + "\n")


def collected(session: same.Session, *faults: Fault) -> None:
    module = Collecting()
    callbacks: list[Any] = [NotesMetrics(session.root / "notes")]
    if faults:
        callbacks += [AwaitReplacement([6, 11]), FaultInjectionCallback(list(faults))]
    trainer = session.fit(module, validates=True, max_epochs=3, callbacks=callbacks)
    session.run.results["fit"] = session.run.metrics
    session.run.results["history"] = [event.kind for event in getattr(trainer.strategy, "history", [])]
    session.run.results["test"] = trainer.test(module, session.data.validation(), verbose=False)


def notes(run: same.Run) -> dict[int, list[Any]]:
    """What was noted, by rank; a replacement's after that of the dead worker."""
    found: dict[int, list[Any]] = {}
    for path in sorted((run.root / "notes").iterdir(), key=lambda path: path.stat().st_mtime):
        found.setdefault(int(path.name.split("-")[0]), []).extend(map(json.loads, path.read_text().splitlines()))
    return found


@pytest.mark.parametrize("stage", sampled([0, 1], 1, rest=pytest.mark.long))
def test_what_is_made_of_collected_outputs_is_that_of_one_device_though_workers_die_and_join(tmp_path, stage):
    def with_a_kill(session: same.Session) -> None:
        collected(session, Fault("kill", 0, stage, step=5, at="backward_input"), Fault("kill", 1, stage, step=9))

    one = same.on_one_device(collected, tmp_path / "one")
    grid = same.on_a_grid(with_a_kill, tmp_path / "grid", max_restarts=10)
    assert grid.results["history"].count("failure") == 2
    assert "rejoin" in " ".join(grid.results["history"])
    assert len(one.results["fit"]) > 15 < len(one.results["test"][0])
    same.assert_same(one.results["fit"], grid.results["fit"])
    same.assert_same(one.results["test"], grid.results["test"], same.FLOAT32_TOLERANCE)
    (expected,), found = notes(one).values(), notes(grid)  # the first epoch ended before anybody died
    assert (len(expected), sorted(found)) == (4, [0, 1, 2, 3])
    for rank, noted in found.items():
        if rank % same.STAGES != stage:
            same.assert_same(expected, noted, where=f"worker {rank}")
        same.assert_same(expected[-1], noted[-1], where=f"worker {rank}")
