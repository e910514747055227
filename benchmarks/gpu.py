"""What needs a device, useful with one: F, B, W, BW of GPT blocks, the executor, messages, failures, memory.

    python benchmarks/gpu.py                           # all of it, on CUDA device 0 (and others, where there are any)
    python benchmarks/gpu.py --only operations messages
    python benchmarks/gpu.py --only nccl               # whether it works here, and how
    python benchmarks/gpu.py --device cpu --quick      # tiny, to see that the code runs: NOT figures of a GPU

Several workers share a device where there are too few: NCCL 2.30 and newer are asked to allow that by
``NCCL_MULTI_RANK_GPU_ENABLE=1``, older ones are told that each process is another host (``NCCL_HOSTID``), so that
payloads go through the network. Which of these works is tried first and printed; what could not run is listed at the
end with the reason, and the exit status is 0.

- *operations*: one stage of GPT blocks; milliseconds of the device for a fused backward and a split one, what the split
  costs, and the model's floating-point operations per second (6 per weight and token, and those of attention) as a part
  of the device's peak in bf16 (MFU);
- *executor*: a step of the same stages, first by a hand-written 1F1B that uses the same communicator and nothing else
  of ours, then by the executor; several workers on one device say what the host and the protocol cost, not what a
  pipeline gains;
- *messages*: one tensor to another worker and back, by size, over Gloo and over NCCL;
- *failure*: a worker of a 2 x 2 grid is killed in the middle of a step; until the others have heard of it, have aborted
  and agreed, are connected again, and have done the step; and the bytes that a survivor's tensors take at most before
  and after it.
"""

from __future__ import annotations

import argparse
import functools
import os
import platform
import signal
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from bare_executor import Job, Run, Worker, squares
from harness import console, describe_machine
from rich.table import Table
from torch import Tensor, nn

from lightning_recycle.errors import ConfigurationError
from lightning_recycle.planning.grid import Grid
from lightning_recycle.runtime.groups_and_transports import Transport
from lightning_recycle.runtime.nccl.nccl_library import CudaStreams, NcclLibrary
from lightning_recycle.runtime.nccl.nccl_transport import NcclTransport
from lightning_recycle.runtime.stage import Stage
from lightning_recycle.runtime.wire import Channel

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from gpt import Block

PEAKS = {  # dense bf16, 10^12 per second, from the vendors' data sheets
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "H200": 989.0,
    "B200": 2250.0,
    "A100": 312.0,
    "L40S": 362.0,
    "L4": 121.0,
    "A10": 125.0,
    "RTX 4090": 165.0,
}
WARMUP = 3
_WORKERS = 4  # the most of any section


@dataclass(frozen=True)
class Setting:
    """What is measured on.

    Args:
        device: "cuda" or "cpu".
        widths: of the blocks.
        tokens: of a micro-batch, in sequences of ``context``.
        blocks: of a stage.
        microbatches: of a step of a pipeline.
        rounds: how often everything is repeated.
        sizes: of messages, in bytes.
    """

    device: str
    widths: tuple[int, ...]
    tokens: int
    context: int
    blocks: int
    microbatches: int
    rounds: int
    sizes: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16


FULL = Setting("cuda", (1024, 2048, 4096), 8192, 1024, 4, 8, 20, tuple(2**n for n in range(12, 29, 2)))
QUICK = Setting("cuda", (1024,), 2048, 512, 2, 4, 5, (2**12, 2**17, 2**22))
TINY = Setting("cpu", (32,), 64, 32, 1, 4, 3, (2**12, 2**17, 2**22))


class NotRun(Exception):
    """Something cannot be measured here."""


# ---------------------------------------------------------------------- models, devices, transports


def blocks(setting: Setting, width: int, stage: int) -> list[nn.Module]:
    """GPT blocks of ``width`` in bf16, heads of 64 (or of all of a small width)."""
    torch.manual_seed(stage)
    return [Block(width, max(1, width // 64), 0.0).to(setting.dtype) for _ in range(setting.blocks)]


def hidden(setting: Setting, width: int) -> Tensor:
    """A micro-batch (sequences, context, width)."""
    return torch.randn(setting.tokens // setting.context, setting.context, width, dtype=setting.dtype)


def device_of(kind: str, rank: int) -> torch.device:
    """Workers take turns at the devices."""
    return torch.device("cpu") if kind == "cpu" else torch.device("cuda", rank % torch.cuda.device_count())


SHARING = ("NCCL_MULTI_RANK_GPU_ENABLE", "NCCL_HOSTID")
"""What lets several workers share a device: NCCL 2.30 and newer; older ones, to which each process is another host."""


class Required(NcclTransport):
    """NCCL, or an error where something would go by Gloo."""

    def connect(self, *arguments: Any) -> None:
        super().connect(*arguments)
        if self.obstacles:
            raise ConfigurationError(f"Worker {self._rank} cannot use NCCL as it should: {'; '.join(self.obstacles)}.")


def nccl(sharing: str, rank: int, device: torch.device) -> Transport:
    """Payloads by NCCL; ``sharing``: one of :data:`SHARING`, or "" where every worker has a device of its own."""
    if sharing:
        os.environ[sharing] = "1" if sharing == SHARING[0] else f"worker{rank}"
    return Required(rank, device, NcclLibrary(), CudaStreams(device), f"of worker {rank}")


def gloo(rank: int, device: torch.device) -> None:
    return None


def transport_of(name: str) -> Callable[[int, torch.device], Transport | None]:
    """``name``: "gloo", "nccl", or "nccl" and one of :data:`SHARING`, with a blank."""
    return gloo if name == "gloo" else functools.partial(nccl, name.partition(" ")[2])


def job(setting: Setting, grid: Grid, width: int, transport: str, **options: Any) -> Job:
    return Job(
        grid,
        options.pop("split_backward", False),
        functools.partial(blocks, setting, width),
        functools.partial(hidden, setting, width),
        device=functools.partial(device_of, setting.device),
        transport=transport_of(transport),
        **options,
    )


def transports(setting: Setting, report: Report) -> list[str]:
    """Those that can be used here; the first call finds out."""
    if setting.device == "cpu":
        report.skip("NCCL", "there is no CUDA device")
        return ["gloo"]
    name = report.nccl(setting)
    return ["gloo"] if name is None else ["gloo", name]


def run_on(device: torch.device) -> Callable[[Callable[[], Any]], float]:
    """What runs a function and says how many seconds the device took for it."""

    def by_clock(function: Callable[[], Any]) -> float:
        began = time.perf_counter()
        function()
        return time.perf_counter() - began

    def by_events(function: Callable[[], Any]) -> float:
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        function()
        after.record()
        after.synchronize()
        return float(before.elapsed_time(after)) / 1e3

    return by_clock if device.type == "cpu" else by_events


class Report:
    """What was printed, and what could not be."""

    def __init__(self) -> None:
        self.skipped: list[tuple[str, str]] = []
        self._nccl: str | None = None
        self._has_tried_nccl = False

    def skip(self, what: str, why: str) -> None:
        if (what, why) not in self.skipped:
            self.skipped.append((what, why))

    def nccl(self, setting: Setting) -> str | None:
        """How four workers can exchange payloads by NCCL, on one device if there is one; prints each answer."""
        if self._has_tried_nccl:
            return self._nccl
        self._has_tried_nccl = True
        version = ".".join(map(str, torch.cuda.nccl.version()))
        for name in ["nccl"] if torch.cuda.device_count() >= _WORKERS else [f"nccl {sharing}" for sharing in SHARING]:
            try:
                exchanged(setting, name, (2**20,), rounds=2)
            except Exception as error:
                console.print(f"NCCL {version} between two workers, {name!r}: does NOT work: {error}")
                self.skip(name, str(error))
            else:
                console.print(f"NCCL {version} between two workers, {name!r}: works")
                self._nccl = name
                break
        return self._nccl


# ---------------------------------------------------------------------- operations


def floating_point_operations(setting: Setting, width: int) -> float:
    """Of F and BW of a stage for one micro-batch: 6 per weight of a product and token, and 12 per pair of positions and
    element for attention, of which a causal one needs half (the count of PaLM, appendix B).
    """
    weights = setting.blocks * 12 * width**2
    return 6.0 * weights * setting.tokens + 6.0 * setting.blocks * width * setting.context * setting.tokens


def peak_of(device: torch.device) -> float | None:
    """Operations per second of ``device`` in bf16; None if its data sheet is not known here."""
    if device.type == "cpu":
        return None
    name = torch.cuda.get_device_name(device)
    return next((1e12 * peak for known, peak in PEAKS.items() if known in name), None)


def operations(setting: Setting, report: Report) -> None:
    """F, B, W, BW of a stage, split against fused."""
    device = device_of(setting.device, 0)
    timed, peak = run_on(device), peak_of(device)
    table = Table(title=f"A stage of {setting.blocks} GPT blocks, bf16, {setting.tokens} tokens: milliseconds")
    for heading in ("width", "F", "BW", "F (split)", "B", "W", "(B + W) / BW", "TFLOP/s", "MFU"):
        table.add_column(heading, justify="right")
    for width in setting.widths:
        found = stage_times(setting, width, device, timed)
        fused, split = found["BW"], found["B"] + found["W"]
        rate = floating_point_operations(setting, width) / (found["F"] + fused)
        table.add_row(
            str(width),
            *(f"{1e3 * found[name]:.2f}" for name in ("F", "BW", "F split", "B", "W")),
            f"{split / fused:.3f}",
            f"{rate / 1e12:.1f}",
            "unknown" if peak is None else f"{rate / peak:.1%}",
        )
    console.print(table)
    if peak is None:
        report.skip("MFU", "the peak of this device is not known (PEAKS in this file)")


def stage_times(
    setting: Setting, width: int, device: torch.device, timed: Callable[[Callable[[], Any]], float]
) -> dict[str, float]:
    """Median seconds of each operation."""
    layers = [layer.to(device) for layer in blocks(setting, width, 1)]
    for parameter in (p for layer in layers for p in layer.parameters()):
        parameter.grad = torch.zeros_like(parameter)
    stage = Stage(layers, 1, 1, device)
    x = hidden(setting, width).to(device).requires_grad_()
    grad = torch.randn_like(x)
    found: dict[str, list[float]] = {name: [] for name in ("F", "BW", "F split", "B", "W")}
    for number in range(WARMUP + setting.rounds):
        measured = {
            "F": timed(lambda: stage.forward(0, 0, x, split_backward=False)),
            "BW": timed(lambda: stage.backward(0, (grad,))),
            "F split": timed(lambda: stage.forward(0, 1, x, split_backward=True)),
            "B": timed(lambda: stage.backward_input(1, (grad,))),
            "W": timed(lambda: stage.backward_weight(1)),
        }
        for name, seconds in measured.items() if number >= WARMUP else ():
            found[name].append(seconds)
    return {name: statistics.median(seconds) for name, seconds in found.items()}


# ---------------------------------------------------------------------- the executor


def one_f_one_b(worker: Worker) -> None:
    """A step of 1F1B by hand: the communicator, autograd, the optimizer; one loss for all micro-batches."""
    grid, communicator = worker.job.grid, worker.communicator
    stage, count = grid.worker(worker.rank).stage, grid.microbatches
    is_first, is_last = stage == 0, stage == grid.stages - 1
    posted = {
        (channel, m): communicator.post_receive(channel, worker.rank + by, m)
        for m in range(count)
        for channel, by, needed in ((Channel.ACTIVATIONS, -1, not is_first), (Channel.GRADIENTS, 1, not is_last))
        if needed
    }
    flight: dict[int, tuple[Tensor, Tensor]] = {}
    losses: list[Tensor] = []

    def forward(m: int) -> None:
        value: Any = worker.example if is_first else communicator.receive(posted[Channel.ACTIVATIONS, m])
        x = value.detach().requires_grad_(not is_first)
        output = x
        for layer in worker.layers:
            output = layer(output)
        if is_last:
            losses.append(squares(output, output) / count)
            output = losses[-1]
        else:
            communicator.send(Channel.ACTIVATIONS, output.detach(), worker.rank + 1, m)
        flight[m] = x, output

    def backward(m: int) -> None:
        x, output = flight.pop(m)
        grad: Any = None if is_last else communicator.receive(posted[Channel.GRADIENTS, m])
        torch.autograd.backward(output, grad)
        if not is_first:
            assert x.grad is not None
            communicator.send(Channel.GRADIENTS, x.grad, worker.rank - 1, m)

    ahead = min(count, grid.stages - 1 - stage)
    for m in range(ahead):
        forward(m)
    for m in range(count):
        if m + ahead < count:
            forward(m + ahead)
        backward(m)
    worker.optimizer.step()
    worker.optimizer.zero_grad()
    communicator.end_step()
    if losses:
        float(torch.stack([loss.detach() for loss in losses]).sum())
    if worker.device.type == "cuda":
        torch.cuda.synchronize()


def step_seconds(rounds: int, worker: Worker, told: Connection) -> None:
    """Tells the seconds of each step, by hand and by the executor, in turns of a round each."""
    worker.step()  # its gradients have their memory now
    found: dict[str, list[float]] = {"1F1B by hand": [], "executor": []}
    ways: dict[str, Callable[[], Any]] = {"1F1B by hand": lambda: one_f_one_b(worker), "executor": worker.step}
    for number in range(WARMUP + rounds):
        for name, way in ways.items():
            worker.communicator.all_reduce(torch.zeros(1))
            began = time.perf_counter()
            way()
            if worker.device.type == "cuda":
                torch.cuda.synchronize()
            if number >= WARMUP:
                found[name].append(time.perf_counter() - began)
    told.send(found)


def executor(setting: Setting, report: Report) -> None:
    """A step by hand and by the executor."""
    for transport in transports(setting, report):
        table = Table(title=f"A step of {setting.microbatches} micro-batches, two stages, {transport}: milliseconds")
        for heading in ("width", "1F1B by hand", "executor", "ratio", "executor, split"):
            table.add_column(heading, justify="right")
        for width in setting.widths:
            medians = {}
            for split_backward in (False, True):
                one = job(setting, Grid(1, 2, setting.microbatches), width, transport, split_backward=split_backward)
                with Run(one, functools.partial(step_seconds, setting.rounds)) as run:
                    found = run.results()[0]
                medians[split_backward] = {name: statistics.median(seconds) for name, seconds in found.items()}
            by_hand, ours = medians[False]["1F1B by hand"], medians[False]["executor"]
            table.add_row(
                str(width),
                f"{1e3 * by_hand:.2f}",
                f"{1e3 * ours:.2f}",
                f"{ours / by_hand:.3f}",
                f"{1e3 * medians[True]['executor']:.2f}",
            )
        console.print(table)


# ---------------------------------------------------------------------- messages


def ping_pong(sizes: Sequence[int], rounds: int, worker: Worker, told: Connection) -> None:
    """Tells the median seconds of one way, by size."""
    communicator, me = worker.communicator, worker.rank
    there, back = (Channel.ACTIVATIONS, Channel.GRADIENTS) if me == 0 else (Channel.GRADIENTS, Channel.ACTIVATIONS)
    found: dict[Any, Any] = {}
    for number, size in enumerate(sizes):
        value = torch.zeros(size, dtype=torch.uint8, device=worker.device)
        seconds = []
        for _ in range(WARMUP + rounds):
            incoming = communicator.post_receive(back, 1 - me, number)
            began = time.perf_counter()
            if me == 0:
                communicator.send(there, value, 1, number)
                communicator.receive(incoming)
                seconds.append((time.perf_counter() - began) / 2)
            else:
                communicator.send(there, communicator.receive(incoming), 0, number)
            communicator.end_step()
        found[size] = statistics.median(seconds[WARMUP:]) if me == 0 else None
    told.send(found)


def exchanged(setting: Setting, transport: str, sizes: Sequence[int], rounds: int) -> dict[Any, Any]:
    """Size -> seconds of one way between two workers."""
    one = job(setting, Grid(1, 2, 2), setting.widths[0], transport)
    with Run(one, functools.partial(ping_pong, sizes, rounds)) as run:
        found: dict[Any, Any] = run.results(seconds=120.0)[0]
        return found


def messages(setting: Setting, report: Report) -> None:
    """Gloo against NCCL, by size."""
    names = transports(setting, report)
    found = {name: exchanged(setting, name, setting.sizes, setting.rounds) for name in names}
    table = Table(title="A tensor to another worker: microseconds, and GB/s")
    for heading in ("bytes", *(part for name in names for part in (name, "GB/s"))):
        table.add_column(heading, justify="right")
    for size in setting.sizes:
        seconds = [found[name][size] for name in names]
        table.add_row(
            f"{size:,}", *(part for second in seconds for part in (f"{1e6 * second:.1f}", f"{size / second / 1e9:.2f}"))
        )
    console.print(table)


# ---------------------------------------------------------------------- a failure


def until_ended(victim: int, at: int, worker: Worker, told: Connection) -> None:
    """Runs steps; the ``victim`` ends itself in the middle of step ``at``. Others tell how much their tensors took at
    most before that and afterwards, how long their abort took, and when they had done the step.
    """
    cuda = worker.device.type == "cuda"
    times: dict[str, float] = {}
    abort = worker.communicator.abort

    def timed_abort(*what: Any) -> None:
        times.setdefault("heard", time.time())
        abort(*what)
        times.setdefault("aborted", time.time())

    def end(step: int, op: Any) -> None:
        if worker.rank == victim and step == at and "1" in str(op):
            told.send(time.time())
            os.kill(os.getpid(), signal.SIGKILL)

    worker.client.on_interrupt = timed_abort
    worker.executor.before_operation.append(end)
    peaks = []
    for step in range(2 * at):
        if cuda and step in (WARMUP, at):
            torch.cuda.reset_peak_memory_stats()
        worker.step()
        if step == at:
            times["stepped"] = time.time()
        if cuda and step in (at - 1, 2 * at - 1):
            peaks.append(torch.cuda.max_memory_allocated())
    told.send((times, peaks))


def failure(setting: Setting, report: Report) -> None:
    """One worker of a 2 x 2 grid is killed; times and memory of the others."""
    width, victim, at = setting.widths[0], 2, 8
    for transport in transports(setting, report):
        one = job(setting, Grid(2, 2, setting.microbatches), width, transport, split_backward=True)
        with Run(one, functools.partial(until_ended, victim, at), expected=(victim,)) as run:
            (killed,) = run.results([victim])
            survivors = [rank for rank in range(4) if rank != victim]
            found = run.results(survivors)
            recorded = run.times()
        table = Table(title=f"A worker is killed ({transport}, width {width}): milliseconds since then")
        for heading in ("heard", "aborted", "agreed", "connected", "step done"):
            table.add_column(heading, justify="right")
        last = {name: max(times[name] for times, _ in found) for name in ("heard", "aborted", "stepped")}
        moments = (last["heard"], last["aborted"], recorded["resumed"], recorded["regrouped"], last["stepped"])
        table.add_row(*(f"{1e3 * (moment - killed):.1f}" for moment in moments))
        console.print(table)
        show_memory(setting, report, transport, survivors, [peaks for _, peaks in found])


def show_memory(
    setting: Setting, report: Report, transport: str, ranks: Sequence[int], peaks: Sequence[Sequence[int]]
) -> None:
    if setting.device == "cpu":
        report.skip("memory peaks", "they are those of a device's allocator")
        return
    table = Table(title=f"The most that a survivor's tensors take ({transport}): MiB")
    for heading in ("worker", "before the failure", "after it"):
        table.add_column(heading, justify="right")
    for rank, (before, after) in zip(ranks, peaks, strict=True):
        table.add_row(str(rank), f"{before / 2**20:.1f}", f"{after / 2**20:.1f}")
    console.print(table)


# ---------------------------------------------------------------------- all of it


def sharing(setting: Setting, report: Report) -> None:
    """Whether NCCL works here, and how."""
    transports(setting, report)


SECTIONS: dict[str, Callable[[Setting, Report], None]] = {
    "nccl": sharing,
    "operations": operations,
    "executor": executor,
    "messages": messages,
    "failure": failure,
}


def described(setting: Setting) -> str:
    if setting.device == "cpu":
        return "on the PROCESSOR, with tiny sizes: these are NOT figures of a GPU"
    names = ", ".join(torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count()))
    return f"on {names}; CUDA {torch.version.cuda}, {platform.node()}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures what can be measured, and prints what cannot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="few and small")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    options = parser.parse_args(arguments)
    if options.device == "cpu" and not options.quick:
        parser.error("--device cpu is there to see that the code runs: add --quick")
    if options.device == "cuda" and not torch.cuda.is_available():
        console.print("Nothing was measured: there is no CUDA device. --device cpu --quick runs the code without one.")
        return
    setting = TINY if options.device == "cpu" else QUICK if options.quick else FULL
    console.print(f"benchmarks/gpu.py {described(setting)}")
    report = Report()
    if setting.device == "cpu":
        torch.set_num_threads(1)
    for name in options.only:
        try:
            SECTIONS[name](setting, report)
        except Exception as error:
            traceback.print_exc()
            report.skip(name, f"{type(error).__name__}: {error}")
    for what, why in report.skipped:
        console.print(f"could not run: {what}: {why}")
    console.print(describe_machine(), highlight=False)
    if setting.device == "cpu":
        console.print("These are NOT figures of a GPU.")


if __name__ == "__main__":
    main()
