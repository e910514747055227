"""A worker's context: role, Lightning's collectives, early ends of a run.

Collectives go through the coordinator, which hides failures from them, as there is no torch process group; they are for
control, not for data: flags, metrics, the parts of a checkpoint.

A signal handler runs amid a collective or a recovery, so it can neither save nor wait. It leaves a note for the
heartbeat; the run ends after a step whose answer says so.

=========================  ==========================================  ===========================================
the signal                 in a job that SLURM may run again            elsewhere
=========================  ==========================================  ===========================================
SIGTERM                    this worker leaves; the run ends with a      this worker leaves, unless it is the last
                           checkpoint once all workers got the signal   holder of its stage; under recycle-run the
                                                                        run ends once all workers got the signal
the one for requeueing     the run ends with a checkpoint, and then     Lightning listens to none
                           the job is requeued
=========================  ==========================================  ===========================================

SIGTERM alone never requeues: ``scancel`` and the time limit send it, too. Workers that all set ``trainer.should_stop``
at one place stop there; if only some do, all stop after one of the next steps
(:mod:`~lightning_recycle.control.protocol.control_collectives`).
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from typing_extensions import override

from lightning_recycle.control.client import ControlClient
from lightning_recycle.control.protocol.control_collectives import StopPlace, stop_point
from lightning_recycle.control.protocol.messages import AfterStep
from lightning_recycle.engines.worker_environment import has_no_successor
from lightning_recycle.errors import UnsupportedFeatureError, suggestion
from lightning_recycle.model.module import global_seed
from lightning_recycle.planning.grid import Grid, Positions, Worker
from lightning_recycle.session.configuration import Options, RunSetup, WorkerIdentity
from lightning_recycle.session.lightning_internals import SignalHandlers, requeues
from lightning_recycle.tensor_memory import merge_shards

log = logging.getLogger(__name__)

if TYPE_CHECKING:  # it imports torch's DTensors, which takes long
    from lightning_recycle.runtime.position_mesh import PositionMesh

ALONE = (
    "{what}, in a hook that a replacement runs alone before it enters the training; the others are past it. Where"
    " workers may be replaced, do that in hooks that come after a step, such as on_train_batch_end or"
    " on_validation_epoch_end."
)
"""The error of a worker that is about to join, when it is asked for ``what`` needs the others."""

# Packages that ask for a process group where nothing depends on the answer.
_LIBRARIES = {"torch", "torchmetrics", "lightning", "lightning_fabric", "pytorch_lightning", __name__.partition(".")[0]}


def watch_process_group(is_in_step: Callable[[], bool], of_members: bool = False) -> None:
    """Warns once if a step asks torch for a default process group.

    ``of_members``: the members of a position form one, for torch's sharded tensors. Other callers are answered that
    there is none: values of members, such as the state of a metric, are not to be summed over them.
    """
    original = getattr(dist.is_initialized, "watched", dist.is_initialized)
    warned = False

    def is_initialized() -> bool:
        nonlocal warned
        caller = sys._getframe(1)
        package = caller.f_globals.get("__name__", "").partition(".")[0]
        if not warned and package not in _LIBRARIES and is_in_step():
            warned = True
            warnings.warn(
                f"{caller.f_code.co_name} ({caller.f_code.co_filename}, line {caller.f_lineno}) asks"
                " torch.distributed.is_initialized() in a step. It is False: with this strategy there is no process"
                " group that steps could use, so what they would gather from other workers, such as negatives, is"
                " that of this worker's micro-batch alone. Use a larger batch_size, or gather in a hook with"
                " self.all_gather.",
                stacklevel=2,
            )
        return original() and (package == "torch" or not of_members)

    is_initialized.watched = original  # type: ignore[attr-defined]
    dist.is_initialized = is_initialized


class StageGroup(ABC):
    """Workers that hold all stages between them: of a run, or of a checkpoint."""

    rank: int
    positions: Positions

    @property
    @abstractmethod
    def is_leader(self) -> bool:
        """Whether this worker speaks for the group, and names files."""

    @property
    @abstractmethod
    def is_column_leader(self) -> bool:
        """Whether this worker speaks for its stage, or for its part of that."""

    @abstractmethod
    def gather_all(self, name: str, value: Any) -> Mapping[int, Any]:
        """The values of all workers of the group, by rank."""

    def gather_columns(self, name: str, contribute: Callable[[], Any]) -> list[Any]:
        """One part per column, in order. Asks again if a speaker dies meanwhile."""
        while True:
            answers = self.gather_all(name, (contribute(),) if self.is_column_leader else None)
            parts = {self.positions.column(rank): value[0] for rank, value in answers.items() if value is not None}
            if len(parts) == self.positions.columns:
                return [parts[column] for column in range(len(parts))]

    def gather_stages(self, name: str, contribute: Callable[[], Any]) -> list[Any]:
        """One part per stage, in order: its members' parts, merged."""
        parts, members = self.gather_columns(name, contribute), self.positions.members
        return [merge_shards(parts[first : first + members]) for first in range(0, len(parts), members)]


class WorkerCollectives(StageGroup):
    """Control collectives of a worker's process, and whether it leads."""

    def __init__(self, run: RunSetup, client: ControlClient, is_in_step: Callable[[], bool]) -> None:
        self._run, self.grid, self.positions = run, run.grid, run.positions
        self.client = client
        self.rank = client.rank
        self.worker = self.positions.position(client.rank)
        self.is_in_step = is_in_step
        """Whether the user's code runs that sees one micro-batch: other workers may not run it as often."""
        self.confirm_step: Callable[[], None] = lambda: None
        """Called before a worker's part is made: what it holds must be what it will be."""
        self._answers: dict[str, Any] = {}

    # ------------------------------------------------------------------ who is who

    @property
    def live_workers(self) -> tuple[int, ...]:
        return self.client.member.roster or tuple(range(self.positions.num_workers))

    @property
    def leader(self) -> int:
        old_leader = self.client.member.leader
        if old_leader >= 0:
            return old_leader
        return self.positions.rank(Worker(0, self.grid.stages - 1))

    @property
    @override
    def is_leader(self) -> bool:
        return not self.client.is_joining and self.rank == self.leader

    @property
    @override
    def is_column_leader(self) -> bool:
        return self.positions.column_leaders(self.live_workers)[self.positions.column(self.rank)] == self.rank

    # ------------------------------------------------------------------ collectives

    def gather(self, name: str, value: Any) -> Mapping[int, Any]:
        """The values of the workers of each stage that read different data.

        By the number of their place in the grid by which data is divided; of the workers at this one's place of tensor
        parallelism. Raises UnsupportedFeatureError in code that sees one micro-batch.
        """
        found, members, tensor = self.gather_all(name, value), self.positions.members, self._run.mesh_sizes[1]
        if members == 1:
            return found
        return {
            self._run.data_grid.rank(self._run.data_worker(rank)): part
            for rank, part in sorted(found.items())
            if (rank - self.rank) % tensor == 0
        }

    @override
    def gather_all(self, name: str, value: Any) -> Mapping[int, Any]:
        """Values of all live workers, by rank; UnsupportedFeatureError in a micro-batch."""
        if self.is_in_step():
            raise UnsupportedFeatureError(
                "A step, or a hook that sees outputs, waits for all workers (all_gather, reduce, broadcast or barrier);"
                " after a failure they run different numbers of steps. Do that in a hook such as on_train_batch_end, or"
                " log the value: what is logged is gathered from all workers. A loss that compares samples"
                " with each other (negatives) has those of its micro-batch: use a larger batch_size, or"
                " num_microbatches=1."
            )
        self.confirm_step()
        return self.client.arrive(name, value)

    def barrier(self, name: str | None = None) -> None:
        self.gather(f"barrier {name or ''}", None)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Returns the object of worker ``src``; 0 means the leader, whatever its rank.

        A string that was asked about before has its answer, also in code that sees one micro-batch: ``trainer.log_dir``
        asks each time.
        """
        if self.is_in_step() and isinstance(obj, str) and obj in self._answers:
            return self._answers[obj]
        payloads = self.gather_all("broadcast", obj)
        source = self.rank
        if len(payloads) > 1:
            source = src if src != 0 and src in payloads else self.leader
        answer = obj if source == self.rank else payloads[source]
        if isinstance(obj, str) and src == 0:
            self._answers[obj] = answer
        return answer

    def reduce(self, tensor: Any, reduce_op: Any, keeps_shares: bool, keeps_lists: bool) -> Any:
        """The values of all live workers as one.

        A sum of equal values is that value: it concerns the whole global batch, so each worker holds the sum that DDP
        would have over all processes. But if steps keep numbers in attributes, each pipeline has its share of them, as
        under DDP, and the pipelines' values are added.
        """
        if not isinstance(tensor, Tensor):
            return tensor
        found = sorted(self.gather("reduce", (tensor.detach(), keeps_shares, keeps_lists)).items())
        shares, lists = (any(flags) for flags in zip(*(kept for _, (_, *kept) in found), strict=True))
        name = str(reduce_op or "sum").rsplit(".", 1)[-1].lower()
        if shares:  # of a pipeline, the last stage has it
            found = [*{self._run.data_grid.worker(rank).pipeline: (rank, answer) for rank, answer in found}.values()]
        values = torch.stack([torch.as_tensor(value) for _, (value, *_) in found])
        if name == "sum" and shares:
            if lists and torch.equal(values, values[:1].expand_as(values)) and len(values) > 1:
                rank_zero_warn(
                    "A sum over workers (sync_dist=True, reduce_fx='sum') adds the same value of all pipelines: right"
                    " for a number that steps count in an attribute, which is each pipeline's share. What is computed"
                    " from lists that steps append to is whole on every worker: log that without sync_dist."
                )
            return values.sum(0).to(tensor.device)
        operations: dict[str, Callable[[Tensor], Tensor]] = {
            "sum": lambda v: v[0] if torch.equal(v, v[:1].expand_as(v)) else v.sum(0),
            "mean": lambda v: v.mean(0) if v.is_floating_point() else v.float().mean(0),
            "avg": lambda v: v.float().mean(0),
            "min": lambda v: v.amin(0),
            "max": lambda v: v.amax(0),
        }
        if name not in operations:
            raise UnsupportedFeatureError(
                f"reduce_op={reduce_op!r} is not supported; use one of {', '.join(operations)}."
                f"{suggestion(name, operations)}"
            )
        return operations[name](values).to(tensor.device)

    def all_gather(self, tensor: Tensor, sync_grads: bool = False) -> Tensor:
        if sync_grads:
            raise UnsupportedFeatureError("all_gather(sync_grads=True) is not supported: it would bypass the schedule.")
        return torch.stack([v for _, v in sorted(self.gather("all_gather", tensor.detach()).items())]).to(tensor.device)

    def decide(self, decision: bool, all_agree: bool = True) -> bool:
        """Whether all workers agree; with ``all_agree=False``, whether any does."""
        decisions = [bool(d) for d in self.gather_all("decision", bool(decision)).values()]
        return all(decisions) if all_agree else any(decisions)

    def by_leader(self, name: str, action: Callable[[], Any]) -> Any:
        """The leader's result of ``action``; UnsupportedFeatureError while joining alone."""
        if self.client.is_joining:
            raise UnsupportedFeatureError(ALONE.format(what=f"It asks the leader for {name}"))
        while True:
            contribution = (action(),) if self.is_leader else None
            for found in self.gather_all(name, contribution).values():
                if found is not None:  # of one worker: only one leads
                    return found[0]

    @override
    def gather_columns(self, name: str, contribute: Callable[[], Any]) -> list[Any]:
        """One part per column, in order, on all workers. Asks again if a speaker dies.

        Raises UnsupportedFeatureError in a joining worker, which is alone, if there are other columns.
        """
        self.confirm_step()
        if self.client.is_joining:
            if self.positions.columns > 1:
                raise UnsupportedFeatureError(ALONE.format(what=f"It asks all stages for {name}"))
            return [contribute()]
        return super().gather_columns(name, contribute)


# ---------------------------------------------------------------------- context


def _mesh_of(run: RunSetup, client: ControlClient, trainer: pl.Trainer) -> PositionMesh | None:
    if run.positions.members == 1:
        return None
    from lightning_recycle.runtime.position_mesh import PositionMesh

    member, device_type = run.positions.member(client.rank), trainer.strategy.root_device.type
    return PositionMesh(run.mesh_sizes, member, device_type, client.is_joining)


def is_in_step(trainer: pl.Trainer) -> bool:
    """Whether a step runs, or a hook that sees the output of one micro-batch."""
    return getattr(trainer.lightning_module, "recorded_logs", None) is not None


class WorkerContext:
    """The context of one worker, whose Trainer is about to run."""

    def __init__(
        self, options: Options, run: RunSetup, place: WorkerIdentity, client: ControlClient, trainer: pl.Trainer
    ) -> None:
        self.options, self.run, self.place, self.client, self.trainer = options, run, place, client, trainer
        self.collectives = WorkerCollectives(run, client, lambda: is_in_step(trainer))
        self.fitting = trainer.state.fn == TrainerFn.FITTING
        self.mesh = _mesh_of(run, client, trainer)
        self.resumed_seed: int | None = None

    @property
    def grid(self) -> Grid:
        return self.run.grid

    @property
    def worker(self) -> Worker:
        return self.collectives.worker

    @cached_property
    def device(self) -> torch.device:
        return self.trainer.strategy.root_device

    @property
    def device_name(self) -> str:
        return f"{self.device.type}:{self.place.device}"

    @property
    def seed(self) -> int:
        """The seed of the run, from which all randomness is derived."""
        return self.own_seed if self.resumed_seed is None else self.resumed_seed

    @cached_property
    def own_seed(self) -> int:
        """The seed of a run that begins anew.

        The strategy's, or that of ``seed_everything``, else 0; a hook that calls it later changes nothing.
        """
        return global_seed() if self.options.seed is None else self.options.seed

    def forward_context(self) -> AbstractContextManager[Any]:
        return self.trainer.strategy.precision_plugin.train_step_context() or nullcontext()


# ---------------------------------------------------------------------- signals


class Preemption:
    """Signals of one worker, from the moment on when Lightning listens to any.

    ``resumes``: whether SLURM may run this job again, resuming from its checkpoint.
    """

    def __init__(self, context: WorkerContext) -> None:
        self.resumes = requeues(context.trainer)
        self.requeue_wanted = False
        self._client, self._fitting = context.client, context.fitting
        self._handlers = SignalHandlers(context.trainer)
        self._handlers.replace(self._end_run, self._leave if self._fitting else None)

    def take_sigterm(self) -> None:
        """Claims SIGTERM for this process, whatever else listened to it."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._leave)

    def release(self) -> None:
        """Releases the signals: this worker's Trainer is the launching process's again."""
        self._handlers.release()

    def _leave(self, *_: Any) -> None:
        self._client.request_leave(with_run=self.resumes or has_no_successor())

    def _end_run(self, signum: int, _: Any) -> None:
        if not self._fitting:
            log.warning(
                "%s: nothing is saved and the job is not requeued, as it does not train.", signal.Signals(signum).name
            )
            return
        self.requeue_wanted = True
        self._client.request_end()


# ---------------------------------------------------------------------- trainer.should_stop


class StopRequests:
    """Agreement with all workers on ``trainer.should_stop``.

    ``agreed``: all have agreed to stop; Lightning may still go on, to ``min_steps`` or ``min_epochs``.
    """

    def __init__(self, context: WorkerContext) -> None:
        self.agreed = False
        self._trainer, self._client = context.trainer, context.client
        self._is_told_to_wait = False

    def agree(self, place: StopPlace, step: int, after_step: AfterStep) -> None:
        """Sets ``trainer.should_stop`` here as on all other workers."""
        trainer, client = self._trainer, self._client
        if self.agreed or client.is_joining:
            return
        if after_step is AfterStep.STOP:
            self.agreed = trainer.should_stop = True
            return
        point = stop_point(step, place)
        if trainer.should_stop and not self._is_told_to_wait:
            self.agreed = client.request_stop_and_wait(point)
            if self.agreed:
                return
            self._is_told_to_wait = True
        trainer.should_stop = False
        client.pass_stop_point(point)
