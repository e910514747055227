"""What the host does between two operations: microseconds of the executor per operation and per message.

    python benchmarks/host_loop.py                       # about a minute
    python benchmarks/host_loop.py --profile             # and where the time goes, by cProfile
    python benchmarks/host_loop.py --microbatches 500 --linears 4

On a GPU the host must be ahead of the device, so what it does per operation bounds how small an operation may be. Here
the layers are linear ones of 8 x 8, so nearly all of a step is the host's part.

*Operations*: one worker, one stage, no peers, the real client with its coordinator in another process. An operation
lasts from the hook before it to the hook before the next one, so all of the loop is in it. ``bare`` is a loop over the
same torch calls without anything of ours: F: layers, loss, its share of the batch, and its value; BW:
``torch.autograd.backward``; B: the same for the input alone; W: the products and sums that make the gradients. What is
left is the executor's. Of a split F the table has a second bare loop, in which each linear layer is a
``torch.autograd.Function`` that does nothing else: what any product takes whose gradient can wait, without code in C++.
REDUCE and STEP come once per step, as does what lies around the operations (*step*). Both take
turns in one process, and of the medians of each round the lower quartile is shown.

*Messages*: three workers, one pipeline of three stages, Gloo; processor time of the main thread of the one in the
middle, in the communicator's three calls, per message.
"""

from __future__ import annotations

import argparse
import cProfile
import functools
import io
import pstats
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import torch
from bare_executor import Job, Run, Worker, squares
from harness import console, describe_machine
from rich.table import Table
from torch import Tensor, nn

from lightning_recycle.planning.grid import Grid, Microbatch, Op, OpKind
from lightning_recycle.planning.program import Task

WIDTH = 8
WARMUP = 5  # steps
GOAL = 100.0  # microseconds per operation, without communication
OF_FUNCTIONS = "F of Functions"
CALLS = ("post_receive", "receive", "send")


def build(linears: int, stage: int) -> list[nn.Module]:
    """The layers of a stage."""
    torch.manual_seed(stage)
    return [nn.Linear(WIDTH, WIDTH) for _ in range(linears)]


def example() -> Tensor:
    """A micro-batch."""
    return torch.ones(4, WIDTH)


def job(stages: int, microbatches: int, linears: int, decoupled: bool) -> Job:
    return Job(Grid(1, stages, microbatches), decoupled, functools.partial(build, linears), example)


# ---------------------------------------------------------------------- operations


class Stamps:
    """When each operation began, of all steps since :meth:`begin`."""

    def __init__(self, worker: Worker) -> None:
        self._marks: list[tuple[float, str]] = []
        self._worker = worker
        worker.executor.before_operation.append(self._mark)

    def _mark(self, step: int, op: Op) -> None:
        self._marks.append((time.perf_counter(), op.kind.value))

    def step(self) -> dict[str, list[float]]:
        """Runs a step; seconds of its operations by kind. What lies around them is called "step"."""
        self._marks = []
        began = time.perf_counter()
        self._worker.step()
        ended = time.perf_counter()
        found: dict[str, list[float]] = defaultdict(list)
        found["step"].append(self._marks[0][0] - began)
        ends = [at for at, _ in self._marks[1:]] + [ended]
        for (at, kind), end in zip(self._marks, ends, strict=True):
            found[kind].append(end - at)
        return found


def program(microbatches: int, decoupled: bool) -> tuple[Task, ...]:
    """All of it for one micro-batch after the other: a planner splits no backward where nobody waits for it."""
    tasks = []
    backward = (OpKind.BACKWARD_INPUT, OpKind.BACKWARD_WEIGHT) if decoupled else (OpKind.BACKWARD,)
    for number in range(microbatches):
        for kind in (OpKind.FORWARD, *backward):
            op = Op(kind, 0, Microbatch(0, number))
            tasks.append(Task(op, str(op), number, decoupled=decoupled))
    once = (Op(kind, 0) for kind in (OpKind.REDUCE, OpKind.STEP))
    return (*tasks, *(Task(op, str(op)) for op in once))


def watch(linears: int, steps: int, profiles: bool, decoupled: bool, worker: Worker, told: Connection) -> None:
    """Runs steps, and bare loops in between; tells the microseconds of both by kind of operation, and with ``profiles``
    the profile of further steps.
    """
    stamps, count = Stamps(worker), worker.job.grid.microbatches
    executor = worker.executor
    runner = executor._runner
    runner.follow(replace(runner._whole_program, tasks=program(count, decoupled), decoupled=decoupled))
    rounds: list[dict[str, float]] = []
    references: list[dict[str, float]] = []
    for number in range(WARMUP + steps):
        reference, found = bare(linears, count), stamps.step()
        if number >= WARMUP:
            references.append(reference)
            rounds.append({kind: 1e6 * statistics.median(seconds) for kind, seconds in found.items()})
    worker.executor.before_operation.clear()
    told.send((quietest(rounds), quietest(references)))
    if profiles:
        profiler, text = cProfile.Profile(), io.StringIO()
        profiler.enable()
        for _ in range(max(1, steps // 4)):
            worker.step()
        profiler.disable()
        pstats.Stats(profiler, stream=text).sort_stats("tottime").print_stats(30)
        told.send(text.getvalue())


def quietest(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The lower quartile of each kind: other users of the machine make a core half as fast for seconds."""
    return {kind: sorted(found[kind] for found in rounds)[len(rounds) // 4] for kind in rounds[0]}


class Product(torch.autograd.Function):
    """A linear layer, and nothing of ours."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # never called
        raise NotImplementedError


def bare(linears: int, count: int) -> dict[str, float]:
    """Kind of operation -> microseconds of the torch calls alone."""
    layers = build(linears, 0)
    parameters = [p for layer in layers for p in layer.parameters()]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.SGD(parameters, lr=1e-6)
    found: dict[str, list[float]] = defaultdict(list)

    def timed(kind: str, function: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        result = function()
        found[kind].append(time.perf_counter() - began)
        return result

    def forward(x: Tensor, layers: Sequence[Callable[[Tensor], Tensor]] = layers) -> Tensor:
        value = x
        for layer in layers:
            value = layer(value)
        loss = squares(value, x)
        share = loss / count
        float(loss.detach())
        return share

    def weights() -> None:
        for layer in layers:
            layer.weight.grad += grad.t().mm(x)  # type: ignore[operator]
            layer.bias.grad += grad.sum(0)  # type: ignore[operator]

    functions = [functools.partial(apply_to, layer) for layer in layers]
    x, grad = example(), example()
    with_grad = example().requires_grad_()
    for _ in range(count):
        share = timed("F", lambda: forward(x))
        timed("BW", lambda: torch.autograd.backward(share))  # noqa: B023 -- called at once
        timed(OF_FUNCTIONS, lambda: forward(x, functions))
        share = forward(with_grad)
        timed("B", lambda: torch.autograd.backward(share, inputs=[with_grad]))  # noqa: B023
        with torch.no_grad():
            timed("W", weights)
        timed("STEP", optimizer.step)
    found["REDUCE"] = found["step"] = [0.0]
    return {kind: 1e6 * statistics.median(seconds) for kind, seconds in found.items()}


def apply_to(layer: nn.Linear, x: Tensor) -> Tensor:
    product: Tensor = Product.apply(x, layer.weight, layer.bias)
    return product


# ---------------------------------------------------------------------- messages


def exchange(steps: int, worker: Worker, told: Connection) -> None:
    """Runs steps; the worker in the middle tells the seconds of processor time and the number of each call."""
    spent, counts = dict.fromkeys(CALLS, 0.0), dict.fromkeys(CALLS, 0)

    def watched(name: str) -> Callable[..., Any]:
        call = getattr(worker.communicator.messages, name)

        def watch(*args: Any) -> Any:
            began = time.thread_time()
            try:
                return call(*args)
            finally:
                spent[name] += time.thread_time() - began
                counts[name] += 1

        return watch

    for _ in range(WARMUP):
        worker.step()
    for name in CALLS:
        setattr(worker.communicator.messages, name, watched(name))
    for _ in range(steps):
        worker.step()
    told.send({name: 1e6 * spent[name] / max(counts[name], 1) for name in CALLS})


def messages(microbatches: int, steps: int) -> Mapping[str, float]:
    """Call -> microseconds per message."""
    with Run(job(3, microbatches, 1, False), functools.partial(exchange, steps)) as run:
        found: Mapping[str, float] = run.results()[1]
        return found


# ---------------------------------------------------------------------- tables


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--microbatches", type=int, default=200)
    parser.add_argument("--linears", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--only", choices=("operations", "messages"))
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.only != "messages":
        for linears in options.linears:
            show_operations(linears, options.microbatches, options.steps, options.profile)
    if options.only != "operations":
        found = messages(min(options.microbatches, 50), options.steps)
        table = Table(title="A message of Gloo, processor time of the main thread, microseconds")
        for heading in (*CALLS, "message"):
            table.add_column(heading, justify="right")
        table.add_row(*(f"{found[name]:.1f}" for name in CALLS), f"{sum(found.values()):.1f}")
        console.print(table)
    console.print(describe_machine(), highlight=False)


def show_operations(linears: int, microbatches: int, steps: int, profile: bool) -> None:
    table = Table(title=f"{linears} linear layers, {microbatches} micro-batches: microseconds (goal: {GOAL:g})")
    for heading in ("backward", "operation", "all", "bare", "executor"):
        table.add_column(heading, justify="left" if heading in ("backward", "operation") else "right")
    profiles = []
    for decoupled in (False, True):
        body = functools.partial(watch, linears, steps, profile, decoupled)
        with Run(job(1, microbatches, linears, decoupled), body) as run:
            ((found, reference),) = run.results()
            profiles += run.results() if profile else []
        for kind, microseconds in found.items():
            table.add_row(
                "split" if decoupled else "fused",
                kind,
                f"{microseconds:.1f}",
                f"{reference[kind]:.1f}",
                f"{microseconds - reference[kind]:.1f}",
                end_section=kind == "STEP",
            )
            if decoupled and kind == "F":
                least = reference[OF_FUNCTIONS]
                table.add_row("", OF_FUNCTIONS, "", f"{least:.1f}", f"{microseconds - least:.1f}")
    console.print(table)
    for text in profiles:
        print(text)


if __name__ == "__main__":
    main()
