"""Every way to end has the exit statuses of the table in docs/operations.md."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.sampling import sampled
from support.scripts import COORDINATOR, RECYCLE_RUN
from support.waiting import PATIENCE

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "operations.md"
KEY = "a secret of 16 bytes or more"
COLUMNS = ("worker", "coordinator", "launcher", "run")
WAITING = ["sh", "-c", "echo ready; exec sleep 100"]
Statuses = dict[str, int]

pytestmark = pytest.mark.timeout(900)


def documented() -> dict[str, Statuses]:
    """The table: way to end -> column -> status."""
    lines = PAGE.read_text().splitlines()
    begin = next(n for n, line in enumerate(lines) if line.startswith("| way to end |")) + 2
    table: dict[str, Statuses] = {}
    for line in lines[begin:]:
        if not line.startswith("|"):
            break
        way, *cells = (cell.strip() for cell in line.strip("|").split(" |"))
        numbers = (re.match(r"\d+", cell) for cell in cells)
        table[way] = {column: int(n[0]) for column, n in zip(COLUMNS, numbers, strict=True) if n}
    return table


# ---------------------------------------------------------------------- processes


class Process:
    """A process whose output is read as it comes."""

    def __init__(self, *command: str, **environment: str) -> None:
        env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
        pipe, same = subprocess.PIPE, subprocess.STDOUT
        self.popen = subprocess.Popen(command, env=env, cwd=HERE, stdout=pipe, stderr=same, text=True)
        self.lines: list[str] = []
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.popen.stdout:
            with self._news:
                self.lines.append(line)
                self._news.notify_all()

    def until(self, word: str, seconds: float = PATIENCE) -> str:
        """The first line with ``word``."""
        with self._news:
            found = self._news.wait_for(lambda: next((x for x in self.lines if word in x), None), seconds)
        assert found, "".join(self.lines)
        return found

    def status(self, seconds: float = PATIENCE) -> int:
        """The exit status, as a shell counts it."""
        try:
            status = self.popen.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError("".join(self.lines)) from None
        self._reader.join(5)
        return status if status >= 0 else 128 - status


class Run:
    """Processes of one run, all ended with the block."""

    def __init__(self) -> None:
        self._everybody: list[Process] = []
        self.address = ""

    def start(self, *command: str, **environment: str) -> Process:
        process = Process(*command, **environment)
        self._everybody.append(process)
        return process

    def coordinator(self, *options: str, listen: str = "127.0.0.1:0", key: str = KEY) -> Process:
        program = [*COORDINATOR, "--listen", listen]
        return self.start(*program, "--runs", "1", *options, RECYCLE_KEY=key)

    def listening(self, *options: str, key: str = KEY) -> Process:
        process = self.coordinator(*options, key=key)
        self.address = process.until("listening on").split()[-1]
        return process

    def worker(self, stages: int, steps: int, seconds: float, *words: str, **environment: str) -> Process:
        script = ["ending_script.py", str(stages), str(steps), str(seconds), *words]
        given = {"RECYCLE_COORDINATOR": self.address, "RECYCLE_KEY": KEY, **environment}
        return self.start(sys.executable, *script, **given)

    def workers(self, stages: int, steps: int, seconds: float, *words: str) -> list[Process]:
        return [self.worker(stages, steps, seconds, *words) for _ in range(2)]

    def begun(self, stages: int, steps: int, seconds: float, word: str) -> tuple[Process, list[Process]]:
        """A coordinator and two workers, the first of which has said ``word``."""
        coordinator = self.listening()
        workers = self.workers(stages, steps, seconds)
        workers[0].until(word)
        return coordinator, workers

    def launcher(self, stages: int, steps: int, seconds: float, *words: str, **environment: str) -> Process:
        """A launching process; the workers are its own."""
        script = ["ending_script.py", str(stages), str(steps), str(seconds), *words]
        return self.start(sys.executable, *script, **environment)

    def agent(self, *words: str) -> Process:
        """A recycle-run, once its worker says that it is ready."""
        process = self.start(*RECYCLE_RUN, *words, RECYCLE_COORDINATOR="127.0.0.1:9", RECYCLE_KEY=KEY)
        process.until("ready")
        return process

    def of_workers(self, *ends: str, options: tuple[str, ...] = ()) -> int:
        """How recycle-run ends whose workers end like that: commands of a shell."""
        choice = "; ".join(f'[ "$LOCAL_RANK" = {n} ] && {end}' for n, end in enumerate(ends))
        command = [*RECYCLE_RUN, *options, "--nproc-per-node", str(len(ends)), "--", "sh", "-c", f"{choice}; true"]
        return self.start(*command, RECYCLE_COORDINATOR="127.0.0.1:9", RECYCLE_KEY=KEY).status()

    def end(self) -> None:
        for process in self._everybody:
            process.popen.kill()
            process.popen.wait(20)


@pytest.fixture
def run() -> Iterator[Run]:
    processes = Run()
    yield processes
    processes.end()


# ---------------------------------------------------------------------- the ways to end


def finished(run: Run) -> Statuses:
    coordinator = run.listening()
    workers = run.workers(1, 3, 0.0)
    launcher = run.launcher(1, 3, 0.0)
    first, second = (worker.status() for worker in workers)
    assert first == second
    return {
        "worker": first,
        "coordinator": coordinator.status(),
        "launcher": launcher.status(),
        "run": run.of_workers("exit 0", "exit 0"),
    }


def a_worker_was_lost(run: Run) -> Statuses:
    coordinator, workers = run.begun(1, 12, 0.3, "step 3")
    workers[0].popen.kill()
    return {
        "worker": workers[1].status(),
        "coordinator": coordinator.status(),
        "run": run.of_workers("kill -9 $$", "{ sleep 1; exit 0; }"),
    }


def exception(run: Run) -> Statuses:
    coordinator = run.listening()
    workers = run.workers(1, 20, 0.2, "raise")
    statuses = sorted(worker.status() for worker in workers)
    assert statuses[1] == 75, "the other one is told to stop"
    said = "".join(line for worker in workers for line in worker.lines)
    assert "RuntimeError: the user's own" in said, "and who raised it shows it"
    missing = run.listening()
    workers = run.workers(1, 20, 0.2, "nope.ckpt")
    assert {worker.status() for worker in workers} - {75} == {1}, "all raise it, or are told to stop"
    assert missing.status() == 1
    said = "".join(line for worker in workers for line in worker.lines)
    assert f"ckpt_path='nope.ckpt': there is no such file or folder; {HERE} holds no whole checkpoint" in said
    return {
        "worker": statuses[0],
        "coordinator": coordinator.status(),
        "launcher": run.launcher(1, 20, 0.2, "raise").status(),
        "run": run.of_workers("exit 1", "{ sleep 1; exit 75; }"),
    }


def bad_configuration(run: Run) -> Statuses:
    run.address = "127.0.0.1:9"
    return {
        "worker": run.worker(1, 3, 0.0, LOCAL_RANK="9").status(),
        "coordinator": run.coordinator("--timeout", "0").status(),
        "launcher": run.launcher(3, 3, 0.0).status(),
        "run": run.of_workers(*[], options=("--grace", "0")),
    }


def another_run(run: Run) -> Statuses:
    """Found in the field: it ended with 0, and said nothing."""
    coordinator = run.listening()
    run.worker(2, 3, 0.0)
    coordinator.until("A run of")
    worker = run.worker(1, 3, 0.0)
    status = worker.status()
    assert "Its grid (pipelines x stages x micro-batches) is" in "".join(worker.lines)
    return {"worker": status, "run": run.of_workers("exit 1")}


def stage_lost(run: Run) -> Statuses:
    coordinator, workers = run.begun(2, 50, 0.2, "step 2")
    workers[0].popen.kill()
    launcher = run.launcher(2, 50, 0.2)
    os.kill(int(launcher.until("step 2 rank 1").split()[-1]), signal.SIGKILL)
    return {
        "worker": workers[1].status(),
        "coordinator": coordinator.status(),
        "launcher": launcher.status(),
        "run": run.of_workers("{ sleep 1; kill -9 $$; }", "exit 75"),
    }


def killed(run: Run) -> Statuses:
    coordinator = run.listening()
    worker = run.worker(1, 50, 0.2)
    coordinator.until("A run of")
    for process in (worker, coordinator):
        process.popen.kill()
    agent = run.agent("--", *WAITING)
    agent.popen.kill()
    launcher = run.launcher(1, 50, 0.2)
    launcher.until("step 0")
    launcher.popen.kill()
    return {
        name: process.status() for name, process in zip(COLUMNS, (worker, coordinator, launcher, agent), strict=True)
    }


def evicted(run: Run) -> Statuses:
    coordinator, workers = run.begun(1, 20, 0.2, "step 2")
    workers[0].popen.send_signal(signal.SIGSTOP)
    assert workers[1].status() == 0
    status = coordinator.status()
    workers[0].popen.send_signal(signal.SIGCONT)
    return {
        "worker": workers[0].status(),
        "coordinator": status,
        "run": run.of_workers("exit 69", "{ sleep 1; exit 0; }"),
    }


def coordinator_lost(run: Run) -> Statuses:
    coordinator, workers = run.begun(1, 50, 0.2, "step 1")
    coordinator.popen.kill()
    first, second = (worker.status() for worker in workers)
    assert first == second
    return {"worker": first, "run": run.of_workers("exit 69", options=("--max-restarts", "1"))}


def told_to_end(number: int) -> Callable[[Run], Statuses]:
    def end(run: Run) -> Statuses:
        coordinator, workers = run.begun(1, 30, 0.2, "step 2")
        workers[0].popen.send_signal(number)
        status = workers[0].status()
        if number == signal.SIGTERM:
            assert workers[1].status() == 0
            coordinator = run.listening()
            worker = run.worker(1, 30, 0.2)
            coordinator.until("A run of")
            coordinator.popen.send_signal(number)
            assert worker.status() == 69
        else:
            coordinator = run.listening()
            coordinator.popen.send_signal(number)
        launcher = run.launcher(1, 50, 0.2)
        launcher.until("step 1")
        launcher.popen.send_signal(number)
        agent = run.agent("--", *WAITING)
        agent.popen.send_signal(number)
        return {
            "worker": status,
            "coordinator": coordinator.status(),
            "launcher": launcher.status(),
            "run": agent.status(),
        }

    return end


def port_in_use(run: Run) -> Statuses:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        at = f"127.0.0.1:{taken.getsockname()[1]}"
        return {
            "coordinator": run.coordinator(listen=at).status(),
            "launcher": run.launcher(1, 3, 0.0, RECYCLE_LISTEN=at, RECYCLE_KEY=KEY).status(),
            "run": run.start(*RECYCLE_RUN, "--coordinator", at, "--", *WAITING).status(),
        }


def wrong_key(run: Run) -> Statuses:
    run.listening(key="another secret of 16 bytes")
    return {"worker": run.worker(1, 3, 0.0).status(), "run": run.of_workers("exit 1")}


def another_version(run: Run) -> Statuses:
    run.listening()
    code = (
        "import sys; from lightning_recycle.control.network import connection; connection.__version__ = '0.0.1';"
        "sys.argv = ['ending_script.py', '1', '3', '0'];"
        "import runpy; runpy.run_path('ending_script.py', run_name='__main__')"
    )
    given = {"RECYCLE_COORDINATOR": run.address, "RECYCLE_KEY": KEY}
    worker = run.start(sys.executable, "-c", code, **given)
    status = worker.status()
    assert "install the same version" in "".join(worker.lines)
    return {"worker": status, "run": run.of_workers("exit 1")}


def nobody_there(run: Run) -> Statuses:
    run.address = "127.0.0.1:9"
    return {"worker": run.worker(1, 3, 0.0, RECYCLE_CONNECT_SECONDS="0.5").status(), "run": run.of_workers("exit 1")}


def others_missing(run: Run) -> Statuses:
    coordinator = run.listening("--start-timeout", "2")
    return {
        "worker": run.worker(2, 3, 0.0).status(),
        "coordinator": coordinator.status(),
        "run": run.of_workers("exit 75"),
    }


def does_not_end(run: Run) -> Statuses:
    agent = run.agent("--grace", "0.5", "--", "sh", "-c", "trap '' TERM; echo ready; sleep 100")
    agent.popen.send_signal(signal.SIGTERM)
    agent.until("did not end and is killed")
    return {"run": agent.status()}


WAYS: dict[str, Callable[[Run], Statuses]] = {
    "the run finished": finished,
    "the same, after a worker was lost": a_worker_was_lost,
    "an exception of the script": exception,
    "bad options, or a configuration that cannot work": bad_configuration,
    "the script wants another run than the coordinator or the others": another_run,
    "all replicas of a stage are lost": stage_lost,
    "killed by SIGKILL": killed,
    "evicted, and nothing replaces it": evicted,
    "its coordinator is lost": coordinator_lost,
    "SIGTERM": told_to_end(signal.SIGTERM),
    "SIGINT, Ctrl-C": told_to_end(signal.SIGINT),
    "SIGTERM, and the workers do not end in time": does_not_end,
    "the port is in use": port_in_use,
    "another key": wrong_key,
    "another version": another_version,
    "no coordinator within `RECYCLE_CONNECT_SECONDS`": nobody_there,
    "a stage has no worker within `--start-timeout`": others_missing,
    "killed repeatedly": lambda run: {"run": run.of_workers("kill -9 $$", options=("--max-restarts", "1"))},
}


def test_every_way_to_end_that_is_documented_is_tried_and_the_reverse():
    assert documented().keys() == WAYS.keys()


@pytest.mark.long
@pytest.mark.parametrize("way", sampled(list(WAYS), 5))
def test_the_exit_statuses_are_those_of_the_table(way, run):
    assert WAYS[way](run) == documented()[way]
