"""torch.compile: how long the first step takes, with an empty and with a filled cache of the compiler.

    python benchmarks/compile_times.py                     # some minutes on two cores
    python benchmarks/compile_times.py --only layers

Each row is a process of its own with the default compiler. A case runs three times: without torch.compile, with an
empty cache on disk, and with what that run left there. Plain Lightning trains on one device; "module" is an ordinary
LightningModule on two workers, "layers" a PipelineModule on 2 x 2 workers; each of their blocks is compiled. In the
last case a worker is killed and replaced: its first step is that of the replacement.

*First step* is the time from its start to its end on the slowest worker, with the wait for all others; *compiled* is
the number of graphs that the workers found in no cache, and *found* of those that were there.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from harness import console, describe_machine, quieten
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_recycle import PipelineModule, RecoveryOptions, ReCycleStrategy
from lightning_recycle.callbacks import Fault, FaultInjectionCallback

WIDTH, BLOCKS, BATCH, STEPS = 256, 2, 16, 4
CASES = ("one device", "module", "layers", "replaced")
WORKERS = {"one device": 1, "module": 2, "layers": 4, "replaced": 4}


class Block(nn.Module):
    """The feed-forward half of a transformer's block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x)), approximate="tanh"))


def _blocks(compiled: bool) -> list[Any]:
    blocks = [Block() for _ in range(BLOCKS)]
    return [torch.compile(block) for block in blocks] if compiled else blocks


class Layers(PipelineModule):
    """Compiled layers."""

    def __init__(self, compiled: bool) -> None:
        super().__init__()
        self.compiled = compiled

    def configure_pipeline(self) -> list[Any]:
        return _blocks(self.compiled)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(output, target)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Module(L.LightningModule):
    """An ordinary module with compiled blocks."""

    def __init__(self, compiled: bool) -> None:
        super().__init__()
        self.net = nn.Sequential(*_blocks(compiled))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Clock(L.Callback):
    """Writes what the first step of this process took, and what its compiler did, to a file of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.steps = 0

    def on_train_batch_start(self, *_: Any) -> None:
        self.begun = time.perf_counter()

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.steps += 1
        if self.steps > 1:
            return
        from torch._dynamo.utils import counters

        inductor = counters["inductor"]
        incarnation = getattr(trainer.strategy, "incarnation", 0)
        found = {
            "seconds": time.perf_counter() - self.begun,
            "compiled": inductor["fxgraph_cache_miss"],
            "found": inductor["fxgraph_cache_hit"],
            "replacement": incarnation > 0,
        }
        (self.folder / f"{os.getpid()}.json").write_text(json.dumps(found))


def run(case: str, compiled: bool, folder: Path) -> None:
    """One training, in this process and its workers."""
    quieten()
    workers = WORKERS[case]
    strategy: Any = "auto"
    if workers > 1:
        stages = 1 if case == "module" else 2
        recovery = RecoveryOptions(max_restarts=int(case == "replaced"))
        strategy = ReCycleStrategy(stages, 2 // stages, recovery=recovery)
    x = torch.randn(BATCH * 400, WIDTH, generator=torch.Generator().manual_seed(0))
    steps = 300 if case == "replaced" else STEPS
    trainer = L.Trainer(
        accelerator="cpu",
        devices=workers,
        strategy=strategy,
        max_steps=steps,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[
            Clock(folder),
            *([FaultInjectionCallback([Fault("kill", 1, 0, 2)])] if case == "replaced" else []),
        ],
    )
    torch.manual_seed(0)
    trainer.fit(
        (Module if case in ("one device", "module") else Layers)(compiled), DataLoader(TensorDataset(x, x), BATCH)
    )


def measure(case: str, compiled: bool, cache: Path) -> dict[str, float]:
    """What a run in a process of its own took."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--run", case, folder, *(["--compiled"] if compiled else [])]
        variables = {"TORCHINDUCTOR_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        begun = time.perf_counter()
        subprocess.run(command, env={**os.environ, **variables}, check=True, stdout=subprocess.DEVNULL)
        total = time.perf_counter() - begun
        told = [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]
    if case == "replaced":
        told = [one for one in told if one["replacement"]]
    return {
        "total": total,
        "seconds": max((one["seconds"] for one in told), default=float("nan")),
        "compiled": sum(one["compiled"] for one in told),
        "found": sum(one["found"] for one in told),
    }


def main(arguments: list[str] | None = None) -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--run", nargs=2, metavar=("CASE", "FOLDER"), help=argparse.SUPPRESS)
    parser.add_argument("--compiled", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.run:
        run(options.run[0], options.compiled, Path(options.run[1]))
        return
    table = Table(
        "case", "workers", "torch.compile", "first step, s", "graphs compiled", "found in the cache", "run, s"
    )
    for case in options.only:
        with tempfile.TemporaryDirectory() as cache:
            for kind in ("none", "empty cache", "filled cache"):
                if case == "replaced" and kind == "filled cache":
                    continue  # when it comes, the others have filled it
                found = measure(case, kind != "none", Path(cache))
                cells = [f"{found['seconds']:.2f}", f"{found['compiled']:.0f}", f"{found['found']:.0f}"]
                table.add_row(case, str(WORKERS[case]), kind, *cells, f"{found['total']:.1f}")
                console.print(f"{case}, {kind}: {found}", highlight=False)
    console.print(table)
    console.print(describe_machine())


if __name__ == "__main__":
    main()
