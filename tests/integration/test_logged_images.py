"""What steps write with a logger's experiment, when a worker dies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from support.sampling import sampled
from test_ordinary_modules import Classifier, data, on_grid
from torch.utils.data import DataLoader

from lightning_recycle.callbacks import Fault


class LogsImages(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.logger.experiment.add_image("seen", torch.rand(3, 2, 2), self.global_step)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("pipeline", sampled([0, 1], 1, rest=pytest.mark.long))  # the leader, and another
def test_an_image_of_a_step_is_written_once(tmp_path: Path, pipeline: int) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = TensorBoardLogger(tmp_path, name="board", version=0)
    faults = [Fault("kill", pipeline, 0, 2, at="reduce")]
    on_grid(2, faults, logger=logger).fit(LogsImages().double(), DataLoader(data(), 8, drop_last=True))
    accumulator = EventAccumulator(logger.log_dir, size_guidance={"images": 0}).Reload()
    steps = [image.step for image in accumulator.Images("seen")]
    assert steps == list(range(18))
