"""Models, optimizers and metrics of other packages train the weights of one device, also when a worker is killed and
replaced.
"""

from typing import Any

import known_models as known
import pytest
import small_training as small
import torch
from support.training import on_one_device
from torch.utils.data import DataLoader

pytestmark = pytest.mark.long


def loader(size: int) -> DataLoader[Any]:
    return DataLoader([small.as_tensors(row) for row in small.as_rows()], batch_size=size)


def test_timm():
    pytest.importorskip("timm")
    small.check(loader, known.Images)


def test_transformers():
    pytest.importorskip("transformers")
    small.check(loader, known.Causal)


def test_peft():
    pytest.importorskip("peft")
    small.check(loader, known.Adapted)


def test_schedulefree():
    """The weights of a run that validates in between, where the optimizer changes the weights and changes them back."""
    pytest.importorskip("schedulefree")
    small.check(loader, known.ScheduleFree, val=loader)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has Muon from 2.9 on")
@pytest.mark.parametrize("model", [known.WithMuon, known.OnlyMuon])
def test_muon(model):
    small.check(loader, model)


def test_metric_collection_with_compute_groups():
    expected = small.train(
        run := on_one_device(max_epochs=2), known.Grouped(), loader(small.GLOBAL_BATCH), loader(small.GLOBAL_BATCH)
    )
    assert len(run.callback_metrics) == 8
    for killed in (False, True):
        weights, grid = small.on_workers(loader, known.Grouped, killed, val=loader)
        assert small.difference(weights, expected) < small.TOLERANCE
        assert {name: float(value) for name, value in grid.callback_metrics.items()} == {
            name: pytest.approx(float(value), abs=1e-6) for name, value in run.callback_metrics.items()
        }
