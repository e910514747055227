"""The meeting of tasks of ``srun``: a shared file with the coordinator and key.

Task 0 hosts the coordinator and writes address and key to a file in a folder that all nodes share, from which the job
was submitted; other tasks wait for that file, and so does a further job that joins. When a worker has finished, its
agent leaves a note beside the file, so that no worker is started again without a run. The file is its owner's alone
(mode 0600), otherwise ignored, and appears complete. Task 0 removes both when it ends.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import socket
import stat
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from lightning_recycle.control.network.addresses_and_keys import (
    address_from,
    family_of,
    free_port,
    own_address_towards,
    shown,
)
from lightning_recycle.errors import ConfigurationError
from lightning_recycle.files import replacing

log = logging.getLogger(__name__)

_PORTS = range(20_000, 30_000)  # below those that systems give to anybody
_LOOK_SECONDS = 0.5  # between two looks into the folder
_GRACE_SECONDS = 900.0  # for SLURM to end a task after SIGTERM; more than partitions give
_NOTICE_SECONDS = 4.0  # for all agents to see that the run is over


@dataclass(frozen=True)
class SlurmTask:
    """One task of a step of ``srun``.

    ``step``: ``<job>.<step>.<number of requeues>``; ``launcher``: an address of the machine of ``srun``; ``folder``:
    the folder of submission.
    """

    step: str
    rank: int
    count: int
    node: str
    launcher: str
    folder: str
    port: int


def task_of(environ: Mapping[str, str]) -> SlurmTask | None:
    """This process's task; None as in a batch script without ``srun``."""
    job, step, rank = (environ.get(name) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID"))
    if job is None or step is None or rank is None:
        return None
    offset = int(job) + int(step) if job.isdigit() and step.isdigit() else 0
    return SlurmTask(
        step=f"{job}.{step}.{environ.get('SLURM_RESTART_COUNT', '0')}",
        rank=int(rank),
        count=int(environ.get("SLURM_STEP_NUM_TASKS", "1")),
        node=environ.get("SLURMD_NODENAME") or socket.gethostname(),
        launcher=environ.get("SLURM_LAUNCH_NODE_IPADDR", "127.0.0.1"),
        folder=environ.get("SLURM_SUBMIT_DIR") or os.getcwd(),
        port=_PORTS[offset % len(_PORTS)],
    )


def own_address(task: SlurmTask) -> tuple[str, int]:
    """Address for the step's coordinator on the machine of this task.

    It is that of the node's name, unless that leads nowhere or only to this machine, as ``/etc/hosts`` may say; then
    the one that reaches the machine of ``srun``. Raises ConfigurationError if there is none.
    """
    try:
        host = _address_of(task.node) or own_address_towards(task.launcher)
        with contextlib.suppress(OSError), socket.create_server((host, task.port), family=family_of(host)):
            return host, task.port
        return host, free_port(host)
    except OSError as error:
        raise ConfigurationError(
            f"Task 0 of step {task.step} finds no address of {task.node} that other nodes reach"
            f" ({error.strerror or error}): give recycle-run --coordinator HOST:PORT."
        ) from error


def _address_of(name: str) -> str | None:
    with contextlib.suppress(OSError):  # it cannot be resolved, or is none of this machine
        host = str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
        if not host.startswith("127.") and host != "::1":
            free_port(host)
            return host
    return None


class Meeting:
    """The file of a step, and the note beside it, in a folder that all nodes see.

    ``job``: the number of the job whose run this task joins.
    """

    def __init__(self, task: SlurmTask, folder: str | None = None, job: str | None = None) -> None:
        self._task, self._job = task, job
        self._folder = Path(folder or task.folder)
        self._path = self._folder / f".recycle-{task.step}"

    @property
    def _note(self) -> Path:
        return self._path.with_name(f"{self._path.name}.finished")

    def announce(self, address: tuple[str, int], key: str) -> None:
        """Announces the coordinator to all tasks; ConfigurationError if that fails."""
        try:
            os.stat(self._folder)  # it is not made here: others would not see it
            with replacing(self._path, mode=0o600) as file:
                file.write(json.dumps({"coordinator": shown(address), "key": key}).encode())
        except OSError as error:
            raise ConfigurationError(
                f"{self._path} cannot be written ({error.strerror or error}), and the tasks of this step would not find"
                " each other: give recycle-run --shared FOLDER, one that all nodes see and you can write to."
            ) from error

    def wait(self, seconds: float) -> tuple[tuple[str, int], str]:
        """Address and key, once announced within ``seconds``; else ConfigurationError."""
        deadline = time.monotonic() + seconds
        while (text := self._read()) is None:
            if time.monotonic() > deadline:
                if self._job is not None:
                    raise ConfigurationError(
                        f"--join {self._job}: no run of that job announced itself in {self._folder} within {seconds:g}"
                        " s. Does it run, with recycle-run? Was it submitted from the same folder, or with the same"
                        " --shared FOLDER?"
                    )
                raise ConfigurationError(
                    f"Task {self._task.rank} of step {self._task.step}, on {self._task.node}, waited {seconds:g} s for"
                    f" {self._path}, which task 0 writes. Either task 0 did not start (see its output), or the nodes"
                    " do not share that folder: submit the job from one that they share, or give recycle-run"
                    " --shared FOLDER. Without a shared folder, set RECYCLE_COORDINATOR and RECYCLE_KEY yourself."
                )
            time.sleep(_LOOK_SECONDS)
        said = json.loads(text)
        return address_from(said["coordinator"], str(self._path)), said["key"]

    def finish(self) -> None:
        """Leaves the note that a worker has finished, so the run has."""
        with contextlib.suppress(OSError):  # only a worker that died at the very end needs it
            self._note.touch()

    @contextlib.contextmanager
    def watched(self, on_finish: Callable[[], None]) -> Iterator[None]:
        """Calls ``on_finish``, from another thread, when a worker of any task finished."""
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(_LOOK_SECONDS):
                if self._note.exists():
                    on_finish()
                    return

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def await_end(self, status: int) -> int:
        """Waits for SLURM to end this process; returns the exit status if it does not.

        If a worker of another task finishes meanwhile, the run has, and it is 0.
        """
        deadline = time.monotonic() + _GRACE_SECONDS
        while time.monotonic() < deadline:
            if self._note.exists() or (self._job is not None and not self._path.exists()):
                return 0
            time.sleep(_LOOK_SECONDS)
        return status

    def close(self) -> None:
        """Removes both; by the task that hosts the coordinator."""
        if self._note.exists() and self._task.count > 1:
            time.sleep(_NOTICE_SECONDS)
        for path in (self._path, self._note):
            with contextlib.suppress(OSError):  # it is not there, or the folder is gone
                path.unlink()

    def _read(self) -> str | None:
        """The content of the file; None if it is missing, or not this user's alone."""
        with contextlib.suppress(OSError):
            names = os.listdir(self._folder)  # also lets NFS look again for a name that was not there
            if self._job is not None:
                steps = [name for name in names if re.fullmatch(rf"\.recycle-{re.escape(self._job)}\.\d+\.\d+", name)]
                if not steps:
                    return None
                self._path = self._folder / max(steps, key=_number_of)
            with open(self._path) as file:
                status = os.fstat(file.fileno())
                if status.st_uid == os.getuid() and not stat.S_IMODE(status.st_mode) & 0o077:
                    return file.read()
        return None


def _number_of(name: str) -> tuple[int, int]:
    """Number of requeues of the job, and the step, by the name of its file."""
    _, step, requeued = name.rsplit(".", 2)
    return int(requeued), int(step)


# ---------------------------------------------------------------------- requeueing


def job_name(environ: Mapping[str, str] = os.environ) -> str:
    """SLURM's name of this job, or of this task of an array: ``123`` or ``120_3``.

    An array's last task shares the array's number: ``scontrol requeue 120`` would requeue all.
    """
    array = environ.get("SLURM_ARRAY_JOB_ID")
    return environ["SLURM_JOB_ID"] if array is None else f"{array}_{environ['SLURM_ARRAY_TASK_ID']}"


def requeue(timeout: float) -> bool:
    """Requeues this job; whether that succeeded within ``timeout`` seconds.

    If it succeeds, SLURM ends this process soon, maybe before it returns.
    """
    try:
        command = ["scontrol", "requeue", job_name()]
    except KeyError as error:
        log.warning("The job is not requeued: %s is not set, so this is not a job of SLURM.", error)
        return False
    log.info("Requeueing job %s.", command[-1])
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired:
        why = f"it has not answered within {timeout:g} s"
    except OSError as error:  # there is no scontrol on this node, or no memory to start it
        why = f"it could not be started ({error})"
    else:
        if done.returncode == 0:
            return True
        why = f"it ended with status {done.returncode} ({(done.stderr or done.stdout).strip()})"
    log.warning(
        "The job is saved but perhaps not requeued: %s: %s. Run that command to have it go on.", " ".join(command), why
    )
    return False
