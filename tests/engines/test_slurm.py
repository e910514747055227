"""How the tasks of a step of srun find each other, without SLURM: what it says is in variables."""

import os
import socket
import stat
import threading
from pathlib import Path

import pytest
from support.waiting import wait_for

from lightning_recycle.engines.slurm import Meeting, SlurmTask, own_address, task_of
from lightning_recycle.errors import ConfigurationError

STEP = {
    "SLURM_JOB_ID": "12345", "SLURM_STEP_ID": "2", "SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "8",
    "SLURMD_NODENAME": "node[7]", "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1", "SLURM_SUBMIT_DIR": "/home/user",
}  # fmt: skip


def task(folder: Path, rank: int = 0, count: int = 1) -> SlurmTask:
    return SlurmTask("7.0.0", rank, count, "no-such-node.invalid", "127.0.0.1", str(folder), 20_007)


@pytest.mark.parametrize(("changes", "expected"), [
    ({}, SlurmTask("12345.2.0", 3, 8, "node[7]", "127.0.0.1", "/home/user", 22_347)),
    ({"SLURM_RESTART_COUNT": "4"}, SlurmTask("12345.2.4", 3, 8, "node[7]", "127.0.0.1", "/home/user", 22_347)),
    ({"SLURM_JOB_ID": "4294901760"}, SlurmTask("4294901760.2.0", 3, 8, "node[7]", "127.0.0.1", "/home/user", 21_762)),
    ({"SLURM_STEP_ID": None}, None),  # a batch script
    ({"SLURM_JOB_ID": None}, None),
])  # fmt: skip
def test_a_task_knows_itself_from_its_variables(changes, expected):
    assert task_of({name: value for name, value in {**STEP, **changes}.items() if value is not None}) == expected


def test_all_tasks_learn_what_one_announces_and_nobody_else_can_read_it(tmp_path):
    host, guest = Meeting(task(tmp_path, 0)), Meeting(task(tmp_path, 1))
    threading.Timer(0.7, host.announce, [("10.0.0.1", 29400), "a key of the run"]).start()
    assert guest.wait(30) == (("10.0.0.1", 29400), "a key of the run")
    (path,) = tmp_path.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    host.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("mode", [0o644, 0o660])
def test_a_file_that_others_can_touch_does_not_count(mode, tmp_path):
    path = tmp_path / ".recycle-7.0.0"
    path.write_text('{"coordinator": "10.0.0.66:1", "key": "planted by somebody"}')
    path.chmod(mode)
    with pytest.raises(ConfigurationError, match="--shared FOLDER"):
        Meeting(task(tmp_path, 1)).wait(0.1)
    if os.geteuid() == 0:
        path.chmod(0o600)
        os.chown(path, 12345, -1)
        with pytest.raises(ConfigurationError, match=r"Task 1 of step 7\.0\.0"):
            Meeting(task(tmp_path, 1)).wait(0.1)


def test_a_folder_that_is_not_there_is_an_error_with_the_remedy(tmp_path):
    with pytest.raises(ConfigurationError, match="--shared FOLDER"):
        Meeting(task(tmp_path / "nowhere")).announce(("10.0.0.1", 29400), "a key of the run")
    Meeting(task(tmp_path), str(tmp_path)).announce(("10.0.0.1", 29400), "a key of the run")


def test_who_finishes_tells_all(tmp_path):
    first, second = Meeting(task(tmp_path, 0)), Meeting(task(tmp_path, 1))
    first.announce(("10.0.0.1", 29400), "a key of the run")
    told = threading.Event()
    with first.watched(told.set):
        assert not told.wait(0.7)
        second.finish()
        assert wait_for(told.is_set, 30)
    first.close()
    assert not list(tmp_path.iterdir())


def test_a_further_job_finds_the_newest_run_of_the_one_that_it_joins(tmp_path):
    announced = {"7.0.0": "10.0.0.1", "7.0.1": "10.0.0.2", "77.0.2": "10.0.0.3"}
    for step, host in announced.items():
        own = SlurmTask(step, 0, 1, "node1", "127.0.0.1", str(tmp_path), 20_000)
        Meeting(own).announce((host, 29400), "a key of the run")
    guest = Meeting(task(tmp_path, 1), job="7")
    assert guest.wait(0.1) == (("10.0.0.2", 29400), "a key of the run")
    guest.finish()
    assert (tmp_path / ".recycle-7.0.1.finished").exists()
    with pytest.raises(ConfigurationError, match="--join 8: no run of that job announced itself"):
        Meeting(task(tmp_path, 1), job="8").wait(0.1)


def test_a_job_whose_run_is_over_does_not_wait_for_slurm_to_end_it(tmp_path):
    host, guest = (
        Meeting(task(tmp_path, 0)),
        Meeting(SlurmTask("8.0.0", 0, 1, "b", "127.0.0.1", str(tmp_path), 1), job="7"),
    )
    host.announce(("10.0.0.1", 29400), "a key of the run")
    guest.wait(0.1)
    host.close()
    assert guest.await_end(143) == 0


def test_the_port_of_a_step_gives_way_to_a_free_one(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        busy = SlurmTask("7.0.0", 0, 1, "no-such-node.invalid", "127.0.0.1", str(tmp_path), taken)
        host, port = own_address(busy)
    assert (host, port != taken) == ("127.0.0.1", True)
    free = SlurmTask("7.0.0", 0, 1, "no-such-node.invalid", "127.0.0.1", str(tmp_path), port)
    assert own_address(free) == ("127.0.0.1", port)


def test_a_name_that_leads_to_the_machine_itself_is_not_told_to_others(tmp_path):
    with pytest.raises(ConfigurationError, match="--coordinator HOST:PORT"):
        own_address(SlurmTask("7.0.0", 0, 1, "localhost", "no-such-node.invalid", str(tmp_path), 20_007))
