"""The engine: plays a training run from event to event.

Concept: between two events training runs in one configuration, step after step, so an interval of any length is one
calculation. Events are failures and repairs (from the source), nodes that get slow or wrong and are found, ends of
pauses, checkpoints, changes that wait for the end of a step, and the policy's alarm. A failure that undoes steps turns
the preceding intervals from training into lost; GPU time is counted from the finished timeline, so it cannot disagree
with it.

Slow nodes: all wait, until after ``slow_after`` the work is dealt out anew, if the policy can. Where training would be
faster without the node, it is left out like one that fails, as soon as the time lost by then equals what leaving it out
costs (the rule of ski rental, which at most doubles the loss; nobody knows how long a node stays slow).

Wrong nodes: what was trained since the first wrong result is undone when it is found. Found by a check of the step in
progress, only that step is; otherwise all load the newest checkpoint from before the first wrong result.

Contract: deterministic for a seed; time is in whole nanoseconds; the parts of the accounting add up exactly.

Must not know: what a policy does, where failures come from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from lightning_recycle.simulation.failures import Change, Health, Wrong
from lightning_recycle.simulation.policies.policy import (
    Configuration,
    Context,
    Happening,
    Loss,
    Policy,
    Reaction,
    Watch,
    WatchfulPolicy,
    checked,
    waiting,
)
from lightning_recycle.simulation.results import Event, Span, State, samples_of
from lightning_recycle.simulation.units import TICKS_PER_SECOND, as_ticks

__all__ = ["Run"]

_FILL = "fill"


@dataclass
class _Pending:
    """A reaction that waits for the end of a step, and the happening it answers."""

    reaction: Reaction
    happening: Happening
    tick: int


class Run:
    """A training run under a policy, played until tick ``end``."""

    def __init__(self, context: Context, policy: Policy, changes: Sequence[Change], end: int) -> None:
        self.context, self.policy, self.end = context, policy, end
        self.watchful = policy if isinstance(policy, WatchfulPolicy) else None
        self.watch = self.watchful.watch if self.watchful else Watch()
        self.spans: list[Span] = []
        self.health = Health(context.cluster.nodes)
        self.known: frozenset[int] = frozenset()  # slow nodes that are known to be slow
        self.slow_due: tuple[int, bool] | None = None  # when slow nodes are looked at; whether to leave them out then
        self.changes = list(changes)[::-1]  # the next one last
        self.now = 0
        self.pauses: list[tuple[str, int]] = []  # what is left of them, the next one last; label and end
        self.pending: _Pending | None = None
        self.alarm: int | None = None
        self.saved = [(0, 0)]  # checkpoints: (taken, readable)
        self.checkpoint = 0  # the state to which a loss goes back
        self.taken = 0  # the newest state of which a checkpoint was begun
        self.readable = 0  # when it can be loaded
        self.checkpointing: bool | None = None  # in a pause: True where a checkpoint's writing goes on after it, False
        # where it can be loaded when the pauses are over (it was itself loaded, or is written in them)
        self.origin = 0  # a step begins here, and every step's duration later
        self.begun = 0  # when the first of them really began
        begin = self.changes.pop() if self.changes and self.changes[-1].tick == 0 else Change(0)
        self.health.apply(begin)
        first = policy.begin(context, self.health.counted)
        self.planned = self.configuration = first.configuration
        self._take(first, Happening(0.0, self.health.counted))
        self._degraded(begin)

    def play(self) -> None:
        """Until the end."""
        while self.now < self.end:
            upcoming = self._next()
            self._span(upcoming)
            self.now = upcoming
            if self.now < self.end:
                self._happen()

    # -- what comes next ------------------------------------------------------------------------------------------

    def _next(self) -> int:
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
        if (back := self.health.next_repair) is not None:
            ticks.append(back)
        if self.slow_due is not None and self._settled():
            ticks.append(self.slow_due[0])
        ticks += (tick for each in self.health.wrong if (tick := self._found_at(each)) is not None)
        return max(self.now, min(ticks))

    def _happen(self) -> None:
        """Handle what is due now; ends of pauses and of steps come before what disturbs them."""
        if self.pauses and self.pauses[-1][1] <= self.now:
            self.pauses.pop()
            if not self.pauses:
                self._start_steps()
        elif not self.pauses and self.configuration.running and self._checkpoint_due() == self.now:
            stall = as_ticks(self.configuration.checkpoint_seconds)
            if stall:
                self.checkpointing = True
                self.pauses = [("checkpoint", self.now + stall)]
            else:
                self._begin_checkpoint(loaded=False)
        elif self.pending is not None and self.pending.tick <= self.now:
            reaction, self.pending = self.pending.reaction, None
            self._switch(reaction)
        elif self.changes and self.changes[-1].tick <= self.now:
            change = self.changes.pop()
            down, up = self.health.apply(change)
            if down or up:
                self._ask(self._happening(down, up))
            self._degraded(change)
        elif (back := self.health.next_repair) is not None and back <= self.now:
            if up := self.health.repaired(self.now):
                self._ask(self._happening(up=up))
        elif self.alarm is not None and self.alarm <= self.now:
            self.alarm = None
            self.health.events.append(Event(self._seconds(), "alarm"))
            self._ask(replace(self._happening(), woken=True))
        elif wrong := next((each for each in self.health.wrong if self._found_at(each) == self.now), None):
            self._find(wrong)
        elif self.slow_due is not None and self.slow_due[0] <= self.now and self._settled():
            self._look_at_slow_nodes(leave=self.slow_due[1])

    def _happening(self, down: tuple[int, ...] = (), up: tuple[int, ...] = ()) -> Happening:
        return Happening(self._seconds(), self.health.counted, down, up)

    def _settled(self) -> bool:
        """Whether training runs and nothing is about to change."""
        return self.configuration.running and not self.pauses and self.pending is None

    # -- slow and wrong nodes -------------------------------------------------------------------------------------

    def _degraded(self, change: Change) -> None:
        """Nodes that get slow, fast again or wrong with ``change``."""
        for name, nodes in (
            ("slow", tuple(node for node, speed in change.speeds if speed < 1)),
            ("fast again", tuple(node for node, speed in change.speeds if speed == 1)),
        ):
            if nodes:
                self.health.events.append(Event(change.tick / TICKS_PER_SECOND, name, nodes))
        if change.speeds:
            self.known -= {node for node, _ in change.speeds}
            after = self.watch.slow_after
            unknown = self.health.speeds.keys() - self.known
            self.slow_due = (self.now + as_ticks(after), False) if unknown and after is not None else None
            self._set_pace()
        for each in change.wrong:
            if each.node in self.health.counted and self._takes_part(each.node):
                running = self.configuration.running and not self.pauses
                self.health.begins_wrong(each, self.now, counts=running)

    def _takes_part(self, node: int) -> bool:
        return self.planned.nodes is None or node in self.planned.nodes

    def _slow_nodes(self) -> dict[int, float]:
        """Speeds of those that take part."""
        speeds = self.health.speeds
        return {node: speeds[node] for node in speeds if node in self.health.counted and self._takes_part(node)}

    def _set_pace(self) -> None:
        """The step in progress goes on at the pace of the nodes as they are now."""
        old, self.configuration = self.configuration, self._paced()
        if old.running and self.configuration.running and not self.pauses and self.now:
            self._carry_on(old)

    def _paced(self) -> Configuration:
        """The policy's configuration with what checks and slow nodes cost."""
        found, slow = self.planned, self._slow_nodes()
        if found.running and slow:
            if self.watchful and slow.keys() <= self.known:
                found = self.watchful.slowed(self.context, found, slow)
            else:
                found = waiting(found, slow)
        return checked(found, self.watch.check_cost) if found.running and self.watch.check_cost else found

    def _look_at_slow_nodes(self, *, leave: bool) -> None:
        self.slow_due = None
        self.known = frozenset(self.health.speeds)
        self._set_pace()
        slow = frozenset(self._slow_nodes())
        if not slow:
            return
        happening = Happening(self._seconds(), self.health.counted - slow, tuple(sorted(slow)))
        reaction = self.policy.react(self.context, self.planned, happening)
        if reaction is None or reaction.configuration.throughput <= self.configuration.throughput:
            return
        if leave:
            self.health.events.append(Event(self._seconds(), "left out", happening.down))
            self.health.leave_out(slow, self.now)
            self._take(reaction, happening)
            return
        undone = {
            Loss.NOTHING: self.now,
            Loss.STEP: self._step_begin(self.configuration),
            Loss.CHECKPOINT: self._newest_checkpoint(),
        }
        costs = self._seconds() - undone[reaction.lost] / TICKS_PER_SECOND
        costs += sum(pause.seconds for pause in reaction.pauses)
        gain = 1 - self.configuration.throughput / reaction.configuration.throughput
        self.slow_due = (self.now + max(1, as_ticks(costs / gain)), True)

    def _found_at(self, wrong: Wrong) -> int | None:
        """When a wrong node is found as things stand: just before the end of a step that is checked, or noticed."""
        every, ticks = self.watch.check_every, [] if wrong.noticed is None else [max(self.now, wrong.noticed)]
        if every is not None and wrong.since is not None and self.configuration.running and not self.pauses:
            period = as_ticks(every)
            due = max(self.now, wrong.since if not period else (wrong.since // period + 1) * period) + 1
            ticks.append(self._boundary(due) - 1)
        return min(ticks, default=None)

    def _find(self, wrong: Wrong) -> None:
        """A wrong node is taken out, and what rests on its results is undone."""
        since, begun = wrong.since, self._step_begin(self.configuration)
        down = self.health.found(wrong, self.now)
        if since is None or since >= begun:
            self._ask(self._happening(down), self._without_this_step)
            return
        self.saved = [each for each in self.saved if each[0] <= since]
        good = max(taken for taken, readable in self.saved if readable <= self.now)
        self.checkpoint = self.taken = good
        self.readable = self.now
        self._ask(self._happening(down), self._from_older_checkpoint)

    def _without_this_step(self, reaction: Reaction | None) -> Reaction:
        found = reaction or Reaction(self.planned)
        if found.lost is not Loss.NOTHING:
            return found
        return replace(found, lost=Loss.STEP, at_boundary=False)

    def _from_older_checkpoint(self, reaction: Reaction | None) -> Reaction:
        found = reaction or Reaction(self.planned)
        if self.watchful is None:
            return replace(found, lost=Loss.CHECKPOINT, at_boundary=False)
        return self.watchful.reloaded(self.context, found)

    def tainted_samples(self) -> float:
        """Samples that rest on a wrong result which nobody has found."""
        first = min((each.since for each in self.health.wrong if each.since is not None), default=None)
        return 0.0 if first is None else samples_of(self.spans, first)

    # -- what a policy decides ------------------------------------------------------------------------------------

    def _ask(self, happening: Happening, revise: Callable[[Reaction | None], Reaction] | None = None) -> None:
        if self.pending is not None:
            # A waiting reaction may rely on a node that has just failed, so the policy answers both at once.
            before, self.pending = self.pending.happening, None
            up = tuple(sorted((*happening.up, *(node for node in before.up if node in happening.live))))
            happening = replace(happening, up=up, woken=happening.woken or before.woken)
        reaction = self.policy.react(self.context, self.planned, happening)
        if revise is not None:
            reaction = revise(reaction)
        if reaction is not None:
            self._take(reaction, happening)

    def _take(self, reaction: Reaction, happening: Happening) -> None:
        self.alarm = None if reaction.wake is None else self.now + max(1, as_ticks(reaction.wake))
        if reaction.at_boundary and self.configuration.running and not self.pauses:
            begun = self.now + as_ticks(self.configuration.lead_seconds)
            self.pending = _Pending(reaction, happening, self._boundary(begun))
            return
        self._switch(reaction)

    def _switch(self, reaction: Reaction) -> None:
        self.planned = reaction.configuration
        old, self.configuration = self.configuration, self._paced()
        interrupted = reaction.lost is Loss.STEP or bool(reaction.pauses) or not reaction.configuration.running
        if reaction.lost is Loss.CHECKPOINT:
            self.taken, self.readable = self._newest_checkpoint(), self.now  # one half written is never complete
            self.saved = [each for each in self.saved if each[0] <= self.taken]
            self._undo(self.taken)
        elif interrupted:
            self._undo(self._step_begin(old))
        resumed = bool(self.pauses) and reaction.lost is Loss.NOTHING
        until = self.pauses[0][1] if resumed else self.now
        if not resumed:
            # Loaded state is as good as a checkpoint that has just been written.
            self.pauses, self.checkpointing = [], False if reaction.lost is Loss.CHECKPOINT else None
        elif reaction.pauses and self.pauses[0][0] == _FILL:
            until = max(self.now, self.pauses[1][1] if len(self.pauses) > 1 else self.now)
            del self.pauses[0]  # it follows the new pauses instead
        if reaction.saved:
            self.checkpointing = False
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
        """The first step begins now."""
        self.origin = self.begun = self.now
        if self.pending is not None:  # it waits for a step that begins only now, after a checkpoint
            self.pending.tick = self._boundary(self.pending.tick)
        if self.configuration.running:
            self.health.resumed(self.now)
        if self.checkpointing is not None:
            self._begin_checkpoint(loaded=not self.checkpointing)
            self.checkpointing = None

    def _begin_checkpoint(self, *, loaded: bool) -> None:
        """A checkpoint of the state of this moment can be loaded later, or at once where it was itself loaded."""
        self.checkpoint = self._newest_checkpoint()
        self.taken = self.now
        self.readable = self.now + (0 if loaded else as_ticks(self.configuration.checkpoint_writing))
        self.saved.append((self.taken, self.readable))

    def _newest_checkpoint(self) -> int:
        """The newest state that can be loaded now."""
        return self.taken if self.readable <= self.now else self.checkpoint

    def _carry_on(self, old: Configuration) -> None:
        """The step in progress continues at another speed; work already done stays done."""
        if _step(old) == _step(self.configuration):
            return
        begun = self._step_begin(old)
        done = (self.now - self.origin) % _step(old)
        self.origin = self.now - done * _step(self.configuration) // _step(old)
        self.begun = begun
        if self.pending is not None:
            self.pending.tick = self._boundary(self.now)

    def _boundary(self, tick: int) -> int:
        """The first end of a step at ``tick`` or after it."""
        step = _step(self.configuration)
        return self.origin - (self.origin - tick) // step * step

    def _step_begin(self, configuration: Configuration) -> int:
        """When the step in progress began; there is none in a pause."""
        if self.pauses or not configuration.running:
            return self.now
        step = _step(configuration)
        steps = (self.now - self.origin) // step
        return self.origin + steps * step if steps else self.begun

    def _checkpoint_due(self) -> int | None:
        every = self.configuration.checkpoint_every
        if every is None:
            return None
        found = self._boundary(max(self.taken + as_ticks(every), self.readable, self.now))
        return found if found > self.begun else found + _step(self.configuration)

    # -- the timeline ---------------------------------------------------------------------------------------------

    def _span(self, until: int) -> None:
        if until <= self.now:
            return
        configuration = self.configuration
        live = len(self.health.live) * self.context.cluster.gpus_per_node
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

    def _undo(self, since: int) -> None:
        """Training after ``since`` is lost."""
        self.health.undone(since)
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


def _step(configuration: Configuration) -> int:
    return max(1, as_ticks(configuration.step_seconds))
