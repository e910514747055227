"""Positions of several processes: steps beside ``ModelParallelStrategy``, recoveries, and the bytes of a rejoin.

    .venv/bin/python benchmarks/sharded.py            # all tables, about fifteen minutes
    .venv/bin/python benchmarks/sharded.py --quick    # the small model and few turns, some minutes
    .venv/bin/python benchmarks/sharded.py --only steps --profile FOLDER  # where its time goes, by cProfile

A Llama of Hugging Face's in float32, on positions of two processes of this machine with one thread each.

Steps: one pipeline of one stage against Lightning's ``ModelParallelStrategy`` on the same mesh and global batches, by
tensor parallelism and by FSDP2. The sides take turns of about a second. A ratio compares two turns of the same cycle;
goal: at most 1.05. Both compute the same: a batch at once, or in two micro-batches, which for ``ModelParallelStrategy``
are two batches that it accumulates.

Failures: two pipelines, so twice as many workers. A member is killed at a seeded random point of a step. Goal: from
that to the next commit at most the time of one redone step plus 250 ms, see ``recovery.py``.

Rejoin: a killed member is replaced, and so is its sibling, which ends. The bytes are those that a replacement receives
from its peer, against the parameters and the state of the optimizer that it then holds. Goal: at most 1.05.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import random
import socket
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from harness import Gate, Spread, console, describe_machine, fit, quieten, step_seconds
from lightning.pytorch.strategies import ModelParallelStrategy
from overhead import Gatekeeper, Plan, Side, play_round, ratio, run_processes
from recovery import GOALS, Recovery, bounded, read_recovery
from rich.table import Table
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightning_recycle import RecoveryOptions, ReCycleStrategy
from lightning_recycle.callbacks import Fault, FaultInjectionCallback
from lightning_recycle.runtime import communicator as communicator_module
from lightning_recycle.tensor_memory import local_part

MEMBERS = 2
MESHES = {"tensor parallelism": (1, MEMBERS), "FSDP2": (MEMBERS, 1)}
"""The number of FSDP's shards, and of those of tensor parallelism."""

STEP_GOAL, REJOIN_GOAL = 1.05, 1.05
VOCABULARY, HEADS = 256, 4
SEED = 20_261_127
FIRST_STEP, LAST_STEP, STEPS_AFTER = 4, 8, 8


@dataclass(frozen=True)
class Size:
    """A model, its global batch in sequences, and how many steps take about a second."""

    name: str
    width: int
    blocks: int
    context: int
    batch_size: int
    steps_per_turn: int

    def data(self, steps: int) -> Dataset:
        """Tokens and targets (samples, context) of ``steps`` global batches."""
        shape = (steps * self.batch_size, self.context + 1)
        text = torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(SEED))
        return TensorDataset(text[:, :-1].contiguous(), text[:, 1:].contiguous())


SIZES = (
    Size("small", width=64, blocks=2, context=32, batch_size=8, steps_per_turn=20),
    Size("larger", width=512, blocks=4, context=128, batch_size=8, steps_per_turn=2),
)


class Llama(L.LightningModule):
    """As it is written for ``ModelParallelStrategy``."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(SEED)
        widths = {"hidden_size": size.width, "intermediate_size": 3 * size.width, "vocab_size": VOCABULARY}
        counts = {"num_hidden_layers": size.blocks, "num_attention_heads": HEADS}
        self.llama = LlamaForCausalLM(LlamaConfig(**widths, **counts, use_cache=False))

    def configure_model(self) -> None:
        mesh: Any = self.device_mesh
        if mesh["tensor_parallel"].size() > 1:
            styles: Any = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
            plan = {name: styles[style]() for name, style in self.llama.config.base_model_tp_plan.items()}
            parallelize_module(self.llama.model, mesh["tensor_parallel"], plan)
        if mesh["data_parallel"].size() > 1:
            for layer in (*self.llama.model.layers, self.llama):
                fully_shard(layer, mesh=mesh["data_parallel"])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens, targets = batch
        loss = F.cross_entropy(self.llama(tokens).logits.flatten(0, 1), targets.flatten())
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


# ---------------------------------------------------------------------- steps


@dataclass(frozen=True)
class ShardedPlan(Plan):
    """What the sides of a round do.

    Args:
        mesh: FSDP's shards, and those of tensor parallelism.
        microbatches: the number of micro-batches of a step.
        profiles: the folder of the profiles, if there are to be any.
    """

    mesh: tuple[int, int] = MESHES["tensor parallelism"]
    microbatches: int = 1
    profiles: str | None = None

    def callbacks(self, gate: Gate) -> list[L.Callback]:
        return [Gatekeeper(self, gate), *([] if self.profiles is None else [_Profile(self, gate.side)])]


class _Profile(L.Callback):
    """Profiles the steps after the warm-up in the first process of a side, what waits at the gate too."""

    def __init__(self, plan: ShardedPlan, side: str) -> None:
        self.plan, self.side, self._profile = plan, side, None

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if self._profile is None and trainer.global_step == self.plan.warmup:
            self._profile = cProfile.Profile()
            self._profile.enable()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._profile.disable()
        if trainer.is_global_zero:
            self._profile.dump_stats(f"{self.plan.profiles}/{self.side}.prof")


def _loader(data: Dataset, plan: ShardedPlan, batches: int) -> DataLoader:
    """Batches of which ``batches`` make a member's part of a global batch."""
    return DataLoader(data, batch_size=plan.size.batch_size // plan.mesh[0] // batches)


def run_ours(plan: ShardedPlan, gate: Gate) -> float:
    """One fit with this package; returns the loss of its last step."""
    shards, tensor = plan.mesh
    strategy = ReCycleStrategy(1, plan.microbatches, tensor_parallel_size=tensor, fsdp_size=shards, seed=SEED)
    loader = _loader(plan.size.data(plan.steps), plan, 1)
    trainer = fit(Llama(plan.size), loader, strategy, devices=MEMBERS, steps=plan.steps, callbacks=plan.callbacks(gate))
    return float(trainer.callback_metrics["train_loss"])


def run_theirs(plan: ShardedPlan, gate: Gate) -> float:
    """One fit with ``ModelParallelStrategy``; returns the mean loss of the last batches of its processes."""
    with socket.socket() as sock:  # free when the first process listens there, or all of them fail
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    return run_processes(_process_of_theirs, [(rank, port, plan, gate) for rank in range(MEMBERS)])


def _process_of_theirs(rank: int, port: int, plan: ShardedPlan, gate: Gate, sender: Any) -> None:
    quieten()
    torch.set_num_threads(1)
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": MEMBERS, "NODE_RANK": 0, "LOCAL_RANK": rank}
    os.environ.update({name: str(value) for name, value in where.items()})
    L.seed_everything(SEED, verbose=False)
    trainer = fit(
        Llama(plan.size),
        _loader(plan.size.data(plan.steps), plan, plan.microbatches),
        ModelParallelStrategy(*plan.mesh),
        devices=MEMBERS,
        steps=plan.steps,
        callbacks=plan.callbacks(gate),
        accumulate_grad_batches=plan.microbatches,
    )
    sender.send(float(trainer.callback_metrics["train_loss"]))


SIDES = {"ours": Side(run_ours, MEMBERS), "ModelParallelStrategy": Side(run_theirs, MEMBERS)}


def _steps_table(sizes: Sequence[Size], options: argparse.Namespace) -> Table:
    table = Table(title=f"A step, {MEMBERS} processes; {options.turns} turns; medians (quartiles)")
    for heading in ("model", "mesh", "micro-batches", "ms", "theirs", "ratio", "processor, ratio", "goal"):
        table.add_column(heading, justify="left" if heading in ("model", "mesh", "goal") else "right")
    for size in sizes:
        for name, mesh in MESHES.items():
            for microbatches in (1, 2):
                plan = ShardedPlan(size, options.turns, options.warmup, mesh, microbatches, options.profile)
                ours, theirs = (played.turns for played in play_round(plan, SIDES).values())
                pairs = list(zip(ours, theirs, strict=True))
                seconds = [mine.seconds / base.seconds for mine, base in pairs]
                table.add_row(
                    size.name,
                    name,
                    str(microbatches),
                    *(
                        f"{statistics.median(1e3 * turn.seconds / size.steps_per_turn for turn in turns):.1f}"
                        for turns in (ours, theirs)
                    ),
                    ratio(seconds),
                    ratio([mine.processor_seconds / base.processor_seconds for mine, base in pairs]),
                    _goal(statistics.median(seconds), STEP_GOAL),
                )
                console.print(f"{size.name}, {name}, {microbatches}: {ratio(seconds)}", highlight=False)
    return table


# ---------------------------------------------------------------------- failures


def _strategy(mesh: tuple[int, int], max_restarts: int = 0) -> ReCycleStrategy:
    recovery = RecoveryOptions(max_restarts=max_restarts)
    return ReCycleStrategy(1, 2, tensor_parallel_size=mesh[1], fsdp_size=mesh[0], seed=SEED, recovery=recovery)


def random_kill(draw: random.Random) -> Fault:
    """A kill of a random member at a random point of a random step."""
    at = draw.choice(("forward", "backward_weight", "reduce", "optimizer"))
    place = {"pipeline": draw.randrange(2), "stage": 0, "member": draw.randrange(MEMBERS)}
    microbatch = draw.randrange(2) if at in ("forward", "backward_weight") else None
    return Fault("kill", step=draw.randint(FIRST_STEP, LAST_STEP), at=at, microbatch=microbatch, **place)


def run_kill(mesh: tuple[int, int], size: Size, fault: Fault) -> Recovery:
    """Trains on two pipelines until some steps after ``fault``."""
    steps = fault.step + 1 + STEPS_AFTER
    loader = DataLoader(size.data(steps), batch_size=size.batch_size // 2 // mesh[0])
    trainer = fit(
        Llama(size),
        loader,
        _strategy(mesh),
        devices=2 * MEMBERS,
        steps=steps,
        callbacks=[FaultInjectionCallback([fault])],
    )
    before, after = step_seconds(trainer, 2, fault.step), step_seconds(trainer, fault.step + 3)
    return read_recovery(trainer.strategy.history, fault, statistics.median(before), statistics.median(after))


def _failures_table(sizes: Sequence[Size], options: argparse.Namespace) -> Table:
    table = Table(title=f"Kills of a member, 2 x {MEMBERS} workers; {options.runs} runs; medians in ms (range)")
    for heading in ("model", "mesh", "detect", "agree", "regroup", "redo", "a step", "beyond it (range)", "goal"):
        table.add_column(heading, justify="left" if heading in ("model", "mesh", "goal") else "right")
    for size in sizes:
        for name, mesh in MESHES.items():
            draw = random.Random(SEED)
            found = [bounded(partial(run_kill, mesh), size, random_kill(draw)) for _ in range(options.runs)]
            beyond = Spread.of(r.beyond_step for r in found)
            parts = [[r.detect, r.agree, r.regroup, r.redo, r.step_after] for r in found]
            medians = (f"{1e3 * statistics.median(each):.0f}" for each in zip(*parts, strict=True))
            table.add_row(size.name, name, *medians, beyond.milliseconds(0), _goal(beyond.median, GOALS["kill"]))
    return table


# ---------------------------------------------------------------------- bytes of a rejoin


_received: list[int] = []
"""Bytes of each message that this process has received from its peer, the state of the callbacks among them."""


class _CountsBytes(L.Callback):
    """A replacement leaves in ``folder`` the bytes that came from its peer, and those that it holds."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if trainer.strategy.incarnation:
            receive = communicator_module._receive_in_pieces

            def counted(communicator: Any, tensors: Sequence[Tensor], source: int) -> None:
                _received.append(sum(tensor.nbytes for tensor in tensors))
                receive(communicator, tensors, source)

            communicator_module._receive_in_pieces = counted

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        if not trainer.strategy.incarnation or not _received:
            return
        state = [value for values in trainer.optimizers[0].state.values() for value in values.values()]
        held = [local_part(t).nbytes for t in (*pl_module.parameters(), *state) if isinstance(t, Tensor)]
        path = self.folder / str(trainer.strategy.grid_rank)
        path.write_text(json.dumps({"received": sum(_received), "held": sum(held)}))


class _WaitsForReplacements(L.Callback):
    """Ends the training some steps after all positions are whole again."""

    def __init__(self) -> None:
        self._whole: int | None = None

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if self._whole is None and trainer.strategy.counters.get("rejoined_workers", 0) >= MEMBERS:
            self._whole = trainer.global_step
        if self._whole is not None and trainer.global_step >= self._whole + 2:
            trainer.should_stop = True
        elif self._whole is None and trainer.global_step > LAST_STEP:
            time.sleep(0.2)


def rejoin(mesh: tuple[int, int], size: Size) -> list[dict[str, int]]:
    """Bytes that each replacement has received, and holds, after a kill."""
    with tempfile.TemporaryDirectory() as folder:
        fault = Fault("kill", pipeline=1, stage=0, step=FIRST_STEP, member=1)
        fit(
            Llama(size),
            DataLoader(size.data(1000), batch_size=size.batch_size // 2 // mesh[0]),
            _strategy(mesh, max_restarts=2 * MEMBERS),
            devices=2 * MEMBERS,
            steps=1000,
            callbacks=[FaultInjectionCallback([fault]), _CountsBytes(folder), _WaitsForReplacements()],
        )
        return [json.loads(path.read_text()) for path in sorted(Path(folder).iterdir())]


def _rejoin_table(sizes: Sequence[Size]) -> Table:
    table = Table(title=f"A position of {MEMBERS} is replaced: MB of each replacement")
    for heading in ("model", "mesh", "received", "held", "ratio", "goal"):
        table.add_column(heading, justify="left" if heading in ("model", "mesh", "goal") else "right")
    for size in sizes:
        for name, mesh in MESHES.items():
            for found in rejoin(mesh, size):
                shown = (f"{found[key] / 1e6:.3f}" for key in ("received", "held"))
                times = found["received"] / found["held"]
                table.add_row(size.name, name, *shown, f"{times:.3f}", _goal(times, REJOIN_GOAL))
    return table


def _goal(found: float, most: float) -> str:
    return f"{most}: {'met' if found <= most else 'missed'}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the small model, few turns and runs")
    parser.add_argument("--turns", type=int, default=12, help="of each side")
    parser.add_argument("--warmup", type=int, default=10, help="steps at the start that do not count")
    parser.add_argument("--runs", type=int, default=5, help="kills of each kind")
    parser.add_argument("--sizes", nargs="*", default=[size.name for size in SIZES], help="which models")
    parser.add_argument("--only", choices=("steps", "failures", "rejoin"), help="one of the tables")
    parser.add_argument("--profile", help="an existing folder for profiles of the steps")
    options = parser.parse_args(arguments)
    began = time.monotonic()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    sizes = [size for size in SIZES if size.name in options.sizes][: 1 if options.quick else None]
    if options.quick:
        options.turns, options.runs = min(options.turns, 5), min(options.runs, 2)
    if options.only in (None, "steps"):
        console.print(_steps_table(sizes, options))
    if options.only in (None, "failures"):
        console.print(_failures_table(sizes, options))
    if options.only in (None, "rejoin"):
        console.print(_rejoin_table(sizes))
    console.print(f"{time.monotonic() - began:.0f} s. {describe_machine()}", highlight=False)


if __name__ == "__main__":
    main()
