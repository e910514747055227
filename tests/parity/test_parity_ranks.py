"""What data code reads from a Trainer, its world size and rank, counts the shares of the data."""

import json
import os
from pathlib import Path
from typing import Any

import same_script as same
from lightning.pytorch.callbacks import Callback

from lightning_recycle import ReCycleStrategy


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


def noted(session: same.Session) -> None:
    session.run.results["before"] = session.trainer().world_size
    trainer = session.fit(same.Classifier(), max_steps=1, callbacks=[NotesRanks(session.root / "ranks")])
    session.run.results["after"] = trainer.world_size, trainer.global_rank


def test_workers_of_one_pipeline_share_its_rank_and_one_worker_is_global_zero(tmp_path):
    """That data code divides a batch by the world size is in the matrix of cases."""
    run = same.on_a_grid(noted, tmp_path)
    assert run.results == {"before": same.PIPELINES, "after": (same.PIPELINES, 0)}
    found = {int(path.name.split("-")[0]): json.loads(path.read_text()) for path in (tmp_path / "ranks").iterdir()}
    assert sorted(found) == [0, 1, 2, 3]
    for place, (*numbers, sampler, is_global_zero) in found.items():
        pipeline = place // same.STAGES
        assert numbers == [same.PIPELINES, pipeline, pipeline, same.PIPELINES]
        assert sampler == {"num_replicas": same.PIPELINES, "rank": pipeline}
        assert is_global_zero == (place == same.LEADER)
