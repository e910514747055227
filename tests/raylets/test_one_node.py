"""Runs on a Ray of this machine. One of them is in ``make test``; the others come with ``make test-ray``."""

import importlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.waiting import wait_for

import lightning_recycle
from lightning_recycle import ConfigurationError

TESTS = Path(__file__).parent.parent

START = """
import json, os, sys, time
import ray
ray.init(address="local", num_cpus=4, object_store_memory=100 << 20, include_dashboard=False, log_to_driver=False)
from raylets.ray_training import *
from lightning_recycle import RayReCycle
"""


def script(body: str, *arguments: Any) -> subprocess.Popen[str]:
    """A driver of its own, with a Ray of its own; Ray's processes end with it."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]),
    }
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
from support.training import difference
result = RayReCycle(2, 2, 6).fit(train, {"signs": sys.argv[1]})
kinds = [event.kind for event in result.history]
lost = [event.worker for event in result.history if event.kind == "failure"]
off = difference(dict(result.state_dict), expected())
print("ANSWER", json.dumps([off, lost, kinds.count("step"), result.returned["step"]]))
"""


@pytest.mark.long
@pytest.mark.timeout(500)
def test_weights_are_exact_after_a_worker_on_ray_was_killed(tmp_path: Path) -> None:
    off, lost, steps, returned = answer(script(KILL, tmp_path))
    assert off < 1e-10
    assert lost == [[0, 1]]
    assert steps == returned == 40


EXCEPTIONS = """
from support.training import QUIET
import lightning as L
from lightning_recycle import ConfigurationError, ReCycleStrategy, StageLostError
class Unusual(LookupError): pass
def wrong_grid(config):
    strategy = ReCycleStrategy(pipeline_parallel_size=2, num_microbatches=3)
    trainer = L.Trainer(accelerator="cpu", devices=1, num_nodes=4, strategy=strategy, max_steps=1, **QUIET)
    trainer.fit(Regression().double(), DataLoader(DATA, batch_size=12))
def outside(config):
    raise Unusual("before the Trainer")
class Raising(Regression):
    def on_train_batch_start(self, batch, batch_idx):
        if self.global_step == 2:
            raise Unusual("in step 2")
class Lost(Regression):
    def on_train_batch_start(self, batch, batch_idx):
        if self.global_step == 2 and self.trainer.strategy.worker.stage == 1:
            os._exit(3)
def within(config):
    run = ray_worker()
    trainer = L.Trainer(accelerator="cpu", strategy=ReCycleStrategy(**run.strategy_arguments), max_steps=5,
                        **{**QUIET, **run.trainer_arguments})
    trainer.fit(config["model"]().double(), DataLoader(DATA, batch_size=12))
    return "returned"
def leaves(config):
    sys.exit(3)
found = []
for function, config in (
    (outside, None), (within, {"model": Raising}), (wrong_grid, None), (within, {"model": Lost}), (leaves, None),
):
    try:
        RayReCycle(2, 2, 6).fit(function, config)
    except Exception as error:
        found.append([type(error).__name__, str(error), str(error.__cause__)])
    else:
        found.append(["nothing", "", ""])
left = [g["state"] for g in ray.util.placement_group_table().values() if g["state"] != "REMOVED"]
print("ANSWER", json.dumps([found, left]))
"""


@pytest.mark.ray_cluster
@pytest.mark.timeout(500)
def test_the_driver_sees_the_users_exception_with_its_class() -> None:
    (outside, within, grid, lost, leaves), left = answer(script(EXCEPTIONS))
    assert outside[:2] == ["Unusual", "before the Trainer"]
    assert within[:2] == ["Unusual", "in step 2"]
    assert "on_train_batch_start" in within[2]
    assert grid[0] == "ConfigurationError"
    assert "2 x 2" in grid[1]
    assert lost[0] == "StageLostError"
    assert leaves[0] == "ReCycleError"
    assert "sys.exit(3)" in leaves[1]
    assert left == []


INTERRUPTED = """
try:
    RayReCycle(2, 2, 6, name="interrupted").fit(train, {"signs": sys.argv[1]})
except KeyboardInterrupt:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and ray.available_resources().get("CPU") != 4:
        time.sleep(0.1)
    groups = [g["state"] for g in ray.util.placement_group_table().values()]
    try:
        ray.get_actor("recycle-interrupted")
        named = True
    except ValueError:
        named = False
    print("ANSWER", json.dumps([ray.available_resources()["CPU"], sorted(set(groups)), named]))
"""


@pytest.mark.ray_cluster
@pytest.mark.timeout(500)
def test_ctrl_c_leaves_nothing_on_the_cluster(tmp_path: Path) -> None:
    process = script(INTERRUPTED, tmp_path)
    try:
        assert wait_for(lambda: len(list(tmp_path.glob("[0-9].*"))) == 4 or process.poll() is not None, 240)
        os.kill(process.pid, signal.SIGINT)
        assert answer(process) == [4.0, ["REMOVED"], False]
    finally:
        process.kill()


SCRIPT = """
from support.training import QUIET, difference
import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_recycle import ReCycleStrategy
def fit_and_validate(config):
    run = ray_worker()
    trainer = L.Trainer(accelerator="cpu", strategy=ReCycleStrategy(**run.strategy_arguments), max_steps=6,
                        callbacks=[ModelCheckpoint(every_n_train_steps=3)],
                        **{**QUIET, "enable_checkpointing": True, **run.trainer_arguments})
    model = Regression().double()
    trainer.fit(model, DataLoader(DATA, batch_size=12))
    trainer.validate(model, DataLoader(DATA, batch_size=24), verbose=False)
result = RayReCycle(2, 2, 6, storage_path=f"file://{sys.argv[1]}", name="stored").fit(fit_and_validate)
loaded = torch.load(result.checkpoint, weights_only=False)["state_dict"]
print("ANSWER", json.dumps([result.checkpoint, difference(loaded, dict(result.state_dict)), sorted(result.metrics)]))
"""


@pytest.mark.ray_cluster
@pytest.mark.timeout(500)
def test_checkpoints_metrics_and_weights_of_a_script_with_several_runs_come_home(tmp_path: Path) -> None:
    path, off, metrics = answer(script("import torch\n" + SCRIPT, tmp_path))
    assert path.startswith(f"{tmp_path}/stored/")
    assert off == 0.0
    assert "val_loss" in metrics


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
groups = sorted({group["state"] for group in ray.util.placement_group_table().values()})
found = [off, lost, kinds.count("rejoined"), trainer.global_step, len(trainer.optimizers), raised, groups]
print("ANSWER", json.dumps(found))
"""


@pytest.mark.ray_cluster
@pytest.mark.timeout(600)
def test_a_driver_whose_workers_are_on_ray_gets_all_that_local_workers_would_bring() -> None:
    off, lost, rejoined, steps, optimizers, raised, groups = answer(script(FROM_DRIVER), 500)
    assert off < 1e-10
    assert lost == [[0, 1]]
    assert (rejoined, steps, optimizers) == (1, 40, 1)
    assert raised == ["in step 4", True]
    assert groups == ["REMOVED"]


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
@pytest.mark.timeout(600)
def test_after_the_loss_of_all_workers_at_once_the_run_starts_again_where_the_cluster_has_room(tmp_path: Path) -> None:
    off, grids, lost = answer(script(ALL_LOST, tmp_path), 500)
    assert off < 1e-10
    assert (grids, lost) == ([[2, 2]], 1)


KILLING = """
import signal, threading
from pathlib import Path
import psutil
from support.training import difference
signs = Path(sys.argv[1])
found = {"journals": []}
def ask(method, *arguments):
    while True:  # while Ray starts it, calls are refused
        try:
            return ray.get(getattr(ray.get_actor("recycle-killed"), method).remote(*arguments))
        except (ValueError, ray.exceptions.RayActorError):
            time.sleep(0.05)
def kill_coordinator(*others):
    pid = ask("process_id")
    found["journals"] += [file.path for file in psutil.Process(pid).open_files() if "coordinator-" in file.path]
    for process in (*others, pid):
        os.kill(process, signal.SIGKILL)
    while ask("process_id") == pid:
        time.sleep(0.02)
def wait_for_steps(number):
    while len(steps := [int(path.read_text().split()[0]) for path in signs.glob("[0-9].*")]) < 4 or min(steps) < number:
        time.sleep(0.02)
def answer(result):
    found["off"] = difference(result.returned["weights"], expected())
    found["returned"] = result.returned["step"]
    found["kinds"] = sorted({event.kind for event in result.history})
    found["committed"] = [event.step for event in result.history if event.kind == "step"]
    found["left"] = [path for path in found["journals"] if os.path.exists(path)]
    print("ANSWER", json.dumps(found))
"""

COORDINATOR = (
    KILLING
    + """
def kill():
    wait_for_steps(3)
    for _ in range(2):
        kill_coordinator()
        while not any(event.kind == "revived" for event in ask("history")):
            time.sleep(0.02)
    (signs / "enough").touch()
threading.Thread(target=kill, daemon=True).start()
result = RayReCycle(2, 2, 6, name="killed").fit(train, {"signs": sys.argv[1]})
found["home"] = difference(dict(result.state_dict), expected())
answer(result)
"""
)


@pytest.mark.ray_cluster
@pytest.mark.timeout(600)
def test_a_coordinator_that_is_killed_twice_goes_on_with_the_same_run(tmp_path: Path) -> None:
    found = answer(script(COORDINATOR, tmp_path), 500)
    assert max(found["off"], found["home"]) < 1e-10
    assert found["returned"] == 40
    assert "revived" in found["kinds"]
    assert not {"failure", "rejoined"} & set(found["kinds"])
    assert found["committed"] == list(range(found["committed"][0], 40))  # the record begins with the newest coordinator
    began = {path.name: list(map(int, path.read_text().split())) for path in tmp_path.glob("steps.*")}
    assert sorted(name[:10] for name in began) == [f"steps.{rank}.0." for rank in range(4)]  # the first four processes
    assert list(began.values()) == [list(range(40))] * 4  # no step is lost, and none is run again
    assert len(set(found["journals"])) == 1
    assert found["left"] == []


EVERYWHERE = (
    KILLING
    + """
from support.training import QUIET
import lightning as L
from lightning_recycle import ReCycleStrategy
def fit_and_validate(config):
    returned = train(config)
    (Path(config["signs"]) / f"fitted.{os.getpid()}").touch()
    deadline = time.monotonic() + 60
    while not (Path(config["signs"]) / "killed").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    run = ray_worker()
    strategy = ReCycleStrategy(**run.strategy_arguments)
    trainer = L.Trainer(accelerator="cpu", strategy=strategy, **{**QUIET, **run.trainer_arguments})
    trainer.validate(Regression().double(), DataLoader(DATA, batch_size=24), verbose=False)
    return returned
def kill():
    kill_coordinator()  # before anybody has come
    while not any((ask("observe", -1, 0.0).positions or {}).values()):
        time.sleep(0.02)
    kill_coordinator()  # some may have a position
    wait_for_steps(3)
    kill_coordinator(int(next(signs.glob("2.0.*")).name.split(".")[2]))  # with worker (1, 0)
    while not list(signs.glob("2.1.*")):
        time.sleep(0.02)
    (signs / "enough").touch()
    while len(list(signs.glob("fitted.*"))) < 4:
        time.sleep(0.02)
    kill_coordinator()  # between two runs
    (signs / "killed").touch()
threading.Thread(target=kill, daemon=True).start()
answer(RayReCycle(2, 2, 6, name="killed").fit(fit_and_validate, {"signs": sys.argv[1]}))
"""
)


@pytest.mark.ray_cluster
@pytest.mark.timeout(600)
def test_a_coordinator_may_be_killed_before_a_run_with_a_worker_and_between_two_runs(tmp_path: Path) -> None:
    found = answer(script(EVERYWHERE, tmp_path), 500)
    assert found["off"] < 1e-10
    assert found["returned"] == 40
    assert {"revived", "failure", "rejoined"} <= set(found["kinds"])
    assert found["committed"] == list(range(found["committed"][0], 40))
    began = {path.name: sorted(map(int, path.read_text().split())) for path in tmp_path.glob("steps.[013].*")}
    assert [set(steps) for steps in began.values()] == [set(range(40))] * 3  # those that were not killed
    assert len(set(found["journals"])) == 1
    assert found["left"] == []


SETTINGS = """
import threading
from pathlib import Path
from lightning_recycle import ConfigurationError
from lightning_recycle.callbacks import HeartbeatCallback, PlanMonitor
signs = Path(sys.argv[1])
terms = []
def ask():
    while not terms:
        time.sleep(0.1)
        try:
            found = ray.get(ray.get_actor("recycle-settled").terms.remote())
            terms.extend([] if found is None else [found.wants])
        except (ValueError, ray.exceptions.RayActorError):
            pass
    (signs / "enough").touch()
threading.Thread(target=ask, daemon=True).start()
def settled(config):
    config["strategy"] = {"memory": "5 micro-batches", "activation_checkpointing": "never", "split_backward": False}
    config["callbacks"] = [HeartbeatCallback(timeout=7.0, last_holder_timeout=70.0), PlanMonitor(0.2, 9, 90)]
    return train(config)
RayReCycle(2, 2, 6, name="settled", last_holder_timeout=60.0).fit(settled, {"signs": sys.argv[1]})
def differing(config):
    try:
        os.close(os.open(Path(config["signs"], "first"), os.O_CREAT | os.O_EXCL))
        config["strategy"] = {"memory": 0.5}
    except FileExistsError:
        config["strategy"] = {"memory": 0.25}
    return train(config)
try:
    RayReCycle(2, 2, 6).fit(differing, {"signs": sys.argv[1]})
except ConfigurationError as error:
    refused = str(error)
print("ANSWER", json.dumps([terms[0].settings, refused]))
"""


@pytest.mark.long
@pytest.mark.timeout(500)
def test_what_the_script_says_reaches_the_coordinator_and_who_says_otherwise_is_refused(tmp_path: Path) -> None:
    settled, refused = answer(script(SETTINGS, tmp_path))
    assert settled["planning.memory"] == "5 micro-batches"
    assert settled["planning.activation_checkpointing"] == "never"
    assert settled["planning.split_backward"] is False
    assert (settled["heartbeat.timeout"], settled["heartbeat.last_holder_timeout"]) == (7.0, 60.0)
    assert [settled[f"monitor.{name}"] for name in ("threshold", "window", "horizon_steps")] == [0.2, 9, 90]
    assert "PlanningOptions(memory=...)) is" in refused
    assert "start all workers with the same script" in refused


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_pipelines": 0}, "pipelines=0"),
        ({"resources_per_worker": {"CPU": -1}}, "'CPU' needs a number"),
        ({"timeout": 0}, "timeout=0"),
        ({"max_replacements": -1}, "max_replacements=-1"),
        ({"planner": "nobody"}, "nobody"),
        ({"use_gpu": True, "resources_per_worker": {"GPU": 0}}, "some of a GPU"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        lightning_recycle.RayReCycle(**{"num_pipelines": 2, "pipeline_parallel_size": 2, **options})
    assert words in str(caught.value)


def test_a_process_that_is_no_worker_is_told_so() -> None:
    with pytest.raises(ConfigurationError, match="RayReCycle"):
        lightning_recycle.ray_worker()


def test_what_is_used_of_rays_private_parts_is_there() -> None:
    state = importlib.import_module("ray._private.state")
    assert callable(state.state.get_draining_nodes)
    assert callable(state.available_resources_per_node)
