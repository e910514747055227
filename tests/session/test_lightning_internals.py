"""Lightning's metrics of logged values are moved only where they are not."""

import pytest
import torch
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection, _ResultMetric

from lightning_recycle.session import lightning_internals


@pytest.fixture(autouse=True)
def spared(monkeypatch) -> None:
    monkeypatch.setattr(_ResultMetric, "to", lightning_internals._move)  # put back afterwards
    lightning_internals.skip_needless_moves()


def test_a_value_from_another_device_still_moves_its_metric():
    results = _ResultCollection(training=True)
    results.log("training_step", "loss", torch.tensor(1.0), on_step=True, batch_size=1)
    results["training_step.loss"].to(torch.device("meta"))
    assert results["training_step.loss"].value.device.type == "meta"
