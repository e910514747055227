"""Each worker's record of what it used, and the proof that every sample was used exactly once.

Concept: a worker writes a line before each REDUCE, with the micro-batches that its gradient holds and the samples that
they consist of, one after it, and one for each step that it applies. A step can be computed several times; for a stage
the newest reduction completed anywhere counts, because nothing that was reduced is dropped while its holder lives. So
for every step and stage the entries of that reduction, by all workers of its generation, must hold each micro-batch
once and, over an epoch, each sample once.

Lines are written at once and whole: they survive the writer's death.
"""

import io
import json
import os
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from typing_extensions import override

from chaos.training import ChaosModel
from lightning_recycle.launch.launcher import INCARNATIONS_PER_START
from lightning_recycle.planning.grid import Op, OpKind, global_index


@dataclass(frozen=True)
class Entry:
    """One line of a diary.

    Args:
        what: "offered" (before a REDUCE), "reduced" (after it) or "applied".
        column: the writer's stage, or its column where positions have several members.
        generation: (number of the start, generation).
        microbatches: what was offered: (index of the global micro-batch, its samples; none in inner stages).
    """

    what: str
    time: int
    pid: int
    column: int
    generation: tuple[int, int]
    step: int
    microbatches: tuple[tuple[int, tuple[int, ...]], ...] = ()


class Diary(pl.Callback):
    """Lets each worker write to its own file in ``directory``. Put it before callbacks that end workers."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._file: io.FileIO | None = None  # not a descriptor: a replacement would get the number of its donor's
        self._key: tuple[tuple[int, int], int] = ((-1, -1), -1)
        self._samples: dict[int, tuple[int, ...]] = {}
        self._held: list[tuple[int, tuple[int, ...]]] = []

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        strategy: Any = trainer.strategy
        assert isinstance(pl_module, ChaosModel)
        self._strategy, self._module = strategy, pl_module
        self._directory.mkdir(exist_ok=True)
        path = self._directory / f"{getattr(trainer.strategy, 'grid_rank', 0)}-{os.getpid()}.jsonl"
        self._file = io.FileIO(path, "a")
        strategy.executor.before_operation.append(self._before)
        strategy.executor.after_operation.append(self._after)

    def _generation(self) -> tuple[int, int]:
        return self._strategy.incarnation // INCARNATIONS_PER_START, self._strategy.generation

    def _before(self, step: int, op: Op) -> None:
        key = (self._generation(), step)
        if key != self._key:
            self._key, self._samples, self._held = key, {}, []
        if op.kind is OpKind.FORWARD:
            self._module.samples_read = None  # what the last stage read is shared with the others
        if op.kind is OpKind.REDUCE:
            self._write("offered", step, tuple(self._held))

    def _after(self, step: int, op: Op) -> None:
        if op.microbatch is not None:
            index = global_index(self._strategy.grid, op.microbatch)
            if op.kind is OpKind.FORWARD:
                self._samples[index] = tuple(self._module.samples_read or ())
                self._module.samples_read = None
            elif op.kind in (OpKind.BACKWARD_WEIGHT, OpKind.BACKWARD):
                self._held.append((index, self._samples[index]))
        elif op.kind is OpKind.REDUCE:
            self._write("reduced", step)

    @override
    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        self._write("applied", trainer.global_step)

    def _write(self, what: str, step: int, microbatches: tuple[tuple[int, tuple[int, ...]], ...] = ()) -> None:
        collectives = self._strategy.session.collectives
        column = collectives.positions.column(collectives.rank)
        entry = Entry(what, time.monotonic_ns(), os.getpid(), column, self._generation(), step, microbatches)
        self._file.write((json.dumps(asdict(entry)) + "\n").encode())


def read_entries(directory: Path) -> list[Entry]:
    """All that was written in ``directory``."""
    entries = []
    for path in sorted(directory.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            raw = json.loads(line)
            raw["generation"] = tuple(raw["generation"])
            raw["microbatches"] = tuple((index, tuple(samples)) for index, samples in raw["microbatches"])
            entries.append(Entry(**raw))
    return entries


def audit(
    entries: Iterable[Entry],
    stages: int,
    steps: int,
    microbatches: int,
    samples: int,
    global_batch: int,
    members: int = 1,
) -> list[str]:
    """What contradicts that every sample was used exactly once in each epoch."""
    offers: dict[tuple[int, int, tuple[int, int]], list[Entry]] = defaultdict(list)
    reduced: dict[tuple[int, int], Entry] = {}
    applied: dict[tuple[int, int], list[int]] = defaultdict(list)
    for entry in sorted(entries, key=lambda entry: entry.time):
        if entry.what == "offered":
            offers[entry.column, entry.step, entry.generation].append(entry)
        elif entry.what == "reduced":
            reduced[entry.column, entry.step] = entry
        else:
            applied[entry.pid, entry.generation[0]].append(entry.step)
    problems = [
        f"process {pid} applied the steps {done}"
        for (pid, _), done in applied.items()
        if done != list(range(done[0], done[0] + len(done)))
    ]
    for column in range(stages * members):
        stage = column // members
        name = f"stage {stage}" if members == 1 else f"column {column}"
        reads = stage in (0, stages - 1)
        used: dict[int, Counter[int]] = defaultdict(Counter)
        for step in range(steps):
            last = reduced.get((column, step))
            if last is None:
                problems.append(f"{name} never reduced step {step}")
                continue
            held = [part for offer in offers[column, step, last.generation] for part in offer.microbatches]
            if sorted(index for index, _ in held) != list(range(microbatches)):
                problems.append(f"{name} reduced the micro-batches {sorted(i for i, _ in held)} in step {step}")
            read = [sample for _, part in held for sample in part]
            if reads and len(read) != global_batch:
                problems.append(f"{name} used {len(read)} samples in step {step}")
            used[step // (samples // global_batch)].update(read)
        for epoch, counts in sorted(used.items()):
            complete = (epoch + 1) * (samples // global_batch) <= steps
            expected = set(range(samples)) if complete and reads else set(counts)
            wrong = {sample: counts[sample] for sample in expected | set(counts) if counts[sample] != 1}
            if wrong:
                problems.append(f"{name} used samples of epoch {epoch} other than once: {wrong}")
    return problems
