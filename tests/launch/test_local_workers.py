"""Worker processes of this machine, as the launching process holds them."""

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.process_tree import is_alive
from support.sampling import sampled
from support.scripts import completed
from support.waiting import next_line, wait_for

from lightning_recycle.launch.worker_group import LocalWorker, LocalWorkerGroup, _ensure_fork_server

SECONDS = 60.0  # more than anything here takes


def lose(worker: LocalWorker) -> None:
    worker.kill()
    assert worker.describe_exit(SECONDS) == "it was killed by SIGKILL"


def test_workers_that_ended_hold_no_descriptors_while_the_run_goes_on():
    with LocalWorkerGroup(time.sleep, None) as group:
        survivor = group.start(SECONDS, "survivor")
        open_descriptors = []
        for _ in range(5):
            worker = group.start(SECONDS, "lost and replaced")
            open_descriptors.append(psutil.Process().num_fds())
            lose(worker)
            worker.release()
        assert len(set(open_descriptors)) == 1, open_descriptors
        assert survivor.describe_exit(0.0) is None


def test_a_worker_that_somebody_may_still_ask_about_is_kept():
    with LocalWorkerGroup(time.sleep, None) as group:
        watched, released = group.start(SECONDS, "watched"), group.start(SECONDS, "released")
        lose(watched)
        released.release()
        group.start(SECONDS, "another")
        assert watched.describe_exit(0.0) == "it was killed by SIGKILL"
        assert released.describe_exit(0.0) is None  # it lives


def fork_server(of: int | None = None) -> psutil.Process:
    (server,) = [c for c in psutil.Process(of).children() if "multiprocessing.forkserver" in " ".join(c.cmdline())]
    return server


@pytest.mark.long
def test_workers_outlive_their_fork_server():
    with LocalWorkerGroup(time.sleep, None) as group:
        killed, ends = group.start(SECONDS, "killed"), group.start(3.0, "ends")
        fork_server().kill()
        assert killed.describe_exit(1.0) is None
        killed.kill()
        assert wait([killed.sentinel, ends.sentinel], SECONDS) == [killed.sentinel]
        assert "fork server" in str(killed.describe_exit(SECONDS))
        later = group.start(SECONDS, "started by a new fork server")
        assert ends.describe_exit(SECONDS)
        lose(later)


@pytest.mark.parametrize("status", [7, 255, -signal.SIGKILL])
def test_how_a_worker_ended_is_known_also_if_others_ask_about_all_processes(status):
    """As each start of a process does, such as that of a replacement in another thread."""
    with LocalWorkerGroup(time.sleep if status < 0 else os._exit, None) as group:
        worker = group.start(SECONDS if status < 0 else status, "ends")
        if status < 0:
            os.kill(worker.pid or 0, -status)
        assert wait([worker.sentinel], SECONDS)
        time.sleep(0.5)  # the fork server has reported it
        multiprocessing.active_children()
        expected = "it was killed by SIGKILL" if status < 0 else f"it exited with code {status}"
        assert worker.describe_exit(SECONDS) == expected


@pytest.mark.long
def test_a_stopped_fork_server_is_replaced_and_how_its_workers_end_is_not_known(caplog):
    with LocalWorkerGroup(time.sleep, None) as group:
        worker, ends = group.start(SECONDS, "killed"), group.start(SECONDS, "killed, too")
        server = fork_server()
        server.suspend()
        worker.kill()
        assert "did not report it" in str(worker.describe_exit(SECONDS))
        started = time.monotonic()
        later = group.start(SECONDS, "started by a new fork server")
        assert time.monotonic() - started < 60
        assert f"process {server.pid}) was stopped" in caplog.text
        assert ends.describe_exit(0.0) is None, "it goes on"
        assert fork_server().pid != server.pid
        lose(later)


STOPPED = """
import psutil, sys, time
from multiprocessing import forkserver
from lightning_recycle.launch.worker_group import LocalWorkerGroup
def stop():
    server = psutil.Process(forkserver._forkserver._forkserver_pid)
    server.suspend()
    while server.status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)
if __name__ == "__main__":
    with LocalWorkerGroup(time.sleep, None) as group:
        group.start(100.0, "worker")
        if sys.argv[1] == "in the run":
            stop()
    if sys.argv[1] == "after it":
        stop()
    print(forkserver._forkserver._forkserver_pid, flush=True)
"""


@pytest.mark.long
@pytest.mark.parametrize("when", ["in the run", "after it"])
def test_a_stopped_fork_server_does_not_outlive_the_launching_process(when, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(STOPPED)
    done = completed([sys.executable, str(script), when], check=True)
    server = int(done.stdout)
    try:
        assert wait_for(lambda: not is_alive(server), 5.0)
    finally:
        if is_alive(server):
            os.kill(server, signal.SIGKILL)
    assert "was stopped; it is killed" in done.stderr


LOADS = """
import multiprocessing, sys, time
import torch
from lightning_recycle.launch.worker_group import LocalWorkerGroup
from lightning_recycle.processes import die_with_parent
from torch.utils.data import DataLoader
def init(_):
    die_with_parent()  # as in a run
def load(path):
    multiprocessing.set_start_method("fork", force=True)  # as worker_main does
    loader = DataLoader(torch.zeros(1000, 10), num_workers=2, batch_size=1, worker_init_fn=init)
    for _ in loader:
        open(path, "w").close()
        time.sleep(0.1)
if __name__ == "__main__":
    import os
    with LocalWorkerGroup(load, None) as group:
        for name in sys.argv[1:]:
            worker = group.start(name, "loads")
            while not os.path.exists(name):
                time.sleep(0.05)
            worker.kill()
            print(worker.describe_exit(60.0))
"""


@pytest.mark.long
def test_workers_that_are_lost_with_their_dataloader_processes_leave_no_folders(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(LOADS)
    command = [sys.executable, str(script), str(tmp_path / "first"), str(tmp_path / "second")]
    with tempfile.TemporaryDirectory() as temporary:  # of a short name, for the paths of sockets
        environment = {**os.environ, "TMPDIR": temporary}
        assert completed(command, env=environment, check=True).stdout == "it was killed by SIGKILL\n" * 2
        assert list(Path(temporary).glob("pymp-*")) == []


def exit_with_what_is_wrong(_: object) -> None:
    frozen, imported = gc.get_freeze_count() > 100_000, "lightning_recycle.strategy" in sys.modules
    sys.exit(None if frozen and imported and gc.isenabled() else f"{gc.get_freeze_count()}, {imported}")


def test_the_collector_of_a_worker_works_and_leaves_alone_what_was_imported_for_it():
    with LocalWorkerGroup(exit_with_what_is_wrong, None) as group:
        assert group.start(None, "worker").describe_exit(SECONDS) == "it exited with code 0"


@pytest.mark.long
@pytest.mark.parametrize("server_dies", sampled([False, True], 1))
def test_workers_end_with_a_killed_launching_process_even_stopped_ones(server_dies):
    script = Path(__file__).with_name("local_workers_script.py")
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as launcher:
        workers = [int(next_line(launcher)) for _ in range(2)]
        os.kill(workers[0], signal.SIGSTOP)
        if server_dies:
            fork_server(launcher.pid).kill()
            assert not wait_for(lambda: not all(map(is_alive, workers)), 1.0)
        launcher.kill()
    assert wait_for(lambda: not any(map(is_alive, workers)), SECONDS)


def exit_with_sum(payload: Any) -> None:
    os._exit(sum(payload.load()))


def test_every_worker_reads_what_it_is_given_and_no_folder_has_it(tmp_path, monkeypatch):
    _ensure_fork_server()  # its socket stays for later tests
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # other tests write to the usual one
    with LocalWorkerGroup(exit_with_sum, [1, 2, 3] + [0] * 1_000_000) as group:
        workers = [group.start(group.payload, "reads") for _ in range(3)]
        assert not [name for name in os.listdir(tmp_path) if name.startswith("lightning_")]
        assert [worker.describe_exit(SECONDS) for worker in workers] == ["it exited with code 6"] * 3


@pytest.mark.long
def test_a_folder_for_temporary_files_whose_path_is_too_long_is_named(tmp_path):
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    code = (
        "from lightning_recycle.errors import WorkerStartError\n"
        "from lightning_recycle.launch.worker_group import _ensure_fork_server\n"
        "try:\n    _ensure_fork_server()\n"
        "except WorkerStartError as error:\n    print(error)\n"
    )
    env = {**os.environ, "TMPDIR": str(folder)}
    done = completed([sys.executable, "-c", code], env=env, check=True)
    assert str(folder) in done.stdout
    assert "Set TMPDIR" in done.stdout
