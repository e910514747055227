"""Regrouping again and again leaves nothing behind in the survivors: no descriptors, no threads."""

import json
import os
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from support.growth import AwaitReplacement, happened, rejoined
from support.models import GLOBAL_BATCH, Regression, dataset
from support.training import exact_fit

from lightning_recycle.callbacks import faults

pytestmark = pytest.mark.long

LAST_STEP = 8
"""In which a worker dies: before it, the others have been counted at the end of several steps."""


class DieAgain(L.Callback):
    """Every process of worker ``rank`` kills itself in its step ``LAST_STEP``, ``times`` times in all."""

    def __init__(self, rank: int, times: int) -> None:
        self._rank, self._times = rank, times
        self._steps = 0

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.strategy.grid_rank == self._rank and trainer.strategy.incarnation < self._times:
            self._steps += 1
            if self._steps == LAST_STEP:
                faults.EFFECTS["kill"]()


class Census(L.Callback):
    """Counts the descriptors and threads of this process in each complete generation, at the end of each whole step."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._counts: dict[int, list[dict[str, int]]] = {}
        self._seen, self._process = -1, 0

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        strategy: Any = trainer.strategy
        if self._process != os.getpid():  # a replacement has what its peer counted of itself
            self._process, self._counts = os.getpid(), {}
        if len(strategy.live_workers) < strategy.grid.num_workers:
            return
        if strategy.generation == self._seen:  # connecting is over in all threads, and nothing is on its way
            counts = {**descriptors(), "threads": len(os.listdir("/proc/self/task"))}
            self._counts.setdefault(strategy.generation, []).append(counts)
        self._seen = strategy.generation

    def on_train_end(self, trainer: L.Trainer, *_: Any) -> None:
        path = self._directory / f"{trainer.strategy.grid_rank}-{os.getpid()}.json"
        path.write_text(json.dumps(list(self._counts.values())))


def descriptors() -> Counter[str]:
    """Open descriptors of this process by kind: socket, pipe, anon_inode, file."""
    kinds: Counter[str] = Counter()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue  # that of the listing itself
        kinds[target.split(":")[0] if ":" in target else "file"] += 1
    return kinds


def check(regroupings: int, tmp_path: Path, pipelines: int = 2) -> None:
    """Worker (1, 0) dies and comes back ``regroupings / 2`` times: each time there are two new generations."""
    deaths = (regroupings + 1) // 2
    steps = (LAST_STEP + 2) * deaths + 6
    run = exact_fit(
        Regression().double(), pipelines, 2, data=dataset(GLOBAL_BATCH * steps), max_steps=steps,
        strategy={"max_restarts": deaths},
        callbacks=[AwaitReplacement(range(2, steps), pace=0), DieAgain(2, deaths), Census(tmp_path)],
    )  # fmt: skip
    assert rejoined(run) == [(1, 0)] * deaths
    assert max(event.generation for event in happened(run, "resumed")) >= regroupings
    processes = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    survivors = [generations for generations in processes if len(generations) > 1]
    assert len(survivors) == 3  # all but the newest of the processes that died
    for generations in survivors:
        assert len(generations) > deaths // 2
        entered = generations[1:]  # each has the connections, besides those of the first, by which a state was sent
        assert len(entered) < 2 or not growth(entered), generations


def growth(generations: list[list[dict[str, int]]]) -> dict[str, tuple[int, int]]:
    """Kinds of which the newest generation always holds more than any earlier one ever held: (before, now).

    A single count proves nothing: connections of a worker that has just died close, and new ones open, in threads of
    their own, so counts are off by a few for a moment. What is left behind, however, is there at every count.
    """
    *earlier, newest = generations
    before = {kind: max(count.get(kind, 0) for counts in earlier for count in counts) for kind in newest[-1]}
    now = {kind: min(count.get(kind, 0) for count in newest) for kind in newest[-1]}
    return {kind: (before[kind], now[kind]) for kind in now if now[kind] > before[kind]}


def test_growth_is_told_from_what_passes():
    steady, fewer, more = ({"socket": n} for n in (10, 7, 13))
    assert not growth([[fewer, steady], [steady, fewer]])  # a connection of a dead worker has just been closed
    assert not growth([[fewer], [more, fewer]])
    assert growth([[steady, fewer], [more, more]]) == {"socket": (10, 13)}
    assert growth([[{"socket": 10}], [{"socket": 10, "pipe": 1}]]) == {"pipe": (0, 1)}


@pytest.mark.exhaustive
def test_fifty_regroupings_leave_no_descriptor_and_no_thread(tmp_path):
    check(50, tmp_path)


def test_the_launching_process_keeps_nothing_of_its_runs(tmp_path):
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    others = set(threading.enumerate())  # of other tests of this process
    check(1, tmp_path / "first")  # what the first run starts, such as the fork server, stays
    assert not project_threads() - others
    before = descriptors()
    check(5, tmp_path / "second")
    assert not project_threads() - others
    assert descriptors() == before


def project_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("recycle-")}
