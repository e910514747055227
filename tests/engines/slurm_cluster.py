"""A SLURM cluster for tests: munged, slurmctld and several slurmds of Debian's packages, on this machine.

Everything lies in one folder and runs as children of this process: nothing of it is left afterwards, and another
installation on the machine is neither used nor touched. A node is a slurmd with a name and a port of its own, and has
more cores than there are. To lose a node, :meth:`Cluster.lose` kills its slurmd with all that runs under it, as if the
machine were gone.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil
from support.scripts import completed

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "scancel", "sinfo")
PACKAGES = "slurmctld slurmd slurm-client munge"
NODES = 4
_CORES = 8  # that each node claims to have

_CONFIGURATION = """
ClusterName=recycle
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
SchedulerType=sched/backfill
SelectType=select/cons_res
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
ReturnToService=2
SlurmdTimeout=10
SlurmctldTimeout=60
InactiveLimit=0
KillWait=10
MinJobAge=3600
Waittime=0
RebootProgram=/bin/true
SchedulerParameters=preempt_send_user_signal
{nodes}
PartitionName=work Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=10 OverSubscribe=NO
PartitionName=spot Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=45 OverSubscribe=NO
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF OverSubscribe=NO
"""


def missing_programs() -> list[str]:
    """What has to be installed before a cluster can be started here."""
    return [program for program in PROGRAMS if shutil.which(program, path=_PATH) is None]


_PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


class Cluster:
    """A running cluster; ``folder`` is short, as a socket lies in it."""

    def __init__(self, folder: Path, nodes: int = NODES) -> None:
        self.folder = folder
        self.nodes = [f"node{number}" for number in range(1, nodes + 1)]
        self._ports = _free_ports(nodes + 1)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def environment(self) -> dict[str, str]:
        """What SLURM's commands need to talk to this cluster, with the rest of this process's environment."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH"))}
        return {**inherited, "PATH": _PATH, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def start(self) -> None:
        (self.folder / "state").mkdir()
        rows = []
        for name, port in zip(self.nodes, self._ports[1:], strict=True):
            (self.folder / f"spool-{name}").mkdir()
            rows.append(
                f"NodeName={name} NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 Port={port} CPUs={_CORES}"
                " RealMemory=1024 State=UNKNOWN"
            )
        configuration = _CONFIGURATION.format(
            folder=self.folder,
            host=socket.gethostname(),
            controller_port=self._ports[0],
            nodes="\n".join(rows),
        )
        (self.folder / "slurm.conf").write_text(configuration)
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        paths = {"socket": "munge.socket", "key-file": "munge.key", "pid-file": "munged.pid"}
        paths |= {"log-file": "munged.log", "seed-file": "munged.seed"}
        options = [f"--{name}={self.folder / path}" for name, path in paths.items()]
        self._run("munged", "munged", "--foreground", "--force", "--num-threads=2", *options)
        self._await((self.folder / "munge.socket").exists, "munged")
        self._run("slurmctld", "slurmctld", "-D", "-c")
        for name in self.nodes:
            self.start_node(name)
        self.await_idle()

    def await_idle(self) -> None:
        """Waits until all nodes can take jobs."""
        self._await(lambda: self._idle() == len(self.nodes), "all nodes to be idle")

    def start_node(self, name: str) -> None:
        """(Re-)starts the slurmd of a node."""
        self._run(name, "slurmd", "-D", "-N", name)

    def lose(self, name: str) -> None:
        """A node is gone: its slurmd and everything that runs under it are killed at once."""
        stopped = [psutil.Process(self._processes[name].pid)]
        stopped += [p for p, _, environ in self.processes() if environ.get("SLURMD_NODENAME") == name]
        for step in psutil.process_iter():  # slurmstepd is not a child of slurmd, and tells nobody whose it is
            with contextlib.suppress(psutil.Error):
                if step.name() == "slurmstepd" and any(c in stopped for c in step.children(recursive=True)):
                    stopped.append(step)
        for signum in (signal.SIGSTOP, signal.SIGKILL):  # nobody says anything about the death of another
            for process in stopped:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(signum)
        self._processes.pop(name).wait()

    def call(self, *command: str, seconds: float = 60.0) -> str:
        """What a command of SLURM prints; it must succeed."""
        done = completed(command, env=self.environment, timeout=seconds)
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout

    def submit(
        self, script: Path, *options: str, arguments: Sequence[str] = (), environment: Mapping[str, str] | None = None
    ) -> int:
        """Submits a batch script; returns the number of the job."""
        command = ["sbatch", "--parsable", *options, str(script), *arguments]
        env = {**self.environment, **(environment or {})}
        done = completed(command, env=env, cwd=script.parent, timeout=60)
        assert done.returncode == 0, done.stderr
        return int(done.stdout)

    def job(self, number: int | str) -> dict[str, str]:
        """What SLURM knows of a job, such as JobState and ExitCode."""
        words = self.call("scontrol", "show", "job", str(number), "--oneliner").split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def await_state(self, number: int | str, *states: str, seconds: float = 90.0) -> dict[str, str]:
        """Waits until a job is in one of ``states``; returns what is known of it."""
        found: dict[str, str] = {}

        def reached() -> bool:
            nonlocal found
            found = self.job(number)
            return found["JobState"] in states

        self._await(reached, f"job {number} to be {' or '.join(states)}", seconds, lambda: str(found))
        return found

    def processes(self) -> list[tuple[psutil.Process, list[str], dict[str, str]]]:
        """The living processes of the cluster and of its jobs, with their words and environments."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):  # it ended while we looked
                environ = process.environ()
                if process.pid != os.getpid() and environ.get("SLURM_CONF") == str(self.folder / "slurm.conf"):
                    found.append((process, process.cmdline(), environ))
        return found

    def stop(self) -> None:
        """Ends everything, also what jobs have left."""
        for process in [*self._processes.values(), *(process for process, _, _ in self.processes())]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for child in self._processes.values():
            child.wait()

    def logs(self) -> str:
        """The ends of all logs, for the message of a test that failed."""
        files = sorted([*self.folder.glob("*.log"), *self.folder.glob("*.out")])
        texts = (f"--- {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in files)
        return "\n".join(texts)

    def _run(self, name: str, *command: str) -> None:
        with open(self.folder / f"{name}.out", "ab") as output:
            self._processes[name] = subprocess.Popen(
                command, env=self.environment, cwd=self.folder, stdout=output, stderr=output, start_new_session=True
            )

    def _idle(self) -> int:
        done = completed(["sinfo", "--noheader", "--Node", "--partition=work", "--states=idle"], env=self.environment)
        return len(done.stdout.splitlines())

    def _await(self, condition, what: str, seconds: float = 30.0, said=lambda: "") -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"waited {seconds:g} s for {what}. {said()}\n{self.logs()}"
            time.sleep(0.1)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [int(one.getsockname()[1]) for one in sockets]


@contextlib.contextmanager
def cluster(folder: Path, nodes: int = NODES) -> Iterator[Cluster]:
    """A cluster within the block."""
    made = Cluster(folder, nodes)
    try:
        made.start()
        yield made
    finally:
        made.stop()
