"""A run begins with the workers that are there, and others join it: the result is that of all of them."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from elastic_script import Talking
from support.growth import happened
from support.models import GLOBAL_BATCH, GLOBAL_MICROBATCHES, Regression, dataset
from support.options import recycle_strategy
from support.sampling import sampled
from support.scripts import RECYCLE_RUN, started
from support.training import QUIET, TOLERANCE, committed_steps, difference, failures, plain_loop
from support.waiting import PATIENCE, line_with
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_recycle import ConfigurationError, UnsupportedFeatureError
from lightning_recycle.control.network.addresses_and_keys import free_port

LENGTH = 16
DATA = dataset(GLOBAL_BATCH * LENGTH)
PIPELINES = 3
HERE = Path(__file__).parent


class Logging(Regression):
    def on_training_loss(self, loss: Tensor) -> None:
        self.log("loss", loss, on_step=True, on_epoch=True)


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


def test_epoch_metrics_do_not_depend_on_the_number_of_workers() -> None:
    logged = []
    for devices in (1, 5):
        _, run = train(devices, 1, model=Logging().double(), strategy={"max_pipelines": 5})
        logged.append({name: float(value) for name, value in run.callback_metrics.items()})
    assert logged[0] == pytest.approx(logged[1], rel=1e-10)
    assert logged[0].keys() == {"loss", "loss_step", "loss_epoch"}


@pytest.mark.parametrize(
    ("devices", "options", "words"),
    [
        (
            2,
            {"min_pipelines": None},
            "devices=2 hold 1 pipelines of 2 stages, .* begins with 3: use devices=6",
        ),
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


# ---------------------------------------------------------------------- workers that a cluster manager starts


def recycle_run(*arguments: str, **environment: str) -> AbstractContextManager[subprocess.Popen[str]]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "RECYCLE_LOG": "json", **environment}
    return started([*RECYCLE_RUN, *arguments], env=env)


def kinds(errors: str) -> list[str]:
    """The kinds of events, each once, that say something of workers, by the log of a coordinator."""
    return [kind for kind in ("failure", "redone", "rejoined", "left") if f'"kind": "{kind}"' in errors]


def workers_at(process: subprocess.Popen[str], step: int, count: int) -> None:
    """Waits until a worker says that it begins ``step`` with so many workers."""
    line_with(process, lambda line: f" step {step} workers {count} " in line)


def assert_exact(output: Path, steps: int) -> None:
    expected = plain_loop(Talking().double(), dataset(GLOBAL_BATCH * steps), steps)
    assert difference(torch.load(output, weights_only=True), expected) < TOLERANCE


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_job_joins_the_run_of_the_first_and_leaves_it_again(tmp_path: Path, number: signal.Signals) -> None:
    """Two of four workers begin, as no others come; two more come, and are asked to leave."""
    output, steps = tmp_path / "weights.pt", 24
    script = [str(HERE / "elastic_script.py"), str(output), str(steps), "2,2,6,1,2", "0=2", "6=4", "16=2"]
    address = f"127.0.0.1:{free_port('127.0.0.1')}"
    key = {"RECYCLE_KEY": "the key of this test"}
    with recycle_run("--coordinator", address, "--nproc-per-node", "2", *script, **key) as first:
        workers_at(first, 4, 2)
        with recycle_run("--nproc-per-node", "2", *script, RECYCLE_COORDINATOR=address, **key) as second:
            workers_at(second, 16, 4)
            second.send_signal(number)
            _, left = second.communicate(timeout=PATIENCE)
        _, errors = first.communicate(timeout=PATIENCE)
    assert first.returncode == 0, errors
    assert second.returncode == 128 + number, left
    assert_exact(output, steps)
    assert kinds(errors) == ["rejoined", "left"]
    assert "as it was asked to. Live workers: 2 of 4." in errors
    joins = f"workers that are started with RECYCLE_COORDINATOR={address} join at a step boundary"
    assert f"The run begins with 2 of 4 workers. Vacant: (1, 0), (1, 1); {joins}." in errors
