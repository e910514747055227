"""Nothing grows: memory, threads and descriptors in a run whose workers die and come back all the time.

    .venv/bin/python benchmarks/soak.py                  # six minutes, a failure every 2.5 s
    .venv/bin/python benchmarks/soak.py --steps 150000   # an hour
    .venv/bin/python benchmarks/soak.py --verify 1       # workers check each other in every step: no false alarms

4 x 2 workers of a model that takes next to no time, so that a minute has the steps and the failures of hours. Workers
are killed, exit, raise, or are told to leave, at seeded random times, and are replaced. (Should all four of a stage be
gone at once, the run ends with that error: try another seed.) One row every twenty seconds: the launching process,
which has the coordinator, and the largest worker. Neither may grow for long; the launching process remembers the
newest ten to twenty thousand steps. It ends with status 1 if any worker was suspected of wrong results or state.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import psutil
import torch
from harness import console, describe_machine, fit
from rich.table import Table
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_recycle import LayerSpec, PipelineModule, RecoveryOptions, ReCycleStrategy, VerificationOptions
from lightning_recycle.callbacks import FaultInjectionCallback, HeartbeatCallback

PIPELINES, STAGES = 4, 2
KINDS = ("kill", "exit", "exception", "preempt")
SUSPICIONS = ("corruption", "disputed", "incomparable", "not_finite")


class SmallModel(PipelineModule):
    """Two small layers for each of two stages."""

    def configure_pipeline(self):
        return [LayerSpec(nn.Linear, 16, 16), nn.ReLU(), LayerSpec(nn.Linear, 16, 16), LayerSpec(nn.Linear, 16, 4)]

    def loss(self, output, target):
        return nn.functional.cross_entropy(output, target)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


@dataclass(frozen=True)
class Footprint:
    """What a process holds: resident memory in MiB, threads, descriptors."""

    memory: float
    threads: int
    descriptors: int

    @classmethod
    def of(cls, process: psutil.Process) -> Footprint:
        """Raises psutil.Error if the process is gone."""
        with process.oneshot():
            return cls(process.memory_info().rss / 2**20, process.num_threads(), process.num_fds())

    def __str__(self) -> str:
        return f"{self.memory:.1f} MiB, {self.threads} threads, {self.descriptors} descriptors"


@dataclass(frozen=True)
class Sample:
    """The launching process and the largest numbers of any worker, ``seconds`` after the beginning."""

    seconds: float
    launcher: Footprint
    worker: Footprint | None


class _Sampler(threading.Thread):
    """Takes a sample every ``interval`` seconds until :meth:`stop`."""

    def __init__(self, interval: float) -> None:
        super().__init__(daemon=True)
        self.samples: list[Sample] = []
        self._interval = interval
        self._stopped = threading.Event()

    def run(self) -> None:
        began = time.monotonic()
        while not self._stopped.wait(self._interval):
            launcher = psutil.Process()
            workers = []
            for process in launcher.children(recursive=True):
                try:
                    # The workers are children of the fork server, which looks like them.
                    if process.ppid() != launcher.pid and "forkserver" in " ".join(process.cmdline()):
                        held = Footprint.of(process)
                        if held.memory:  # none: it is ending
                            workers.append(held)
                except psutil.Error:  # it ended while we looked
                    continue
            largest = None
            if workers:
                largest = Footprint(
                    max(worker.memory for worker in workers),
                    max(worker.threads for worker in workers),
                    max(worker.descriptors for worker in workers),
                )
            self.samples.append(Sample(time.monotonic() - began, Footprint.of(launcher), largest))

    def stop(self) -> None:
        self._stopped.set()
        self.join()


def measure(
    steps: int, mtbf: float, seed: int, interval: float = 20.0, verify: float = 0.0
) -> tuple[Sequence[Sample], Counter[str]]:
    """Trains for ``steps`` steps; returns the samples, and how often each kind of event happened.

    With ``verify``, which is as in :class:`ReCycleStrategy`, states are compared every tenth step, too.
    """
    microbatches = 2
    data = TensorDataset(torch.randn(4096, 16), torch.randint(0, 4, (4096,)))
    loader = DataLoader(data, batch_size=2 * microbatches, shuffle=True)
    strategy = ReCycleStrategy(
        STAGES,
        microbatches,
        recovery=RecoveryOptions(max_restarts=1_000_000),
        verification=VerificationOptions(verify=verify, checksum_every=10 if verify else "auto"),
    )
    callbacks = [HeartbeatCallback(timeout=2.0), FaultInjectionCallback(mtbf=mtbf, kinds=KINDS, seed=seed)]
    sampler = _Sampler(interval)
    sampler.start()
    try:
        fit(SmallModel(), loader, strategy, devices=PIPELINES * STAGES, steps=steps, callbacks=callbacks)
    finally:
        sampler.stop()
    return sampler.samples, Counter(event.kind for event in strategy.history)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=15_000)
    parser.add_argument("--mtbf", type=float, default=2.5, help="mean seconds between two failures")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--verify", type=float, default=0.0, help="the share of the time that checks may take")
    options = parser.parse_args(arguments)

    began = time.monotonic()
    samples, events = measure(options.steps, options.mtbf, options.seed, verify=options.verify)
    table = Table(title=f"{options.steps} steps, {PIPELINES} x {STAGES} workers, a failure every {options.mtbf:g} s")
    for heading in ("seconds", "launching process", "largest worker"):
        table.add_column(heading, justify="right")
    for sample in samples:
        table.add_row(f"{sample.seconds:.0f}", str(sample.launcher), str(sample.worker or ""))
    console.print(table)
    console.print(", ".join(f"{kind} {number}" for kind, number in sorted(events.items())))
    console.print(f"{time.monotonic() - began:.0f} s. {describe_machine()}")
    alarms = {kind: events[kind] for kind in SUSPICIONS if events[kind]}
    if alarms:
        console.print(f"Nothing was wrong, but: {alarms}")
    return 1 if alarms else 0


if __name__ == "__main__":
    sys.exit(main())
