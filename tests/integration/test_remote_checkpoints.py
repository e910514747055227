"""Checkpoints on file systems that are not this machine's: written and read by fsspec, as one file."""

import os
from typing import Any

import fsspec
import lightning as L
import pytest
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from support.models import GLOBAL_BATCH, Regression, dataset
from support.sampling import sampled
from support.training import exact_fit

from lightning_recycle import UnsupportedFeatureError

LENGTH = 6


class Imported(L.Callback):
    """Workers that get it know the file system of this module."""


class Store(DirFileSystem):
    """``store://...`` is a file system of its own, whose files happen to be in a folder that the environment names."""

    protocol = "store"
    cachable = False

    def __init__(self, **options: Any) -> None:
        super().__init__(path=os.environ["STORE"], fs=LocalFileSystem(auto_mkdir=True), **options)


fsspec.register_implementation("store", Store, clobber=True)
WAYS: dict[str, dict[str, Any]] = {
    "file": {},
    "file, all wait": {"background": False},
    "AsyncCheckpointIO": {"checkpoint_io": AsyncCheckpointIO(TorchCheckpointIO())},
}


@pytest.mark.parametrize("way", ["file", *sampled(list(WAYS)[1:], 0, rest=pytest.mark.long)])
def test_a_run_resumes_exactly_from_another_file_system(way, tmp_path, monkeypatch):
    strategy = WAYS[way]
    monkeypatch.setenv("STORE", str(tmp_path / "store"))
    monkeypatch.chdir(tmp_path)
    folder, data = "store://bucket/run", dataset(GLOBAL_BATCH * LENGTH)
    saving = ModelCheckpoint(folder, "{step}", monitor="step", mode="max", every_n_train_steps=2, save_last=True)
    exact_fit(
        Regression().double(), 2, 2, data=data, max_steps=5, enable_checkpointing=True,
        callbacks=[Imported(), saving], strategy=strategy,
    )  # fmt: skip
    assert saving.best_model_path == f"{folder}/step=4.ckpt"
    assert sorted(os.listdir(tmp_path / "store/bucket/run")) == ["last.ckpt", "step=4.ckpt"]
    exact_fit(
        Regression().double(), 1, 2, data=data, max_steps=LENGTH, ckpt_path=saving.last_model_path, strategy=strategy,
        callbacks=[Imported()],
    )  # fmt: skip
    assert os.listdir(tmp_path) == ["store"]  # nothing is written to a local folder of that name


def test_a_folder_is_refused_there(tmp_path, monkeypatch):
    monkeypatch.setenv("STORE", str(tmp_path / "store"))
    saving = ModelCheckpoint("store://bucket/run", every_n_train_steps=1)
    with pytest.raises(UnsupportedFeatureError, match=r"store://bucket/run.*\.ckpt is in none: mount it"):
        exact_fit(
            Regression().double(), 1, 1, data=dataset(GLOBAL_BATCH), max_steps=1, enable_checkpointing=True,
            callbacks=[Imported(), saving], strategy={"save_distributed_checkpoint": True},
        )  # fmt: skip
