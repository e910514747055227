"""What the end of a run takes: memory of the launching process or coordinator, and of the workers, and seconds.

    python benchmarks/result_memory.py             # 200 MB of weights, with Adam 600 MB, on 2 x 2 workers
    python benchmarks/result_memory.py --megabytes 800

Each way in which a result comes home is a run of one step in processes of its own: in messages, in files, or not at
all; with workers of the launching process, and with workers that are started by hand and a ``recycle-coordinator``.
The figures are peaks of resident memory (VmHWM; pages of a mapped file count) over the whole run, so the row "stays" is
what training takes.
"""

from __future__ import annotations

import argparse
import os
import re
import secrets
import socket
import subprocess
import sys
import time
from pathlib import Path

_WIDTH = 1000


def peak(pid: int | str = "self") -> float:
    """Peak of the resident memory of a process, in MB."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) / 1e3


def train(megabytes: int, way: str) -> None:
    """The script of a run, in the launching process and in workers that are started by hand."""
    import lightning as L
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    from lightning_recycle import CheckpointOptions, LayerSpec, MonitoringOptions, PipelineModule, ReCycleStrategy
    from lightning_recycle.launch import run_preparation

    run_preparation.FILE_BYTES = 0 if way == "files" else 1 << 60

    class Large(PipelineModule):
        def configure_pipeline(self) -> list[LayerSpec]:
            count = 2 * round(megabytes * 1e6 / (2 * 4 * _WIDTH**2))
            return [LayerSpec(nn.Linear, _WIDTH, _WIDTH, bias=False) for _ in range(count)]

        def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return nn.functional.mse_loss(output, target)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters())

    inputs = torch.randn(4, _WIDTH)
    strategy = ReCycleStrategy(
        pipeline_parallel_size=2,
        num_microbatches=1,
        checkpoints=CheckpointOptions(gather_result=way != "stays"),
        monitoring=MonitoringOptions(run_summary=False),
    )
    trainer = L.Trainer(
        accelerator="cpu", devices=4, strategy=strategy, max_steps=1, logger=False, barebones=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    began = time.monotonic()
    trainer.fit(Large(), DataLoader(TensorDataset(inputs, inputs), batch_size=2))
    print(f"peak {peak():.0f} {time.monotonic() - began:.1f}", flush=True)


def in_children(way: str, megabytes: int) -> tuple[float, float, float]:
    """Peaks of the launching process and of the largest worker, and seconds; workers of the launching process."""
    command = [sys.executable, __file__, "--train", way, "--megabytes", str(megabytes)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        workers: dict[int, float] = {}
        while process.poll() is None:
            for child in _descendants(process.pid):
                try:
                    workers[child] = max(workers.get(child, 0.0), peak(child))
                except (OSError, AssertionError):  # it has just ended
                    continue
            time.sleep(0.05)
        assert process.stdout is not None
        own, seconds = _told(process.stdout.read())
    return own, max(workers.values()), seconds


def by_hand(way: str, megabytes: int) -> tuple[float, float, float]:
    """The same, of the coordinator; workers that are started by hand."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    environment = {**os.environ, "RECYCLE_KEY": secrets.token_hex(16), "RECYCLE_COORDINATOR": address}
    serve = ["-m", "lightning_recycle.control.coordinator.standalone", "--listen", address, "--runs", "1"]
    grid = ["--pipelines", "2", "--stages", "2", "--microbatches", "1"]
    with subprocess.Popen(
        [sys.executable, *serve, *grid], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as coordinator:
        command = [sys.executable, __file__, "--train", way, "--megabytes", str(megabytes)]
        workers = [
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            for _ in range(4)
        ]
        highest = 0.0
        while coordinator.poll() is None:
            try:
                highest = max(highest, peak(coordinator.pid))
            except (OSError, AssertionError):
                break
            time.sleep(0.05)
        told = [_told(worker.communicate()[0]) for worker in workers]
    return highest, max(memory for memory, _ in told), max(seconds for _, seconds in told)


def _told(output: str) -> tuple[float, float]:
    found = re.search(r"^peak (\d+) ([\d.]+)$", output, re.MULTILINE)
    assert found is not None, output
    return float(found[1]), float(found[2])


def _descendants(pid: int) -> list[int]:
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, path.read_text().split()):
            found += [child, *_descendants(child)]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=200, help="of weights; Adam has twice as many")
    parser.add_argument("--train", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(options.megabytes, options.train)
        return
    print(f"{options.megabytes} MB of weights, with Adam {3 * options.megabytes} MB; peaks of resident memory in MB")
    print(f"{'workers':>16}{'result':>10}{'launching process or coordinator':>36}{'worker':>10}{'s':>8}")
    for name, run, ways in (
        ("of one process", in_children, ("messages", "files", "stays")),
        ("by hand", by_hand, ("messages", "stays")),
    ):
        for way in ways:
            own, worker, seconds = run(way, options.megabytes)
            print(f"{name:>16}{way:>10}{own:>36.0f}{worker:>10.0f}{seconds:>8.1f}", flush=True)


if __name__ == "__main__":
    main()
