"""A run whose coordinator is killed and started again: real processes, all on this machine."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from outside_worker import error
from support.scripts import COORDINATOR
from support.training import TOLERANCE
from support.waiting import PATIENCE

from lightning_recycle.control.network.addresses_and_keys import free_port

HERE = Path(__file__).parent
KEY = "the key of this test"


class Cluster:
    """A standalone coordinator and four workers of ``outside_worker.py``."""

    def __init__(self, folder: Path, steps: int, seconds: float, *options: str) -> None:
        self.port = free_port("127.0.0.1")
        self.folder, self.steps, self.seconds, self.options = folder, steps, seconds, options
        self.output = folder / "trained.pt"
        self.state = folder / "state.log"
        self.workers: list[subprocess.Popen[str]] = []
        self.said: list[list[tuple[float, str]]] = []  # what each worker wrote, and when
        self.records: list[Path] = []  # what each coordinator wrote
        self.coordinator: subprocess.Popen[bytes] | None = None
        self._environment = {
            **os.environ,
            "RECYCLE_KEY": KEY,
            "RECYCLE_COORDINATOR": f"127.0.0.1:{self.port}",
            "OMP_NUM_THREADS": "1",
        }

    def start(self, *options: str) -> None:
        """A coordinator and all workers."""
        self.start_coordinator(*options)
        for _ in range(4):
            self.start_worker()

    def start_coordinator(self, *options: str) -> None:
        command = [*COORDINATOR, "--listen", f"127.0.0.1:{self.port}"]
        command += ["--runs", "1", "--state", str(self.state), *options]
        record = self.folder / f"coordinator-{len(self.records)}.txt"
        self.records.append(record)
        with record.open("wb") as file:
            self.coordinator = subprocess.Popen(command, env=self._environment, stdout=file, stderr=file)

    def kill_coordinator(self) -> None:
        self.coordinator.kill()
        self.coordinator.wait()

    def start_worker(self) -> subprocess.Popen[str]:
        script = [sys.executable, str(HERE / "outside_worker.py"), str(self.steps), str(self.seconds), str(self.output)]
        env = self._environment
        process = subprocess.Popen(
            [*script, *self.options], env=env, cwd=HERE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        said: list[tuple[float, str]] = []
        self.workers.append(process)
        self.said.append(said)

        def listen() -> None:
            for line in process.stdout:
                said.append((time.monotonic(), line))

        threading.Thread(target=listen, daemon=True).start()
        return process

    def begun(self, worker: int = 0) -> int:
        """The newest step that ``worker`` has begun; -1 before the first."""
        steps = [int(line.split()[1]) for _, line in self.said[worker] if line.startswith("step ")]
        return steps[-1] if steps else -1

    def await_step(self, step: int, worker: int = 0, seconds: float = PATIENCE) -> None:
        deadline = time.monotonic() + seconds
        while self.begun(worker) < step:
            assert self.workers[worker].poll() is None, self.words()
            assert time.monotonic() < deadline, self.words()
            time.sleep(0.005)

    def words(self) -> str:
        said = ["".join(line for _, line in lines) for lines in self.said]
        return "\n----\n".join([*said, *(record.read_text() for record in self.records)])

    def end(self, *killed: int) -> str:
        """Waits for the end of all but the workers ``killed``; they and the coordinator say that it is well, and the
        weights are those of the undisturbed training. Returns what the newest coordinator wrote.
        """
        deadline = time.monotonic() + PATIENCE
        for number, process in enumerate(self.workers):
            if number in killed:
                continue
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired as timeout:
                raise AssertionError(self.words()) from timeout
            assert process.returncode == 0, self.words()
        assert self.coordinator.wait(PATIENCE) == 0, self.words()
        assert error(self.output, self.steps) < TOLERANCE
        return self.records[-1].read_text()

    def close(self) -> None:
        processes = [*self.workers, *([self.coordinator] if self.coordinator is not None else [])]
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)
            process.wait()


@contextlib.contextmanager
def cluster(folder: Path, steps: int, seconds: float, *options: str) -> Iterator[Cluster]:
    found = Cluster(folder, steps, seconds, *options)
    try:
        yield found
    finally:
        found.close()
