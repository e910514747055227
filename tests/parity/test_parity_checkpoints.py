"""``ModelCheckpoint`` in every mode: what it writes in the background is what it writes on one device."""

import json
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import same_script as same
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from support.options import recycle_strategy
from support.sampling import sampled

from lightning_recycle.session.checkpoint_files import damage

EPOCHS = 4
MODES: dict[str, dict[str, Any]] = {
    "best": {"monitor": "val_loss", "save_top_k": 2, "save_last": True, "filename": "{epoch}-{val_loss:.4f}"},
    "worst": {"monitor": "val_loss", "mode": "max", "save_last": "link"},
    "every loss": {"monitor": "val_loss", "every_n_epochs": 2, "save_top_k": -1, "auto_insert_metric_name": False},
    "after epochs": {"every_n_epochs": 2, "save_top_k": -1, "save_on_train_epoch_end": True},
    "weights": {"every_n_train_steps": 3, "save_top_k": -1, "save_weights_only": True},
    "newest": {"every_n_train_steps": 2},
    "best of steps": {"monitor": "step", "mode": "max", "every_n_train_steps": 2, "save_top_k": 3, "save_last": True},
    "last only": {"every_n_train_steps": 5, "save_top_k": 0, "save_last": True},
    "versions": {"every_n_train_steps": 7, "save_top_k": -1, "filename": "same"},
    "one name": {"every_n_train_steps": 4, "filename": "one", "enable_version_counter": False},
    "timed": {"train_time_interval": timedelta(seconds=0), "save_top_k": -1},
}


class Notes(L.Callback):
    """Writes down in each epoch what the callbacks have, when that is complete."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def on_train_epoch_start(self, trainer: Any, *_: Any) -> None:
        session = getattr(trainer.strategy, "session", None)
        if session is not None:
            session.checkpoints.complete()
        if trainer.is_global_zero:
            with open(self._root / "notes.jsonl", "a") as file:
                print(json.dumps(seen(self._root, trainer)), file=file)


def seen(root: Path, trainer: Any) -> dict[str, Any]:
    """By mode: the files, and the paths and scores that the callback remembers."""
    found = {}
    for callback in trainer.checkpoint_callbacks:
        name = Path(callback.dirpath).name
        paths = [callback.best_model_path, callback.last_model_path, callback.kth_best_model_path]
        ranks = [Path(path).name for path in callback.best_k_models]
        files = sorted(os.listdir(root / name)) if (root / name).is_dir() else []
        links = [os.readlink(root / name / file) for file in files if (root / name / file).is_symlink()]
        found[name] = [files, links, [Path(path).name for path in paths], ranks, callback._last_global_step_saved]
    return found


def script(session: same.Session) -> None:
    saving = [ModelCheckpoint(session.root / name, **options) for name, options in MODES.items()]
    trainer = session.fit(
        same.Classifier(lr=0.4), validates=True, max_epochs=EPOCHS, enable_checkpointing=True,
        callbacks=[*saving, Notes(session.root)],
    )  # fmt: skip
    session.run.results["best"] = trainer.test(
        trainer.lightning_module, session.data.validation(), ckpt_path="best", weights_only=False, verbose=False
    )
    lines = (session.root / "notes.jsonl").read_text().splitlines()
    session.run.results["seen"] = [*map(json.loads, lines), seen(session.root, trainer)]


@pytest.fixture(scope="module")
def one_device(tmp_path_factory) -> same.Run:
    return same.on_one_device(script, tmp_path_factory.mktemp("one"))


@pytest.mark.parametrize("sharded", sampled([False, True], 1, rest=pytest.mark.long))
@pytest.mark.parametrize("stages", sampled([1, 2], 1))
def test_files_paths_and_scores_are_the_same_in_every_epoch(stages, sharded, one_device, tmp_path):
    run = same.Run(None, None, tmp_path)
    strategy = recycle_strategy(
        pipeline_parallel_size=stages, num_microbatches=2, background=True, save_distributed_checkpoint=sharded
    )
    data = same.Data(same.GLOBAL_BATCH // 2)
    script(same.Session(tmp_path, lambda: {"devices": 2 * stages, "strategy": strategy}, data, run))
    assert len(run.results["seen"]) == EPOCHS + 1
    for epoch, (one, grid) in enumerate(zip(one_device.results["seen"], run.results["seen"], strict=True)):
        for name in MODES:
            assert grid[name] == one[name], f"{name} in epoch {epoch}"
    same.assert_same(one_device.results["best"], run.results["best"], same.FLOAT32_TOLERANCE)
    for path in tmp_path.rglob("*.ckpt"):
        assert damage(path) is None, path
    if not sharded:
        for name in ("best/last.ckpt", "newest/epoch=3-step=16.ckpt"):
            known, found = (torch.load(root / name, weights_only=False) for root in (one_device.root, tmp_path))
            same.assert_same(known["state_dict"], found["state_dict"])
            same.assert_same(known["optimizer_states"], found["optimizer_states"])
