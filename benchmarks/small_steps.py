"""What a step costs beyond its computing: a trivial module with one stage, beside Lightning's DDP.

    python benchmarks/small_steps.py [--workers 4] [--steps 50] [--turns 10] [--logs yes no]

One linear layer of 32 x 2 and a batch of 8 per worker, SGD, with and without ``self.log`` in the step. Both sides have
one torch thread per worker, run at the same time in processes of their own, and take turns of ``--steps`` steps (see
``turns.py``), so both meet the same load. Where workers share cores, a step takes what all processes together compute,
and other users of the machine disturb processor time less than the clock.

Printed are medians over the turns (and quartiles of the ratios, each of two turns of one cycle), per step: milliseconds
by the clock; milliseconds of processor time of all workers together, with the launching process, which for ours is the
coordinator; of one worker's main thread, of its threads of Gloo, and of its other threads; how often a worker gave up
its core to wait.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from harness import console, describe_machine, quieten
from lightning.pytorch.strategies import DDPStrategy
from rich.table import Table
from torch.utils.data import DataLoader, TensorDataset
from turns import Gate, Turns

from lightning_recycle import ReCycleStrategy

SIDES = ("DDP", "ours")
WARMUP = 30  # steps
BATCH_SIZE = 8


class Trivial(L.LightningModule):
    """One linear layer."""

    def __init__(self, logs: bool) -> None:
        super().__init__()
        self.logs = logs
        self.net = torch.nn.Linear(32, 2)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.net(batch[0]).square().mean()
        if self.logs:
            self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


@dataclass(frozen=True)
class Spent:
    """What processes have spent since they began.

    Args:
        worker, main, gloo, launcher: milliseconds of processor time: of a worker, of its main thread, of its threads of
            Gloo, of the process that launched it.
        waits: how often the worker gave up its core.
    """

    worker: float
    main: float
    gloo: float
    launcher: float
    waits: float

    @classmethod
    def now(cls, launcher: int) -> Spent:
        """By this worker, which the process ``launcher`` has launched (Linux)."""
        threads = [Path(path) for path in sorted(Path("/proc/self/task").iterdir())]
        of_gloo = [path for path in threads if (path / "comm").read_text().startswith(("gloo_", "pt_gloo_"))]
        return cls(
            worker=1e3 * time.process_time(),
            main=1e3 * time.thread_time(),
            gloo=sum(map(_on_core, of_gloo)),
            launcher=sum(map(_on_core, Path(f"/proc/{launcher}/task").iterdir())),
            waits=resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw,
        )

    def since(self, before: Spent, steps: int) -> Spent:
        """Per step."""
        return Spent(*((now - then) / steps for now, then in zip(astuple(self), astuple(before), strict=True)))


def _on_core(thread: Path) -> float:
    """Milliseconds of processor time."""
    return int((thread / "schedstat").read_text().split()[0]) / 1e6


@dataclass(frozen=True)
class Plan:
    """What both sides do: ``turns`` turns of ``steps`` steps in ``workers`` workers, after the warm-up."""

    workers: int
    steps: int
    turns: int
    logs: bool

    @property
    def all_steps(self) -> int:
        return WARMUP + self.turns * self.steps


class _Gatekeeper(L.Callback):
    """Leads each worker through the gate; worker 0 leaves what it has spent in a file."""

    def __init__(self, plan: Plan, gate: Gate, launcher: int) -> None:
        self.plan, self.gate, self.launcher = plan, gate, launcher
        self.spent: list[Spent] = []

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, index: int) -> None:
        if index == WARMUP // 2:
            torch.set_num_threads(1)
        if index >= WARMUP and (index - WARMUP) % self.plan.steps == 0:
            self._arrive(trainer)

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self._arrive(trainer)
        if trainer.global_rank == 0:
            lines = (" ".join(map(str, astuple(spent))) for spent in self.spent)
            Path(self.gate.directory, f"{self.gate.side}.spent").write_text("\n".join(lines))

    def _arrive(self, trainer: L.Trainer) -> None:
        if trainer.global_rank == 0:
            self.spent.append(Spent.now(self.launcher))
        self.gate.wait(trainer.global_rank)


def train(plan: Plan, gate: Gate) -> None:
    """One fit of the side ``gate.side``, in the process that launches its workers."""
    quieten()
    os.environ.update(PYTHONWARNINGS="ignore", OMP_NUM_THREADS="1")
    torch.set_num_threads(1)
    strategy = DDPStrategy(start_method="fork") if gate.side == "DDP" else ReCycleStrategy(pipeline_parallel_size=1)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=plan.workers,
        strategy=strategy,
        max_steps=plan.all_steps,
        callbacks=[_Gatekeeper(plan, gate, os.getpid())],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = TensorDataset(torch.randn(BATCH_SIZE * plan.workers * plan.all_steps, 32))
    trainer.fit(Trivial(plan.logs), DataLoader(data, batch_size=BATCH_SIZE))


@dataclass(frozen=True)
class Turn:
    """What a side took for one turn, per step: milliseconds by the clock, and what was spent."""

    clock: float
    workers: float
    spent: Spent

    @property
    def processor(self) -> float:
        """Milliseconds of processor time of all processes."""
        return self.workers + self.spent.launcher


def play(plan: Plan) -> dict[str, list[Turn]]:
    """Both sides by turns."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as directory:
        processes = {side: context.Process(target=train, args=(plan, Gate(directory, side))) for side in SIDES}

        def check() -> None:
            for side, process in processes.items():
                if process.exitcode:
                    raise RuntimeError(f"{side} failed")

        turns = Turns(directory, dict.fromkeys(SIDES, plan.workers), check)
        try:
            for process in processes.values():
                process.start()
            played = turns.play(plan.turns)
            for process in processes.values():
                process.join()
        finally:
            turns.close()
            for process in processes.values():
                process.kill()
        check()
        found = {}
        for side in SIDES:
            lines = Path(directory, f"{side}.spent").read_text().splitlines()
            spent = [Spent(*map(float, line.split())) for line in lines]
            found[side] = [
                Turn(
                    1e3 * turn.seconds / plan.steps,
                    1e3 * turn.processor_seconds / plan.steps,
                    after.since(before, plan.steps),
                )
                for turn, before, after in zip(played[side], spent[:-1], spent[1:], strict=True)
            ]
        return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures both sides by turns and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=50, help="per turn")
    parser.add_argument("--turns", type=int, default=10, help="of each side")
    parser.add_argument("--logs", nargs="*", choices=("yes", "no"), default=("yes", "no"))
    options = parser.parse_args(arguments)
    table = Table(title=f"A trivial step, one stage, {options.workers} workers; {options.turns} turns of each side")
    for heading in ("self.log", "side", "clock", "ratio", "processor", "ratio", "main", "Gloo", "other", "launcher"):
        table.add_column(heading, justify="left" if heading in ("self.log", "side") else "right")
    table.add_column("waits", justify="right")
    for logs in options.logs:
        played = play(Plan(options.workers, options.steps, options.turns, logs == "yes"))
        for side in SIDES:
            turns, base = played[side], played["DDP"]
            spent = [turn.spent for turn in turns]
            table.add_row(
                logs if side == SIDES[0] else "",
                side,
                _median([turn.clock for turn in turns]),
                _ratio([turn.clock / other.clock for turn, other in zip(turns, base, strict=True)]),
                _median([turn.processor for turn in turns]),
                _ratio([turn.processor / other.processor for turn, other in zip(turns, base, strict=True)]),
                _median([one.main for one in spent]),
                _median([one.gloo for one in spent]),
                _median([one.worker - one.main - one.gloo for one in spent]),
                _median([one.launcher for one in spent]),
                f"{statistics.median(one.waits for one in spent):.0f}",
                end_section=side == SIDES[-1],
            )
    console.print(table)
    console.print(describe_machine(), highlight=False)


def _median(values: list[float]) -> str:
    return f"{statistics.median(values):.2f}"


def _ratio(ratios: list[float]) -> str:
    """Median and quartiles."""
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.3f} ({low:.2f}-{high:.2f})"


if __name__ == "__main__":
    main()
