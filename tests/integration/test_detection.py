"""Suspicion is not proof: what takes long is not a fault, and a worker is given up only where a peer can do its work.

Workers that are stuck are found: see test_fault_kinds.py. Slow hooks, slow micro-batches and a held GIL are families of
tests/chaos, the rules are judged in tests/control, and that no hook is judged by a usual duration is judged in
test_hooks_take_their_time.py.
"""

import time
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from support.models import Regression, dataset
from support.training import fit, undisturbed
from torch.utils.data import TensorDataset

from lightning_recycle.callbacks import HeartbeatCallback

TIMEOUT = 1.5  # seconds
LONG = 2.5 * TIMEOUT


class Stalling(TensorDataset):
    """Data on a file system that hangs for a moment."""

    def __getitem__(self, index: Any) -> Any:
        if index == 24 * 5:
            time.sleep(LONG)
        return super().__getitem__(index)


class LongCheckpoint(ModelCheckpoint):
    """On the leader the file system is slow."""

    def on_save_checkpoint(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.is_global_zero:
            time.sleep(LONG)


@pytest.mark.long
def test_slow_reading_and_slow_writing_are_no_faults(tmp_path):
    callbacks = [HeartbeatCallback(interval=0.2, timeout=TIMEOUT), LongCheckpoint(tmp_path, every_n_train_steps=5)]
    started = time.monotonic()
    run = fit(
        Regression().double(), 2, 2, data=Stalling(*dataset().tensors), callbacks=callbacks, enable_checkpointing=True
    )
    assert time.monotonic() - started > 2 * LONG
    assert undisturbed(run)
