"""Data that differ between the workers are found, before the first step or on a replacement."""

import time
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import same_script as same
from lightning.pytorch.callbacks import Callback
from support.growth import causes
from torch.utils.data import DataLoader, Subset

from lightning_recycle import ConfigurationError
from lightning_recycle.callbacks import Fault, FaultInjectionCallback

STEPS = 5
SIZE = STEPS * same.GLOBAL_BATCH


class Splits(L.LightningDataModule):
    """Splits its data in setup(): by nothing that is seeded, or otherwise once ``marker`` exists."""

    def __init__(self, size: int, marker: Path | None) -> None:
        super().__init__()
        self.size, self.marker = size, marker

    def train_dataloader(self) -> Any:
        return DataLoader(self.training, batch_size=self.size, shuffle=True)

    def setup(self, stage: str) -> None:
        seed = None if self.marker is None else int(self.marker.exists())
        order = np.random.default_rng(seed).permutation(2 * SIZE).tolist()
        self.training = Subset(same.samples(2 * SIZE), order[:SIZE])


class Shifts(Splits):
    """Samples that depend on a global variable, which no worker gets from another."""

    def setup(self, stage: str) -> None:
        _shift[0] = float(self.marker.exists())
        self.training = Shifted(same.samples(2 * SIZE), range(SIZE))


_shift = [0.0]


class Shifted(Subset[Any]):
    def __getitem__(self, index: Any) -> Any:
        x, y = super().__getitem__(index)
        return x + _shift[0], y

    def __getitems__(self, indices: Any) -> Any:
        return [self[index] for index in indices]


def test_a_split_that_differs_between_workers_ends_the_run_before_its_first_step(tmp_path):
    def script(session: same.Session) -> None:
        session.run.module = same.Classifier()
        session.trainer(max_epochs=1).fit(session.run.module, datamodule=Splits(session.data.batch_size, None))

    with pytest.raises(ConfigurationError, match=r"samples of Subset differ.*default_rng\(0\)"):
        same.on_a_grid(script, tmp_path)


class MarksAndWaits(Callback):
    """Makes the marker before any worker is lost, and trains slowly."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self.marker.touch()
        time.sleep(0.4 if trainer.global_step > 2 else 0)  # the replacement shall come before the end


@pytest.mark.long
@pytest.mark.parametrize(("data", "stays"), [(Splits, True), (Shifts, False)])
def test_a_replacement_has_the_split_of_its_peer_and_goes_if_its_data_differ_all_the_same(data, stays, tmp_path):
    marker = tmp_path / "marker"
    seen = []
    for faults in ([], [Fault("kill", 1, 1, step=2)]):
        marker.unlink(missing_ok=True)

        def script(session: same.Session, faults: list[Fault] = faults) -> None:
            session.run.module = same.Classifier()
            callbacks: list[Callback] = [MarksAndWaits(marker)] if faults else []
            callbacks.append(FaultInjectionCallback(faults))
            trainer = session.trainer(max_epochs=3, callbacks=callbacks)
            trainer.fit(session.run.module, datamodule=data(session.data.batch_size, marker))

        seen.append(same.on_a_grid(script, tmp_path, max_restarts=10 if bool(faults) else 0))
    calm, killed = seen
    assert killed.progress == calm.progress
    same.assert_same(calm.weights, killed.weights)
    assert any("samples in a replacement differ" in cause for cause in causes(killed.trainer)) is not stays
