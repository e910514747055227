"""Spot instances come and go as in a trace of EC2, and the losses stay those of one device: about two minutes.

    python examples/spot.py                                   # writes spot.svg
    python examples/spot.py --trace aws-p3 --hours 11 --minutes 3

Two workers stay, as on machines on demand; they hold one pipeline. An instance is a process that runs this script with
the address of the run. Most instances leave at a step boundary after SIGTERM, every third vanishes (SIGKILL). While an
instance boots the trace stands still. Each layer sleeps like an accelerator that computes, as cores are few.
"""

import argparse
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_recycle import Event, PipelineModule, RecoveryOptions, ReCycleStrategy
from lightning_recycle.traces import available_traces, load_trace

PIPELINES, STAGES, MICROBATCHES, STAYING = 4, 2, 4, 2
BATCH, KILLED = 64, 3  # samples of a step; of so many departures one comes without notice


class Block(nn.Module):
    """A layer on an accelerator that takes ``seconds`` for a micro-batch."""

    def __init__(self, features: tuple[int, int], seconds: float) -> None:
        super().__init__()
        self.linear, self.seconds = nn.Linear(*features), seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        return torch.tanh(self.linear(x))


class Sine(PipelineModule):
    """Learns sin(3x), (batch, 1) -> (batch, 1), float64."""

    def __init__(self, seconds: float = 0.04) -> None:
        super().__init__()
        self.seconds, self.end = seconds, os.environ.get("SPOT_END", "")
        self.losses: list[float] = []

    def configure_pipeline(self) -> list[nn.Module]:
        torch.manual_seed(0)
        return [Block((1, 64), self.seconds).double(), Block((64, 1), self.seconds).double()]

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output - target).square().mean()

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        if self.trainer.world_size == 1:
            self.losses.append(float(outputs["loss"]))
        self.trainer.should_stop = os.path.exists(self.end)  # any worker that sees it stops all at the same step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=3e-3)


def fit(model: Sine, pipelines: int, **arguments: Any) -> L.Trainer:
    """Trains ``model``; a step has the batches of ``pipelines`` DataLoaders, 64 samples in all."""
    x = torch.rand(4096, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 4 - 2
    data = DataLoader(TensorDataset(x, (3 * x).sin()), batch_size=BATCH // pipelines)
    names = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    quiet: dict[str, Any] = dict.fromkeys(names, False)
    trainer = L.Trainer(accelerator="cpu", max_epochs=-1, **quiet, **arguments)
    trainer.fit(model, data)
    return trainer


def elastic() -> list[Event]:
    """The run, in the launching process and in all instances; returns what happened."""
    recovery = RecoveryOptions(num_pipelines=PIPELINES, min_pipelines=1, max_pipelines=2 * PIPELINES)
    strategy = ReCycleStrategy(STAGES, MICROBATCHES, recovery=recovery)
    fit(Sine(), PIPELINES, devices=STAYING, strategy=strategy)
    return strategy.history


def replay(changes: list[tuple[float, int]], live: list[int], wanted: list[tuple[float, int]]) -> None:
    """Starts and ends instances until the trace is over.

    Args:
        changes: pauses in seconds, each with the number of instances that there are then.
        live: the number of live workers, the newest last.
        wanted: becomes the times, each with the number of workers from then on.
    """
    instances: list[subprocess.Popen[bytes]] = []
    ended: list[subprocess.Popen[bytes]] = []
    environment = {**os.environ, "RECYCLE_COORDINATOR": os.environ["RECYCLE_LISTEN"], "OMP_NUM_THREADS": "1"}
    del environment["RECYCLE_LISTEN"]
    for pause, count in changes:
        time.sleep(pause)
        wanted.append((time.time(), STAYING + count))
        while len(instances) > count:
            ended.append(instances.pop(0))
            ended[-1].send_signal(signal.SIGTERM if len(ended) % KILLED else signal.SIGKILL)
        while len(instances) < count:
            instances.append(subprocess.Popen([sys.executable, __file__], env=environment))
        while live[-1] != STAYING + count and all(instance.poll() is None for instance in instances):
            time.sleep(0.02)
    Path(os.environ["SPOT_END"]).touch()
    for instance in ended + instances:
        instance.wait()


def draw(history: list[Event], wanted: list[tuple[float, int]], path: str) -> None:
    """Live workers above, steps per second below."""
    import matplotlib.pyplot as plt  # instances do without

    steps = [event.time for event in history if event.kind == "step"]
    begin, end = steps[0], steps[-1]
    live = [(event.time, len(event.details["roster"])) for event in history if event.kind == "resumed"]
    kills = [event.time - begin for event in history if event.kind == "failure"]
    _, (above, below) = plt.subplots(2, sharex=True, figsize=(8, 5), layout="constrained")
    for label, series, style in (("in the trace", wanted, ":"), ("live", live, "-")):
        times, counts = zip(*series, (end, series[-1][1]), strict=True)
        above.step([at - begin for at in times], counts, style, where="post", label=label)
    above.plot(kills, [0] * len(kills), "rx", label="vanished")
    above.set(ylabel="workers", ylim=(-0.5, None))
    above.legend(loc="upper right")
    rates = Counter(int((at - begin) / 2) for at in steps)
    below.step([2 * n for n in sorted(rates)], [rates[n] / 2 for n in sorted(rates)], where="post")
    below.set(xlabel="seconds", ylabel="steps per second", ylim=(0, None), xlim=(0, end - begin))
    plt.savefig(path)


def main(arguments: list[str] | None = None) -> int:
    """Run the command."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    if "RECYCLE_COORDINATOR" in os.environ:  # an instance
        elastic()
        return 0
    parser = argparse.ArgumentParser(description="Training on spot instances.")
    parser.add_argument("--trace", default="aws-g4dn", help=f"{', '.join(available_traces())}, or a file")
    parser.add_argument("--hours", type=float, default=4.0, help="of the trace")
    parser.add_argument("--minutes", type=float, default=1.0, help="in which they pass, without the time to boot")
    parser.add_argument("--most", type=int, default=6, help="instances when the trace is at its peak")
    parser.add_argument("--output", default="spot.svg")
    options = parser.parse_args(arguments)
    trace = load_trace(options.trace)
    changes, last, had = [], 0.0, 0
    for at, up in trace.availability:
        count = round(up * options.most / trace.peak)
        if at <= 3600 * options.hours and count != had:
            changes.append(((at - last) * options.minutes / 60 / options.hours, count))
            last, had = at, count
    with socket.create_server(("127.0.0.1", 0)) as free:
        os.environ["RECYCLE_LISTEN"] = f"127.0.0.1:{free.getsockname()[1]}"
    os.environ["RECYCLE_KEY"] = secrets.token_urlsafe(32)
    live, wanted = [0], list[tuple[float, int]]()

    def follow(record: logging.LogRecord) -> bool:
        event = record.__dict__["event"]
        if event["kind"] == "resumed":
            live.append(len(event["details"]["roster"]))
        return True

    events = logging.getLogger("lightning_recycle.events")
    events.setLevel(logging.INFO)
    events.addFilter(follow)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SPOT_END"] = f"{folder}/end"
        thread = threading.Thread(target=replay, args=(changes, live, wanted), daemon=True)
        thread.start()
        history = elastic()
        thread.join()
    alone = Sine(seconds=0.0)
    losses = [event.details["loss"] for event in history if event.kind == "step"]
    fit(alone, 1, devices=1, max_steps=len(losses))
    off = max(abs(a - b) for a, b in zip(losses, alone.losses, strict=True))
    kinds = Counter(event.kind for event in history)
    print(f"{len(losses)} steps, losses from {losses[0]:.4f} to {losses[-1]:.4f}, at most {off:.0e} from one device's.")
    print(f"Instances: {kinds['rejoined']} came, {kinds['left']} left, {kinds['failure']} vanished.")
    print(f"Steps that ran again: {kinds['redone']}.")
    assert off < 1e-10
    draw(history, wanted, options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
