"""Simulated run: plays training from event to event, for one seed or several.

Training between two events has one configuration, so an interval of any length is one calculation. Events are failures
and repairs (from the source), ends of pauses, checkpoints, changes at the end of a step, and the policy's alarm. A
failure that undoes steps turns the preceding intervals into lost ones; GPU time is counted from the finished timeline.
Runs are deterministic for a seed, in whole nanoseconds. A single run says little: two runs of six hours with a failure
every 30 minutes can differ by a tenth of the throughput.

A result has throughput, timeline and GPU time by cause, in whole GPU-nanoseconds, so the parts of :class:`Accounting`
add up exactly. Useful and repeated time of each span are rounded down; the rest of the participants' time is bubble.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Literal

from lightning_recycle.errors import ConfigurationError, PlanningError
from lightning_recycle.simulation.failures import (
    TICKS_PER_SECOND,
    Change,
    Duration,
    FailureSource,
    as_seconds,
    as_ticks,
)
from lightning_recycle.simulation.policy import (
    Configuration,
    Context,
    Loss,
    Policy,
    Reaction,
    Trigger,
)
from lightning_recycle.simulation.training_model import Cluster, TrainingModel


class Cause(str, Enum):
    """Cause of a GPU-second's use."""

    USEFUL = "useful"
    """F, B and W of samples that counted, each once."""
    BUBBLE = "bubble"
    """Taking part in a step without computing: bubbles, communication, REDUCE, STEP."""
    IDLE = "idle"
    """Alive but not taking part: spares, left-over nodes, training that cannot run."""
    REDONE = "redone"
    """Lost steps, and computation that a policy does twice (redundant or recomputed)."""
    RECONFIGURING = "reconfiguring"
    """Pauses: detection, regrouping, transfer, restart, writing checkpoints."""
    FAILED = "failed"
    """Down."""


class State(str, Enum):
    """The state of training in an interval."""

    TRAINING = "training"
    LOST = "lost"
    """Trained, but undone by a later failure."""
    PAUSED = "paused"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class Interval:
    """Seconds without a change; ``throughput`` leaves out samples that are lost later."""

    begin: float
    end: float
    state: State
    label: str
    gpus: int
    """Number of GPUs that take part."""
    live_gpus: int
    throughput: float
    choice: str = ""
    """Choice of a policy with several ways: "reroute", "layers", ..."""


@dataclass(frozen=True, slots=True)
class SimulatedEvent:
    """An event at ``time`` seconds with the nodes concerned.

    "failure", "repair", or "alarm" (of the policy).
    """

    time: float
    kind: str
    nodes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Accounting:
    """GPU-nanoseconds by cause."""

    useful: int = 0
    bubble: int = 0
    idle: int = 0
    redone: int = 0
    reconfiguring: int = 0
    failed: int = 0

    @property
    def total(self) -> int:
        """The sum of all parts, in GPU-nanoseconds."""
        return sum(getattr(self, cause.value) for cause in Cause)

    def seconds(self, cause: Cause | str) -> float:
        """GPU-seconds of a cause."""
        return float(getattr(self, Cause(cause).value)) / TICKS_PER_SECOND

    def fractions(self) -> dict[str, float]:
        """Fraction of all GPU time, by cause."""
        return {cause.value: getattr(self, cause.value) / self.total if self.total else 0.0 for cause in Cause}


FIGURES = ("throughput", "ratio", "ratio_per_gpu", "fraction_of_ideal", "goodput", "ettr", "mfu", "cost")
"""The properties of a result that are numbers."""


@dataclass(frozen=True)
class SimulationResult:
    """One simulated run.

    Args:
        model: name of the model.
        policy: class name of the policy.
        duration: simulated time in seconds.
        gpus: GPUs of the cluster.
        samples: samples trained and kept; an unfinished last step counts for the part that is done.
        fault_free_throughput: samples/s of the model's grid under 1F1B without failures.
        fault_free_gpus: GPUs of that grid.
        accounting: where the GPU time went.
        intervals: the timeline.
        events: failures and repairs.
        flops_per_sample: floating-point operations of a sample, without those that are done again.
        peak_flops: of one GPU, per second.
        price: of a GPU and hour.
    """

    model: str
    policy: str
    duration: float
    gpus: int
    samples: float
    fault_free_throughput: float
    fault_free_gpus: int
    accounting: Accounting
    intervals: tuple[Interval, ...]
    events: tuple[SimulatedEvent, ...]
    flops_per_sample: float = 0.0
    peak_flops: float = 1.0
    price: float = 0.0

    @property
    def throughput(self) -> float:
        """Samples/s over the whole duration."""
        return self.samples / self.duration

    @property
    def ratio(self) -> float:
        """Throughput relative to fault-free 1F1B."""
        return self.throughput / self.fault_free_throughput

    @property
    def ratio_per_gpu(self) -> float:
        """The same per GPU of the cluster, idle spares included."""
        return self.ratio * self.fault_free_gpus / self.gpus

    @property
    def fraction_of_ideal(self) -> float:
        """Throughput relative to live GPUs without bubbles, pauses and repetition."""
        live = self.accounting.total - self.accounting.failed
        return self.accounting.useful / live if live else 0.0

    @property
    def goodput(self) -> float:
        """Fraction of the GPU time, failed GPUs included, spent on samples that count."""
        return self.accounting.fractions()["useful"]

    @property
    def ettr(self) -> float:
        """Effective training time ratio: fraction of the duration with steps that count."""
        trained = (each.end - each.begin for each in self.intervals if each.state is State.TRAINING)
        return sum(trained) / self.duration

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: operations of the samples over the GPUs' peak."""
        return self.throughput * self.flops_per_sample / (self.peak_flops * self.gpus)

    @property
    def cost(self) -> float:
        """Of all GPUs while their nodes are up, whatever they do."""
        up = self.accounting.total - self.accounting.failed
        return self.price * up / TICKS_PER_SECOND / 3600

    @property
    def failures(self) -> int:
        """Number of node failures; a node may fail more than once."""
        return sum(len(event.nodes) for event in self.events if event.kind == "failure")

    def losses(self) -> dict[str, float]:
        """Samples/s lost by cause, against fault-free 1F1B on all GPUs; they add up.

        A GPU-second that is idle, redone, reconfiguring or failed loses what a GPU achieves in a second without
        failures; "slower steps" is the rest: the difference in bubbles, negative where a schedule is faster than 1F1B.
        """
        per_gpu_second = self.fault_free_throughput / self.fault_free_gpus
        lost = {
            cause.value: self.accounting.seconds(cause) * per_gpu_second / self.duration
            for cause in (Cause.FAILED, Cause.RECONFIGURING, Cause.REDONE, Cause.IDLE)
        }
        missing = per_gpu_second * self.gpus - self.throughput
        return {**lost, "slower steps": missing - sum(lost.values())}


@dataclass(frozen=True, slots=True)
class Span:
    """Ticks without a change; ``configuration`` is in force, or follows the pause."""

    begin: int
    end: int
    state: State
    label: str
    configuration: Configuration
    live_gpus: int

    @property
    def gpus(self) -> int:
        return min(self.configuration.gpus, self.live_gpus)

    def part(self, begin: int, end: int, state: State) -> Span:
        """The same configuration from ``begin`` to ``end``, in another state."""
        return replace(self, begin=begin, end=end, state=state)


def account(spans: Sequence[Span], gpus: int) -> Accounting:
    """GPU time of the cluster's ``gpus`` GPUs by cause.

    Raises PlanningError when a configuration claims more work than its GPUs have time, or more GPUs than are live.
    """
    useful = bubble = idle = redone = reconfiguring = failed = 0
    for span in spans:
        ticks, taking_part = span.end - span.begin, span.gpus
        failed += (gpus - span.live_gpus) * ticks
        idle += (span.live_gpus - taking_part) * ticks
        if span.state is State.TRAINING:
            work, again = _training(span, ticks)
            useful += work
            redone += again
            bubble += taking_part * ticks - work - again
        elif span.state is State.LOST:
            redone += taking_part * ticks
        else:  # nothing takes part while training is stopped
            reconfiguring += taking_part * ticks
    return Accounting(useful, bubble, idle, redone, reconfiguring, failed)


def _training(span: Span, ticks: int) -> tuple[int, int]:
    configuration = span.configuration
    step = max(1, as_ticks(configuration.step_seconds))
    work, again = as_ticks(configuration.useful_gpu_seconds), as_ticks(configuration.repeated_gpu_seconds)
    if configuration.gpus > span.live_gpus or work + again > configuration.gpus * step * (1 + 1e-6):
        raise PlanningError(
            f"the policy's configuration {configuration.label!r} is impossible: {configuration.gpus} GPUs of "
            f"{span.live_gpus} live ones do {(work + again) / 1e9:g} GPU-seconds of work in {step / 1e9:g} s."
        )
    useful = work * ticks // step
    return useful, min(again * ticks // step, configuration.gpus * ticks - useful)


def samples_of(spans: Sequence[Span]) -> float:
    """Samples that were trained and never undone."""
    return sum(
        span.configuration.samples * (span.end - span.begin) / max(1, as_ticks(span.configuration.step_seconds))
        for span in spans
        if span.state is State.TRAINING
    )


_FILL = "fill"


@dataclass
class _Pending:
    """A reaction that waits for the end of a step, and the trigger it answers."""

    reaction: Reaction
    trigger: Trigger
    tick: int


class SimulatedRun:
    """A training run under a policy, played until tick ``end``.

    Attributes:
        spans, events: the timeline so far; ``now``: the present tick; ``live``: the nodes that work.
        changes: failures and repairs to come, the next one last; ``pauses``: likewise, as (label, end).
        alarm: the tick at which the policy wants to be asked again; ``pending``: its reaction to the end of a step.
        snapshot: the newest state of which a checkpoint was begun; ``loadable_at``: when that can be loaded.
        older_snapshot: the state to which a loss goes back until then.
        after_pauses: "write" if a checkpoint of the state after the pauses is then written on; "loaded" if that state
            can be loaded at once, as it was itself loaded, or saved in the pauses.
        origin: a step begins here, and every step's duration later; ``begun``: when the first of them really began.
    """

    def __init__(self, context: Context, policy: Policy, changes: Sequence[Change], end: int) -> None:
        self.context, self.policy, self.end = context, policy, end
        self.spans: list[Span] = []
        self.live = frozenset(range(context.cluster.nodes))
        self.events: list[SimulatedEvent] = []
        self.changes = list(changes)[::-1]
        self.now = 0
        self.pauses: list[tuple[str, int]] = []
        self.pending: _Pending | None = None
        self.alarm: int | None = None
        self.older_snapshot = self.snapshot = self.loadable_at = 0
        self.after_pauses: Literal["write", "loaded"] | None = None
        self.origin = self.begun = 0
        if self.changes and self.changes[-1].tick == 0:
            self._apply_change(self.changes.pop())
        first = policy.begin(context, self.live)
        self.configuration = first.configuration
        self._accept(first, Trigger(0.0, self.live))

    def play(self) -> None:
        """Plays to the end."""
        while self.now < self.end:
            upcoming = self._next_tick()
            self._extend_timeline(upcoming)
            self.now = upcoming
            if self.now < self.end:
                self._handle_next_event()

    # -- what comes next ------------------------------------------------------------------------------------------

    def _next_tick(self) -> int:
        ticks = [self.end]
        if self.pauses:
            ticks.append(self.pauses[-1][1])
        elif self.configuration.running and (due := self._checkpoint_due()) is not None:
            ticks.append(due)
        if self.pending is not None:
            ticks.append(self.pending.tick)
        if self.changes:
            ticks.append(self.changes[-1].tick)
        if self.alarm is not None:
            ticks.append(self.alarm)
        return max(self.now, min(ticks))

    def _handle_next_event(self) -> None:
        """Handles one due event; ends of pauses and steps come before disturbances."""
        if self.pauses and self.pauses[-1][1] <= self.now:
            self.pauses.pop()
            if not self.pauses:
                self._start_steps()
        elif not self.pauses and self.configuration.running and self._checkpoint_due() == self.now:
            stall = as_ticks(self.configuration.checkpoint_seconds)
            if stall:
                self.after_pauses = "write"
                self.pauses = [("checkpoint", self.now + stall)]
            else:
                self._begin_checkpoint(loaded=False)
        elif self.pending is not None and self.pending.tick <= self.now:
            reaction, self.pending = self.pending.reaction, None
            self._put_into_force(reaction)
        elif self.changes and self.changes[-1].tick <= self.now:
            change = self.changes.pop()
            self._apply_change(change)
            self._ask_policy(Trigger(self._seconds(), self.live, change.down, change.up))
        elif self.alarm is not None and self.alarm <= self.now:
            self.alarm = None
            self.events.append(SimulatedEvent(self._seconds(), "alarm"))
            self._ask_policy(Trigger(self._seconds(), self.live, woken=True))

    def _apply_change(self, change: Change) -> None:
        """Applies failures and returns of nodes."""
        self.live = self.live.difference(change.down).union(change.up)
        for kind, nodes in (("failure", change.down), ("repair", change.up)):
            if nodes:
                self.events.append(SimulatedEvent(change.tick / TICKS_PER_SECOND, kind, nodes))

    # -- what a policy decides ------------------------------------------------------------------------------------

    def _ask_policy(self, trigger: Trigger) -> None:
        """Asks the policy for its reaction, also to the trigger of one that still waits."""
        if self.pending is not None:
            # A waiting reaction may rely on a node that has just failed, so the policy answers both at once.
            before, self.pending = self.pending.trigger, None
            up = tuple(sorted((*trigger.up, *(node for node in before.up if node in trigger.live))))
            trigger = replace(trigger, up=up, woken=trigger.woken or before.woken)
        reaction = self.policy.react(self.context, self.configuration, trigger)
        if reaction is not None:
            self._accept(reaction, trigger)

    def _accept(self, reaction: Reaction, trigger: Trigger) -> None:
        """Puts ``reaction`` into force, or keeps it for the end of the step."""
        self.alarm = None if reaction.wake is None else self.now + max(1, as_ticks(reaction.wake))
        if reaction.at_boundary and self.configuration.running and not self.pauses:
            begun = self.now + as_ticks(self.configuration.lead_seconds)
            self.pending = _Pending(reaction, trigger, self._boundary(begun))
            return
        self._put_into_force(reaction)

    def _put_into_force(self, reaction: Reaction) -> None:
        """Undoes lost time, rearranges pauses, restarts or goes on with the step."""
        old, self.configuration = self.configuration, reaction.configuration
        interrupted = reaction.lost is Loss.STEP or bool(reaction.pauses) or not reaction.configuration.running
        if reaction.lost is Loss.CHECKPOINT:
            self.snapshot, self.loadable_at = self._newest_checkpoint(), self.now  # a half one is never complete
            self._mark_lost(self.snapshot)
        elif interrupted:
            self._mark_lost(self._step_begin(old))
        resumed = bool(self.pauses) and reaction.lost is Loss.NOTHING
        until = self.pauses[0][1] if resumed else self.now
        if not resumed:
            # Loaded state is as good as a checkpoint that has just been written.
            self.pauses, self.after_pauses = [], "loaded" if reaction.lost is Loss.CHECKPOINT else None
        elif reaction.pauses and self.pauses[0][0] == _FILL:
            until = max(self.now, self.pauses[1][1] if len(self.pauses) > 1 else self.now)
            del self.pauses[0]  # it follows the new pauses instead
        if reaction.saved:
            self.after_pauses = "loaded"
        for pause in reaction.pauses:
            until += as_ticks(pause.seconds)
            self.pauses.insert(0, (pause.label, until))
        fill = as_ticks(self.configuration.fill_seconds)
        if fill and interrupted and self.now and self.configuration.running:
            self.pauses.insert(0, (_FILL, until + fill))
        if self.pauses:
            return
        if reaction.lost is Loss.NOTHING and old.running and self.configuration.running and self.now:
            self._carry_on(old)
        else:
            self._start_steps()

    def _start_steps(self) -> None:
        """A step begins now, and a checkpoint if the pauses were for one."""
        self.origin = self.begun = self.now
        if self.pending is not None:  # it waits for a step that begins only now, after a checkpoint
            self.pending.tick = self._boundary(self.pending.tick)
        if self.after_pauses is not None:
            self._begin_checkpoint(loaded=self.after_pauses == "loaded")
            self.after_pauses = None

    def _begin_checkpoint(self, *, loaded: bool) -> None:
        """A checkpoint of this moment, loadable later, or at once if it was loaded."""
        self.older_snapshot = self._newest_checkpoint()
        self.snapshot = self.now
        self.loadable_at = self.now + (0 if loaded else as_ticks(self.configuration.checkpoint_writing))

    def _newest_checkpoint(self) -> int:
        """The newest state that can be loaded now."""
        return self.snapshot if self.loadable_at <= self.now else self.older_snapshot

    def _carry_on(self, old: Configuration) -> None:
        """The step in progress continues at another speed; work already done stays done."""
        if _step_ticks(old) == _step_ticks(self.configuration):
            return
        begun = self._step_begin(old)
        done = (self.now - self.origin) % _step_ticks(old)
        self.origin = self.now - done * _step_ticks(self.configuration) // _step_ticks(old)
        self.begun = begun
        if self.pending is not None:
            self.pending.tick = self._boundary(self.now)

    def _boundary(self, tick: int) -> int:
        """The first end of a step at ``tick`` or after it."""
        step = _step_ticks(self.configuration)
        return self.origin - (self.origin - tick) // step * step

    def _step_begin(self, configuration: Configuration) -> int:
        """Begin of the step in progress; there is none in a pause."""
        if self.pauses or not configuration.running:
            return self.now
        step = _step_ticks(configuration)
        steps = (self.now - self.origin) // step
        return self.origin + steps * step if steps else self.begun

    def _checkpoint_due(self) -> int | None:
        """The end of a step at which the next checkpoint begins; None for no checkpoints."""
        interval = self.configuration.checkpoint_every
        if interval is None:
            return None
        boundary = self._boundary(max(self.snapshot + as_ticks(interval), self.loadable_at, self.now))
        return boundary if boundary > self.begun else boundary + _step_ticks(self.configuration)

    # -- the timeline ---------------------------------------------------------------------------------------------

    def _extend_timeline(self, until: int) -> None:
        """Adds the time from now ``until`` then, to the last span if that goes on."""
        if until <= self.now:
            return
        configuration = self.configuration
        live = len(self.live) * self.context.cluster.gpus_per_node
        if self.pauses:
            state, label = State.PAUSED, self.pauses[-1][0]
        else:
            state = State.TRAINING if configuration.running else State.STOPPED
            label = configuration.label
        last = self.spans[-1] if self.spans else None
        if (
            last
            and (last.state, last.label, last.live_gpus) == (state, label, live)
            and (last.configuration is configuration)
        ):
            self.spans[-1] = last.part(last.begin, until, state)  # as after a checkpoint that stops nothing
            return
        self.spans.append(Span(self.now, until, state, label, configuration, live))

    def _mark_lost(self, since: int) -> None:
        """Makes all training ``since`` a tick lost time."""
        at = len(self.spans)
        while at and self.spans[at - 1].end > since:
            at -= 1
            span = self.spans[at]
            if span.state is State.TRAINING:
                parts = [span.part(max(span.begin, since), span.end, State.LOST)]
                if span.begin < since:
                    parts.insert(0, span.part(span.begin, since, State.TRAINING))
                self.spans[at : at + 1] = parts

    def _seconds(self) -> float:
        return self.now / TICKS_PER_SECOND


def _step_ticks(configuration: Configuration) -> int:
    """The duration of a step; at least one tick."""
    return max(1, as_ticks(configuration.step_seconds))


# -- whole runs ------------------------------------------------------------------------------------------------------

_MTBF_SEEDS = 8  # runs from which the mean time between failures is known


def simulate(
    model: TrainingModel,
    cluster: Cluster,
    policy: Policy,
    failures: FailureSource,
    duration: Duration = "1d",
    seed: int = 0,
) -> SimulationResult:
    """Train ``model`` on ``cluster`` for ``duration`` while nodes fail.

    Args:
        model: the model to train.
        cluster: the machines.
        policy: how failures are handled.
        failures: the source of failures.
        duration: seconds, or text such as "6h".
        seed: seed of the failures.

    Raises:
        ConfigurationError: when the arguments do not fit together.
    """
    seconds = as_seconds("duration", duration, positive=True, owner="simulate")
    if cluster.gpus < model.gpus:
        raise ConfigurationError(
            f"{model.name} needs {model.gpus} GPUs, the cluster has {cluster.gpus}: use Cluster.of(model)."
        )
    changes = () if policy.ignores_failures else failures.changes(cluster, seconds, seed)
    mtbf = None if policy.ignores_failures else mean_time_between_failures(failures, cluster, seconds)
    run = SimulatedRun(Context(model, cluster, mtbf), policy, changes, as_ticks(seconds))
    run.play()
    return SimulationResult(
        model=model.name,
        policy=type(policy).__name__,
        duration=seconds,
        gpus=cluster.gpus,
        samples=samples_of(run.spans),
        fault_free_throughput=model.global_batch / model.fault_free_seconds(),
        fault_free_gpus=model.gpus,
        flops_per_sample=sum(model.transformer.flops()),
        peak_flops=model.device.peak_flops,
        price=cluster.price,
        accounting=account(run.spans, cluster.gpus),
        intervals=tuple(map(_interval, run.spans)),
        events=tuple(run.events),
    )


def mean_time_between_failures(failures: FailureSource, cluster: Cluster, duration: float) -> float | None:
    """Mean seconds between two failures of the cluster; None without failures.

    An operator's knowledge from the past: the mean of eight runs with other seeds, where the source is random.
    """
    count = sum(
        bool(change.down) and change.tick > 0
        for seed in range(_MTBF_SEEDS)
        for change in failures.changes(cluster, duration, 1_000_000 + seed)
    )
    return _MTBF_SEEDS * duration / count if count else None


def _interval(span: Span) -> Interval:
    training = span.state is State.TRAINING
    return Interval(
        span.begin / TICKS_PER_SECOND,
        span.end / TICKS_PER_SECOND,
        span.state,
        span.label,
        span.gpus,
        span.live_gpus,
        span.configuration.throughput if training else 0.0,
        span.configuration.choice,
    )


@dataclass(frozen=True)
class Repetitions:
    """Results that differ only in the seed."""

    results: tuple[SimulationResult, ...]

    @property
    def ratio(self) -> float:
        """Mean throughput relative to fault-free 1F1B."""
        return self.mean("ratio")

    def mean(self, figure: str) -> float:
        """Mean of a property of the results, such as "ratio"."""
        return statistics.fmean(getattr(result, figure) for result in self.results)

    @property
    def deviation(self) -> float:
        """Standard deviation of the ratio from run to run."""
        return statistics.stdev(result.ratio for result in self.results) if len(self.results) > 1 else 0.0


def repeat(
    model: TrainingModel,
    cluster: Cluster,
    policy: Policy,
    failures: FailureSource,
    duration: Duration = "1d",
    seeds: Iterable[int] = range(10),
) -> Repetitions:
    """:func:`simulate` for each seed.

    Raises:
        ConfigurationError: as for ``simulate``, or when there is no seed.
    """
    results = tuple(simulate(model, cluster, policy, failures, duration, seed) for seed in seeds)
    if not results:
        raise ConfigurationError("repeat(seeds=()): give at least one seed.")
    return Repetitions(results)
