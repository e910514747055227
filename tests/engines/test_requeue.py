"""Signals to the tasks of a SLURM job: all save at one step boundary, and then one has the job run again.

SLURM's part is played by this process: it sets the variables, sends the signals, and ``scontrol`` is a script of its.
``make test-slurm`` does the same with a real cluster.
"""

import os
import signal
import subprocess
import sys
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


class Job:
    """A job of four tasks on two nodes, with its coordinator."""

    def __init__(self, folder: Path, **variables: str) -> None:
        self.folder, self._parent = folder / "run", folder
        self._calls = folder / "calls"
        self._coordinator: subprocess.Popen[str] | None = None
        self.tasks: list[subprocess.Popen[str]] = []
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
            command = [sys.executable, "slurm_training.py", str(self.folder), str(STEPS), "0.05", *arguments]
            with open(self._parent / f"task{rank}.log", "w") as output:
                streams = {"stdout": output, "stderr": output, "text": True}
                env = {**self._environment, **own}
                self.tasks.append(subprocess.Popen(command, cwd=HERE, env=env, **streams))

    def await_step(self, step: int) -> None:
        for rank in range(4):
            self._await_line(f"task{rank}", f"step {step}\n")

    def signal(self, signum: signal.Signals) -> None:
        for task in self.tasks:
            task.send_signal(signum)

    def statuses(self) -> list[int | None]:
        """How the tasks ended."""
        wait_for(lambda: all(task.poll() is not None for task in self.tasks), 200)
        return [task.poll() for task in self.tasks]

    @property
    def calls(self) -> list[str]:
        """What scontrol was asked for, and what was in the folder at that moment."""
        return self._calls.read_text().splitlines() if self._calls.exists() else []

    def output(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self._parent.glob("*.log")))

    def close(self) -> None:
        for process in [*self.tasks, *([self._coordinator] if self._coordinator is not None else [])]:
            process.kill()
            process.wait()
        self.tasks.clear()

    def _await_line(self, name: str, words: str) -> str:
        log = self._parent / f"{name}.log"
        assert wait_for(lambda: log.exists() and words in log.read_text(), 200), self.output()
        return next(line for line in log.read_text().splitlines(keepends=True) if words in line).rstrip("\n")


@pytest.fixture
def jobs(tmp_path) -> Iterator[Callable[..., Job]]:
    """Makes a job."""
    made: list[Job] = []

    def make(**arguments: Any) -> Job:
        made.append(Job(tmp_path, **arguments))
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


def test_sigterm_to_all_ends_the_run_with_a_checkpoint_and_requeues_nothing(jobs):
    job = jobs()
    job.start()
    job.await_step(3)
    job.signal(signal.SIGTERM)
    assert job.statuses() == [ENDED] * 4, job.output()
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
