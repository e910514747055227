"""Who joins a running training holds what its peers hold, and decides what they decide."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from growth import AwaitReplacement, rejoined
from support import GLOBAL_BATCH, Regression, dataset, difference, fit
from torch import Tensor

from lightning_recycle.callbacks import Fault

EPOCH = 5  # steps
DATA = dataset(GLOBAL_BATCH * EPOCH)


class Plateau(Regression):
    """The learning rate follows what was logged in the epoch."""

    def on_training_output(self, output: Tensor, target: Tensor) -> None:
        self.log("error", (output - target).square().mean(), on_step=False, on_epoch=True)
        self.log("samples", float(len(output)), on_step=False, on_epoch=True, reduce_fx="sum")

    def on_train_batch_start(self, *_: Any) -> None:
        self.log("begun", 1.0, on_step=False, on_epoch=True, reduce_fx="sum")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.9)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "error"}}


class EpochDiary(L.Callback):
    """Every process keeps, for each epoch that it ended, its learning rate and what was logged."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._epochs: dict[int, dict[str, float]] = {}

    def on_train_epoch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.current_epoch:
            logged = {n: float(v) for n, v in trainer.callback_metrics.items() if not n.startswith("recycle/")}
            self._epochs[trainer.current_epoch] = {"lr": trainer.optimizers[0].param_groups[0]["lr"], **logged}

    def on_train_end(self, trainer: L.Trainer, *_: Any) -> None:
        torch.save(self._epochs, self._directory / f"{trainer.global_rank}.pt")


def test_a_replacement_in_an_epoch_logs_it_whole_and_steps_with_the_learning_rate_of_its_peers(tmp_path: Path) -> None:
    def train(name: str, faults: Sequence[Fault]) -> tuple[L.Trainer, dict[str, Tensor], dict[int, Any]]:
        (tmp_path / name).mkdir()
        model = Plateau().double()
        run = fit(
            model,
            3,
            2,
            faults,
            data=DATA,
            max_epochs=6,
            max_steps=-1,
            strategy={"restart_workers": True},
            callbacks=[AwaitReplacement([7]), EpochDiary(tmp_path / name)],
        )
        return run, model.state_dict(), {rank: torch.load(tmp_path / name / f"{rank}.pt") for rank in range(6)}

    _, weights, diaries = train("undisturbed", [])
    run, joined_weights, joined = train("disturbed", [Fault("kill", 1, 0, step=2), Fault("kill", 2, 1, step=3)])
    assert sorted(rejoined(run)) == [(1, 0), (2, 1)]
    assert len({epoch["lr"] for epoch in diaries[0].values()}) > 1
    for rank, epochs in joined.items():
        assert epochs.keys() >= {2, 3, 4, 5}
        for epoch, values in epochs.items():
            assert values["samples"] == len(DATA)
            assert values["begun"] == EPOCH
            torch.testing.assert_close(values, diaries[rank][epoch], rtol=1e-10, atol=1e-10)
    assert difference(joined_weights, weights) < 1e-10
