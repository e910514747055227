"""What the survivor of a failure holds, measured in its process, against the limit that its plans keep to.

    .venv/bin/python benchmarks/memory.py            # two grids, two models: some minutes
    .venv/bin/python benchmarks/memory.py --quick    # the first of each
    .venv/bin/python benchmarks/memory.py --survivors  # without a limit: before and after the failure, in five grids
    .venv/bin/python benchmarks/memory.py --members    # positions of 1, 2 and 4 processes, without failures

For each grid and model a worker of the first stage is killed, whose micro-batches its peers take over, in three runs:
with all the memory of the machine; with a limit that leaves its peers room for 1.6 micro-batches, and forwards that are
never computed again; with the same limit, and forwards that are computed again where that helps. Of the newest plan and
its steps the table shows

- *room*: the limit without what a worker holds between steps, and what the plan uses of it at most (*planned*);
- *saved*: the most bytes that autograd held at a time, each storage once, counted in the workers as they are saved and
  freed;
- *resident*: the highest resident memory of a worker within a step, less the one at its begin. It also has what an
  operation needs only while it runs, and what W needs of a split backward;
- the plan's period in slots, if all operations take one (the run is told so), and the number of forwards that are
  computed again.

With ``--survivors`` the table compares *saved* with what the plan holds (goal: at most 1.1 of it) and with the same
worker before the failure (goal: at most 1.15).

With ``--members`` a pipeline of two stages trains layers that are made on the meta device and divided by FSDP2. Of the
process that holds most the table shows parameters, gradients, state of the optimizer and shadow together, and its
highest resident memory; and the latter of the launching process. Goals: at most 0.55 and 0.30 of what one process
holds, and 500 MB.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import weakref
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import lightning as L
import torch
from harness import console, describe_machine, fit
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from lightning_recycle import CheckpointOptions, MonitoringOptions, PipelineModule, PlanningOptions, ReCycleStrategy
from lightning_recycle.callbacks import Fault, FaultInjectionCallback
from lightning_recycle.planning import Costs, Grid, OpKind, Schedule, retime
from lightning_recycle.planning.costs import Profile, StageProfile, save_profile
from lightning_recycle.tensor_memory import local_part

GRIDS = (Grid(2, 3, 4), Grid(2, 4, 4))
SURVIVORS = (
    (Grid(2, 2, 8), False),
    (Grid(2, 2, 8), True),
    (Grid(3, 2, 6), True),
    (Grid(2, 4, 8), True),
    (Grid(3, 4, 6), True),
)
KILLED, STEPS = 5, 9
ROOM = 1.6  # micro-batches
SLOT = 0.01  # seconds
SAMPLES = 8  # of a micro-batch


class Spread(nn.Module):
    """Makes a sequence of a vector: the data itself is to take no memory worth mentioning."""

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.randn(length, width))

    def forward(self, x: Tensor) -> Tensor:
        return x[:, None] + self.places


class Dense(PipelineModule):
    """Linear layers and activation functions on long sequences."""

    length, width = 256, 256

    def configure_pipeline(self) -> list[Any]:
        torch.manual_seed(0)
        pairs = [layer for _ in range(12) for layer in (nn.Linear(self.width, self.width), nn.Tanh())]
        return [nn.Sequential(Spread(self.length, self.width), pairs[0]), *pairs[1:]]

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return (output.mean(1) - target).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


class Attention(Dense):
    """Transformer layers with dropout."""

    length, width = 128, 64

    def configure_pipeline(self) -> list[Any]:
        torch.manual_seed(0)
        made = [nn.TransformerEncoderLayer(self.width, 4, 4 * self.width, 0.1, batch_first=True) for _ in range(8)]
        return [nn.Sequential(Spread(self.length, self.width), made[0]), *made[1:]]


MODELS: dict[str, type[Dense]] = {"dense": Dense, "attention": Attention}


class _Held:
    """A tensor that autograd saved; counted while it lives."""

    now = peak = 0
    _uses: ClassVar[Counter[int]] = Counter()  # by storage

    def __init__(self, tensor: Tensor, own: frozenset[int]) -> None:
        self.tensor = tensor.detach()
        storage = tensor.untyped_storage()
        place, size = storage.data_ptr(), storage.nbytes()
        if place not in own:
            if not _Held._uses[place]:
                _Held.now += size
                _Held.peak = max(_Held.peak, _Held.now)
            _Held._uses[place] += 1
            weakref.finalize(self, _Held._gone, place, size)

    @staticmethod
    def _gone(place: int, size: int) -> None:
        _Held._uses[place] -= 1
        if not _Held._uses[place]:
            _Held.now -= size


def _resident(name: str) -> int:
    """Bytes of this process: VmRSS, now; VmHWM, at most since it was reset (Linux)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise RuntimeError(f"/proc/self/status has no {name}")


class _Peaks(L.Callback):
    """Writes down the most that this worker held in its newest steps."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.steps: dict[int, tuple[int, int]] = {}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        own = frozenset(p.untyped_storage().data_ptr() for p in pl_module.parameters())
        # Until the process ends: whatever is saved while nobody else looks at it is counted.
        torch.autograd.graph.saved_tensors_hooks(lambda t: _Held(t, own), lambda held: held.tensor).__enter__()
        executor = trainer.strategy.session.executor
        executor.before_operation.append(self._before)
        executor.after_operation.append(self._after)
        self.stage, self.began = executor.worker.stage, False

    def _before(self, step: int, op: Any) -> None:
        if not self.began:
            Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
            self.began, self.base, _Held.peak = True, _resident("VmRSS"), _Held.now

    def _after(self, step: int, op: Any) -> None:
        if op.kind is OpKind.REDUCE:
            self.began = False
            self.steps[step] = (_Held.peak, _resident("VmHWM") - self.base)
            (self.folder / f"{os.getpid()}-{self.stage}.json").write_text(json.dumps(self.steps))


@dataclass(frozen=True)
class Found:
    """One run; bytes of the workers of the first stage, after the failure and the step in which its buffers grow."""

    room: float
    planned: float
    saved: int
    resident: int
    period: float
    recomputed: int
    schedule: Schedule
    before: int


def measure(grid: Grid, kind: type[Dense], **planning: Any) -> Found:
    """Trains with a failure in the first stage."""
    model = kind()
    count = grid.global_microbatches * SAMPLES
    data = TensorDataset(torch.randn(count, kind.width), torch.randn(count, kind.width))
    loader = DataLoader(data, batch_size=grid.microbatches * SAMPLES)
    with tempfile.TemporaryDirectory() as folder:
        equal = StageProfile(SLOT, SLOT, SLOT, 0.0, 0.0, 0, 0)
        save_profile(f"{folder}/profile", Profile((equal,) * grid.stages, latency=0.0, bandwidth=0.0, steps=1))
        strategy = ReCycleStrategy(
            grid.stages,
            grid.microbatches,
            planning=PlanningOptions(profile=f"{folder}/profile", **planning),
            monitoring=MonitoringOptions(run_summary=False),
        )
        trainer = fit(
            model,
            loader,
            strategy,
            devices=grid.num_workers,
            steps=STEPS,
            callbacks=[FaultInjectionCallback([Fault("kill", 1, 0, step=KILLED)]), _Peaks(folder)],
        )
        written = [json.loads(path.read_text()) for path in Path(folder).glob("*-0.json")]
    after = [tuple(peaks) for steps in written for step, peaks in steps.items() if int(step) > KILLED + 1]
    schedule = trainer.strategy.schedules[-1]
    memory = schedule.problem.memory
    assert memory is not None, "the workers have measured it"
    live = schedule.problem.live_workers(0)
    return Found(
        memory.room(0),
        max(schedule.peak_memory(worker) for worker in live) - memory.fixed[0],
        max(saved for saved, _ in after),
        max(resident for _, resident in after),
        retime(schedule, Costs.uniform(grid.stages)).period,
        sum(len(schedule.recomputed(worker)) for worker in schedule.live_workers),
        schedule,
        max(peaks[0] for steps in written for step, peaks in steps.items() if 1 < int(step) < KILLED),
    )


class Sharded(Dense):
    """Linear layers, made on the meta device where several processes hold a position."""

    width, layers_made = 1024, 16

    def configure_pipeline(self) -> list[Any]:
        with torch.device("meta" if self.trainer.strategy.options.members > 1 else "cpu"):
            return [nn.Sequential(nn.Linear(self.width, self.width), nn.Tanh()) for _ in range(self.layers_made)]

    def configure_model(self) -> None:
        super().configure_model()
        if self.trainer.strategy.options.members > 1:
            for layer in self.layers:
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


class _Shares(L.Callback):
    """Writes down what this worker holds between steps, and its highest resident memory."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        runner = trainer.strategy.session.executor.runner
        states = [t for state in trainer.optimizers[0].state.values() for t in state.values() if t.numel() > 1]
        parts = [local_part(tensor) for tensor in (*runner._layer_tensors(), *states)]
        held = sum({part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in parts}.values())
        (self.folder / f"{os.getpid()}.json").write_text(json.dumps((held, _resident("VmHWM"))))


def members() -> Table:
    """What the processes of a position hold, in MB."""
    table = Table(title="16 layers of 1,024 x 1,024 in two stages, MB", title_justify="left")
    for column in ("processes of a position", "held", "of one process", "resident", "launching process"):
        table.add_column(column, justify="right")
    found: dict[int, list[float]] = {}
    for count in (4, 2, 1):  # the launching process keeps what it has had, and has the layers of the last run only
        model = Sharded()
        data = TensorDataset(torch.randn(64, model.width), torch.randn(64, model.width))
        with tempfile.TemporaryDirectory() as folder:
            options: Any = {"checkpoints": CheckpointOptions(gather_result=False)}
            strategy = ReCycleStrategy(
                2, 2, fsdp_size=count, monitoring=MonitoringOptions(run_summary=False), **options
            )
            loader, callbacks = DataLoader(data, batch_size=4), [_Shares(folder)]
            fit(model, loader, strategy, devices=2 * count, steps=2, callbacks=callbacks)
            written = [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]
        held, resident = map(max, zip(*written, strict=True))
        found[count] = [size / 2**20 for size in (held, resident, _resident("VmHWM"))]
    for count, (held, resident, launching) in sorted(found.items()):
        ratio = f"{held / found[1][0]:.2f}"
        table.add_row(str(count), f"{held:,.1f}", ratio, f"{resident:,.1f}", f"{launching:,.1f}")
    return table


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="only the first grid and model")
    parser.add_argument("--survivors", action="store_true", help="the survivors before and after, without a limit")
    parser.add_argument("--members", action="store_true", help="positions of several processes")
    options = parser.parse_args()
    quick = options.quick
    # Freed blocks go back to the system at once, so that resident memory is what is held.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = os.environ["MALLOC_TRIM_THRESHOLD_"] = str(64 << 10)
    console.print(describe_machine())
    if options.members:
        console.print(members())
        return
    if options.survivors:
        console.print(survivors())
        return
    for grid in GRIDS[:1] if quick else GRIDS:
        for name in list(MODELS)[:1] if quick else MODELS:
            console.print(compared(grid, name))


def survivors() -> Table:
    """What workers of the first stage hold in MB, where memory is not short."""
    table = Table(title="dense: workers of the first stage, MB", title_justify="left")
    for column in ("grid", "backward", "micro-batch", "before", "planned", "after", "of planned", "of before"):
        table.add_column(column, justify="right")
    for grid, split in SURVIVORS:
        found = measure(grid, Dense, split_backward=split)
        memory = found.schedule.problem.memory
        assert memory is not None
        sizes = (memory.after_forward[0], found.before, found.planned, found.saved)
        ratios = (found.saved / found.planned, found.saved / found.before)
        cells = [f"{size / 2**20:,.1f}" for size in sizes] + [f"{ratio:.2f}" for ratio in ratios]
        table.add_row(str(grid), "split" if split else "fused", *cells)
    return table


def compared(grid: Grid, name: str) -> Table:
    """The three runs of a model on a grid."""
    table = Table(title=f"{name}, {grid}: survivors of the first stage, MB", title_justify="left")
    for column in ("run", "room", "planned", "saved", "resident", "period", "again"):
        table.add_column(column, justify="left" if column == "run" else "right")
    free = measure(grid, MODELS[name])
    memory = free.schedule.problem.memory
    assert memory is not None
    one = max(fixed + 1.01 * held for fixed, held in zip(memory.fixed, memory.after_forward, strict=True))
    limit = int(max(one, memory.fixed[0] + ROOM * memory.after_forward[0]))  # every stage has room for one
    runs = {"no limit": free}
    for choice in ("never", "auto"):
        runs[choice] = measure(grid, MODELS[name], memory=limit, activation_checkpointing=choice)
    for run, found in runs.items():
        sizes = (found.room, found.planned, found.saved, found.resident)
        table.add_row(run, *(f"{size / 2**20:,.1f}" for size in sizes), f"{found.period:g}", str(found.recomputed))
    return table


if __name__ == "__main__":
    main()
