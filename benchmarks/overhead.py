"""No tax: fault-free steps per second against a hand-written pipeline on ``torch.distributed.pipelining``.

    .venv/bin/python benchmarks/overhead.py            # three sizes of the example GPT, about ten minutes
    .venv/bin/python benchmarks/overhead.py --quick    # the smallest one, half a minute

The baseline is what one would write without this package: ``Schedule1F1B`` in a process group per pipeline, gradients
as views of one flat buffer, one all-reduce of it in a process group per stage, the same AdamW, and nothing else: no
logging, no commit, no recovery. All sides train the same model on the same data in memory on a 2 x 2 grid over Gloo,
with one torch thread per worker.

They take turns of about a second, several per round; each round starts fresh processes, whose first steps do not count.
A ratio compares two turns that follow each other. Processor time is shown besides: it is what a worker costs where
workers share cores, as here, and other users of the machine disturb it less than they disturb the clock.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from harness import console, describe_machine, fit, quieten
from rich.table import Table
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.utils.data import DataLoader, TensorDataset
from turns import Gate, Turn, Turns

from lightning_recycle import ReCycleStrategy
from lightning_recycle.module import stage_layers

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from gpt import GPT

__all__ = ["SIDES", "SIZES", "Plan", "Size", "main", "play_round", "run_baseline", "run_strategy"]

PIPELINES, STAGES, MICROBATCHES = 2, 2, 4
SEED = 1


@dataclass(frozen=True)
class Size:
    """A model, its batch (sequences per pipeline), and how many steps take about a second."""

    name: str
    width: int
    blocks: int
    heads: int
    context: int
    batch_size: int
    steps_per_turn: int
    dropout: float = 0.1

    def build(self) -> GPT:
        return GPT(self.width, self.blocks, self.heads, self.context, self.dropout)

    def data(self, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and targets (samples, context) of ``steps`` global batches."""
        samples = steps * PIPELINES * self.batch_size
        text = torch.randint(256, (samples, self.context + 1), generator=torch.Generator().manual_seed(SEED))
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()


SIZES = (
    Size("small", width=64, blocks=2, heads=4, context=64, batch_size=8, steps_per_turn=30),
    Size("tiny", width=128, blocks=4, heads=4, context=128, batch_size=8, steps_per_turn=8),  # conf/model/gpt_tiny.yaml
    Size("mini", width=256, blocks=8, heads=8, context=128, batch_size=8, steps_per_turn=2),  # conf/model/gpt_mini.yaml
)


@dataclass(frozen=True)
class Plan:
    """What one round does: ``turns`` turns of ``size.steps_per_turn`` steps, after ``warmup`` steps."""

    size: Size
    turns: int
    warmup: int

    @property
    def steps(self) -> int:
        return self.warmup + self.turns * self.size.steps_per_turn

    def is_gate(self, step: int) -> bool:
        """Whether a turn ends before ``step``."""
        return step >= self.warmup and (step - self.warmup) % self.size.steps_per_turn == 0


# ---------------------------------------------------------------------- ours


def run_strategy(plan: Plan, gate: Gate, **options: Any) -> float:
    """One fit with ``ReCycleStrategy(**options)``; returns the loss of its last step."""
    loader = DataLoader(TensorDataset(*plan.size.data(plan.steps)), batch_size=plan.size.batch_size)
    strategy = ReCycleStrategy(pipeline_parallel_size=STAGES, num_microbatches=MICROBATCHES, seed=SEED, **options)
    trainer = fit(
        plan.size.build(),
        loader,
        strategy,
        devices=PIPELINES * STAGES,
        steps=plan.steps,
        callbacks=[_Gatekeeper(plan, gate)],
    )
    return float(trainer.callback_metrics["train_loss"])


class _Gatekeeper(L.Callback):
    """Leads each worker through the gate."""

    def __init__(self, plan: Plan, gate: Gate) -> None:
        self.plan, self.gate = plan, gate

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self.plan.is_gate(trainer.global_step):
            self.gate.wait(trainer.global_rank)

    def on_train_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.gate.wait(trainer.global_rank)


# ---------------------------------------------------------------------- the baseline


def run_baseline(plan: Plan, gate: Gate) -> float:
    """One run of the hand-written pipeline; returns the loss of its last step."""
    context = multiprocessing.get_context("forkserver")
    receivers, processes = [], []
    with tempfile.TemporaryDirectory() as directory:
        for rank in range(PIPELINES * STAGES):
            receiver, sender = context.Pipe(duplex=False)
            arguments = (rank, plan, gate, f"file://{directory}/rendezvous", sender)
            process = context.Process(target=_baseline_worker, args=arguments)
            process.start()
            sender.close()
            receivers.append(receiver)
            processes.append(process)
        try:
            losses = [receiver.recv() for receiver in receivers]  # EOFError: the worker died, its traceback is above
        finally:
            for process in processes:
                process.join(timeout=30)
                process.kill()
    return statistics.mean(loss for loss in losses if loss is not None)


def _baseline_worker(rank: int, plan: Plan, gate: Gate, rendezvous: str, sender: Any) -> None:
    quieten()
    torch.set_num_threads(1)
    torch.manual_seed(SEED + rank)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=PIPELINES * STAGES)
    pipeline, stage = divmod(rank, STAGES)
    pipeline_groups = [dist.new_group([d * STAGES + s for s in range(STAGES)]) for d in range(PIPELINES)]
    stage_groups = [dist.new_group([d * STAGES + s for d in range(PIPELINES)]) for s in range(STAGES)]

    size, model = plan.size, plan.size.build()
    owned = stage_layers(len(model.layers), STAGES)[stage]
    model.keep_layers(owned)
    model.materialize(owned, SEED)
    model.train()
    optimizer = model.configure_optimizers()
    gradient = _flatten_gradients(list(model.parameters()))

    is_first, is_last = stage == 0, stage == STAGES - 1
    layers = nn.Sequential(*(model.layers[index] for index in owned))
    schedule = Schedule1F1B(
        PipelineStage(layers, stage, STAGES, torch.device("cpu"), group=pipeline_groups[pipeline]),
        n_microbatches=MICROBATCHES,
        loss_fn=lambda output, target: model.loss(output, target) / (PIPELINES * MICROBATCHES),
        scale_grads=False,
    )
    inputs, targets = size.data(plan.steps)
    global_batch = PIPELINES * size.batch_size
    losses: list[torch.Tensor] = []
    for step in range(plan.steps):
        if plan.is_gate(step):
            gate.wait(rank)
        mine = slice(step * global_batch + pipeline, (step + 1) * global_batch, PIPELINES)
        gradient.zero_()
        losses.clear()
        schedule.step(
            *((inputs[mine],) if is_first else ()),
            target=targets[mine] if is_last else None,
            losses=losses if is_last else None,
            return_outputs=False,
        )
        dist.all_reduce(gradient, group=stage_groups[stage])
        optimizer.step()
    gate.wait(rank)
    sender.send(PIPELINES * float(sum(losses)) if is_last else None)
    dist.destroy_process_group()


def _flatten_gradients(parameters: list[nn.Parameter]) -> torch.Tensor:
    """One buffer that every ``parameter.grad`` is a view of."""
    buffer = torch.zeros(sum(p.numel() for p in parameters))
    offset = 0
    for parameter in parameters:
        parameter.grad = buffer[offset : offset + parameter.numel()].view_as(parameter)
        offset += parameter.numel()
    return buffer


# ---------------------------------------------------------------------- the comparison

SIDES: dict[str, Callable[[Plan, Gate], float]] = {
    "baseline": run_baseline,
    "ours, 1F1B": lambda plan, gate: run_strategy(plan, gate, decoupled=False),  # like for like: fused backward
    "ours, default": run_strategy,
}


def play_round(plan: Plan) -> tuple[dict[str, list[Turn]], dict[str, float]]:
    """Starts all sides, lets them take their turns; returns those and each side's last loss."""
    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(len(SIDES)) as threads:
        running: dict[str, Future[float]] = {}

        def check() -> None:
            for future in running.values():
                if future.done():
                    future.result()

        turns = Turns(directory, list(SIDES), PIPELINES * STAGES, check)
        for side, run in SIDES.items():
            running[side] = threads.submit(run, plan, Gate(directory, side))
        try:
            played = turns.play(plan.turns)
            return played, {side: future.result() for side, future in running.items()}
        finally:
            turns.close()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the smallest model, one round")
    parser.add_argument("--rounds", type=int, default=3, help="fresh processes per model")
    parser.add_argument("--turns", type=int, default=15, help="of each side per round")
    parser.add_argument("--warmup", type=int, default=10, help="steps at the start of a round that do not count")
    parser.add_argument("--sizes", nargs="*", default=[size.name for size in SIZES], help="which models")
    options = parser.parse_args(arguments)
    os.environ["OMP_NUM_THREADS"] = "1"
    sizes = [size for size in SIZES if size.name in options.sizes][: 1 if options.quick else None]
    rounds = 1 if options.quick else options.rounds

    grid = f"{PIPELINES} x {STAGES} workers, {MICROBATCHES} micro-batches"
    table = Table(title=f"Fault-free, {grid}; {rounds} x {options.turns} turns")
    for heading in ("GPT", "side", "steps/s", "ratio (quartiles)", "processor ms/step", "ratio (quartiles)"):
        table.add_column(heading, justify="left" if heading in ("GPT", "side") else "right")
    for size in sizes:
        turns: dict[str, list[Turn]] = {side: [] for side in SIDES}
        for _ in range(rounds):
            played, _ = play_round(Plan(size, options.turns, options.warmup))
            for side, mine in played.items():
                turns[side] += mine
        for side, mine in turns.items():
            pairs = list(zip(mine, turns["baseline"], strict=True))
            table.add_row(
                size.name if side == "baseline" else "",
                side,
                f"{statistics.median(size.steps_per_turn / turn.seconds for turn in mine):.2f}",
                _ratio([base.seconds / turn.seconds for turn, base in pairs]),
                f"{statistics.median(1e3 * turn.processor_seconds / size.steps_per_turn for turn in mine):.1f}",
                _ratio([turn.processor_seconds / base.processor_seconds for turn, base in pairs]),
                end_section=side == list(SIDES)[-1],
            )
    console.print(table)
    console.print(describe_machine(), highlight=False)


def _ratio(ratios: list[float]) -> str:
    """Median and quartiles."""
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


if __name__ == "__main__":
    main()
