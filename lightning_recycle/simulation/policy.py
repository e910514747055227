"""Policies: reactions to failures; shared settings, costs and step times.

The simulated run plays time; a policy gives the training between two events (:class:`Configuration`) and its reaction
to an event (:class:`Reaction`). ``begin`` and ``react`` are pure: a policy's memory is the configuration's ``layout``.
``react`` may be called again before its last answer has taken effect, with the configuration in force or, in a pause,
the next one. Apart from a dead worker's work all policies are alike unless a setting or a publication's constant
differs. Durations may be given as text and are kept in seconds.

*Steps*: ``1f1b`` has a fused backward and one optimizer step for all stages; ``planned`` is the planner's schedule with
a split backward and a staggered optimizer, within the workers' memory, where it is faster than 1F1B. A step takes the
period of the heuristic's schedule; the first after a stop takes longer, up to the makespan, because the pipelines are
empty. Results are cached for the life of the process.

*Recoveries*: all live workers agree on a new generation, look up the plan and their partners, and connect. The first
two were measured with this package's coordinator, over real sockets with up to 2,000 workers on two cores
(``benchmarks/control_plane.py``): between the measured sizes straight lines on logarithmic scales. Assumptions:
``regroup`` is that of NCCL at 32 GPUs; ``connect`` gives 25 s for 10,000 workers, as much as MegaScale (arXiv
2402.15627) reports (under 30 s).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache
from typing import ClassVar, Literal, NamedTuple, get_args

from lightning_recycle.arguments import at_least, choice, whole
from lightning_recycle.planning import (
    Costs,
    Grid,
    HeuristicPlanner,
    LayerCosts,
    Problem,
    Technique,
    normalize,
    normalized_failures,
)
from lightning_recycle.planning.costs import PER_STAGE
from lightning_recycle.planning.layouts import Judgement, judgement_of, with_variation
from lightning_recycle.planning.schedule import Schedule
from lightning_recycle.planning.timing import MicrobatchVariation
from lightning_recycle.simulation.failures import Duration, keep_seconds
from lightning_recycle.simulation.training_model import Cluster, MeasuredModel, TrainingModel, one_f_one_b_seconds


class Loss(Enum):
    """Training that an event undoes: samples are trained again and counted once."""

    NOTHING = "nothing"
    STEP = "step"
    """The step in progress."""
    CHECKPOINT = "checkpoint"
    """Everything since the newest checkpoint."""


@dataclass(frozen=True, slots=True)
class Context:
    """Training model, cluster and nodes.

    ``mtbf``: mean seconds between two failures of the cluster, for checkpoint intervals; None for no failures.
    """

    model: TrainingModel
    cluster: Cluster
    mtbf: float | None = None

    def workers(self, nodes: Iterable[int]) -> tuple[int, ...]:
        """The workers of live nodes: number i of a node is ``node * gpus_per_node + i``."""
        each = self.cluster.gpus_per_node
        return tuple(node * each + i for node in sorted(nodes) for i in range(each))


@dataclass(frozen=True)
class Configuration:
    """Training until the next event.

    Args:
        gpus: GPUs that take part; other live ones are idle. 0 if training stands still.
        useful_gpu_seconds: F, B and W of the samples of one step, each counted once.
        repeated_gpu_seconds: computation of one step done twice: redundant or recomputed.
        checkpoint_every: seconds between checkpoints, taken at the next end of a step; None for none.
        checkpoint_seconds: pause of training for a checkpoint.
        checkpoint_writing: seconds from then, while training goes on, until the checkpoint can be loaded.
        layout: the policy's own data.
        fill_seconds: extra time of the first step after a stop, because later steps overlap (staggered optimizer).
        lead_seconds: seconds by which the first worker begins the next step early. After that moment, all can only be
            stopped at the end of the next step.
        choice: the choice of a policy with several ways, e.g. "layers".
    """

    label: str
    step_seconds: float
    samples: int
    gpus: int
    useful_gpu_seconds: float
    repeated_gpu_seconds: float = 0.0
    checkpoint_every: float | None = None
    checkpoint_seconds: float = 0.0
    checkpoint_writing: float = 0.0
    layout: object = None
    fill_seconds: float = 0.0
    lead_seconds: float = 0.0
    choice: str = ""

    @property
    def running(self) -> bool:
        """Whether any steps are trained."""
        return self.gpus > 0

    @property
    def throughput(self) -> float:
        """Samples/s between events, not counting checkpoints."""
        return self.samples / self.step_seconds if self.running else 0.0


def stopped(label: str, layout: object = None) -> Configuration:
    """A configuration that trains no steps."""
    return Configuration(label, 1.0, 0, 0, 0.0, layout=layout)


@dataclass(frozen=True, slots=True)
class Downtime:
    """Training stands still for ``seconds``, because of ``label``."""

    label: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Trigger:
    """Changes that a policy reacts to, earlier ones included that still wait.

    ``down`` and ``up``: nodes that have failed or come back just now; ``live``: working ones; ``woken``: the alarm of
    the policy's last reaction went off.
    """

    time: float
    live: frozenset[int]
    down: tuple[int, ...] = ()
    up: tuple[int, ...] = ()
    woken: bool = False


@dataclass(frozen=True)
class Reaction:
    """A policy's decision.

    Args:
        pauses: pauses in order. A pause interrupts the step in progress, which is then undone unless ``at_boundary``.
        lost: training that is undone.
        at_boundary: whether to wait for the end of the newest step any worker has begun; nothing is lost then.
        saved: whether the pauses write a checkpoint, which can be loaded when they are over.
        wake: seconds until the policy wants to be asked again; a new reaction clears this alarm.
    """

    configuration: Configuration
    pauses: tuple[Downtime, ...] = ()
    lost: Loss = Loss.NOTHING
    at_boundary: bool = False
    saved: bool = False
    wake: float | None = None


def is_covered(ranges: Iterable[tuple[int, int]], end: int) -> bool:
    """Whether ``ranges`` (first, last + 1) have every number below ``end``."""
    reached = 0
    for first, after in sorted(set(ranges)):
        if first > reached:
            return False
        reached = max(reached, after)
    return reached >= end


CheckpointKind = Literal["synchronous", "background", "sharded", "memory"]

CHECKPOINTS: tuple[str, ...] = get_args(CheckpointKind)


class CheckpointCosts(NamedTuple):
    """Seconds of a checkpoint: standing still, then writing, and loading."""

    stall: float
    writing: float
    loading: float


_WORKER_STORAGE = 1e9  # bytes/s at which a worker reads and writes storage that grows with the cluster
_HOST = 20e9  # bytes/s from a GPU to its host's memory


def checkpoint_costs(kind: str, model: TrainingModel, storage: float) -> CheckpointCosts:
    """The costs of one checkpoint of a kind of ``CHECKPOINTS``.

    Training stands still; after ``writing`` more seconds the checkpoint can be loaded, and a failure before then falls
    back on the previous one. Workers with the same stage each copy or write an equal part of its state. ``storage``:
    bytes/s of the shared storage, per GPU of the fault-free grid.

    - *synchronous* stands still until all state is on the shared storage.
    - *background* (CheckFreq, FAST'21) stands still for a copy to the host's memory, then writes to the shared storage.
    - *sharded* stands still until each worker's part is on storage that grows with the cluster, and loads the same way.
    - *memory* (Gemini, SOSP'23) never stands still; each worker's part goes to a peer, and is loaded from a peer. A
      copy in memory survives.
    """
    shared = model.transformer.state_bytes() / (storage * model.gpus)
    stage = model.state_bytes(1 / model.stages)  # of one GPU
    part = stage / model.pipelines
    if kind == "synchronous":
        return CheckpointCosts(shared, 0.0, shared)
    if kind == "background":
        return CheckpointCosts(part / _HOST, shared, shared)
    if kind == "sharded":
        return CheckpointCosts(part / _WORKER_STORAGE, 0.0, stage / _WORKER_STORAGE)
    return CheckpointCosts(0.0, part / model.network_bandwidth, model.transfer_seconds(1 / model.stages))


def best_interval(rule: str, costs: CheckpointCosts, mtbf: float | None) -> float:
    """Seconds between checkpoints by first-order formulas (Young 1974, Daly 2006).

    ``rule``: "young", sqrt(2 stall mtbf), or "daly", the same less the stall (the mtbf, if it is below stall / 2).
    ``mtbf``: mean seconds between failures of the whole cluster; None, without failures: half an hour.
    """
    if mtbf is None:
        return max(1800.0, costs.writing)
    found = math.sqrt(2 * costs.stall * mtbf)
    if rule == "daly":
        found = found - costs.stall if costs.stall < 2 * mtbf else mtbf
    return max(found, costs.writing, 1.0)


MEASURED_AGREEMENT = ((64, 0.018), (250, 0.059), (500, 0.167), (1000, 0.437), (2000, 1.489))
"""Workers, and seconds from a kill until all have agreed on a new generation."""


def agreement_seconds(workers: int) -> float:
    """Seconds until that many workers agree on a new generation."""
    if workers < 1:
        return 0.0
    points = MEASURED_AGREEMENT
    place = next((n for n in range(1, len(points)) if workers <= points[n][0]), len(points) - 1)
    (x0, y0), (x1, y1) = points[place - 1], points[place]
    slope = math.log(y1 / y0) / math.log(x1 / x0)
    return float(y0 * (workers / x0) ** slope)


# -- steps --------------------------------------------------------------------------------------------------------

DEFAULT_EFFORT = 100_000
"""Operations that the planner plays: at most 0.2 s for the paper's models.

Step times are within 1 % of those with eight times as many.
"""


_MOST_JUDGED = 5_000
"""Operations of an iteration; some dozens of plans of this size take seconds."""

_JUDGED_SHARE = 5
"""Divisor of the effort for plans that choose among distributions."""


@lru_cache(maxsize=16)
def planned_schedule(problem: Problem, effort: int = DEFAULT_EFFORT) -> Schedule:
    """The heuristic's plan of ``problem``."""
    return HeuristicPlanner(effort).plan(problem)


@lru_cache(maxsize=65536)
def planned_step(problem: Problem, effort: int = DEFAULT_EFFORT) -> Judgement:
    """A step under the heuristic's plan of ``problem``."""
    return replace(judgement_of(planned_schedule(problem, effort)), schedule=None)


@lru_cache(maxsize=65536)
def distribution(problem: Problem, failures: int, effort: int = DEFAULT_EFFORT) -> tuple[int, ...]:
    """Failures of each stage after failure normalization.

    By the periods of the plans, as in a run, up to ``_MOST_JUDGED`` operations; else, or without effort, by lower
    bounds.
    """
    grid = problem.grid

    def period(spread: tuple[int, ...]) -> float:
        judged = replace(problem, failed=normalized_failures(grid, spread))
        return planned_step(judged, effort // _JUDGED_SHARE).period

    judged = failures and effort and 3 * grid.global_microbatches * grid.stages <= _MOST_JUDGED
    return normalize(problem, failures, period=period if judged else None)


ScheduleName = Literal["1f1b", "planned"]

SCHEDULES: tuple[str, ...] = get_args(ScheduleName)


def pipeline_step(
    schedule: str,
    costs: Costs,
    microbatches: int,
    in_flight_limit: tuple[int, ...] | None = None,
    effort: int = DEFAULT_EFFORT,
) -> Judgement:
    """A step of one whole pipeline under ``schedule``, one of ``SCHEDULES``.

    ``in_flight_limit``: for the planned schedule. Where it admits no micro-batch, 1F1B is assumed to fit, as the policy
    has decided to run this pipeline.
    """
    usual = Judgement(one_f_one_b_seconds(costs, microbatches))
    if schedule == "1f1b" or (in_flight_limit and min(in_flight_limit) < 1):
        return usual
    limit = None if in_flight_limit is None else tuple(min(most, microbatches) for most in in_flight_limit)
    problem = Problem(Grid(1, costs.stages, microbatches), costs, frozenset(), Technique(True, True), limit)
    return min(usual, planned_step(problem, effort))


def unmovable(model: TrainingModel) -> str:
    """Why the layers of ``model`` cannot move; empty if they can."""
    return "the stages were measured as a whole" if isinstance(model, MeasuredModel) else ""


@lru_cache(maxsize=256)
def layer_costs(model: TrainingModel) -> LayerCosts:
    """Costs of each unit of ``model`` with the replicas of the fault-free grid."""
    count = model.stages if unmovable(model) else model.units
    costs = model.costs() if unmovable(model) else model.costs((1,) * count)
    return LayerCosts(
        **{name: getattr(costs, name) for name in PER_STAGE},
        output_bytes=(model.microbatch * model.transformer.boundary_bytes(),) * count,
        held_bytes=(model.activation_bytes(1 / count),) * count,
        parameter_bytes=(model.state_bytes(1 / count),) * count,
        memory_limit=model.memory_bytes,
        bandwidth=model.network_bandwidth,
        latency=model.network_latency,
    )


@lru_cache(maxsize=4096)
def step_judgement(problem: Problem, variation: MicrobatchVariation | None, effort: int) -> Judgement:
    """A step of the planner's schedule, or of 1F1B if faster and nothing has failed.

    ``problem`` has the mean costs of micro-batches; ``variation``: differences where stages share layers.
    """
    if variation is not None:
        schedule = planned_schedule(problem, effort)
        return replace(with_variation(Judgement(schedule.period, schedule=schedule), variation, effort), schedule=None)
    step = planned_step(problem, effort)
    if problem.failed or problem.technique != Technique():
        return step
    return min(step, Judgement(one_f_one_b_seconds(problem.costs, problem.grid.microbatches)))


# -- policies -----------------------------------------------------------------------------------------------------

_RULES = ("young", "daly")


def pauses(**seconds: float) -> tuple[Downtime, ...]:
    """Pauses by name, without those of zero length."""
    return tuple(Downtime(label.replace("_", " "), value) for label, value in seconds.items() if value > 0)


@dataclass(frozen=True, kw_only=True)
class Policy(ABC):
    """A way to handle failures, with the settings that every policy has.

    Args:
        schedule: schedule of whole pipelines, "1f1b" or "planned".
        effort: effort of the planner, in operations.
        detection: seconds from a failure to its detection; the heartbeat timeout.
        agreement: seconds until all live workers agree on a new generation; None: as measured, by their number.
        lookup: seconds to look up the plan and a worker's partners.
        regroup: seconds for new communicators, besides ``connect``.
        connect: seconds for new communicators, for each live worker.
        restart: seconds to restart the job, besides detection and loading a checkpoint.
        checkpoint: "synchronous", "background", "sharded" or "memory" (see :func:`checkpoint_costs`).
        checkpoint_every: time from a checkpoint to the next, or by the formula of "young" or "daly" from the mean time
            between failures and the stall of a checkpoint.
        storage: bytes/s of the shared storage, per GPU of the fault-free grid. (The default is 1 GB/s for 32 GPUs,
            which gives 107 s for the 6.7B model; Oobleck's public simulator has 120 s.)
    """

    schedules: ClassVar[tuple[str, ...]] = SCHEDULES
    ignores_failures: ClassVar[bool] = False
    """Whether nodes never fail under this policy (the upper bound)."""

    schedule: ScheduleName = "1f1b"
    effort: int = DEFAULT_EFFORT
    detection: Duration = 5.0
    agreement: Duration | None = None
    lookup: Duration = 0.06
    regroup: Duration = 5.0
    connect: Duration = 0.0025
    restart: Duration = 300.0
    checkpoint: CheckpointKind = "background"
    checkpoint_every: Duration = "5min"
    storage: float = 1e9 / 32

    def __post_init__(self) -> None:
        name = type(self).__name__
        keep_seconds(self, "detection", "agreement", "lookup", "regroup", "connect", "restart")
        if self.checkpoint_every not in _RULES:
            keep_seconds(self, "checkpoint_every", positive=True)
        at_least(name, "storage", self.storage, above=True)
        whole(name, "effort", self.effort)
        for setting, choices in (("schedule", self.schedules), ("checkpoint", CHECKPOINTS)):
            choice(*choices).checked(name, setting, getattr(self, setting))

    @abstractmethod
    def begin(self, context: Context, live: frozenset[int]) -> Reaction:
        """How training starts on the live nodes."""

    @abstractmethod
    def react(self, context: Context, current: Configuration, trigger: Trigger) -> Reaction | None:
        """Reaction to a change; None: nothing changes."""

    # -- the schedule ----------------------------------------------------------------------------------------------

    def pipeline_step(
        self, model: TrainingModel, microbatches: int, costs: Costs | None = None, limit: tuple[int, ...] | None = None
    ) -> Judgement:
        """A step of a whole pipeline, by default of the fault-free split.

        ``limit``: micro-batches that fit into a worker of each stage.
        """
        if costs is None:
            costs, limit = model.costs(), model.in_flight_limit()
        return pipeline_step(self.schedule, costs, microbatches, limit, self.effort)

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def checkpoint_costs(self, context: Context) -> CheckpointCosts:
        """Seconds of one checkpoint."""
        return checkpoint_costs(self.checkpoint, context.model, self.storage)

    def checkpoint_interval(self, context: Context) -> float:
        """Seconds from a checkpoint to the next."""
        every = self.checkpoint_every
        if isinstance(every, str):
            return best_interval(every, self.checkpoint_costs(context), context.mtbf)
        return every

    # -- recoveries ------------------------------------------------------------------------------------------------

    def regrouping(self, workers: int, *, broken: bool, transfer: float = 0.0, **own: float) -> tuple[Downtime, ...]:
        """The pauses of a change of the roster.

        ``broken``: a worker failed, which must be detected first. ``own``: other pauses than ``regroup``, between the
        agreement and the transfer.
        """
        agreed = agreement_seconds(workers) if self.agreement is None else float(self.agreement)
        middle = own or {"regroup": float(self.regroup) + float(self.connect) * workers}
        detect = float(self.detection) if broken else 0.0
        return pauses(detect=detect, agree=agreed + float(self.lookup), **middle, transfer=transfer)

    def restarting(self, context: Context, *, broken: bool) -> tuple[Downtime, ...]:
        """The pauses of a restart from the newest checkpoint."""
        detect = float(self.detection) if broken else 0.0
        loading = self.checkpoint_costs(context).loading
        return pauses(detect=detect, restart=float(self.restart), load=loading)

    def regrouped(self, found: Configuration, workers: int, *, broken: bool, transfer: float = 0.0) -> Reaction:
        """A change of the roster: at once if ``broken``, else at the end of a step."""
        steps = self.regrouping(workers, broken=broken, transfer=transfer)
        return Reaction(found, steps, Loss.STEP) if broken else Reaction(found, steps, at_boundary=True)

    def restarted(self, context: Context, found: Configuration, *, broken: bool, trained: bool = True) -> Reaction:
        """A restart from the newest checkpoint, where there are workers for it.

        ``broken``: a worker failed, which must be detected first. ``trained``: whether training is undone.
        """
        steps = self.restarting(context, broken=broken) if found.running else ()
        return Reaction(found, steps, Loss.CHECKPOINT if trained else Loss.NOTHING)

    def growing(self, context: Context, found: Configuration) -> Reaction:
        """A checkpoint at the end of the step, and a restart from it with more workers."""
        costs = self.checkpoint_costs(context)
        steps = (*pauses(checkpoint=costs.stall + costs.writing), *self.restarting(context, broken=False))
        return Reaction(found, steps, at_boundary=True, saved=True)

    def running(
        self, context: Context, label: str, step: Judgement, workers: int, layout: object, *, part: float = 1.0
    ) -> Configuration:
        """Training at ``step`` with this policy's checkpoints.

        ``part``: part of the global batch that is trained. Without ``workers``, training stands still.
        """
        model = context.model
        if not workers:
            return stopped(label, layout)
        costs = self.checkpoint_costs(context)
        return Configuration(
            label,
            step.period,
            round(model.global_batch * part),
            workers,
            model.useful_gpu_seconds * part,
            model.recomputed_gpu_seconds * part,
            layout=layout,
            fill_seconds=step.fill,
            lead_seconds=step.lead,
            checkpoint_every=self.checkpoint_interval(context),
            checkpoint_seconds=costs.stall,
            checkpoint_writing=costs.writing,
        )
