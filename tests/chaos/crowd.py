"""Workers that come and go while a run trains: further processes of the same script, as from a cluster manager.

Concept: from some steps on all wait until so many workers train. The workers write down which ranks there are, and each
process which it has. A thread of the launching process starts processes that join the run, or ends some of those: by
SIGTERM, upon which they leave at a step boundary, or by SIGKILL.
"""

import contextlib
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from support.growth import AwaitReplacement
from typing_extensions import override

from chaos.scenario import STEPS, Crowd
from lightning_recycle.control.network.addresses_and_keys import free_port
from lightning_recycle.launch.worker_group import process_context

_LOOK_SECONDS = 0.02
_END_SECONDS = 60.0  # for those that are left to end with the run, and the longest time that one has taken to start


class AwaitCrowd(AwaitReplacement):
    """Waits, before each step, until there are as many workers as ``crowds`` say."""

    def __init__(self, crowds: tuple[Crowd, ...], directory: Path) -> None:
        super().__init__(range(min((crowd.step for crowd in crowds), default=STEPS), STEPS), pace=0.01)
        self._crowds, self._directory = crowds, directory

    @override
    def missing(self, strategy: Any) -> bool:
        step, live = strategy.lightning_module.global_step, strategy.live_workers
        index = max(index for index, crowd in enumerate(self._crowds) if crowd.step <= step)
        note = " ".join(map(str, (index, *live)))
        if note != noted(self._directory):  # whoever wrote last may be gone
            temporary = self._directory / f"{os.getpid()}.tmp"
            temporary.write_text(note)
            temporary.rename(self._directory / "now")
        (self._directory / f"trains-{os.getpid()}-{strategy.grid_rank}").touch()  # it is counted from now on
        return len(live) != self._crowds[index].workers


def noted(directory: Path) -> str:
    """What a worker has written down last."""
    with contextlib.suppress(FileNotFoundError):
        return (directory / "now").read_text()
    return ""


@contextlib.contextmanager
def crowded(crowds: tuple[Crowd, ...], directory: Path, join: Callable[[], None]) -> Iterator[list[str]]:
    """While the block runs, processes that call ``join`` come and go; yields what is wrong in the end."""
    problems: list[str] = []
    if not crowds:
        yield problems
        return
    directory.mkdir()
    address = f"127.0.0.1:{free_port('127.0.0.1')}"
    access = {"RECYCLE_LISTEN": address, "RECYCLE_KEY": secrets.token_hex()}
    os.environ.update(access)
    director = _Director(crowds, directory, join, address, access["RECYCLE_KEY"])
    director.start()
    try:
        yield problems
    finally:
        for name in access:
            os.environ.pop(name)
        problems += director.end()


class _Director(threading.Thread):
    """Starts and ends processes so that there are as many workers as there should be."""

    def __init__(
        self, crowds: tuple[Crowd, ...], directory: Path, join: Callable[[], None], address: str, key: str
    ) -> None:
        super().__init__(daemon=True)
        self._crowds, self._directory = crowds, directory
        self._target = _Joining(join, {"RECYCLE_COORDINATOR": address, "RECYCLE_KEY": key})
        self._processes: list[BaseProcess] = []
        self._asked: list[BaseProcess] = []  # those that are told to leave, or killed
        self._starting: dict[int | None, float] = {}  # those that do not train yet
        self._slowest = 0.0  # seconds from a start to the training
        self._over = threading.Event()

    @override
    def run(self) -> None:
        while not self._over.wait(_LOOK_SECONDS):
            now = noted(self._directory)
            if not now:
                continue
            index, *live = map(int, now.split())
            crowd, training = self._crowds[index], self._training()
            starting = [process for process in self._processes if process.is_alive() and process not in training]
            for _ in range(crowd.workers - len(live) - len(starting)):
                self._start()
            holders = {rank: process for process, rank in training.items() if rank in live}  # the newest of each rank
            others = [one for one in holders.values() if one.is_alive() and one not in self._asked]
            gone = len(holders) - len(others)  # or about to go, though the workers that are left have not noticed yet
            for process in others[: max(0, len(live) - crowd.workers - gone)]:
                self._asked.append(process)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid or 0, signal.SIGKILL if crowd.kills else signal.SIGTERM)

    def _training(self) -> dict[BaseProcess, int]:
        """The rank of each process that trains, or has trained, the oldest first."""
        ranks = {pid: rank for _, pid, rank in (path.name.split("-") for path in self._directory.glob("trains-*"))}
        for pid in ranks:
            started = self._starting.pop(int(pid), time.monotonic())
            self._slowest = max(self._slowest, time.monotonic() - started)
        return {one: int(ranks[str(one.pid)]) for one in self._processes if str(one.pid) in ranks}

    def _start(self) -> None:
        process = process_context().Process(target=self._target)
        process.start()
        self._processes.append(process)
        self._starting[process.pid] = time.monotonic()

    def end(self) -> list[str]:
        """Waits until all have ended; what is wrong with them."""
        self._over.set()
        self.join()
        deadline = time.monotonic() + _END_SECONDS + self._slowest
        left = []
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                left.append(f"process {process.pid}, which had joined, did not end with the run")
                process.kill()
                process.join()
        return left


class _Joining:
    """Body of a process that joins the run."""

    def __init__(self, join: Callable[[], None], environment: dict[str, str]) -> None:
        self._join, self._environment = join, environment

    def __call__(self) -> None:
        os.environ.update(self._environment, RECYCLE_CONNECT_SECONDS="20")
        os.environ.pop("RECYCLE_LISTEN", None)
        self._join()
