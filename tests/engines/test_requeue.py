"""Signals to the tasks of a SLURM job: all save at one step boundary, and then one has the job run again.

SLURM's part is played by this process: it sets the variables, sends the signals, and ``scontrol`` is a script of its.
``make test-slurm`` does the same with a real cluster.
"""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from slurm_training import Slow
from support.models import GLOBAL_BATCH, dataset
from support.scripts import COORDINATOR
from support.training import difference, plain_loop
from support.waiting import wait_for

from lightning_recycle.engines.slurm import job_name, requeue

pytestmark = pytest.mark.long

HERE = Path(__file__).parent
STEPS = 60
ENDED = 75  # the status of a worker whose run ended otherwise than at its end

SCONTROL = """#!/bin/sh
complete=$(ls -A {folder} | grep -c '^hpc_ckpt_1.ckpt$')
unfinished=$(ls -A {folder} | grep -c writing)
echo "$@ with $complete checkpoint and $unfinished unfinished" >> {calls}
"""


class Srun:
    """A running ``fake_srun.py``."""

    def __init__(self) -> None:
        command = [sys.executable, str(HERE / "fake_srun.py")]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen(command, cwd=HERE, env={**os.environ, "OMP_NUM_THREADS": "1"}, **pipes)
        self._said: dict[int, int] = {}
        self._started: queue.SimpleQueue[int] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def start(self, **task: Any) -> int:
        """Starts a task; returns the number of its process."""
        self._process.stdin.write(json.dumps(task) + "\n")
        self._process.stdin.flush()
        return self._started.get(timeout=100)

    def status(self, pid: int) -> int | None:
        """How a task ended; None while it lives."""
        return self._said.get(pid)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _listen(self) -> None:
        for line in self._process.stdout:
            said = json.loads(line)
            if "status" in said:
                self._said[said["pid"]] = said["status"]
            else:
                self._started.put(said["pid"])


class Job:
    """A job of four tasks on two nodes, with its coordinator."""

    def __init__(self, srun: Srun, folder: Path, **variables: str) -> None:
        self._srun, self.folder, self._parent = srun, folder / "run", folder
        self._calls = folder / "calls"
        self._coordinator: subprocess.Popen[str] | None = None
        self.tasks: list[int] = []
        programs = folder / "programs"
        programs.mkdir()
        self.folder.mkdir()
        for name, text in {
            "scontrol": SCONTROL.format(folder=self.folder, calls=self._calls),
            "srun": "#!/bin/sh\nexit 1\n",
        }.items():
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)
        self._environment = {
            **os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "RECYCLE_KEY": "a secret of 16 bytes or more",
            "OMP_NUM_THREADS": "1", "SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "train", "SLURM_NTASKS": "4",
            "SLURM_NTASKS_PER_NODE": "2", "SLURM_NNODES": "2", **variables,
        }  # fmt: skip

    def start(self, *arguments: str, **environment: str) -> None:
        command = [*COORDINATOR, "--listen", "127.0.0.1:0"]
        options = ["--runs", "1", "--timeout", "60"]
        with open(self._parent / "coordinator.log", "w") as output:
            streams: dict[str, Any] = {"stdout": output, "stderr": output, "text": True}
            self._coordinator = subprocess.Popen([*command, *options], env=self._environment, **streams)
        address = self._await_line("coordinator", "listening on ").split()[-1]
        for rank in range(4):
            place = {"SLURM_PROCID": rank, "SLURM_NODEID": rank // 2, "SLURM_LOCALID": rank % 2}
            own = {name: str(value) for name, value in place.items()}
            own |= {"RECYCLE_COORDINATOR": address, "RECYCLE_NODE": f"node{rank // 2}", **environment}
            argv = ["slurm_training.py", str(self.folder), str(STEPS), "0.05", *arguments]
            log = str(self._parent / f"task{rank}.log")
            self.tasks.append(self._srun.start(argv=argv, environ={**self._environment, **own}, log=log))

    def await_step(self, step: int) -> None:
        for rank in range(4):
            self._await_line(f"task{rank}", f"step {step}\n")

    def signal(self, signum: signal.Signals, *ranks: int) -> None:
        for rank in ranks or range(4):
            os.kill(self.tasks[rank], signum)

    def status(self, rank: int) -> int | None:
        """How a task ended; None while it lives."""
        return self._srun.status(self.tasks[rank])

    def statuses(self) -> list[int | None]:
        """How the tasks ended."""
        wait_for(lambda: all(self._srun.status(task) is not None for task in self.tasks), 60)
        return [self._srun.status(task) for task in self.tasks]

    @property
    def calls(self) -> list[str]:
        """What scontrol was asked for, and what was in the folder at that moment."""
        return self._calls.read_text().splitlines() if self._calls.exists() else []

    def output(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self._parent.glob("*.log")))

    def close(self) -> None:
        for task in self.tasks:
            if self._srun.status(task) is None:
                os.kill(task, signal.SIGKILL)
        if self._coordinator is not None:
            self._coordinator.kill()
            self._coordinator.wait()
        self.tasks.clear()

    def _await_line(self, name: str, words: str) -> str:
        log = self._parent / f"{name}.log"
        assert wait_for(lambda: log.exists() and words in log.read_text(), 90), self.output()
        return next(line for line in log.read_text().splitlines(keepends=True) if words in line).rstrip("\n")


@pytest.fixture(scope="module")
def srun() -> Iterator[Srun]:
    made = Srun()
    yield made
    made.close()


@pytest.fixture
def jobs(srun, tmp_path) -> Iterator[Callable[..., Job]]:
    """Makes a job."""
    made: list[Job] = []

    def make(**arguments: Any) -> Job:
        made.append(Job(srun, tmp_path, **arguments))
        return made[-1]

    yield make
    for job in made:
        job.close()


def check_resumed(job: Job) -> None:
    """The job runs again, as SLURM would let it, to the weights of one that was never interrupted."""
    job.close()
    job.start(SLURM_RESTART_COUNT="1")
    saved = torch.load(job.folder / "hpc_ckpt_1.ckpt", weights_only=True)["global_step"]
    assert job.statuses() == [0, 0, 0, 0], job.output()
    assert f"step {saved}\n" in job.output()
    assert "step 0\n" not in job.output()
    expected = plain_loop(Slow().double(), dataset(GLOBAL_BATCH * STEPS), STEPS)
    assert difference(torch.load(job.folder / "trained.pt"), expected) < 1e-10


ARRAY = {"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "2"}


@pytest.mark.parametrize(
    ("faults", "variables", "name"),
    [((), {}, "7"), (("kill:0:1:checkpoint",), ARRAY, "5_2")],
    ids=["", "the leader is killed while it saves"],
)
def test_all_save_and_then_one_requeues(faults, variables, name, jobs):
    job = jobs(**variables)
    job.start(*faults)
    job.await_step(3)
    job.signal(signal.SIGUSR1)
    assert sorted(job.statuses()) == ([-9, ENDED, ENDED, ENDED] if faults else [ENDED] * 4), job.output()
    assert job.calls == [f"requeue {name} with 1 checkpoint and 0 unfinished"], job.output()
    check_resumed(job)


def test_sigterm_to_one_task_is_its_departure_and_to_all_the_end_of_the_run(jobs):
    job = jobs()
    job.start()
    job.await_step(3)
    job.signal(signal.SIGTERM, 1)
    assert wait_for(lambda: job.status(1) is not None, 60), job.output()
    gone = job.status(1)
    job.signal(signal.SIGTERM, 0, 2, 3)
    assert job.statuses() == [ENDED, gone, ENDED, ENDED], job.output()
    assert [path.name for path in job.folder.iterdir()] == ["hpc_ckpt_1.ckpt"], job.output()
    assert not job.calls  # who ends a job by SIGTERM alone may have cancelled it


@pytest.mark.parametrize(
    ("variables", "name"),
    [({"SLURM_JOB_ID": "7"}, "7"), ({"SLURM_JOB_ID": "5", **ARRAY}, "5_2"), ({"SLURM_JOB_ID": "6", **ARRAY}, "5_2")],
)
def test_the_name_of_a_job_is_that_of_its_task_in_an_array(variables, name):
    assert job_name(variables) == name


@pytest.mark.parametrize(("script", "said"), [
    ("exit 0", None),
    ("echo 'Requested operation is presently disabled' >&2; exit 1", "presently disabled"),
    ("exec sleep 1000", "has not answered within 0.5 s"),
    (None, "could not be started"),
])  # fmt: skip
def test_what_scontrol_does_not_do_is_said(script, said, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin" if script else str(tmp_path))
    if script is not None:
        (tmp_path / "scontrol").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "scontrol").chmod(0o755)
    assert requeue(0.5 if said and "0.5" in said else 30.0) == (said is None)
    assert said is None or (said in caplog.text and "scontrol requeue 7" in caplog.text)


def test_outside_of_a_job_nothing_is_requeued(monkeypatch, caplog):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert not requeue(1.0)
    assert "SLURM_JOB_ID" in caplog.text
