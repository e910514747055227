"""Workers that are nothing but an executor: the real client, communicator, stage and coordinator, without Lightning.

What a step costs beyond its layers can be told apart only where nothing else runs. The data is there already, the loss
is the sum of squares, and the optimizer is what the benchmark says.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor, nn

from lightning_recycle.control.client import ControlClient
from lightning_recycle.control.coordinator.coordinator import Coordinator, CoordinatorOptions
from lightning_recycle.control.options import HeartbeatTimeouts, RecoveryOptions
from lightning_recycle.control.plans.plan_provider import PlanProvider
from lightning_recycle.control.protocol import messages
from lightning_recycle.launch.worker_group import process_context
from lightning_recycle.planning.grid import Grid, Microbatch
from lightning_recycle.planning.planner import PlanningOptions
from lightning_recycle.runtime.commit_reports import CommitRules
from lightning_recycle.runtime.communicator import Communicator
from lightning_recycle.runtime.executor import Executor
from lightning_recycle.runtime.gradients import GradientBuffers
from lightning_recycle.runtime.groups_and_transports import Transport
from lightning_recycle.runtime.stage import Stage
from lightning_recycle.runtime.stage_bundle import StageBundle, StageTies
from lightning_recycle.runtime.step_runner import StepRunner

HOST = "127.0.0.1"
_PATIENCE = 300.0  # seconds for anything
_BEAT_SECONDS = 10.0


def on_cpu(rank: int) -> torch.device:
    return torch.device("cpu")


def by_gloo(rank: int, device: torch.device) -> None:
    return None


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-6)


@dataclass(frozen=True)
class Job:
    """What workers do.

    Args:
        grid: pipelines, stages, micro-batches.
        split_backward: whether weight gradients are computed apart from input gradients.
        staggered: whether a stage steps before the others hold their gradients.
        build: stage -> its layers, on the CPU; can be pickled.
        example: -> the input of the first layer for one micro-batch.
        device: rank -> the device of a worker.
        transport: (rank, device) -> what carries payloads; None for Gloo.
        optimizer: parameters -> the optimizer.
        heartbeat_timeout: seconds after which a silent worker counts as dead.
    """

    grid: Grid
    split_backward: bool
    build: Callable[[int], Sequence[nn.Module]]
    example: Callable[[], Tensor]
    staggered: bool = True
    device: Callable[[int], torch.device] = on_cpu
    transport: Callable[[int, torch.device], Transport | None] = by_gloo
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] = sgd
    heartbeat_timeout: float = _PATIENCE


def squares(output: Tensor, target: Tensor) -> Tensor:
    """The loss."""
    return output.square().mean()


class _Data:
    """In the place of a loader: the same micro-batch again and again."""

    can_read_again = True

    def __init__(self, value: Tensor) -> None:
        self._value = value

    def begin_step(self, handle: Any) -> None: ...

    def read_ahead(self, handle: Any) -> None: ...

    def read_again(self) -> None: ...

    def fetch(self, handle: Any, microbatch: Microbatch) -> tuple[Tensor, Tensor]:
        return self._value, self._value


@dataclass(frozen=True)
class _Handle:
    loader: _Data
    index: int


class _NoValues:
    """A micro-batch leaves nothing but its output."""

    record = b""

    def note(self, earlier: bytes) -> bytes:
        return b""

    output = note


class _Host:
    """In the place of the session."""

    records_outputs = False

    def split(self, data: Any, index: int) -> tuple[Any, Any]:
        return data  # type: ignore[no-any-return]

    def microbatch(self, index: int, statistics: Sequence[Tensor]) -> AbstractContextManager[Any]:
        return nullcontext(_NoValues())

    def recomputing(self, index: int) -> AbstractContextManager[None]:
        return nullcontext()

    def is_suspect(self, error: Exception) -> bool:
        return False

    def on_generation(self) -> None: ...

    def on_recovery(self, step: int, is_applied: bool) -> None: ...

    def as_in_step(self, step: int) -> AbstractContextManager[None]:
        return nullcontext()

    def describe_step(self, step: int) -> messages.Facts:
        return messages.Facts({"global_step": step}, {})


class Worker:
    """One worker, in the calling process."""

    def __init__(self, job: Job, rank: int, address: tuple[str, int], key: bytes) -> None:
        self.job, self.rank = job, rank
        self.device = job.device(rank)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        place = job.grid.worker(rank)
        self.layers = [layer.to(self.device) for layer in job.build(place.stage)]
        self.parameters = [p for layer in self.layers for p in layer.parameters()]
        self.optimizer = job.optimizer(self.parameters)
        self.client = ControlClient(
            rank, address, key, heartbeat_interval=min(_BEAT_SECONDS, job.heartbeat_timeout / 5)
        )
        self.communicator = Communicator(
            rank,
            HOST,
            self.device,
            self.client,
            self.client.key_for("connections"),
            transport=job.transport(rank, self.device),
        )
        is_last = place.stage == job.grid.stages - 1
        self.stage = Stage(
            self.layers, place.stage * len(self.layers), 1, self.device, loss=squares if is_last else None
        )
        bundle = StageBundle(self.stage, self.parameters, GradientBuffers(self.parameters, self.device), StageTies())
        host: Any = _Host()
        rules = CommitRules(staggered=job.staggered)
        runner = StepRunner(place, job.grid, self.client, self.communicator, bundle, host, rules)
        self.executor = Executor(runner)
        self.example = job.example().to(self.device)
        self._data = _Data(self.example)
        self.client.await_announcement(_PATIENCE)
        self.executor.regroup()

    def step(self) -> float:
        """One step; returns its loss."""
        handle: Any = _Handle(self._data, self.executor.version)
        return self.executor.run_step(handle, lambda result: self.optimizer.step()).loss


class Run:
    """The coordinator of a job, and a process for each worker that runs ``body(worker)``.

    ``body`` is called with a :class:`Worker` and a pipe, to which it sends what it has measured. The plan for the
    failure of the workers ``expected`` is made ahead.
    """

    def __init__(
        self, job: Job, body: Callable[[Worker, Connection], None], threads: int = 1, expected: Sequence[int] = ()
    ) -> None:
        logging.getLogger("lightning_recycle").setLevel(logging.ERROR)
        planner = PlanProvider(job.grid, PlanningOptions(split_backward=job.split_backward, staggered=job.staggered))
        planner.prepare()
        if expected:
            planner.plan(frozenset(map(job.grid.worker, expected)), {})
        options = CoordinatorOptions(
            heartbeat=HeartbeatTimeouts(job.heartbeat_timeout, _PATIENCE),
            recovery=RecoveryOptions(rebalance="never", start_timeout=_PATIENCE),
            report_timeout=_PATIENCE,
        )
        self.coordinator = Coordinator(job.grid, planner, options, staggered=job.staggered)
        self.coordinator._plans.plan_ahead = lambda: None  # type: ignore[method-assign] # takes processor time
        context = process_context()
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []
        for rank in range(job.grid.num_workers):
            mine, theirs = context.Pipe()
            arguments = (job, rank, self.coordinator.address, self.coordinator.authkey, body, theirs, threads)
            self.processes.append(context.Process(target=_work, args=arguments, daemon=True))  # type: ignore[attr-defined]
            self.processes[-1].start()
            theirs.close()
            self.pipes.append(mine)
        self.coordinator.start({})

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.coordinator.stop()
        for process in self.processes:
            process.kill()
            process.join(10)
        self.coordinator.close()

    def results(self, ranks: Sequence[int] | None = None, seconds: float = _PATIENCE) -> list[Any]:
        """One answer of each of ``ranks``, all by default."""
        found = []
        for rank in range(len(self.pipes)) if ranks is None else ranks:
            if not self.pipes[rank].poll(seconds):
                raise TimeoutError(f"worker {rank} said nothing for {seconds:g} s")
            try:
                answer = self.pipes[rank].recv()
            except EOFError:
                raise RuntimeError(f"worker {rank} ended; its traceback is above") from None
            found.append(answer)
        return found

    def times(self) -> Mapping[str, float]:
        """When the newest event of each kind was recorded, in seconds since the epoch."""
        return {event.kind: event.time for event in self.coordinator.history}

    def await_event(self, kind: str, count: int) -> None:
        deadline = time.monotonic() + _PATIENCE
        while sum(event.kind == kind for event in self.coordinator.history) < count:
            if time.monotonic() > deadline:
                raise TimeoutError(f"no {kind!r} within {_PATIENCE:g} s")
            time.sleep(0.002)


def _work(
    job: Job,
    rank: int,
    address: tuple[str, int],
    key: bytes,
    body: Callable[[Worker, Connection], None],
    told: Connection,
    threads: int,
) -> None:
    torch.set_num_threads(threads)
    logging.getLogger("lightning_recycle").setLevel(logging.ERROR)
    worker = Worker(job, rank, address, key)
    body(worker, told)
    threading.Event().wait(_PATIENCE)  # until it is ended: an exit would be a failure to recover from
    os._exit(0)
