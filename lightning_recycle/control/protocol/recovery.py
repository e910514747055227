"""Recovery: a new generation, from its start to the workers' actions. Pure.

A *generation* begins when all have joined or returned to a restarted coordinator, when the roster or the layout
changes, when links broke, a speculation was wrong, a result is disputed or a step is to be inspected, when work that
raised is repeated, or when the chosen leader has no state: all live workers stop (Regroup), report (Report), and go on
from one committed version (Resume). Decision and actions are data.

In step t a worker is RUNNING, then REDUCED (it holds its stage's complete gradient), then APPLIED: RUNNING in t+1. No
worker is REDUCED in t+1 before all have applied t, as its micro-batches flow through all and peers without any are
waited for; so versions differ by at most one. A worker keeps the gradient of a step until it begins the step after the
next; peers that lack it adopt it. A stage can reach the highest version among its workers, plus one if such a worker is
REDUCED. The *committed* version v is the minimum over the stages: step v runs again. A stage that can reach v+1 is
*ahead*: it computes forwards and input gradients for the others with its parameters of version v, but neither reduces
nor steps, so its optimizer and hooks see each step once. Reduced gradients are dropped, before any worker has applied
them, only with tied stages (:class:`Forget`), and by a worker itself where the checks of the step were not over
(:mod:`~lightning_recycle.runtime.verification`). Training losses may be lost with the worker that computed them: a step
without its loss is not committed, and stages that hold its gradient compute it again.

A *speculative* version is not confirmed until all contributions are known. Its worker is not REDUCED in the next
step and sends no results of it, so nothing that follows from it is kept. If the decision does not commit the
speculative step its worker sends its Commit again, unless all contributions were known before the loss: then these
confirm it.

Rosters hold whole positions: the siblings of a lost member are released.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from lightning_recycle.control.protocol import control_collectives, messages
from lightning_recycle.control.protocol.messages import Adoption, Decision, StepState, WorkerStatus
from lightning_recycle.control.protocol.state import (
    Command,
    Generation,
    MembershipState,
    Next,
    Record,
    Send,
    after,
)
from lightning_recycle.errors import ReCycleError


def begin_generation(state: MembershipState, becomes: messages.Cuts = ()) -> Next:
    """All live workers stop and report; the first generation begins once all joined.

    ``becomes``: the layout for which they then get ready.
    """
    if state.generation.number < 0 and state.roster.joined < state.roster.live:
        return state, ()
    state = with_leader(control_collectives.forget_retracted(state))
    wish = state.layout.wanted
    state = state.updated(
        generation=Generation(state.generation.number + 1, regrouping=True, becomes=becomes),
        layout=state.layout.updated(wanted=wish if wish is not None and wish.is_for(state.roster.ranks) else None),
    )
    checks = state.faults.disturbances > 0
    unproven = state.steps.unproven if state.steps.unproven >= state.steps.summed else -1
    regroup = messages.Regroup(state.generation.number, state.roster.ranks, state.roster.leader, checks, unproven)
    return state, (Send(state.roster.ranks, regroup),)


def begin_generation_unless_over(state: MembershipState, commands: tuple[Command, ...]) -> Next:
    """Begins a generation after ``commands``, unless they ended the run."""
    return (state, commands) if state.outcome is not None else after(commands, begin_generation(state))


def with_leader(state: MembershipState) -> MembershipState:
    """Returns ``state`` with a live leader: the current one if it has a state."""
    roster = state.roster
    if roster.leader in roster.live and roster.leader not in roster.joining:
        return state
    column = state.positions.columns - state.positions.members  # the first member of the last stage
    last = state.holders(column) or roster.live
    return state.with_roster(leader=state.positions.column_leaders(last).get(column, min(roster.live)))


# ---------------------------------------------------------------------- what survives


def _reachable(statuses: Mapping[int, WorkerStatus]) -> dict[int, int]:
    """The highest version that some worker of each column has or can apply."""
    found: dict[int, int] = {}
    for status in statuses.values():
        found[status.column] = max(status.version + status.reduced, found.get(status.column, -1))
    return found


def committed_version(statuses: Mapping[int, WorkerStatus], known_losses: int | None = None) -> int:
    """The version at which all can go on; arguments as in :func:`decide`."""
    version = min(_reachable(statuses).values())
    return version if known_losses is None else min(version, known_losses)


def decide(statuses: Mapping[int, WorkerStatus], known_losses: int | None = None) -> Decision:
    """The decision from the statuses of all survivors, at least one in each column.

    ``known_losses``: the number of steps whose loss is known; by default all that are needed.

    Raises:
        ReCycleError: for statuses that the commit protocol cannot produce. Going on would train on a mixture.
    """
    by_column: dict[int, dict[int, WorkerStatus]] = {}
    for rank, status in sorted(statuses.items()):
        by_column.setdefault(status.column, {})[rank] = status
    reachable = _reachable(statuses)
    version = committed_version(statuses, known_losses)
    adoptions: list[Adoption] = []
    for column, workers in sorted(by_column.items()):
        if reachable[column] > version + 1 or any(s.version < version - 1 for s in workers.values()):
            raise ReCycleError(
                f"No recovery: column {column} spans versions {sorted({s.version for s in workers.values()})} while the"
                f" whole can only agree on {version}: the commit protocol was violated."
            )
        if any(s.version > version and not s.has_shadow for s in workers.values()):
            raise ReCycleError(
                f"No recovery: column {column} has applied step {version}, which others cannot reach, and has not kept"
                " the parameters that it had before."
            )
        for step in (version - 1, version) if reachable[column] > version else (version - 1,):
            receivers = {r for r, s in workers.items() if s.state_in(step) is StepState.RUNNING}
            if not receivers:
                continue
            donors = {r for r, s in workers.items() if r not in receivers and s.version <= step + 1}
            if not donors:
                raise ReCycleError(
                    f"No recovery: no worker of column {column} holds the reduced gradient of step {step}, which"
                    f" workers {sorted(receivers)} lack."
                )
            adoptions.append(Adoption(column, step, min(donors)))
    ahead = frozenset(column for column, best in reachable.items() if best > version)
    return Decision(version, ahead, tuple(adoptions))


# ---------------------------------------------------------------------- positions that have lost a member


def without_positions(state: MembershipState, ranks: Collection[int]) -> Next:
    """The positions of ``ranks`` leave the roster, and their siblings are released."""
    siblings = (state.positions.all_members(ranks) & state.roster.live).difference(ranks)
    released = tuple(Record("released", state.steps.version, rank) for rank in sorted(siblings))
    return state.without(ranks), released


# ---------------------------------------------------------------------- actions of a worker


@dataclass(frozen=True, slots=True)
class Give:
    """Give this worker's state to ``ranks``, which join its stage."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Take:
    """Take over the state of rank ``donor``, which has the committed version."""

    donor: int


@dataclass(frozen=True, slots=True)
class Apply:
    """Step the optimizer with the reduced gradient that this worker holds."""


@dataclass(frozen=True, slots=True)
class Confirm:
    """The commit of speculative ``step`` is known: correct the step if it was wrong."""

    step: int


@dataclass(frozen=True, slots=True)
class Adopt:
    """The stage gets the reduced gradient of ``step`` from ``donor``.

    ``lacks``: whether this worker has not got it yet; then it is REDUCED.
    """

    step: int
    donor: int
    lacks: bool


@dataclass(frozen=True, slots=True)
class AwaitPeers:
    """Wait until all peers have adopted, before any overwrites what others receive."""


@dataclass(frozen=True, slots=True)
class CommitTogether:
    """Commit ``step``, which no worker has applied, again with all.

    After another failure some stage may lack its gradient, and a run with commits has no shadow.
    """

    step: int


@dataclass(frozen=True, slots=True)
class Forget:
    """Drop the reduced gradient, which no worker has applied.

    A sum over tied stages can be made again only if all of them run the step again.
    """


@dataclass(frozen=True, slots=True)
class Serve:
    """Compute this worker's part of applied ``step`` for the redo, from its shadow."""

    step: int


Action: TypeAlias = Give | Take | Apply | Confirm | Adopt | AwaitPeers | CommitTogether | Forget | Serve


def actions(
    rank: int,
    status: WorkerStatus,
    decision: Decision,
    donors: Mapping[int, int],
    commits: bool,
    tied: bool,
    confirmed: bool = False,
) -> tuple[Action, ...]:
    """A worker's actions in a connected generation, before ``decision.version`` runs.

    ``status``: as reported; its version is -1 if the worker joins. ``donors``: for each rank that joins, the peer that
    gives it its state. ``commits``: whether stages commit a step together before they apply it. ``tied``: whether
    stages hold copies of one parameter, so that a step is REDUCED in all of them or in none. ``confirmed``: whether all
    contributions to step ``decision.version`` are known.

    Raises:
        ReCycleError: for a status from which the decision cannot be carried out.
    """
    planned: list[Action] = []
    version, reduced = status.version, status.reduced

    def apply() -> None:
        nonlocal version, reduced
        if not reduced:
            raise ReCycleError(f"No recovery: worker {rank} is to apply step {version}, whose gradient it lacks.")
        planned.append(Apply())
        version, reduced = version + 1, False

    if status.speculative and (version == decision.version or confirmed):
        planned.append(Confirm(version - 1))
    if receivers := tuple(sorted(other for other, donor in donors.items() if donor == rank)):
        planned.append(Give(receivers))
    if rank in donors:
        planned.append(Take(donors[rank]))
        version, reduced = decision.version, False
    adoptions = [adoption for adoption in decision.adoptions if adoption.column == status.column]
    for adoption in adoptions:
        if adoption.step == decision.version and version < decision.version:
            apply()
        lacks = version == adoption.step and not reduced
        planned.append(Adopt(adoption.step, adoption.donor, lacks))
        reduced = reduced or lacks
    if adoptions:
        planned.append(AwaitPeers())
    if version < decision.version:
        if commits and any(adoption.step == decision.version - 1 for adoption in decision.adoptions):
            planned.append(CommitTogether(decision.version - 1))
        apply()
    if tied and version == decision.version and reduced:
        planned.append(Forget())
    if version > decision.version:
        planned.append(Serve(decision.version))
    return tuple(planned)


@dataclass(frozen=True, slots=True)
class StepPart:
    """The part of a step that a worker does.

    A worker is *done* if it is REDUCED in the step or has applied it, and runs it again for others.

    Attributes:
        computes_weights: whether it runs W. A worker that is done runs only F and B, unless a member of its position is
            not done: then it computes weight gradients for that member's collectives, and drops them.
        reduces: whether it runs REDUCE; a worker that is done has the sum.
        buffer_step: the step whose gradient buffers it writes to. There are two sets, for even and odd steps: a
            finished result must not change, so a worker that is done writes to the other set.
        applies: whether it runs STEP; not if it has applied the step already.
        awaits_peers: whether it waits for its peers at the beginning. They do not depend on a worker without
            micro-batches and could get two steps ahead of it; if its link was cut in the last reduction, it could not
            catch up once its peers are gone.
    """

    computes_weights: bool
    reduces: bool
    buffer_step: int
    applies: bool
    awaits_peers: bool


def part_of(step: int, version: int, reduced: bool, idle_peer: bool, siblings_done: bool = True) -> StepPart:
    """The part of ``step`` of a worker that has applied ``version`` steps.

    ``reduced``: whether it is REDUCED in step ``version``. ``idle_peer``: whether the plan leaves a worker of its stage
    without micro-batches. ``siblings_done``: whether the columns of the other members are done with the step.
    """
    done = step < version or reduced
    return StepPart(not (done and siblings_done), not done, step + 1 if done else step, step == version, idle_peer)
