"""What a run resumes from after everybody was killed while it wrote a checkpoint.

    .venv/bin/python benchmarks/checkpoint_kills.py               # 200 kills of each format, an hour
    .venv/bin/python benchmarks/checkpoint_kills.py --kills 10    # a sample
    .venv/bin/python benchmarks/checkpoint_kills.py --background  # of checkpoints that are written in the background
    .venv/bin/python benchmarks/checkpoint_kills.py --writers 100 # of the writer of such a checkpoint alone

A run on 1 x 2 workers writes its whole state, 50 MB, to ``last.ckpt`` after every step. At a seeded random moment of
writing it the launching process and all workers get SIGKILL at once, and the next run starts with
``ckpt_path="last"``. Its weights must be those that undisturbed training has at that step, in float64 to 1e-10; and the
step must be that of the checkpoint that was being written (the newest) or the one before (the second newest). Both
formats, one file and a folder; half of the kills with TMPDIR on the file system of the checkpoints, half with TMPDIR on
another one.

With ``--writers`` the worker that writes a checkpoint in the background gets SIGKILL at such a moment, on 2 x 2
workers, and is replaced. Training must be exact in the end, and all checkpoints on the disk whole, the newest among
them.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import psutil
import torch
from harness import console, describe_machine, quieten
from lightning.pytorch.callbacks import ModelCheckpoint
from rich.table import Table
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_recycle import CheckpointOptions, PipelineModule, RecoveryOptions, ReCycleStrategy
from lightning_recycle.session.checkpoint_files import damage

WIDTH, INPUTS, BATCH = 1024, 64, 4
STEPS = 4000  # of data; no run comes that far
TOLERANCE = 1e-10
START_SECONDS = 300.0  # for a run to resume, on whatever machine
FIRST_SPAN = 0.5  # seconds in which the first kill of a side may come; then as long as writing takes
OTHER_FILE_SYSTEM = Path("/dev/shm")

_one_at_a_time = threading.Lock()


# ------------------------------------------------------------------ the run that is killed


class Wide(PipelineModule):
    """16 MB of weights in float64; with Adam's moments a checkpoint has 50 MB."""

    def configure_pipeline(self):
        torch.manual_seed(0)
        sizes = (INPUTS, WIDTH, WIDTH, WIDTH, 1)
        return [nn.Linear(before, after).double() for before, after in itertools.pairwise(sizes)]

    def loss(self, output, target):
        return (output - target).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    samples = torch.randn(STEPS * BATCH, INPUTS + 1, generator=generator, dtype=torch.float64)
    return TensorDataset(samples[:, :INPUTS], samples[:, INPUTS:])


class Diary(L.Callback):
    """Tells the judge what this run resumed from, and when it writes: a line of JSON for each."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        strategy: Any = trainer.strategy
        torch.save(pl_module.state_dict(), self._folder / f"stage{strategy.worker.stage}.pt")
        strategy.barrier()
        self._note(trainer, "resumed")

    def on_save_checkpoint(self, trainer: L.Trainer, *_: Any) -> None:
        self._note(trainer, "writes")

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self._note(trainer, "wrote")

    def _note(self, trainer: L.Trainer, what: str) -> None:
        if trainer.is_global_zero:
            with open(self._folder / "diary.jsonl", "a") as file:
                print(json.dumps([what, trainer.global_step, time.monotonic()]), file=file)


def train(folder: Path, sharded: bool, background: bool) -> None:
    quieten()
    newest = ModelCheckpoint(folder / "checkpoints", every_n_train_steps=1, save_top_k=0, save_last=True)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=ReCycleStrategy(
            pipeline_parallel_size=2,
            num_microbatches=2,
            checkpoints=CheckpointOptions(
                save_distributed_checkpoint=sharded, background=background, on_checkpoint_error="raise"
            ),
        ),
        max_epochs=1,
        callbacks=[Diary(folder), newest],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Wide(), DataLoader(data(), batch_size=BATCH), ckpt_path="last")


def serve() -> None:
    """Starts a run for each line of JSON on standard input (folder, side, TMPDIR), and tells its process id.

    Everything is imported, and the launching process is forked, which takes half as long as a start from nothing.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how a killed run ended
    for line in sys.stdin:
        folder, sharded, background, scratch = json.loads(line)
        pid = os.fork()
        if pid:
            print(pid, flush=True)
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        output = os.open(Path(folder) / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        tempfile.tempdir = os.environ["TMPDIR"] = scratch
        try:
            train(Path(folder), sharded, background)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(0)


# ------------------------------------------------------------------ the run whose writers are killed


class KillsWriters(L.Callback):
    """Kills the worker that begins to write a checkpoint, most times, at a random moment within ``span`` seconds; and
    waits before each step until no worker is missing. The last checkpoint is spared.
    """

    def __init__(self, steps: int, span: float, seed: int) -> None:
        self._steps, self._span, self._seed = steps, span, seed

    def on_train_start(self, trainer: L.Trainer, *_: Any) -> None:
        strategy: Any = trainer.strategy
        strategy.at_point.append(self._begins)
        type(self)._strategy = strategy  # no part of its state

    def _begins(self, point: str, step: int) -> None:
        random_ = random.Random(f"{self._seed} {step}")
        if point == "checkpoint" and step < self._steps and random_.random() < 0.8:
            threading.Timer(random_.uniform(0, self._span), self._kill).start()

    _strategy: Any

    def _kill(self) -> None:
        if len(self._strategy.live_workers) == self._strategy.grid.num_workers:  # another one holds the stage
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        strategy: Any = trainer.strategy
        deadline = time.monotonic() + START_SECONDS
        while len(strategy.live_workers) < strategy.grid.num_workers and time.monotonic() < deadline:
            client = strategy.session.client
            if client.is_interrupted or client.member.is_paused:
                break
            time.sleep(0.005)


def kill_writers(kills: int, sharded: bool, seed: int, directory: Path) -> tuple[int, float, list[str]]:
    """The number of kills of a run in which about ``kills`` writers are killed, the largest difference of a weight from
    undisturbed training, and what is wrong with its checkpoints.
    """
    quieten()
    steps = kills * 2
    saving = ModelCheckpoint(directory, "{step}", every_n_train_steps=2, save_top_k=1, save_last="link")
    trainer = L.Trainer(
        accelerator="cpu",
        devices=4,
        strategy=ReCycleStrategy(
            pipeline_parallel_size=2,
            num_microbatches=2,
            recovery=RecoveryOptions(max_restarts=10 * kills),
            checkpoints=CheckpointOptions(save_distributed_checkpoint=sharded, background=True),
        ),
        max_steps=steps,
        callbacks=[KillsWriters(steps, 0.3, seed), saving],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Wide()
    trainer.fit(module, DataLoader(data(), batch_size=BATCH // 2))
    wrong = [f"{path}: {why}" for path in directory.glob("*.ckpt") if (why := damage(path)) is not None]
    if saving.best_model_path != str(directory / f"step={steps}.ckpt"):
        wrong.append(f"the newest is {saving.best_model_path}")
    failures = sum(event.kind == "failure" for event in trainer.strategy.history)
    return failures, Undisturbed().difference(module.state_dict(), steps), wrong


# ------------------------------------------------------------------ the judge


@dataclass(frozen=True)
class Side:
    """A format; whether TMPDIR is on another file system than the checkpoints; whether training goes on meanwhile."""

    sharded: bool
    two_file_systems: bool
    background: bool = False

    def __str__(self) -> str:
        return f"{'folder' if self.sharded else 'file'}, {'two file systems' if self.two_file_systems else 'one'}"


@dataclass
class SideResult:
    """What the kills of a side left: "newest", "second newest" or "without" -> how often."""

    side: Side
    found: Counter[str] = field(default_factory=Counter)
    interrupted: int = 0
    """Kills that came before the run knew that the checkpoint was complete."""
    difference: float = 0.0
    """Largest difference of a weight from undisturbed training."""
    errors: list[str] = field(default_factory=list)


Note = tuple[str, int, float]
"""What a run does, at which step, when."""


class Undisturbed:
    """The weights of undisturbed training on one device, step by step."""

    def __init__(self) -> None:
        with _one_at_a_time:  # sides run in threads, which share torch's generator
            self._model, self._data, self._step = Wide(), data(), 0
            self._layers = nn.Sequential(*self._model.layers)
        self._optimizer = torch.optim.AdamW(self._layers.parameters(), lr=1e-3)

    def difference(self, weights: dict[str, torch.Tensor], step: int) -> float:
        """Largest difference of ``weights`` at ``step``, which never falls from one call to the next."""
        for number in range(self._step, step):
            inputs, target = self._data[number * BATCH : (number + 1) * BATCH]
            self._optimizer.zero_grad()
            self._model.loss(self._layers(inputs), target).backward()
            self._optimizer.step()
        self._step = max(self._step, step)
        if self._step > step:
            return float("inf")
        expected = self._model.state_dict()
        assert weights.keys() == expected.keys()
        return max(float((weights[name] - expected[name]).abs().max()) for name in expected)


@contextlib.contextmanager
def starter() -> Iterator[subprocess.Popen[str]]:
    """The process that starts runs."""
    command = [sys.executable, __file__, "--serve"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        yield process


@contextlib.contextmanager
def victim(side: Side, folder: Path, scratch: Path, server: subprocess.Popen[str]) -> Iterator[int]:
    """A run that resumes, by its process id; at the end of the block all of its processes are killed at once."""
    (folder / "diary.jsonl").unlink(missing_ok=True)
    assert server.stdin is not None
    assert server.stdout is not None
    print(json.dumps([str(folder), side.sharded, side.background, str(scratch)]), file=server.stdin, flush=True)
    pid = int(server.stdout.readline())
    try:
        yield pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            while True:  # the group is the session's: launching process, fork server, workers
                os.killpg(pid, signal.SIGKILL)
                time.sleep(0.005)
        for left in scratch.iterdir():
            shutil.rmtree(left) if left.is_dir() else left.unlink()


def diary(folder: Path) -> list[Note]:
    try:
        lines = (folder / "diary.jsonl").read_text().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    return [tuple(json.loads(line)) for line in lines if line.endswith("\n")]


def wait_for(pid: int, folder: Path, what: str, times: int) -> None:
    """Waits until the run in ``folder`` has noted ``what`` so many times."""
    deadline = time.monotonic() + START_SECONDS
    while sum(noted == what for noted, *_ in diary(folder)) < times:
        ended = not psutil.pid_exists(pid)
        if ended or time.monotonic() > deadline:
            output = (folder / "output.txt").read_text()[-2000:]
            raise RuntimeError(f"the run {'ended' if ended else 'hangs'}:\n{output}")
        time.sleep(0.002)


def measure(side: Side, kills: int, seed: int, directory: Path, scratch: Path, tell: bool = False) -> SideResult:
    """Kills a run ``kills`` times and resumes it each time.

    Args:
        side: what is written where.
        kills: the number of kills.
        seed: draws the moments.
        directory: an empty directory for the run and its checkpoints.
        scratch: an empty directory, TMPDIR of the run.
        tell: whether to print a line now and then.
    """
    with starter() as server:
        return _kill_and_resume(server, side, kills, random.Random(f"{seed} {side}"), directory, scratch, tell)


def _kill_and_resume(
    server: subprocess.Popen[str],
    side: Side,
    kills: int,
    random_: random.Random,
    directory: Path,
    scratch: Path,
    tell: bool,
) -> SideResult:
    result, undisturbed, spans = SideResult(side), Undisturbed(), [FIRST_SPAN]
    newest = 0  # the step of the checkpoint that was being written at the newest kill
    for kill in range(kills + 1):
        try:
            with victim(side, directory, scratch, server) as pid:
                wait_for(pid, directory, "resumed", 1)
                step = next(step for what, step, _ in diary(directory) if what == "resumed")
                weights = {}
                for stage in range(2):
                    weights |= torch.load(directory / f"stage{stage}.pt", weights_only=True)
                difference = undisturbed.difference(weights, step)
                result.difference = max(result.difference, difference)
                if kill:
                    good = difference < TOLERANCE and newest - 1 <= step <= newest
                    name = ("newest" if step == newest else "second newest") if good else "without"
                    result.found[name] += 1
                    if not good:
                        result.errors.append(f"kill {kill} at step {newest}: resumed {step}, off by {difference:.1e}")
                if tell and kill % 10 == 0:
                    console.print(f"{side}: {kill} kills, {dict(result.found)}")
                if kill == kills:
                    break
                wait_for(pid, directory, "writes", random_.choice((2, 2, 3)))  # the first may replace nothing
                time.sleep(random_.uniform(0.0, 1.2 * statistics.median(spans)))
        except RuntimeError as error:
            result.errors.append(f"after kill {kill}: {error}")
            result.found["without"] += 1
            break
        notes = diary(directory)
        starts = {step: at for what, step, at in notes if what == "writes"}
        ends = {step: at for what, step, at in notes if what == "wrote"}
        if side.background:  # it is asked for when the one before is complete
            ends = {step: starts[step + 1] for step in starts if step + 1 in starts}
        spans += [ends[step] - starts[step] for step in starts if step in ends]
        newest = max(starts)
        result.interrupted += newest not in ends
    return result


def table(results: Sequence[SideResult]) -> Table:
    found = Table(
        "checkpoint, TMPDIR", "kills", "newest", "second newest", "without", "while writing", "weights off by"
    )
    for result in results:
        counts = [result.found[name] for name in ("newest", "second newest", "without")]
        numbers = [sum(counts), *counts, result.interrupted]
        found.add_row(str(result.side), *map(str, numbers), f"{result.difference:.1e}")
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="kills of each format")
    parser.add_argument("--writers", type=int, default=0, help="kills of the writer alone")
    parser.add_argument("--background", action="store_true", help="write them while the training goes on")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.serve:
        serve()
        return
    torch.set_num_threads(1)
    if options.writers:
        for sharded in (False, True):
            with tempfile.TemporaryDirectory(prefix="checkpoint_kills_") as name:
                killed, difference, wrong = kill_writers(options.writers // 2, sharded, options.seed, Path(name))
            kind = "folder" if sharded else "file"
            console.print(f"{kind}: {killed} workers killed, weights off by {difference:.1e}", *wrong, sep="\n")
            if wrong or difference > TOLERANCE:
                sys.exit(1)
        return
    sides = [Side(sharded, two, options.background) for two in (False, True) for sharded in (False, True)]
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(options.jobs) as pool:

        def folder(where: str | Path | None = None) -> Path:
            return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="checkpoint_kills_", dir=where)))

        if folder(OTHER_FILE_SYSTEM).stat().st_dev == folder().stat().st_dev:
            parser.error(f"{tempfile.gettempdir()} and {OTHER_FILE_SYSTEM} are one file system: set TMPDIR.")
        waiting = [
            pool.submit(
                measure, side, options.kills // 2, options.seed, folder(),
                folder(OTHER_FILE_SYSTEM if side.two_file_systems else None), True,
            )
            for side in sides
        ]  # fmt: skip
        results = [each.result() for each in waiting]
    console.print(describe_machine())
    console.print(table(results))
    for error in [error for result in results for error in result.errors]:
        console.print(error)
    if any(result.found["without"] for result in results):
        sys.exit(1)


if __name__ == "__main__":
    main()
