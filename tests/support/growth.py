"""What tests of replacements share: what waits for them, views of the history."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import lightning as L

LONGEST_WAIT = 60.0  # seconds for a replacement to come, on whatever machine


class AwaitReplacement(L.Callback):
    """Before each of ``steps``, waits until no worker is missing or the roster is about to change.

    Training goes on before, at ``pace`` seconds per step, so a replacement starts while the survivors train; and it
    does not end before the replacement has come, however slow the machine is. While the roster is about to change, or
    the plan, nobody may wait: then the next step does.
    """

    def __init__(self, steps: Collection[int], pace: float = 0.02) -> None:
        self._steps = frozenset(steps)
        self._pace = pace
        self._was_interrupted = False

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        client = trainer.strategy.session.client
        time.sleep(self._pace)
        if not self._was_interrupted and trainer.global_step not in self._steps:
            return
        self._was_interrupted = False
        deadline = time.monotonic() + LONGEST_WAIT
        while self.missing(trainer.strategy) and time.monotonic() < deadline:
            if client.is_interrupted or client.member.is_paused:
                self._was_interrupted = True
                return
            time.sleep(0.005)

    def missing(self, strategy: Any) -> bool:
        """Whether a worker is waited for."""
        return len(strategy.live_workers) < int(strategy.grid.num_workers * strategy.options.members)


class AwaitWorkers(AwaitReplacement):
    """Waits until there are ``wanted`` workers, by the step from which on that holds; with 0.1 s per step."""

    def __init__(self, wanted: dict[int, int], steps: int) -> None:
        super().__init__(range(min(wanted, default=steps), steps), pace=0.1)
        self._wanted = wanted

    def missing(self, strategy: Any) -> bool:
        step = strategy.lightning_module.global_step
        return len(strategy.live_workers) != self._wanted[max(first for first in self._wanted if first <= step)]


class Marks(L.Callback):
    """Makes a file ``<rank>-<incarnation>-<pid>`` when a process trains."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        (self._directory / f"{trainer.strategy.grid_rank}-{trainer.strategy.incarnation}-{os.getpid()}").touch()


class Meanwhile(threading.Thread):
    """Does something in the launching process once ``ready()`` answers; :attr:`found` is the answer."""

    def __init__(self, ready: Callable[[], Any], then: Callable[[Any], None], timeout: float = 60.0) -> None:
        super().__init__(daemon=True)
        self._ready, self._then, self._timeout = ready, then, timeout
        self.found: Any = None

    def run(self) -> None:
        deadline = time.monotonic() + self._timeout
        while not (found := self._ready()) and time.monotonic() < deadline:
            time.sleep(0.005)
        if found:
            self._then(found)
            self.found = found

    def __enter__(self) -> Meanwhile:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.join(self._timeout)
        assert self.found, "what was waited for never came"


def mark_of(directory: Path, rank: int, incarnation: int) -> int | None:
    """The process that runs ``rank`` as its process number ``incarnation``, if it has said so."""
    names = [path.name for path in directory.glob(f"{rank}-{incarnation}-*")]
    return int(names[0].split("-")[2]) if names else None


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def happened(run: L.Trainer, kind: str) -> list[Any]:
    """The events of one kind, in order."""
    return [event for event in run.strategy.history if event.kind == kind]


def rejoined(run: L.Trainer) -> list[tuple[int, int]]:
    return [event.worker for event in happened(run, "rejoined")]


def causes(run: L.Trainer) -> list[str]:
    return [str(event.details["cause"]) for event in happened(run, "failure")]
