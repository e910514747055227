"""For how long a run stands still when its coordinator is killed and started again, and whether its weights are exact.

    .venv/bin/python benchmarks/coordinator_kills.py               # 100 kills
    .venv/bin/python benchmarks/coordinator_kills.py --kills 10    # a sample
    .venv/bin/python benchmarks/coordinator_kills.py --deaths      # a worker dies in the same second, every other time

Four workers on 2 x 2 train with ``recycle-coordinator``, each a process of its own. At seeded random moments the
coordinator gets SIGKILL and is started again at once, at the same address; several times in a run, also while it goes
on from the kill before, at the start and while the results are delivered. The weights of each run must be those of
training on one device without kills, in float64 to 1e-10. What counts is the *stall*: the longest time between two
steps around a kill, less the time from the kill until the new process listens, and less the usual time of a step. A
stall that the next kill cuts short ends there, and the next one begins; *without a step* is the whole time between two
steps, with all kills in it.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import torch
from harness import console, describe_machine, quieten
from rich.table import Table
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_recycle import PipelineModule, ReCycleStrategy
from lightning_recycle.control.network.addresses_and_keys import free_port

WORKERS, BATCH, STEPS, STEP_SECONDS = 4, 16, 120, 0.05
TOLERANCE = 1e-10
PATIENCE = 300.0  # seconds for a run, on whatever machine


class Model(PipelineModule):
    def configure_pipeline(self) -> nn.Sequential:
        torch.manual_seed(1)
        layers: list[nn.Module] = [nn.Linear(8, 32)]
        for _ in range(3):
            layers += [nn.Tanh(), nn.Linear(32, 32)]
        return nn.Sequential(*layers, nn.Linear(32, 1)).double()

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(output, target)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        print("step", self.global_step, flush=True)
        time.sleep(STEP_SECONDS)


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    draw = lambda width: torch.randn(2 * BATCH * STEPS, width, generator=generator, dtype=torch.float64)  # noqa: E731
    return TensorDataset(draw(8), draw(1))


def undisturbed() -> dict[str, torch.Tensor]:
    """The weights of the same training on one device, without this project's strategy."""
    model, (x, y) = Model(), data().tensors
    optimizer, layers = model.configure_optimizers(), nn.Sequential(*model.layers)
    for step in range(STEPS):
        part = slice(2 * BATCH * step, 2 * BATCH * (step + 1))
        optimizer.zero_grad()
        model.loss(layers(x[part]), y[part]).backward()
        optimizer.step()
    return model.state_dict()


def work(output: Path) -> None:
    """One worker: the script that a cluster manager starts."""
    quieten()
    torch.set_num_threads(1)
    model = Model()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        num_nodes=2,
        strategy=ReCycleStrategy(pipeline_parallel_size=2, num_microbatches=4),
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(data(), batch_size=BATCH))
    temporary = output.with_suffix(f".{os.getpid()}")
    torch.save(model.state_dict(), temporary)
    temporary.rename(output)


@dataclass
class Result:
    """What was measured: kills, seconds, and how far the weights were off at most."""

    kills: int = 0
    stalls: list[float] = field(default_factory=list)
    gaps: list[tuple[float, int]] = field(default_factory=list)
    """Seconds between two steps with at least one kill between them, and how many there were."""
    restarts: list[float] = field(default_factory=list)
    difference: float = 0.0
    errors: list[str] = field(default_factory=list)


class _Run:
    """Processes of one run, and when its steps began."""

    def __init__(self, folder: Path) -> None:
        self._address = f"127.0.0.1:{free_port('127.0.0.1')}"
        self.folder, self.output = folder, folder / "trained.pt"
        self.steps: list[tuple[float, int]] = []  # when a worker began which step
        self.workers: list[subprocess.Popen[str]] = []
        self.training: set[int] = set()  # the processes that have begun a step
        self._environment = {
            **os.environ,
            "RECYCLE_KEY": "a key of this benchmark",
            "RECYCLE_COORDINATOR": self._address,
            "OMP_NUM_THREADS": "1",
        }
        self.start_coordinator()
        for _ in range(WORKERS):
            self.start_worker()

    def start_coordinator(self) -> float:
        """Returns when it listens, in seconds of the monotonic clock."""
        command = [
            sys.executable,
            "-m",
            "lightning_recycle.control.coordinator.standalone",
            "--listen",
            self._address,
        ]
        command += ["--runs", "1", "--state", str(self.folder / "state.log")]
        with (self.folder / "coordinator.log").open("ab") as log:
            self.coordinator = subprocess.Popen(command, env=self._environment, stdout=subprocess.PIPE, stderr=log)
        assert self.coordinator.stdout is not None
        self.coordinator.stdout.readline()
        return time.monotonic()

    def start_worker(self) -> None:
        command = [sys.executable, __file__, "--work", str(self.output)]
        with (self.folder / f"worker-{len(self.workers)}.log").open("wb") as log:
            worker = subprocess.Popen(command, env=self._environment, stdout=subprocess.PIPE, stderr=log, text=True)
        self.workers.append(worker)

        def listen() -> None:
            assert worker.stdout is not None
            for line in worker.stdout:
                if line.startswith("step "):
                    self.training.add(worker.pid)
                    self.steps.append((time.monotonic(), int(line.split()[1])))

        threading.Thread(target=listen, daemon=True).start()

    @property
    def step(self) -> int:
        return max((step for _, step in list(self.steps)), default=-1)

    @property
    def is_over(self) -> bool:
        return all(worker.poll() is not None for worker in self.workers)

    @property
    def has_finished(self) -> bool:
        """Whether a coordinator has seen the run's end."""
        return "The run finished." in (self.folder / "coordinator.log").read_text(errors="replace")

    def _pauses(self) -> list[tuple[float, float]]:
        """When a step was begun for the first time, and when the next one was."""
        firsts: dict[int, float] = {}
        for moment, step in sorted(self.steps):
            firsts.setdefault(step, moment)
        return list(itertools.pairwise(sorted(firsts.values())))

    def stalls(self, kills: Sequence[tuple[float, float]]) -> list[float]:
        """For each (killed, listens): the longest time between two new steps around it, less what is not this
        project's. It ends at the next kill.
        """
        pauses, found = self._pauses(), []
        usual = statistics.median(after - before for before, after in pauses)
        ends = [killed for killed, _ in kills[1:]] + [math.inf]
        for (killed, listens), end in zip(kills, ends, strict=True):
            # Steps may go on for a moment; from what its coordinator has told before.
            around = [
                min(after, end) - max(before, killed)
                for before, after in pauses
                if before < min(listens + 2.0, end) and after > killed
            ]
            found.append(max(0.0, max(around, default=0.0) - (listens - killed) - usual))
        return found

    def gaps(self, kills: Sequence[tuple[float, float]]) -> list[tuple[float, int]]:
        """The times between two steps that have kills in them, and how many."""
        counted = [
            (after - before, sum(before < kill < after for kill, _ in kills)) for before, after in self._pauses()
        ]
        return [(seconds, count) for seconds, count in counted if count]

    def words(self) -> str:
        files = sorted(self.folder.glob("*.log"))
        return "\n".join(f"--- {file.name}\n{file.read_text(errors='replace')[-3000:]}" for file in files)

    def close(self) -> None:
        for process in (*self.workers, self.coordinator):
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)
            process.wait()


def measure(kills: int, seed: int, folder: Path, deaths: bool = False) -> Result:
    """Runs as many trainings as ``kills`` take.

    Args:
        kills: of a coordinator.
        seed: of the moments.
        folder: for the files of the runs.
        deaths: whether a worker dies in the same second, and is replaced, at every other kill.
    """
    chance, result, expected = random.Random(seed), Result(), undisturbed()
    number = 0
    while result.kills < kills and not result.errors:
        where = folder / f"run-{number}"
        where.mkdir()
        number += 1
        run = _Run(where)
        try:
            _disturb(run, kills, chance, result, deaths)
            found = torch.load(run.output, weights_only=True)
            difference = max(float((found[name] - value).abs().max()) for name, value in expected.items())
            result.difference = max(result.difference, difference)
        except Exception as error:
            result.errors.append(f"run {number - 1}: {type(error).__name__}: {error}\n{run.words()}")
        finally:
            run.close()
    return result


def _disturb(run: _Run, kills: int, chance: random.Random, result: Result, deaths: bool) -> None:
    """Kills the coordinator of ``run`` until the run is over."""
    deadline, measured, died = time.monotonic() + PATIENCE, [], 0
    at_once = chance.random() < 0.3  # from the start, before all are there
    while not run.is_over:
        if time.monotonic() > deadline:
            raise TimeoutError(f"no end after {PATIENCE:g} s")
        if result.kills >= kills or (run.step < 2 and not at_once):
            time.sleep(0.05)
            continue
        time.sleep(chance.choice((0.0, 0.1, 0.5, 1.5, 3.0)) * chance.random())
        if run.coordinator.poll() is not None:
            break  # it has ended, all is delivered
        killed = time.monotonic()
        run.coordinator.kill()
        run.coordinator.wait()
        if run.has_finished:
            break  # killed while it ended: there is nothing to go on with, and another one would wait for the next run
        alive = [worker for worker in run.workers if worker.poll() is None]
        whole = len(alive) == WORKERS and run.training.issuperset(worker.pid for worker in alive)  # or a stage is lost
        if deaths and result.kills % 2 and whole and 2 <= run.step < STEPS - 40:
            chance.choice(alive).kill()
            died += 1
            run.start_worker()
        listens = run.start_coordinator()
        result.kills += 1
        result.restarts.append(listens - killed)
        measured.append((killed, listens))
        at_once = at_once and chance.random() < 0.5
    codes = [worker.wait(PATIENCE) for worker in run.workers]
    if codes.count(0) != WORKERS or (run.coordinator.wait(60) != 0 and not run.has_finished):
        raise RuntimeError(f"the workers ended with {codes}, {died} were killed")
    measured = [times for times in measured if times[0] > run.steps[0][0]]
    result.stalls += run.stalls(measured)
    result.gaps += run.gaps(measured)


def table(result: Result) -> Table:
    found = Table(title=f"{result.kills} kills of the coordinator; weights off by {result.difference:.1e} at most")
    for name in ("seconds", "median", "90 %", "most"):
        found.add_column(name, justify="right")
    rows = {"stall of the training": result.stalls, "start of the process": result.restarts}
    for count in sorted({count for _, count in result.gaps}):
        rows[f"without a step, {count} in it"] = [seconds for seconds, found in result.gaps if found == count]
    for name, values in rows.items():
        ordered = sorted(values) or [0.0]
        shown = (statistics.median(ordered), ordered[int(0.9 * (len(ordered) - 1))], ordered[-1])
        found.add_row(name, *(f"{value:.2f}" for value in shown))
    return found


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Kills the coordinator of real runs.")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--deaths", action="store_true", help="a worker dies in the same second, at every other kill")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.work is not None:
        work(options.work)
        return
    with _folder() as folder:
        result = measure(options.kills, options.seed, folder, options.deaths)
    console.print(describe_machine())
    console.print(table(result))
    for error in result.errors:
        console.print(error, markup=False)
    sys.exit(bool(result.errors) or result.difference > TOLERANCE)


if __name__ == "__main__":
    main()
