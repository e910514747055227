"""No tax: fault-free steps, processor time and memory, compared with alternatives and for each feature.

    .venv/bin/python benchmarks/overhead.py            # four sizes of the example GPT, half an hour
    .venv/bin/python benchmarks/overhead.py --quick    # one of them, about two minutes
    .venv/bin/python benchmarks/overhead.py --apart    # the smallest GPT, runs without pauses, about five minutes
    .venv/bin/python benchmarks/overhead.py --only ordinary    # one stage, beside DDP, about eight minutes

The first comparison is with other ways to train the same model on the same global batches, of data in memory:

- baseline: hand-written without this package on the same 2 x 2 grid: ``Schedule1F1B`` of
  ``torch.distributed.pipelining`` in a process group per pipeline, gradients as views of one flat buffer, one
  all-reduce of it in a process group per stage, the same AdamW, and nothing else: no logging, commit or recovery;
- DDP: Lightning with ``strategy="ddp"`` over Gloo in 4 processes, a quarter of the global batch each;
- alone: Lightning on one CPU device, in one process with the whole global batch, with one thread, and with all cores.

All others have one torch thread per worker. On a machine with fewer cores than workers all compute the same at the same
speed, and what differs is overhead; it says nothing about machines on which the workers do not share cores.

The second is of an ordinary LightningModule in 4 workers of one stage: DDP, ours, and ours with two micro-batches per
worker, which survivors share more evenly.

The third is of our own features, each switched on against off (``FEATURES``): the staggered optimizer with its shadow,
kept on the device or on the host, against a commit of all stages together without one (goal: at most 3 % of a step); a
module that overrides ``on_training_output``; the backward, always split. ``Shadow.update`` is also timed alone.

The sides of a comparison take turns of about a second, several per round; each round starts fresh processes, whose
first steps do not count. A ratio compares two turns of the same cycle. Processor time is also shown: it is the cost of
a worker where workers share cores, and other users of the machine disturb it less than the clock.

Memory is that of the worker that needs most, at the end of the training: state is its parameters and what the optimizer
keeps of them; own is what no other process shares (``Private_*`` of ``/proc/self/smaps_rollup``); peak is the largest
resident set that it ever had (``VmHWM``), most of which are torch's and Python's libraries.

``--apart`` compares with the baseline alone, and no two sides are alive at once: a turn of a second begins
with cold caches, and Gloo's threads, which poll while they wait, cost less beside processes that sleep.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from harness import Gate, Turn, Turns, console, describe_machine, fit, quieten
from rich.table import Table
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_recycle import PlanningOptions, RecoveryOptions, ReCycleStrategy
from lightning_recycle.model.layers import even_parts
from lightning_recycle.runtime.stage_bundle import Shadow

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from gpt import GPT

PIPELINES, STAGES, MICROBATCHES = 2, 2, 4
WORKERS = PIPELINES * STAGES
SEED = 1
GOAL = 1.03  # of the seconds of a step: what shadow and staggering may cost


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

    def build(self, kind: type[GPT] = GPT) -> GPT:
        return kind(self.width, self.blocks, self.heads, self.context, self.dropout)

    def data(self, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and targets (samples, context) of ``steps`` global batches."""
        samples = steps * PIPELINES * self.batch_size
        text = torch.randint(256, (samples, self.context + 1), generator=torch.Generator().manual_seed(SEED))
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()


SIZES = (
    Size("small", width=64, blocks=2, heads=4, context=64, batch_size=8, steps_per_turn=30),
    Size("tiny", width=128, blocks=4, heads=4, context=128, batch_size=8, steps_per_turn=8),  # conf/model/gpt_tiny.yaml
    Size("mini", width=256, blocks=8, heads=8, context=128, batch_size=8, steps_per_turn=2),  # conf/model/gpt_mini.yaml
    Size("trivial", width=8, blocks=2, heads=1, context=4, batch_size=4, steps_per_turn=50),  # all of it is overhead
)


class OrdinaryGPT(L.LightningModule):
    """The same model in one stage, as its steps are usually written."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        gpt = size.build()
        gpt.materialize(range(len(gpt.layers)), SEED)
        self.layers = nn.Sequential(*gpt.layers)

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        tokens, targets = batch  # (batch, sequence), int64
        loss = nn.functional.cross_entropy(self.layers(tokens).flatten(0, 1), targets.flatten())
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


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


# ---------------------------------------------------------------------- memory


@dataclass(frozen=True)
class Memory:
    """Of one worker at the end of its training; bytes.

    Args:
        state: parameters and optimizer state.
        own: not shared with any other process.
        peak: of the resident set, ever.
    """

    state: int
    own: int
    peak: int

    @classmethod
    def now(cls, parameters: Iterable[nn.Parameter], optimizer: torch.optim.Optimizer) -> Memory:
        """That of this process (Linux)."""
        kept = [value for state in optimizer.state.values() for value in state.values()]
        tensors = [*parameters, *(value for value in kept if isinstance(value, torch.Tensor))]
        return cls(
            sum(t.numel() * t.element_size() for t in tensors),
            _kilobytes("/proc/self/smaps_rollup", "Private_") * 1024,
            _kilobytes("/proc/self/status", "VmHWM") * 1024,
        )

    def save(self, gate: Gate, rank: int) -> None:
        """Leaves it where :meth:`load` finds it."""
        (Path(gate.directory) / f"{gate.side}.{rank}.json").write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, directory: str, side: str, workers: int) -> Memory:
        """The largest of each number among the workers of ``side``."""
        found = [json.loads((Path(directory) / f"{side}.{rank}.json").read_text()) for rank in range(workers)]
        return cls(**{name: max(memory[name] for memory in found) for name in found[0]})


def _kilobytes(path: str, prefix: str) -> int:
    lines = Path(path).read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(prefix))


# ---------------------------------------------------------------------- ours


class _WatchedGPT(GPT):
    """Logs the accuracy of each micro-batch: its hook makes the outputs travel to all workers."""

    def on_training_output(self, output: torch.Tensor, target: torch.Tensor) -> None:
        self.log("train_accuracy", (output.argmax(-1) == target).float().mean())


def run_strategy(plan: Plan, gate: Gate, watched: bool = False, **options: Any) -> float:
    """One fit with ``ReCycleStrategy(**options)``; returns the loss of its last step."""
    loader = DataLoader(TensorDataset(*plan.size.data(plan.steps)), batch_size=plan.size.batch_size)
    strategy = ReCycleStrategy(STAGES, MICROBATCHES, seed=SEED, **options)
    trainer = fit(
        plan.size.build(_WatchedGPT if watched else GPT),
        loader,
        strategy,
        devices=WORKERS,
        steps=plan.steps,
        callbacks=[Gatekeeper(plan, gate)],
    )
    return float(trainer.callback_metrics["train_loss"])


def run_ordinary(plan: Plan, gate: Gate, num_microbatches: int = 1) -> float:
    """One fit of an ordinary module in one stage; returns the loss of its last step."""
    batch_size = PIPELINES * plan.size.batch_size // WORKERS
    loader = DataLoader(TensorDataset(*plan.size.data(plan.steps)), batch_size=batch_size)
    strategy = ReCycleStrategy(num_microbatches=num_microbatches, seed=SEED)
    module = OrdinaryGPT(plan.size)
    trainer = fit(module, loader, strategy, devices=WORKERS, steps=plan.steps, callbacks=[Gatekeeper(plan, gate)])
    return float(trainer.callback_metrics["train_loss"])


def _rank(trainer: L.Trainer) -> int:
    """A number of this worker's own: under DDP its global rank."""
    return int(getattr(trainer.strategy, "grid_rank", trainer.global_rank))


class Gatekeeper(L.Callback):
    """Leads each worker through the gate."""

    def __init__(self, plan: Plan, gate: Gate) -> None:
        self.plan, self.gate = plan, gate
        self._step = -1

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        is_new, self._step = trainer.global_step != self._step, trainer.global_step  # a step may have several batches
        if is_new and self.plan.is_gate(trainer.global_step):
            self.gate.wait(_rank(trainer))

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        Memory.now(pl_module.parameters(), trainer.optimizers[0]).save(self.gate, _rank(trainer))
        self.gate.wait(_rank(trainer))


# ---------------------------------------------------------------------- the baseline


def run_baseline(plan: Plan, gate: Gate) -> float:
    """One run of the hand-written pipeline; returns the loss of its last step."""
    with tempfile.TemporaryDirectory() as directory:
        rendezvous = f"file://{directory}/rendezvous"
        return run_processes(_baseline_worker, [(rank, plan, gate, rendezvous) for rank in range(WORKERS)])


def run_processes(worker: Callable[..., None], arguments: Sequence[tuple[Any, ...]]) -> float:
    """Calls ``worker(*arguments, sender)`` in a process for each; returns the mean of the losses that they send."""
    context = multiprocessing.get_context("forkserver")
    receivers, processes = [], []
    for mine in arguments:
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=worker, args=(*mine, sender))
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
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=WORKERS)
    pipeline, stage = divmod(rank, STAGES)
    pipeline_groups = [dist.new_group([d * STAGES + s for s in range(STAGES)]) for d in range(PIPELINES)]
    stage_groups = [dist.new_group([d * STAGES + s for d in range(PIPELINES)]) for s in range(STAGES)]

    size, model = plan.size, plan.size.build()
    owned = even_parts(len(model.layers), STAGES)[stage]
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
    Memory.now(model.parameters(), optimizer).save(gate, rank)
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


# ---------------------------------------------------------------------- Lightning without us


def run_lightning(
    plan: Plan, gate: Gate, processes: int, threads: int = 1, build: Callable[[Size], L.LightningModule] = Size.build
) -> float:
    """One fit with Lightning's own strategies; returns the loss of its last step, the mean over all processes."""
    with socket.socket() as sock:  # free when the first process listens there, or all of them fail
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    arguments = [(rank, processes, port, plan, gate, threads, build) for rank in range(processes)]
    return run_processes(_lightning_worker, arguments)


def _lightning_worker(
    rank: int,
    processes: int,
    port: int,
    plan: Plan,
    gate: Gate,
    threads: int,
    build: Callable[[Size], L.LightningModule],
    sender: Any,
) -> None:
    quieten()
    torch.set_num_threads(threads)
    if processes > 1:  # as Lightning's launcher would set them, which starts the main script again
        os.environ.update(
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            WORLD_SIZE=str(processes),
            NODE_RANK="0",
            LOCAL_RANK=str(rank),
        )
    L.seed_everything(SEED, verbose=False)
    global_batch = PIPELINES * plan.size.batch_size
    data = TensorDataset(*plan.size.data(plan.steps))
    sampler = DistributedSampler(data, processes, rank, shuffle=False)  # Lightning's own would shuffle
    loader = DataLoader(data, batch_size=global_batch // processes, sampler=sampler)
    trainer = fit(
        build(plan.size),
        loader,
        "ddp" if processes > 1 else "auto",
        devices=processes,
        steps=plan.steps,
        callbacks=[Gatekeeper(plan, gate)],
    )
    sender.send(float(trainer.callback_metrics["train_loss"]))


# ---------------------------------------------------------------------- the comparison


@dataclass(frozen=True)
class Side:
    """One that takes turns.

    Args:
        run: trains with the plan and leads its workers through the gate; returns the loss of its last step.
        workers: the number of its processes.
    """

    run: Callable[[Plan, Gate], float]
    workers: int = WORKERS


@dataclass(frozen=True)
class Played:
    """What a side did in a round.

    Args:
        turns: its turns.
        loss: of its last step.
        memory: of its workers, the largest of each number.
    """

    turns: list[Turn]
    loss: float
    memory: Memory


CORES = len(os.sched_getaffinity(0))

_FUSED = PlanningOptions(split_backward=False)

SIDES: dict[str, Side] = {
    "baseline": Side(run_baseline),
    "ours, 1F1B": Side(lambda plan, gate: run_strategy(plan, gate, planning=_FUSED)),  # like for like
    "ours, default": Side(run_strategy),
}

ALTERNATIVES: dict[str, Side] = {
    **SIDES,
    "DDP": Side(lambda plan, gate: run_lightning(plan, gate, WORKERS)),
    "alone, 1 thread": Side(lambda plan, gate: run_lightning(plan, gate, 1), workers=1),
    f"alone, {CORES} threads": Side(lambda plan, gate: run_lightning(plan, gate, 1, CORES), workers=1),
}

ORDINARY: dict[str, Side] = {
    "DDP": Side(lambda plan, gate: run_lightning(plan, gate, WORKERS, build=OrdinaryGPT)),
    "ours": Side(run_ordinary),
    "ours, 2 micro-batches": Side(lambda plan, gate: run_ordinary(plan, gate, 2)),
}

_FEATURE_SIDES: dict[str, Side] = {
    "default": Side(run_strategy),
    "not staggered": Side(lambda plan, gate: run_strategy(plan, gate, planning=PlanningOptions(staggered=False))),
    "shadow on host": Side(lambda plan, gate: run_strategy(plan, gate, recovery=RecoveryOptions(shadow="host"))),
    "on_training_output": Side(lambda plan, gate: run_strategy(plan, gate, watched=True)),
    "split": Side(lambda plan, gate: run_strategy(plan, gate, planning=PlanningOptions(split_backward=True))),
    "fused": Side(lambda plan, gate: run_strategy(plan, gate, planning=_FUSED)),
}

COMPARISONS = ("alternatives", "ordinary", "features")

FEATURES: tuple[tuple[str, str, str, float | None], ...] = (
    ("staggered, shadow on the device", "default", "not staggered", GOAL),
    ("staggered, shadow on the host", "shadow on host", "not staggered", GOAL),
    ("on_training_output overridden", "on_training_output", "default", None),
    ("split backward", "split", "fused", None),
    ('split_backward="auto"', "default", "fused", None),
)
"""(feature, side with it, side without it, the most that the ratio of their seconds may be)."""


def play_round(plan: Plan, sides: Mapping[str, Side] = SIDES) -> dict[str, Played]:
    """Starts all sides and lets them take their turns."""
    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(len(sides)) as threads:
        running: dict[str, Future[float]] = {}

        def check() -> None:
            for future in running.values():
                if future.done():
                    future.result()

        turns = Turns(directory, {name: side.workers for name, side in sides.items()}, check)
        for name, side in sides.items():
            running[name] = threads.submit(side.run, plan, Gate(directory, name))
        try:
            played = turns.play(plan.turns)
            losses = {name: future.result() for name, future in running.items()}
        finally:
            turns.close()
        return {
            name: Played(played[name], losses[name], Memory.load(directory, name, side.workers))
            for name, side in sides.items()
        }


def _play(sides: Mapping[str, Side], plan: Plan, rounds: int) -> tuple[dict[str, list[Turn]], dict[str, Memory]]:
    """All turns of ``rounds`` rounds, and the memory in the last one."""
    turns: dict[str, list[Turn]] = {name: [] for name in sides}
    memory: dict[str, Memory] = {}
    for _ in range(rounds):
        for name, played in play_round(plan, sides).items():
            turns[name] += played.turns
            memory[name] = played.memory
    return turns, memory


def _play_apart(sides: Mapping[str, Side], plan: Plan, rounds: int) -> tuple[dict[str, list[Turn]], dict[str, Memory]]:
    """As :func:`_play`, but no two sides are alive at once, and all turns of a round are one."""
    turns: dict[str, list[Turn]] = {name: [] for name in sides}
    memory: dict[str, Memory] = {}
    for number in range(rounds):
        for name in sides if number % 2 == 0 else reversed(list(sides)):
            played = play_round(plan, {name: sides[name]})[name]
            turns[name].append(
                Turn(
                    statistics.fmean(turn.seconds for turn in played.turns),
                    statistics.fmean(turn.processor_seconds for turn in played.turns),
                )
            )
            memory[name] = played.memory
    return turns, memory


def shadow_seconds(size: Size, stage: int, on_host: bool, repeats: int = 50) -> float:
    """Median seconds of one ``Shadow.update`` of a stage, in this process with nothing beside it."""
    model = size.build()
    owned = even_parts(len(model.layers), STAGES)[stage]
    model.keep_layers(owned)
    model.materialize(owned, SEED)
    shadow = Shadow(list(model.parameters()), on_host)
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        shadow.update()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


# ---------------------------------------------------------------------- the tables


def _alternatives_table(
    sides: Mapping[str, Side], grid: str, sizes: Sequence[Size], options: argparse.Namespace, rounds: int
) -> Table:
    """The first of ``sides`` is what the ratios are relative to."""
    table = Table(title=f"Fault-free, {grid}; {rounds} x {options.turns} turns; medians (quartiles); MiB per worker")
    headings = ("GPT", "side", "steps/s", "ratio", "cpu ms/step", "ratio", "state", "own", "peak")
    for heading in headings:
        table.add_column(heading, justify="left" if heading in ("GPT", "side") else "right")
    for size in sizes:
        plan = Plan(size, options.turns, options.warmup)
        turns, memory = (_play_apart if options.apart else _play)(sides, plan, rounds)
        first, *_, last = sides
        for side, mine in turns.items():
            pairs = list(zip(mine, turns[first], strict=True))
            table.add_row(
                size.name if side == first else "",
                side,
                f"{statistics.median(size.steps_per_turn / turn.seconds for turn in mine):.2f}",
                ratio([base.seconds / turn.seconds for turn, base in pairs]),
                f"{statistics.median(1e3 * turn.processor_seconds / size.steps_per_turn for turn in mine):.1f}",
                ratio([turn.processor_seconds / base.processor_seconds for turn, base in pairs]),
                *(f"{value / 2**20:.1f}" for value in asdict(memory[side]).values()),
                end_section=side == last,
            )
    return table


def _features_table(size: Size, options: argparse.Namespace, rounds: int) -> Table:
    turns, memory = _play(_FEATURE_SIDES, Plan(size, options.turns, options.warmup), rounds)
    table = Table(title=f"What features cost, {size.name} GPT, fault-free; with against without, medians (quartiles)")
    for heading in ("feature", "step ms", "seconds, ratio", "processor, ratio", "own memory", "goal"):
        table.add_column(heading, justify="left" if heading in ("feature", "goal") else "right")
    for feature, side, other, goal in FEATURES:
        pairs = list(zip(turns[side], turns[other], strict=True))
        ratios = [mine.seconds / base.seconds for mine, base in pairs]
        table.add_row(
            feature,
            f"{statistics.median(1e3 * mine.seconds / size.steps_per_turn for mine, _ in pairs):.1f}",
            ratio(ratios),
            ratio([mine.processor_seconds / base.processor_seconds for mine, base in pairs]),
            f"{(memory[side].own - memory[other].own) / 2**20:+.1f} MiB",
            "" if goal is None else f"{goal}: {'met' if statistics.median(ratios) <= goal else 'missed'}",
        )
    step = statistics.median(turn.seconds / size.steps_per_turn for turn in turns["default"])
    for where, on_host in (("device", False), ("host", True)):
        seconds = max(shadow_seconds(size, stage, on_host) for stage in range(STAGES))
        table.add_row(f"Shadow.update alone, {where}", f"{1e3 * seconds:.2f}", f"{1 + seconds / step:.4f}", "", "", "")
    return table


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one model, one round of few turns")
    parser.add_argument("--rounds", type=int, default=2, help="fresh processes per model")
    parser.add_argument("--turns", type=int, default=12, help="of each side per round")
    parser.add_argument("--warmup", type=int, default=10, help="steps at the start of a round that do not count")
    parser.add_argument("--sizes", nargs="*", default=[size.name for size in SIZES], help="which models")
    parser.add_argument("--only", choices=COMPARISONS, help="one of the comparisons")
    parser.add_argument("--apart", action="store_true", help="five runs of each side, never two at once")
    options = parser.parse_args(arguments)
    if options.apart:
        options.quick, options.only, options.rounds = False, "alternatives", 5
        options.sizes, options.warmup = [SIZES[0].name], 40
    began = time.monotonic()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    sizes = [size for size in SIZES if size.name in options.sizes][: 1 if options.quick else None]
    rounds = options.rounds
    if options.quick:
        rounds, options.turns = 1, min(options.turns, 5)

    wanted = [options.only] if options.only else COMPARISONS
    if "alternatives" in wanted:
        grid = f"{PIPELINES} x {STAGES} workers, {MICROBATCHES} micro-batches"
        console.print(_alternatives_table(SIDES if options.apart else ALTERNATIVES, grid, sizes, options, rounds))
    if "ordinary" in wanted:
        console.print(_alternatives_table(ORDINARY, f"{WORKERS} workers of one stage", sizes, options, rounds))
    if "features" in wanted:
        console.print(_features_table(SIZES[0] if options.quick else SIZES[1], options, rounds))
    console.print(f"{time.monotonic() - began:.0f} s. {describe_machine()}", highlight=False)


def ratio(ratios: list[float]) -> str:
    """Median and quartiles."""
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.3f} ({low:.2f}-{high:.2f})"


if __name__ == "__main__":
    main()
