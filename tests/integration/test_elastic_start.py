"""A run begins with the workers that are there, and others join it: the result is that of all of them."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
from support.growth import happened
from support.models import GLOBAL_BATCH, GLOBAL_MICROBATCHES, Regression, dataset
from support.options import recycle_strategy
from support.sampling import sampled
from support.training import QUIET, TOLERANCE, committed_steps, difference, failures, plain_loop
from torch.utils.data import DataLoader

from lightning_recycle import ConfigurationError, UnsupportedFeatureError

LENGTH = 16
DATA = dataset(GLOBAL_BATCH * LENGTH)
PIPELINES = 3


def train(devices: int, stages: int = 2, model: Any = None, **arguments: Any) -> tuple[Any, L.Trainer]:
    """Trains on ``devices`` of three pipelines."""
    model = Regression().double() if model is None else model
    options = {"num_pipelines": PIPELINES, "min_pipelines": 1, **arguments.pop("strategy", {})}
    sizes = (stages, GLOBAL_MICROBATCHES // PIPELINES)
    strategy = recycle_strategy(*sizes, **options)
    settings = {"max_steps": LENGTH, **QUIET, **arguments}
    run = L.Trainer(accelerator="cpu", devices=devices, strategy=strategy, **settings)
    run.fit(model, DataLoader(DATA, batch_size=GLOBAL_BATCH // PIPELINES))
    return model, run


@pytest.mark.parametrize(("devices", "stages"), sampled([(1, 1), (2, 1), (2, 2), (3, 2), (5, 2), (4, 3)], 1))
def test_a_run_on_fewer_devices_than_positions_has_the_result_of_all(
    devices: int, stages: int, caplog: pytest.LogCaptureFixture
) -> None:
    model, run = train(devices, stages)
    assert difference(model.state_dict(), plain_loop(Regression().double(), DATA, LENGTH)) < TOLERANCE
    assert committed_steps(run) == list(range(LENGTH))
    assert failures(run) == []
    assert all(event.details["roster"] == tuple(range(devices)) for event in happened(run, "resumed"))
    (first, *_) = run.strategy.schedules
    assert len(first.failed) == PIPELINES * stages - devices
    (line,) = (text for text in caplog.messages if text.startswith("The run begins with "))
    assert f"{devices} of {PIPELINES * stages} workers. Vacant: " in line
    assert f"({PIPELINES - 1}, {stages - 1}); for other workers to join" in line


@pytest.mark.parametrize(
    ("devices", "stages", "most"),
    sampled([(5, 1, 5), (6, 1, 6), (7, 2, 4), (12, 2, 6), (3, 1, 6)], 1, seed=7, rest=pytest.mark.long),
)
def test_more_workers_than_the_batch_has_pipelines_share_it(devices: int, stages: int, most: int) -> None:
    model, run = train(devices, stages, strategy={"max_pipelines": most})
    assert difference(model.state_dict(), plain_loop(Regression().double(), DATA, LENGTH)) < TOLERANCE
    assert [committed_steps(run), failures(run)] == [list(range(LENGTH)), []]
    assert run.world_size == PIPELINES
    (schedule, *_) = run.strategy.schedules
    loads = [sum(op.kind == "F" for op in schedule.program(worker)) for worker in schedule.live_workers]
    assert max(loads) <= -(-GLOBAL_MICROBATCHES // (devices // stages)), "each has its share"


@pytest.mark.parametrize(
    ("devices", "options", "words"),
    [
        (2, {"min_pipelines": None}, "devices=2 hold 1 pipelines of 2 stages, .* begins with 3: use devices=6"),
        (1, {}, "devices=1 hold 0 pipelines of 2 stages, and the run begins with 1: use devices=2."),
        (8, {}, "devices=8 are more than the 6 positions of num_pipelines=3 with 2 stages: use devices=6"),
        (6, {"max_pipelines": 2}, r"max_pipelines=2\): the run has 3 pipelines: give at least that many"),
        (6, {"max_pipelines": 13}, r"max_pipelines=13\): 3 pipelines with .* have work for 12: give at most that many"),
        (6, {"min_pipelines": 4}, r"min_pipelines=4\): the run has 3 pipelines: give at most that many"),
    ],
)
def test_devices_with_which_no_run_begins_are_refused(devices: int, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        train(devices, strategy=options)


def test_positions_of_several_processes_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedFeatureError, match=r"do not support RecoveryOptions\(num_"):
        train(4, strategy={"tensor_parallel_size": 2})
