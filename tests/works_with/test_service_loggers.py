"""Loggers of services write one run with the rows of one device, also when the leader is killed; a row near its death
may be there twice.
"""

import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import small_training as small
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CometLogger, MLFlowLogger, WandbLogger
from support.growth import AwaitReplacement, rejoined
from support.training import failures, grid_trainer, on_one_device
from support.waiting import wait_for
from torch.utils.data import DataLoader

from lightning_recycle.callbacks import Fault

pytestmark = pytest.mark.long

Rows = dict[tuple[str, int], float]
"""Values by name and step."""


def train(logger: Any, folder: Path, workers: int = 1, killed: bool = False) -> L.Trainer:
    """Logs each step of two epochs, and saves after every second one."""
    saving = ModelCheckpoint(folder / "saved", every_n_train_steps=2, save_top_k=-1)
    options: dict[str, Any] = {"logger": logger, "log_every_n_steps": 1, "max_epochs": 2, "enable_checkpointing": True}
    if workers == 1:
        run = on_one_device(callbacks=[saving], **options)
    else:
        faults = [Fault("kill", 0, 0, small.KILLED_AT)] if killed else []
        waits = [AwaitReplacement([small.ENTERS_AT])] if killed else []
        run = grid_trainer(workers, 1, faults, {"max_restarts": 1}, callbacks=[saving, *waits], **options)
    rows = [small.as_tensors(row) for row in small.as_rows()]
    run.fit(small.Perceptron(), DataLoader(rows, batch_size=small.GLOBAL_BATCH // workers))
    if workers > 1:
        assert failures(run) == rejoined(run) == [(0, 0)] * killed
    return run


def assert_same(train_and_read: Callable[..., Rows], folder: Path) -> None:
    """Rows of a grid, and of one whose leader is killed, are those of one device."""
    expected = train_and_read(folder / "one")
    assert len(expected) == 2 * small.STEPS + 2
    for name in ("grid", "killed"):
        found = train_and_read(folder / name, workers=2, killed=name == "killed")
        assert found == {key: pytest.approx(value, abs=1e-9) for key, value in expected.items()}


def records(path: Path) -> Iterator[Any]:
    """What an offline run of wandb keeps, a log in LevelDB's format."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, place, parts = path.read_bytes(), 7, b""
    while place + 7 <= len(content):
        if (left := 32768 - place % 32768) < 7:
            place += left
            continue
        _, size, kind = struct.unpack_from("<IHB", content, place)
        parts += content[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or the last part
            record = Record()
            record.ParseFromString(parts)
            yield record
            parts = b""


def rows_of_wandb(folder: Path) -> Rows:
    (path,) = folder.glob("wandb/offline-run-*/*.wandb")  # one run
    assert wait_for(lambda: any(record.WhichOneof("record_type") == "exit" for record in records(path)))
    rows: Rows = {}
    for record in records(path):
        if record.WhichOneof("record_type") == "history":
            row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            rows |= {(name, row["trainer/global_step"]): row[name] for name in row if name.startswith("loss")}
    return rows


def test_wandb_offline(tmp_path):
    wandb = pytest.importorskip("wandb")

    def logged(folder: Path, **options: Any) -> Rows:
        train(WandbLogger(save_dir=folder, offline=True), folder, **options)
        wandb.finish()
        return rows_of_wandb(folder)

    assert_same(logged, tmp_path)


def rows_of_mlflow(logger: MLFlowLogger) -> Rows:
    client, (run,) = logger.experiment, logger.experiment.search_runs([logger.experiment_id])
    names = [name for name in run.data.metrics if name.startswith("loss")]
    assert run.info.status == "FINISHED"
    return {(name, m.step): m.value for name in names for m in client.get_metric_history(run.info.run_id, name)}


def test_mlflow_with_files(tmp_path, monkeypatch):
    """``after_save_checkpoint`` copies each checkpoint when it is whole."""
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")

    def logged(folder: Path, **options: Any) -> Rows:
        logger = MLFlowLogger(tracking_uri=f"file:{folder}", log_model="all")
        train(logger, folder, **options)
        copies = sorted(folder.glob("*/*/artifacts/*/*.ckpt"))
        assert [torch.load(copy)["global_step"] for copy in copies] == [2, 4, 6, 8]
        return rows_of_mlflow(logger)

    assert_same(logged, tmp_path)


@pytest.mark.parametrize("killed", [False, True])
def test_comet_offline(killed, tmp_path):
    """Of which Lightning 2.6 makes a disabled experiment: nothing is written, as on one device."""
    pytest.importorskip("comet_ml")
    logger = CometLogger(api_key="none", online=False, offline_directory=str(tmp_path))
    assert train(logger, tmp_path, workers=2, killed=killed).global_step == 2 * small.STEPS
    assert not list(tmp_path.glob("*.zip"))
