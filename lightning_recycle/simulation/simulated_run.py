"""Simulated run: plays training from event to event, once or for several seeds.

Training between two events has one configuration, so an interval of any length is one calculation. Events are failures
and repairs (from the source), ends of pauses, checkpoints, changes at the end of a step, and the policy's alarm. A
failure that undoes steps turns the preceding intervals into lost ones; GPU time is counted from the finished timeline.
Runs are deterministic for a seed, in whole nanoseconds. A single run says little: two runs of six hours with a failure
every 30 minutes can differ by a tenth of the throughput.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from lightning_recycle.errors import ConfigurationError
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
from lightning_recycle.simulation.results import (
    Interval,
    SimulatedEvent,
    SimulationResult,
    Span,
    State,
    account,
    samples_of,
)
from lightning_recycle.simulation.training_model import Cluster, TrainingModel

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
        """The tick of the next event."""
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
