"""What data code reads from a Trainer, its world size and rank, counts the shares of the data."""

import json
import os
from pathlib import Path
from typing import Any

import lightning as L
import same_script as same
from lightning.pytorch.callbacks import Callback

from lightning_recycle import ReCycleStrategy


class DividesTheBatch(L.LightningDataModule):
    """The user gives the global batch size; ``setup`` divides it, as lightning-hydra-template does."""

    def setup(self, stage: str) -> None:
        assert same.GLOBAL_BATCH % self.trainer.world_size == 0
        self.batch_size = same.GLOBAL_BATCH // self.trainer.world_size

    def train_dataloader(self) -> Any:
        return same.Data(self.batch_size).training()


class NotesRanks(Callback):
    """Every worker writes down what data code could ask it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        found = [trainer.world_size, trainer.global_rank, pl_module.global_rank, trainer.strategy.world_size]
        sampler = trainer.distributed_sampler_kwargs
        if isinstance(trainer.strategy, ReCycleStrategy):
            self.folder.mkdir(exist_ok=True)
            place = trainer.strategy.grid_rank
            (self.folder / f"{place}-{os.getpid()}").write_text(json.dumps([*found, sampler, trainer.is_global_zero]))


def divided(session: same.Session) -> None:
    session.run.module = same.Classifier()
    trainer = session.trainer(max_epochs=1, callbacks=[NotesRanks(session.root / "ranks")])
    session.run.results["before"] = (trainer.world_size, trainer.global_rank)
    trainer.fit(session.run.module, datamodule=DividesTheBatch())
    session.run.results["after"] = (trainer.world_size, trainer.global_rank)


divided_runs = same.runs_of(divided)


def test_a_global_batch_that_is_divided_by_the_world_size_stays_whole(divided_runs):
    one, grid = divided_runs
    assert grid.progress == one.progress == (1, same.STEPS_PER_EPOCH)
    same.assert_same(one.weights, grid.weights)


def test_the_launching_process_tells_the_same_world_size_before_and_after(divided_runs):
    assert divided_runs[1].results == {"before": (same.PIPELINES, 0), "after": (same.PIPELINES, 0)}


def test_workers_of_one_pipeline_share_its_rank_and_one_worker_is_global_zero(divided_runs):
    found = {
        int(path.name.split("-")[0]): json.loads(path.read_text())
        for path in (divided_runs[1].root / "ranks").iterdir()
    }
    assert sorted(found) == [0, 1, 2, 3]
    for place, (*numbers, sampler, is_global_zero) in found.items():
        pipeline = place // same.STAGES
        assert numbers == [same.PIPELINES, pipeline, pipeline, same.PIPELINES]
        assert sampler == {"num_replicas": same.PIPELINES, "rank": pipeline}
        assert is_global_zero == (place == same.LEADER)
