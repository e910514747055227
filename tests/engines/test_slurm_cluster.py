"""Jobs on a real cluster of SLURM: ``make test-slurm``. Each batch script is what a user writes, and nothing more."""

import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from slurm_cluster import PACKAGES, Cluster, cluster, missing_programs
from slurm_training import Slow
from support.models import GLOBAL_BATCH, dataset
from support.training import difference, plain_loop
from support.waiting import PATIENCE, wait_for

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(
        bool(missing_programs()) or os.geteuid() != 0,
        reason=f"needs root and {', '.join(missing_programs()) or 'nothing else'}: apt-get install {PACKAGES}",
    ),
]

HERE = Path(__file__).parent
STEPS = 40

SCRIPT = """#!/bin/bash
#SBATCH --nodes={nodes} --ntasks-per-node={tasks} --no-kill
srun --no-kill {python} -m lightning_recycle.engines.recycle_run {python} {training} {folder} {steps} {pace} {arguments}
"""


@pytest.fixture(scope="module")
def slurm() -> Iterator[Cluster]:
    with tempfile.TemporaryDirectory(prefix="slurm") as folder, cluster(Path(folder)) as made:  # short: a socket's path
        yield made


class Job:
    """A job of four tasks."""

    def __init__(
        self,
        slurm: Cluster,
        folder: Path,
        *arguments: str,
        nodes: int = 4,
        pace: float = 0.1,
        options: tuple[str, ...] = (),
    ) -> None:
        self.slurm, self.folder = slurm, folder
        script = SCRIPT.format(
            nodes=nodes, tasks=4 // nodes, python=sys.executable, training=HERE / "slurm_training.py",
            folder=folder / ("run-$SLURM_ARRAY_TASK_ID" if "--array=1-2" in options else "run"), steps=STEPS, pace=pace,
            arguments=" ".join(arguments),
        )  # fmt: skip
        (folder / "job.sh").write_text(script)
        self.number = slurm.submit(
            folder / "job.sh", "--output=%j.log", "--open-mode=append", *options, environment={"OMP_NUM_THREADS": "1"}
        )

    def output(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("*.log")))

    def await_step(self, step: int, times: int = 4) -> None:
        words = f"step {step}\n"
        found = wait_for(lambda: self.output().count(words) >= times, PATIENCE, pause=0.1)
        assert found, f"{self.slurm.job(self.number)}\n{self.output()}\n{self.slurm.logs()}"

    def workers(self) -> dict[str, psutil.Process]:
        """The training processes, by the number of their task."""
        found = {}
        for process, words, environ in self.slurm.processes():
            is_training = any(word.endswith("slurm_training.py") for word in words) and "-m" not in words
            if is_training and words[0] != "srun" and environ.get("SLURM_JOB_ID") == str(self.number):
                found.setdefault(environ["SLURM_PROCID"], process)
        return found

    def check_completed(self) -> None:
        """SLURM says that it succeeded, and the weights are those of a training without anything of this project."""
        known = self.slurm.await_state(self.number, "COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", seconds=PATIENCE)
        assert (known["JobState"], known["ExitCode"]) == ("COMPLETED", "0:0"), self.output()
        for run in self.folder.glob("run*"):
            assert difference(torch.load(run / "trained.pt"), expected()) < 1e-10
        assert not list(self.folder.glob(".recycle*"))


def expected() -> dict[str, torch.Tensor]:
    torch.set_num_threads(1)
    return plain_loop(Slow().double(), dataset(GLOBAL_BATCH * STEPS), STEPS)


def test_a_killed_worker_is_replaced_and_the_next_job_follows(slurm, tmp_path):
    job = Job(slurm, tmp_path, "await", nodes=2)
    (tmp_path / "next.sh").write_text("#!/bin/bash\nexit 0\n")
    follower = slurm.submit(tmp_path / "next.sh", f"--dependency=afterok:{job.number}", "--output=/dev/null")
    job.await_step(3)
    job.workers()["2"].kill()
    job.check_completed()
    assert "was killed by SIGKILL; it is started again" in job.output()
    assert "joins at step" in job.output()
    slurm.await_state(follower, "COMPLETED")


def test_members_of_a_position_share_a_node_and_are_replaced(slurm, tmp_path):
    """The killed one is started again by its task, and so is its sibling, whose state is out of date."""
    job = Job(slurm, tmp_path, "await", "members", nodes=2)
    job.await_step(3)
    job.workers()["2"].kill()
    job.check_completed()
    places = re.findall(r"position \d is on node\d", job.output())
    assert len(places) == 6
    assert len(set(places)) == 2
    assert job.output().count("joins at step") == 2


def test_a_killed_coordinators_task_goes_on(slurm, tmp_path):
    """The first task's worker is killed, too; the coordinator beside it is not a child of that worker."""
    job = Job(slurm, tmp_path, "await", nodes=2)
    job.await_step(3)
    job.workers()["0"].kill()
    job.check_completed()


def test_a_signal_before_the_end_requeues_and_the_next_run_resumes(slurm, tmp_path):
    job = Job(slurm, tmp_path, nodes=2)
    job.await_step(3)
    slurm.call("scancel", "--signal=USR1", str(job.number))  # as with #SBATCH --signal=USR1@90
    assert wait_for(lambda: slurm.job(job.number)["Restarts"] == "1", 60), job.output()
    assert (tmp_path / "run" / "hpc_ckpt_1.ckpt").exists()
    job.check_completed()
    assert job.output().count("step 3\n") == 4


def test_a_preempted_job_resumes(slurm, tmp_path):
    job = Job(slurm, tmp_path, pace=0.5)
    job.await_step(3)
    (tmp_path / "urgent.sh").write_text("#!/bin/bash\nsleep 1\n")
    urgent = ["--partition=urgent", "--nodes=4", "--ntasks-per-node=8", "--output=/dev/null"]
    other = slurm.submit(tmp_path / "urgent.sh", *urgent)
    slurm.await_state(other, "COMPLETED")
    assert int(slurm.job(job.number)["Restarts"]) >= 1
    assert (tmp_path / "run" / "hpc_ckpt_1.ckpt").exists(), job.output()
    job.check_completed()
    assert job.output().count("step 3\n") == 4


JOINING = """#!/bin/bash
#SBATCH --nodes=1 --exclusive --ntasks-per-node=2 --no-kill
srun --no-kill {python} -m lightning_recycle.engines.recycle_run ${{1:+--join $1}} \\
    {python} {training} {folder} {steps} 0.1 0=2 8=6 20=4
"""


def test_further_jobs_join_the_run_of_the_first_and_one_that_is_preempted_leaves(slurm, tmp_path):
    """Three jobs of one node each, of which the second and third are of an array; nothing is redone."""
    names = {"python": sys.executable, "training": HERE / "slurm_training.py", "folder": tmp_path / "run"}
    (tmp_path / "job.sh").write_text(JOINING.format(**names, steps=STEPS))
    environment = {"OMP_NUM_THREADS": "1", "RECYCLE_LOG": "json"}

    def says(name: str, words: str) -> bool:
        path = tmp_path / name
        return path.exists() and words in path.read_text()

    first = slurm.submit(tmp_path / "job.sh", "--output=first.log", environment=environment)
    assert wait_for(lambda: says("first.log", "step 4\n"), PATIENCE, pause=0.1), slurm.logs()
    options = ("--array=1-2", "--partition=spot", "--output=%a.log")
    more = slurm.submit(tmp_path / "job.sh", *options, arguments=[str(first)], environment=environment)
    assert wait_for(lambda: says("2.log", "step 19\n"), PATIENCE, pause=0.1), slurm.logs()
    (tmp_path / "urgent.sh").write_text("#!/bin/bash\nsleep 1\n")
    node = slurm.job(f"{more}_2")["NodeList"]
    slurm.submit(
        tmp_path / "urgent.sh", "--partition=urgent", f"--nodelist={node}", "--ntasks-per-node=8", "--output=/dev/null"
    )
    known = slurm.await_state(first, "COMPLETED", "FAILED", seconds=PATIENCE)
    log = (tmp_path / "first.log").read_text()
    assert known["ExitCode"] == "0:0", log
    slurm.await_state(f"{more}_1", "COMPLETED", seconds=PATIENCE)
    preempted = slurm.job(f"{more}_2")
    slurm.call("scancel", "--quiet", f"{more}_2")  # it may be in the queue again
    assert difference(torch.load(tmp_path / "run" / "trained.pt"), expected()) < 1e-10
    kinds = [kind for kind in ("failure", "redone", "rejoined", "left") if f'"kind": "{kind}"' in log]
    assert kinds == ["rejoined", "left"]
    assert preempted["PreemptTime"] != "None"


def test_each_job_of_an_array_is_requeued_by_itself(slurm, tmp_path):
    job = Job(slurm, tmp_path, nodes=2, options=("--array=1-2",))
    job.await_step(3, times=8)
    slurm.call("scancel", "--signal=USR1", f"{job.number}_2")
    assert wait_for(lambda: slurm.job(f"{job.number}_2")["Restarts"] == "1", 60), job.output()
    for name in (f"{job.number}_1", f"{job.number}_2"):
        slurm.await_state(name, "COMPLETED", seconds=PATIENCE)
    assert slurm.job(f"{job.number}_1")["Restarts"] == "0"
    for run in ("run-1", "run-2"):
        assert difference(torch.load(tmp_path / run / "trained.pt"), expected()) < 1e-10


def test_a_failing_training_is_a_failed_job(slurm, tmp_path):
    job = Job(slurm, tmp_path, "fail", nodes=2)
    known = slurm.await_state(job.number, "COMPLETED", "FAILED", seconds=PATIENCE)
    assert known["JobState"] == "FAILED"
    assert known["ExitCode"] in ("1:0", "75:0"), job.output()  # the largest: 75 of those that were stopped in time
    assert "the user's mistake" in job.output()


def test_a_cancelled_job_leaves_nothing(slurm, tmp_path):
    job = Job(slurm, tmp_path, nodes=2)
    job.await_step(3)
    slurm.call("scancel", str(job.number))
    slurm.await_state(job.number, "CANCELLED")

    def left() -> list[str]:
        return [" ".join(words) for _, words, environ in slurm.processes() if "SLURM_JOB_ID" in environ]

    assert wait_for(lambda: not left(), 60), left()


def test_at_last_a_lost_node(slurm, tmp_path):
    """It stays lost: a slurmd that this test started would be a process that it leaves."""
    job = Job(slurm, tmp_path)
    job.await_step(3)
    slurm.lose("node4")
    job.check_completed()
    assert "Node failure on node4" in job.output()
