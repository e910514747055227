"""What buckets hide of the reduction of the gradients: the time of a step with one bucket and with several.

    .venv/bin/python benchmarks/reduction.py            # about ten minutes
    .venv/bin/python benchmarks/reduction.py --quick    # one stage alone, fewer steps

Stages of eight layers with 8 MiB of gradients each, whose F, B and W sleep, so that a few cores carry all workers.
Their connections are paced by the kernel (SO_MAX_PACING_RATE) to what a network of 0.5 Gbit/s carries, so a reduction
takes about as long as a W. With one stage the backward is fused and autograd says which gradients are complete; with
two the last stage has a W of its own.

*REDUCE* is what a worker waits for after its last backward, on the worker of the last stage that waits least; what is
hidden is the part of it that several buckets save. *planned* is that of the planner's model, from the REDUCE of one
bucket; it counts on W alone, while in a fused backward B hides some of it too.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from harness import Spread, console, describe_machine, fit, step_seconds
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_recycle import CommunicationOptions, LayerSpec, PipelineModule, ReCycleStrategy, defer_weight_grad

LAYERS = 8  # of a stage
NUMBERS = 2 * 2**20  # of a layer's parameter, 4 bytes each
LAYER_SECONDS = 0.12  # of its F, its B and its W
PIPELINES, MICROBATCHES = 2, 2
BYTES_PER_SECOND = 64 * 2**20
CAPS = (1000.0, 25.0, 8.0)  # MiB: one bucket, the default, one for each layer
_SO_MAX_PACING_RATE = 47  # Linux; the socket module has no name for it


class _Sleeping(torch.autograd.Function):
    """x; its forward, input gradient and weight gradient sleep."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter, seconds: float) -> Tensor:
        ctx.weight, ctx.seconds = weight, seconds
        time.sleep(seconds)
        return x + weight[0]

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor | None, None]:
        (grad_output,) = grad_outputs
        weight, seconds = ctx.weight, ctx.seconds

        def weight_gradient() -> Tensor:
            time.sleep(seconds)
            return grad_output.sum().expand_as(weight)

        time.sleep(seconds)
        return grad_output, defer_weight_grad(weight, weight_gradient), None


class _Layer(nn.Module):
    def __init__(self, numbers: int, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.zeros(numbers))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = _Sleeping.apply(x, self.weight, self.seconds)
        return output


class _Model(PipelineModule):
    def __init__(self, layers: int, numbers: int, seconds: float) -> None:
        super().__init__()
        self.sizes = layers, numbers, seconds

    def configure_pipeline(self) -> list[LayerSpec]:
        layers, numbers, seconds = self.sizes
        return [LayerSpec(_Layer, numbers, seconds) for _ in range(layers)]

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-12)


class _Recorder(L.Callback):
    """Paces this worker's connections, and writes what its REDUCE and its processor took in each step."""

    def __init__(self, directory: str, rate: int) -> None:
        self.directory, self.rate = Path(directory), rate
        self.reduce: list[float] = []
        self.processor: list[float] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        executor = trainer.strategy.executor
        started = 0.0

        def before(step: int, op: Any) -> None:
            nonlocal started
            started = time.perf_counter()

        def after(step: int, op: Any) -> None:
            if op.kind.value == "REDUCE":
                self.reduce.append(time.perf_counter() - started)

        executor.before_operation.append(before)
        executor.after_operation.append(after)

    def on_train_batch_start(self, *_: Any) -> None:
        self.processor.append(time.process_time())
        for name in os.listdir("/proc/self/fd"):
            try:
                copy = socket.socket(fileno=os.dup(int(name)))
            except OSError:  # no socket, or closed by now
                continue
            with copy:
                if copy.family == socket.AF_INET and copy.type == socket.SOCK_STREAM:
                    copy.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, self.rate)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.processor.append(time.process_time())
        seconds = [after - before for before, after in zip(self.processor, self.processor[1:], strict=False)]
        worker = trainer.strategy.worker
        (self.directory / f"{worker.pipeline} {worker.stage}").write_text(json.dumps([self.reduce, seconds]))


@dataclass(frozen=True)
class Measurement:
    """A run with buckets of ``cap`` MiB: seconds of its steps, of the REDUCE of its last stage, and of the processor in
    a step of one worker (medians).
    """

    cap: float
    buckets: int
    steps: Spread
    reduce: float
    processor: float


def measure(
    cap: float, stages: int, steps: int, *, numbers: int = NUMBERS, seconds: float = LAYER_SECONDS, warmup: int = 2
) -> Measurement:
    """Trains for ``steps`` steps after ``warmup`` ones."""
    data = TensorDataset(torch.zeros((steps + warmup) * PIPELINES * MICROBATCHES, 1), torch.ones(1, 1).expand(
        (steps + warmup) * PIPELINES * MICROBATCHES, 1))  # fmt: skip
    with tempfile.TemporaryDirectory() as directory:
        trainer = fit(
            _Model(LAYERS * stages, numbers, seconds),
            DataLoader(data, batch_size=MICROBATCHES),
            ReCycleStrategy(stages, MICROBATCHES, communication=CommunicationOptions(bucket_cap_mb=cap)),
            devices=PIPELINES * stages,
            steps=steps + warmup,
            callbacks=[_Recorder(directory, BYTES_PER_SECOND)],
        )
        found = {path.name: json.loads(path.read_text()) for path in Path(directory).iterdir()}
    last = [reduce[warmup:] for name, (reduce, _) in found.items() if name.endswith(f" {stages - 1}")]
    per_bucket = max(1, int(cap * 2**20 // (4 * numbers)))
    return Measurement(
        cap,
        -(-LAYERS // per_bucket),
        Spread.of(step_seconds(trainer, warmup)),
        statistics.median(min(of_step) for of_step in zip(*last, strict=True)),
        statistics.median(value for _, values in found.values() for value in values[warmup:]),
    )


def _report(stages: int, steps: int) -> None:
    table = Table(title=f"{PIPELINES} x {stages} workers, {LAYERS * NUMBERS * 4 >> 20} MiB of gradients each")
    for name in ("bucket_cap_mb", "buckets", "step ms", "REDUCE ms", "planned ms", "hidden", "processor ms"):
        table.add_column(name, justify="right")
    whole: float | None = None
    for cap in CAPS:
        found = measure(cap, stages, steps)
        whole = found.reduce if whole is None else whole
        # The last W completes buckets at equal distances, which are summed one after the other.
        share = 1 / found.buckets
        planned = max(whole * share, whole - LAYERS * LAYER_SECONDS * (1 - share))
        table.add_row(
            f"{cap:g}",
            f"{found.buckets}",
            found.steps.milliseconds(0),
            f"{1e3 * found.reduce:.0f}",
            f"{1e3 * planned:.0f}",
            f"{1 - found.reduce / whole:.0%}",
            f"{1e3 * found.processor:.0f}",
        )
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one stage alone, fewer steps")
    quick = parser.parse_args().quick
    console.print(describe_machine())
    for stages in (1,) if quick else (1, 2):
        _report(stages, 4 if quick else 10)


if __name__ == "__main__":
    main()
