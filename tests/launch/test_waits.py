"""Each wait of launcher and workers names whom it waits for, and ends when they are gone."""

import ast
import time
from pathlib import Path
from typing import Any

import pytest
from support.waiting import PATIENCE

import lightning_recycle
from lightning_recycle.control.options import WorkerProcess
from lightning_recycle.launch.worker_group import WorkerGroup

PACKAGE, TESTS = Path(lightning_recycle.__file__).parent, Path(__file__).parents[1]

WAITS = {"_wait", "wait", "wait_for", "sleep", "recv", "poll"}
"""Names of functions that block."""

COORDINATOR = (
    "the coordinator; its loss, or a generation, ends it",
    "test_a_worker_gives_up_a_coordinator_that_does_not_come_back",
)
BOUNDED = "time alone", ""

ADDRESSEES: dict[str, tuple[str, str]] = {
    # what waits: whom it waits for, and a test in which that one dies or never answers
    "control/client.py begin_step": ("all, to stop", "test_the_survivors_train_while_the_replacement_starts"),
    "control/client.py wait_to_enter": COORDINATOR,
    "control/client.py _await_confirmation": COORDINATOR,
    "control/client.py await_assignment": COORDINATOR,
    "control/client.py await_announcement": ("a generation", "test_an_announcement_that_does_not_come_is_an_error_after"
                                             "_its_time"),
    "control/client.py await_verdict": COORDINATOR,
    "control/client.py report_and_wait": ("all live workers", "test_a_worker_that_does_not_stop_for_a_regroup_is"
                                          "_evicted"),
    "control/client.py await_committed": ("live workers", "test_a_fault_is_survived_named_and_leaves_exact_weights"),
    "control/client.py await_loss": ("those that compute", "test_a_fault_is_survived_named_and_leaves_exact_weights"),
    "control/client.py lookup": ("a publisher", "test_waiting_for_what_nobody_publishes_is_interrupted_by_a_loss"),
    "control/client.py _hiding_failures": ("all live workers", "test_a_worker_may_fail_outside_of_steps"),
    "control/client.py enter_hook": ("its siblings", "test_a_kill_at_a_collective_of_a_hook"),
    "control/client.py wait": ("its siblings", "test_a_kill_at_a_collective_of_a_hook"),
    "control/client.py _await_answer": ("all live workers", "test_a_worker_may_fail_outside_of_steps"),
    "control/client.py receive_parcel": ("a holder", "test_who_waits_for_a_lost_worker_or_for_nothing_is_told"),
    "control/client.py await_background_work": ("its own thread, or the end of the run",
                                                "test_files_are_those_that_callbacks_remember_whenever_a_writer_dies"),
    "control/client.py request_stop_and_wait": ("all workers", "test_a_worker_that_asks_by_its_own_clock_and_dies"
                                                "_leaves_the_others_well"),
    "control/client.py _wait": COORDINATOR,
    "control/client.py _beat": BOUNDED,
    "launch/worker_group.py _watch_fork_server": BOUNDED,
    "launch/worker_group.py _run_worker": BOUNDED,
    "launch/worker_group.py describe_exit": ("a process, for a time", "test_how_a_worker_ended_is_known_also_if_others"
                                              "_ask_about_all_processes"),
    "launch/worker_group.py _describe_exit": BOUNDED,
    "control/monitoring/logs.py _receive": ("workers that log", "test_a_worker_that_is_killed_leaves_whole_records_and"
                                          "_others_go_on"),
    "control/monitoring/logs.py __init__": BOUNDED,
    "control/monitoring/logs.py _send": ("the launcher, for a time", "test_a_handler_that_hangs_holds_up_no_worker"
                                       "_and_lost_records_are_counted"),
    "launch/worker_process.py run_outside": BOUNDED,
    "launch/worker_process.py retry_connecting": ("the coordinator, for a time", "test_after_the_deadline_the_newest"
                                                  "_error_is_raised"),
    "launch/ray_workers.py free_slots": BOUNDED,
    "launch/ray_workers.py describe_exit": ("an actor, for a time", "test_a_killed_actor_is_replaced_where_it_was"),
    "launch/ray_workers.py _has_started": BOUNDED,
    "launch/ray_workers.py attend": BOUNDED,
    "launch/ray_workers.py watch": BOUNDED,
    "launch/launcher.py _await_end": ("the coordinator's thread", "test_a_run_that_cannot_save_in_time_ends_and_says"
                                         "_so"),
    "session/concurrent_checkpoints.py finish": ("its own thread, that copies memory", "test_large_tensors_that_only"
                                                 "_step_writes_are_copied_later_by_whoever_comes_first"),
    "session/concurrent_checkpoints.py await_originals": ("its own thread, or a generation", "test_training_waits_for"
                                                          "_a_checkpoint_of_whose_state_no_copy_fits"),
    "session/concurrent_checkpoints.py await_thread": ("its own thread, for a time",
                                                 "test_a_checkpoint_that_is_being_written_is_completed_however_the_run_ends"),
    "session/checkpoint_files.py save_sharded": BOUNDED,  # torch's future, which is done
    "session/checkpoint_files.py write": BOUNDED,
}  # fmt: skip


def waits() -> set[str]:
    """The functions of launcher and workers that block."""
    found = set()
    control = (PACKAGE / "control" / name for name in ("client.py", "monitoring/logs.py"))
    for path in (*PACKAGE.glob("launch/*.py"), *PACKAGE.glob("session/*.py"), *control):
        for function in ast.walk(ast.parse(path.read_text())):
            calls = ast.walk(function) if isinstance(function, ast.FunctionDef) else ()
            names = (call.func for call in calls if isinstance(call, ast.Call))
            if any((getattr(name, "attr", None) or getattr(name, "id", "")) in WAITS for name in names):
                found.add(f"{path.relative_to(PACKAGE).as_posix()} {function.name}")
    return found


def test_each_wait_has_an_addressee_and_a_test_in_which_that_is_gone():
    assert waits() == ADDRESSEES.keys()
    texts = [path.read_text() for path in TESTS.rglob("test_*.py")]
    for what, (_, name) in ADDRESSEES.items():
        assert not name or any(f"def {name}(" in text for text in texts), f"{what}: there is no {name}"


class Process(WorkerProcess):
    """A process that ends by itself after ``seconds``, or when it is killed."""

    def __init__(self, seconds: float) -> None:
        self.ends, self.was_killed = time.monotonic() + seconds, False

    def describe_exit(self, timeout: float) -> str | None:
        time.sleep(max(0.0, min(timeout, self.ends - time.monotonic())))
        return "it ended" if time.monotonic() >= self.ends else None

    def kill(self) -> None:
        if self.describe_exit(0.0) is None:
            self.ends, self.was_killed = time.monotonic(), True

    def close(self) -> None:
        pass


class Group(WorkerGroup):
    def start(self, argument: Any, name: str) -> WorkerProcess:
        worker = Process(argument)
        self.add(worker)
        return worker

    def attend(self, coordinator: Any) -> None:
        pass


@pytest.mark.parametrize("dies", [False, True])
def test_of_all_processes_only_those_are_waited_for_that_complete_something(dies):
    """Not for one that was started a moment ago, to replace a worker that is lost."""
    group = Group()
    writer, newborn = group.start(0.2, "writer"), group.start(10 * PATIENCE, "newborn")
    assert isinstance(writer, Process)
    if dies:
        writer.kill()
        writer.was_killed = False
    began = time.monotonic()
    group.end([writer], patience=10 * PATIENCE)
    assert time.monotonic() - began < PATIENCE
    assert newborn.was_killed
    assert not writer.was_killed
