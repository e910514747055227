"""Runs on a Ray of this machine. One of them is in ``make test``; the others come with ``make test-ray``."""

import importlib
import inspect
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.waiting import wait_for

TESTS = Path(__file__).parent.parent

START = """
import json, os, sys, time
import ray
ray.init(address="local", num_cpus=4, object_store_memory=100 << 20, include_dashboard=False, log_to_driver=False)
from raylets.ray_training import *
"""


def script(body: str, *arguments: Any) -> subprocess.Popen[str]:
    """A driver of its own, with a Ray of its own; Ray's processes end with it."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", START + body, *map(str, arguments)]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=environment, start_new_session=True, **pipes)


def answer(process: subprocess.Popen[str], timeout: float = 400) -> Any:
    """What a driver answered, among what Ray printed there."""
    try:
        output, errors = process.communicate(timeout=timeout)
    finally:
        if process.poll() is None:
            process.kill()
    assert process.returncode == 0, errors[-4000:]
    (answered,) = [line for line in output.splitlines() if line.startswith("ANSWER ")]
    return json.loads(answered.removeprefix("ANSWER "))


KILL = """
import signal, threading
from pathlib import Path
from support.training import difference
def kill():
    signs = Path(sys.argv[1])
    while True:
        time.sleep(0.05)
        for path in signs.glob("1.0.*"):
            if int(path.read_text().split()[0]) >= 3:
                os.kill(int(path.name.split(".")[2]), signal.SIGKILL)
                (signs / "enough").touch()
                return
threading.Thread(target=kill, daemon=True).start()
model = Regression().double()
trainer = from_driver(model, [Signs(sys.argv[1])])
kinds = [event.kind for event in trainer.strategy.history]
lost = [event.worker for event in trainer.strategy.history if event.kind == "failure"]
off = difference(model.state_dict(), expected())
print("ANSWER", json.dumps([off, lost, kinds.count("step"), trainer.global_step]))
"""


@pytest.mark.long
def test_weights_are_exact_after_a_worker_on_ray_was_killed(tmp_path):
    off, lost, steps, returned = answer(script(KILL, tmp_path))
    assert off < 1e-10
    assert lost == [[0, 1]]
    assert steps == returned == 40


INTERRUPTED = """
try:
    from_driver(Regression().double(), [Signs(sys.argv[1])])
except (KeyboardInterrupt, SystemExit):
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and ray.available_resources().get("CPU") != 4:
        time.sleep(0.1)
    print("ANSWER", json.dumps(ray.available_resources()["CPU"]))
    sys.exit(0)
"""


@pytest.mark.ray_cluster
def test_ctrl_c_leaves_nothing_on_the_cluster(tmp_path):
    process = script(INTERRUPTED, tmp_path)
    try:
        assert wait_for(lambda: len(list(tmp_path.glob("[0-9].*"))) == 4 or process.poll() is not None, 240)
        os.kill(process.pid, signal.SIGINT)
        assert answer(process) == 4.0
    finally:
        process.kill()


NO_ROOM = """
from lightning_recycle.errors import WorkerStartError
from lightning_recycle import RayEngine
try:
    from_driver(Regression().double(), engine=RayEngine({"CPU": 1.5}), start_timeout=10.0)
except WorkerStartError as error:
    print("ANSWER", json.dumps(str(error)))
"""


@pytest.mark.ray_cluster
def test_a_cluster_without_room_is_an_error_that_says_what_was_wanted_and_what_is_free():
    told = answer(script(NO_ROOM))
    assert "no room for 4 workers with {'CPU': 1.5} each within 10 s (start_timeout); the cluster has {" in told


FROM_DRIVER = """
from support.training import difference
model = Dying().double()
trainer = from_driver(model)
kinds = [event.kind for event in trainer.strategy.history]
off = difference(model.state_dict(), expected())
lost = [event.worker for event in trainer.strategy.history if event.kind == "failure"]
try:
    from_driver(Dying(raises=True).double())
except LookupError as error:
    raised = [str(error), "on_train_batch_start" in str(error.__cause__)]
found = [off, lost, kinds.count("rejoined"), trainer.global_step, len(trainer.optimizers), raised]
print("ANSWER", json.dumps(found))
"""


@pytest.mark.ray_cluster
def test_a_driver_whose_workers_are_on_ray_gets_all_that_local_workers_would_bring():
    off, lost, rejoined, steps, optimizers, raised = answer(script(FROM_DRIVER), 500)
    assert off < 1e-10
    assert lost == [[0, 1]]
    assert (rejoined, steps, optimizers) == (1, 40, 1)
    assert raised == ["in step 4", True]


ALL_LOST = """
from lightning.pytorch.callbacks import ModelCheckpoint
from support.training import difference
model = AllDie().double()
trainer = from_driver(model, [ModelCheckpoint(sys.argv[1], every_n_train_steps=4)], on_stage_lost="restart")
grids = {(schedule.grid.pipelines, schedule.grid.stages) for schedule in trainer.strategy.schedules}
kinds = [event.kind for event in trainer.strategy.history]
print("ANSWER", json.dumps([difference(model.state_dict(), expected()), sorted(grids), kinds.count("stage_lost")]))
"""


@pytest.mark.ray_cluster
def test_after_the_loss_of_all_workers_at_once_the_run_starts_again_where_the_cluster_has_room(tmp_path):
    off, grids, lost = answer(script(ALL_LOST, tmp_path), 500)
    assert off < 1e-10
    assert (grids, lost) == ([[2, 2]], 1)


def test_what_is_used_of_rays_private_parts_is_there():
    state = importlib.import_module("ray._private.state")
    assert callable(state.state.get_draining_nodes)
    assert callable(state.available_resources_per_node)
    strategies = importlib.import_module("ray.util.scheduling_strategies")
    assert "_spill_on_unavailable" in inspect.signature(strategies.NodeAffinitySchedulingStrategy).parameters
