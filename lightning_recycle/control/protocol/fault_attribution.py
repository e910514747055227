"""Fault attribution: wrong bits, exceptions and broken links. Pure.

- Wrong bits: a stage's workers send checksums of one step (:class:`~.messages.Checked`). The largest group is right if
  it has at least two workers and no other is as large (:func:`find_culprits`), as independent errors do not agree; a
  wrong worker is evicted, or the run ends. Otherwise the stage counts as lost: it has no state that can be trusted. A
  recomputed micro-batch with other bits is put to the vote of the stage (:func:`decide_dispute`).
- NaN or infinity (NotFinite): the step is not committed, and the next generation *inspects* it: a worker that makes
  such a value of finite ones disputes its own result. If its peers get finite values it was the device; otherwise the
  step is *excused*: it runs again and is taken as it is. A step is inspected once, unless a loss interrupts that.
- Newcomers that hold other values than the others are dismissed, and steps that they took part in, and not all have
  applied, run again. The position gets one more worker, then it stays empty.
- Exceptions that a machine may explain (Raised): the same work runs elsewhere (:func:`judge_exception`). If the
  exception follows the work, it is the user's own; if not, the run goes on without that machine. The last holder of a
  stage repeats the work itself, if that is exact. Replicas are not spent on one cause: a place is tried ``retries``
  times more, at most one worker of a stage is evicted in a step (a full disk is common to all), and in a step a stage
  raises at most ``retries + 1`` times.
- Links that break without a death (Broken, GraceElapsed): the same workers connect again and check whom they reach. The
  fewest workers that leave no broken pair (a minimum vertex cover) are evicted, never the last holder of a stage
  (:func:`choose_evictions`).

Must not know: how checksums are made, what a device is, sockets, which exceptions are suspected
(:mod:`~lightning_recycle.runtime.machine_errors`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import Any, TypeAlias

from lightning_recycle.control.protocol import messages
from lightning_recycle.control.protocol.messages import FINITE, IS_FINITE, Checked, Raised, WorkerStatus
from lightning_recycle.control.protocol.recovery import begin_generation, begin_generation_unless_over, decide
from lightning_recycle.control.protocol.state import (
    Command,
    Dispute,
    Evict,
    Failed,
    GraceElapsed,
    MembershipState,
    Next,
    Outcome,
    Pair,
    Record,
    Remembered,
    Send,
    StageLost,
    StartGrace,
    Sums,
    after,
    end,
)
from lightning_recycle.errors import ReCycleError

MAX_EXCUSED = 3
"""Steps with such values of the model's, after which no others are inspected."""


EXCUSES_ALL = 1 << 62
"""A step that does not come."""


@dataclass(frozen=True, slots=True)
class Culprit:
    """Worker whose checksums ``kinds`` differ from those of the ranks ``right``."""

    rank: int
    kinds: tuple[str, ...]
    right: tuple[int, ...]
    device: str


@dataclass(frozen=True, slots=True)
class Undecided:
    """Workers differ with no majority: ``groups`` of ranks with equal checksums."""

    groups: tuple[tuple[int, ...], ...]
    kinds: tuple[str, ...]


_Found: TypeAlias = Undecided | tuple[Culprit, ...]


def find_culprits(checked: Mapping[int, Checked]) -> _Found:
    """The wrong workers of one stage; none if it is empty."""
    groups: dict[tuple[tuple[str, bytes], ...], list[int]] = defaultdict(list)
    for rank, report in sorted(checked.items()):
        groups[tuple(sorted(report.sums.items()))].append(rank)
    if len(groups) < 2:
        return ()
    largest, second = sorted(groups.values(), key=len, reverse=True)[:2]
    if len(largest) == len(second):
        names = sorted({name for report in checked.values() for name in report.sums})
        kinds = tuple(name for name in names if len({report.sums.get(name) for report in checked.values()}) > 1)
        return Undecided(tuple(sorted(map(tuple, groups.values()))), kinds)
    right = checked[largest[0]].sums
    return tuple(
        Culprit(rank, differing(report.sums, right), tuple(largest), report.device)
        for rank, report in sorted(checked.items())
        if rank not in largest
    )


def differing(mine: Mapping[str, bytes], right: Mapping[str, bytes]) -> tuple[str, ...]:
    """Names of the checksums that differ."""
    return tuple(sorted(name for name in mine.keys() | right.keys() if mine.get(name) != right.get(name)))


class Finding(Enum):
    """Result of a vote that finds no culprit."""

    UNDECIDED = "it is unknown who is right"
    INCOMPARABLE = "computations cannot be compared"


def decide_dispute(dispute: Dispute) -> tuple[Culprit, ...] | Finding:
    """The wrong workers, when all have voted.

    Workers without checksums have another kind of machine, and no vote. The largest group of votes is right if it has
    at least two and no other is as large. A worker that claimed other bits at first is wrong, whatever it gets now.
    Without such a group, workers that repeat their own bits but not each other's may be different machines; if several
    do not repeat their own, the computation is not deterministic.
    """
    dispute = replace(dispute, votes={rank: vote for rank, vote in dispute.votes.items() if vote[0]})
    shaky = [rank for rank, (_, repeats) in dispute.votes.items() if not repeats]
    if len(shaky) > 1:
        return Finding.INCOMPARABLE
    groups: dict[tuple[tuple[str, bytes], ...], list[int]] = defaultdict(list)
    for rank, (sums, repeats) in sorted(dispute.votes.items()):
        if repeats:
            groups[tuple(sorted(sums.items()))].append(rank)
    sizes = sorted(map(len, groups.values()), reverse=True)
    if len(sizes) == 1 and sizes[0] == 1 and len(dispute.votes) == 2:  # the other one does not repeat its own
        return tuple(_claimant(dispute, rank, dispute.votes.keys() - {rank}) for rank in shaky)
    if not sizes or sizes[0] < 2 or sizes[1:2] == sizes[:1]:
        return Finding.UNDECIDED if len(dispute.votes) < 3 else Finding.INCOMPARABLE
    agreed = next(ranks for ranks in groups.values() if len(ranks) == sizes[0])
    right = dispute.votes[agreed[0]][0]
    wrong = [rank for rank, claim in sorted(dispute.claims.items()) if claim != right]
    return tuple(_claimant(dispute, rank, frozenset(agreed), right) for rank in wrong)


def _claimant(dispute: Dispute, rank: int, others: Collection[int], right: Sums | None = None) -> Culprit:
    claim = dispute.claims[rank]
    if right is None:
        right = next(claim for other, claim in dispute.claims.items() if other != rank)
    device = dispute.devices.get(rank, "")
    return Culprit(rank, differing(claim, right), tuple(sorted(set(others) - {rank})), device)


# ---------------------------------------------------------------------- newcomers that differ


def doubt(state: MembershipState) -> MembershipState:
    """State after the loss of a newcomer, whose newest step was perhaps not compared.

    The newcomer may have taken part in the next one with wrong values: all run that again. No worker has applied it, as
    its loss is not known.
    """
    if state.returned is None and state.steps.version == state.steps.summed:
        return state
    return state.with_steps(unproven=state.steps.summed).with_generation(passes=frozenset())


def dismiss(state: MembershipState, step: int, causes: Mapping[int, str]) -> Next:
    """Dismisses newcomers, by rank, whose values differ after ``step``."""
    commands: list[Command] = []
    for rank, cause in sorted(causes.items()):
        before = state.roster.dismissed
        state = state.with_roster(dismissed={**before, rank: (*before.get(rank, ()), step)})
        details = {"cause": cause, "stays_empty": rank in state.roster.barred}
        commands += [Record("dismissed", step, rank, details), Evict(rank, cause)]
    return doubt(state), tuple(commands)


def on_differs(state: MembershipState, event: messages.Differs) -> Next:
    """A worker that has just joined does not hold what its donor gave."""
    if event.rank not in state.roster.newcomers:
        return state, ()
    return dismiss(state, event.step, {event.rank: event.cause})


# ---------------------------------------------------------------------- checks


def compare(state: MembershipState) -> Next:
    """Compares the reports of the steps that all live workers have applied."""
    commands: tuple[Command, ...] = ()
    for step in sorted(step for step in state.checks.checksums if step < state.steps.version):
        checked = {rank: report for rank, report in state.checks.checksums[step].items() if rank in state.roster.live}
        other_steps = {other: value for other, value in state.checks.checksums.items() if other != step}
        state = state.with_checks(checksums=other_steps)
        culprits: list[Culprit] = []
        strange: dict[int, str] = {}
        newcomers = {rank for rank, since in state.roster.newcomers.items() if since > state.checks.agreed}
        for column in range(state.positions.columns):
            of_column = {rank: report for rank, report in checked.items() if state.positions.column(rank) == column}
            compared = {rank: report for rank, report in of_column.items() if rank not in newcomers} or of_column
            verdict = find_culprits(compared)
            if isinstance(verdict, Undecided):
                return after(commands, _end_undecided(state, step, column // state.positions.members, verdict))
            culprits += verdict
            wrong = {culprit.rank for culprit in verdict}
            right = next((report.sums for rank, report in compared.items() if rank not in wrong), {})
            for rank in of_column.keys() - compared.keys():
                if names := differing(of_column[rank].sums, right):
                    what = " and ".join(names)
                    strange[rank] = f"after step {step} its {what} differ from its peers', and it has joined"
        since = state.checks.agreed
        for culprit in culprits:
            state, caused = _convict(state, step, culprit, since)
            commands += caused
            if state.outcome is not None:
                return state, commands
        checks = state.checks if culprits else replace(state.checks, agreed=step)
        state = state.updated(checks=checks.plan(step, state.steps.summed, checked))
        if strange:
            state, dismissed = dismiss(state, step, strange)
            commands += dismissed
    return state, commands


def _corrupt(
    state: MembershipState, step: int, rank: int | None, outcome: Outcome | None, cause: str, **details: Any
) -> Next:
    """Records wrong bits after ``step``; evicts ``rank``, or ends the run."""
    then = "evicted" if outcome is None else "ended"
    record = Record("corruption", step, rank, {"cause": cause, **details, "then": then})
    if outcome is not None:
        return after((record,), end(state, outcome))
    assert rank is not None
    return state, (record, Evict(rank, cause))


def _convict(state: MembershipState, step: int, culprit: Culprit, since: int) -> Next:
    """``culprit`` holds wrong bits after ``step``; after ``since`` it did not."""
    rank, what, outcome = culprit.rank, " and ".join(culprit.kinds), None
    peers = " and ".join(map(state.positions.name, culprit.right))
    cause = f"after step {step} its {what} differ from those of its peers {peers}, which are equal"
    if state.checks.policy == "raise":
        outcome = Failed(f"Worker {state.positions.name(rank)} holds wrong bits: {cause}. {_contaminated(since, step)}")
    return _corrupt(state, step, rank, outcome, cause, kind=what, proof="state", device=culprit.device, since=since)


def _end_undecided(state: MembershipState, step: int, stage: int, found: Undecided) -> Next:
    what, since = " and ".join(found.kinds), state.checks.agreed
    groups = " ".join(f"[{', '.join(map(state.positions.name, group))}]" for group in found.groups)
    cause = (
        f"After step {step} workers of stage {stage} hold different bits ({what}): {groups}, in groups that agree; no"
        " group is the largest, so it is unknown which of them are right"
    )
    why = f"its {what} differ from its peer's, and it is unknown whose are right"
    of_stage = (rank for rank in state.roster.live if state.positions.stage(rank) == stage)
    outcome: Outcome = StageLost(stage, dict.fromkeys(of_stage, why))
    if state.checks.policy == "raise":
        outcome = Failed(f"{cause}. {_contaminated(since, step)}")
    return _corrupt(state, step, None, outcome, cause, kind=what, proof="undecided", stage=stage, since=since)


def _contaminated(since: int, step: int) -> str:
    before = "before that nothing was compared" if since < 0 else f"they were equal after step {since}"
    return (
        f"{before[0].upper()}{before[1:]}, so results since then, up to step {step}, may be wrong. A device whose"
        " memory or arithmetic errs does this, and so do hooks or callbacks that change weights on some workers only,"
        " or optimizers that are not deterministic. Start again from a checkpoint that is older than that;"
        " VerificationOptions(on_corruption='evict') goes on without the worker where a majority says what is right."
    )


def on_disputed(state: MembershipState, event: messages.Disputed) -> Next:
    """A worker got other bits than a peer, or twice others than itself before.

    In the second case no peer votes. The step cannot be committed, so a generation begins, or a loss begins one.
    """
    if not state.generation.runs(event.generation):
        return state, ()
    if event.other == event.rank and event.mine != event.theirs:
        dispute = Dispute(event.step, event.microbatch, event.rank, event.rank, {event.rank: event.theirs})
        own_error = Culprit(event.rank, differing(event.theirs, event.mine), (event.rank,), event.device)
        return _convict_of_computing(state, dispute, own_error)
    if event.other not in state.roster.live:
        return state, ()
    claims = {event.rank: event.mine, event.other: event.theirs}
    dispute = Dispute(event.step, event.microbatch, event.rank, event.other, claims, {}, {event.rank: event.device})
    kinds = " and ".join(differing(event.mine, event.theirs)) or FINITE
    cause = f"got another {kinds} than worker {state.positions.name(event.other)}"
    if event.other == event.rank:
        cause = "made a value that is not finite"
    details = {"of": state.positions.place(event.other), "microbatch": event.microbatch, "kind": kinds, "cause": cause}
    record = Record("disputed", event.step, event.rank, details)
    return after((record,), begin_generation(state.with_checks(dispute=dispute)))


def call_vote(
    state: MembershipState, statuses: Mapping[int, WorkerStatus], version: int
) -> tuple[MembershipState, messages.Vote | None, tuple[Command, ...]]:
    """The vote on a dispute, if the whole stage holds the parameters of its step.

    Otherwise the dispute is dropped, as the step is computed and checked again. A value that is not finite is then
    kept, or there would be no end.
    """
    dispute = state.checks.dispute
    if dispute is None:
        return state, None, ()
    voters = sorted(state.holders(state.positions.stage(dispute.recorder)))
    able = all((statuses[rank].version, statuses[rank].commit_step) == (version, None) for rank in voters)
    if dispute.step != version or not able or not {dispute.recorder, dispute.accused} <= set(voters):
        state = state.with_checks(dispute=None)
        if is_about_numbers(dispute) and dispute.accused in voters:
            state, kept = excuse(state, dispute.step, "its stage has gone on, and cannot tell")
            return state, None, kept
        return state, None, ()
    state = state.with_checks(dispute=replace(dispute, votes={}))
    return state, messages.Vote(dispute.recorder, tuple(voters)), ()


def on_voted(state: MembershipState, event: messages.Voted) -> Next:
    """A worker has voted; after the last vote, or by a loss, a generation begins."""
    dispute = state.checks.dispute
    if not state.generation.runs(event.generation) or dispute is None:
        return state, ()
    votes = {**dispute.votes, event.rank: (event.sums, not event.varies)}
    devices = {**dispute.devices, event.rank: event.device}
    dispute = replace(dispute, votes=votes, devices=devices, varies=event.varies or dispute.varies)
    if votes.keys() != state.holders(state.positions.stage(dispute.recorder)):
        return state.with_checks(dispute=dispute), ()
    found = _settle_dispute(state.with_checks(dispute=None), dispute)
    return found if any(isinstance(command, Evict) for command in found[1]) else begin_generation_unless_over(*found)


def _settle_dispute(state: MembershipState, dispute: Dispute) -> Next:
    if is_about_numbers(dispute):
        return _settle_finite_dispute(state, dispute)
    finding = decide_dispute(dispute)
    if finding is Finding.INCOMPARABLE:
        varies = f"{dispute.varies} gives other bits each time"
        return _give_up_comparing(state, varies if dispute.varies else "no worker of a stage agrees with another one")
    if finding is Finding.UNDECIDED:
        return _end_disputed(state, dispute)
    assert not isinstance(finding, Finding)
    commands: tuple[Command, ...] = ()
    for culprit in finding:
        state, caused = _convict_of_computing(state, dispute, culprit)
        commands += caused
        if state.outcome is not None:
            break
    return state, commands


def _settle_finite_dispute(state: MembershipState, dispute: Dispute) -> Next:
    found = who_made_it(dispute)
    if isinstance(found, str):
        return excuse(state, dispute.step, f"worker {state.positions.place(dispute.accused)} made it, and {found}")
    # The step runs again without the culprit, or with none if the run ends.
    state = state.with_checks(inspects=-1)
    return _convict_of_computing(state, dispute, found, "made a value that is not finite of finite ones in the")


def _convict_of_computing(
    state: MembershipState, dispute: Dispute, culprit: Culprit, did: str = "computed a wrong"
) -> Next:
    rank, what = culprit.rank, " and ".join(culprit.kinds)
    others = " and ".join(map(state.positions.name, culprit.right))
    says = f"says {others}" if culprit.right != (rank,) else "and got something else twice"
    cause = f"in step {dispute.step} it {did} {what} of micro-batch {dispute.microbatch}, {says}"
    facts = {"kind": what, "proof": "computation", "device": culprit.device, "since": dispute.step - 1}
    outcome = None
    if state.checks.policy == "raise":
        outcome = Failed(
            f"Worker {state.positions.name(rank)} computes wrong results: {cause}. That step was not committed. Its"
            " device may be broken; VerificationOptions(on_corruption='evict') goes on without it."
        )
    return _corrupt(state, dispute.step, rank, outcome, cause, **facts)


def _end_disputed(state: MembershipState, dispute: Dispute) -> Next:
    names = " and ".join(map(state.positions.name, sorted(dispute.claims)))
    what = " and ".join(differing(*dispute.claims.values()))
    cause = (
        f"In step {dispute.step} workers {names} computed a different {what} of micro-batch {dispute.microbatch}, and"
        " did so again; it is unknown which of them is right"
    )
    stage = state.positions.stage(dispute.recorder)
    outcome = Failed(
        f"{cause}. Steps before this one may have taken wrong gradients, too. A third pipeline would decide; the newest"
        " checkpoints are as good as the checks before them."
    )
    facts = {"kind": what, "proof": "undecided", "stage": stage, "since": state.checks.agreed}
    return _corrupt(state, dispute.step, None, outcome, cause, **facts)


def on_incomparable(state: MembershipState, event: messages.Incomparable) -> Next:
    """A worker reports that computations cannot be compared."""
    if not state.checks.comparable:
        return state, ()
    found = _give_up_comparing(state, event.cause)
    return found if state.generation.regrouping else begin_generation_unless_over(*found)


def _give_up_comparing(state: MembershipState, why: str) -> Next:
    state = state.with_checks(comparable=False, dispute=None)
    return state, (Record("incomparable", state.steps.version, None, {"cause": why}),)


def on_not_finite(state: MembershipState, event: messages.NotFinite) -> Next:
    """A worker has met a value that is not finite, and waits for another generation."""
    if not state.generation.runs(event.generation):
        return state, ()
    if state.checks.inspects == event.step:
        return begin_generation_unless_over(*excuse(state, event.step, "no worker makes it of finite values"))
    which = f"the loss of micro-batch {event.microbatch}" if event.microbatch >= 0 else "the gradient of its stage"
    details = {"cause": f"{which} is not finite", "then": "inspected"}
    record = Record("not_finite", event.step, event.rank, details)
    return after((record,), begin_generation(state.with_checks(inspects=event.step)))


def is_about_numbers(dispute: Dispute) -> bool:
    """Whether the question is if a value is finite."""
    return dispute.accused == dispute.recorder


def who_made_it(dispute: Dispute) -> Culprit | str:
    """The worker whose device made a value that is not finite, or why none did."""
    accused = dispute.accused
    others = {rank: vote for rank, vote in dispute.votes.items() if rank != accused}
    finite = tuple(sorted(rank for rank, (sums, _) in others.items() if sums.get(FINITE) == IS_FINITE))
    if not others:
        return "it has no peer"
    if not all(repeats for _, repeats in others.values()):
        return "its peers get other values each time"
    if 2 * len(finite) <= len(others):
        return "its peers get such a value, too"
    kinds = tuple(sorted(dispute.claims[accused].keys() - {FINITE}))
    return Culprit(accused, kinds, finite, dispute.devices.get(accused, ""))


def excuse(state: MembershipState, step: int, why: str) -> Next:
    """Such values of ``step`` are the model's, or the data's."""
    count = state.checks.excuses + 1
    until = step if count < MAX_EXCUSED else EXCUSES_ALL
    checks = replace(state.checks, inspects=-1, excused=until, excuses=count)
    cause = f"the value that is not finite is the model's or the data's: {why}"
    then = "kept" if count < MAX_EXCUSED else "kept, and not asked for again"
    return state.updated(checks=checks), (Record("not_finite", step, None, {"cause": cause, "then": then}),)


def settle_inspection(state: MembershipState) -> Next:
    """Ends the inspection once all have applied its step: no value was wrong again."""
    step = state.checks.inspects
    if not 0 <= step < state.steps.version:
        return state, ()
    state = state.with_checks(inspects=-1)
    details = {"cause": "all values are finite now; no worker made the other one again", "then": "gone"}
    return state, (Record("not_finite", step, None, details),)


# ---------------------------------------------------------------------- exceptions


_REMEMBERED_STEPS = 1000  # by then a hook that writes to a full disk has been called again, on whatever worker


class Verdict(Enum):
    """Verdict on a worker that raised."""

    EVICT = "it is evicted, and a peer does its work"
    AGAIN = "all connect again, and it runs the work once more itself"
    OWN = "the exception is the user's own"


def judge_exception(
    raised: Raised, stage: int, version: int, past: Sequence[Remembered], has_peer: bool, retries: int
) -> Verdict:
    """Verdict on a suspected exception.

    ``version``: the number of steps that all workers have applied. ``past``: the earlier exceptions. ``has_peer``:
    whether another live worker holds the state of the stage. ``retries``: how often work that raised runs again.
    """
    of_stage = [one for one in past if one.stage == stage]
    at_place = sum(one.place == (raised.step, raised.operation) for one in of_stage)
    since_commit = sum(one.version == version for one in of_stage)
    if at_place >= retries or since_commit > retries:
        return Verdict.OWN
    # A lost device is not a common cause, and its process cannot go on.
    if has_peer and (raised.sticky or not since_commit):
        return Verdict.EVICT
    return Verdict.AGAIN if raised.exact and not raised.sticky else Verdict.OWN


def remember_exception(raised: Raised, stage: int, version: int, past: Sequence[Remembered]) -> tuple[Remembered, ...]:
    """``past`` with ``raised``, without old exceptions."""
    new = Remembered(raised.rank, raised.generation, stage, (raised.step, raised.operation), version)
    return (*(one for one in past if version - one.version <= _REMEMBERED_STEPS), new)


def on_raised(state: MembershipState, event: messages.Raised) -> Next:
    """A suspected exception: evict its worker, work again, or it is the user's."""
    if any((past.rank, past.generation) == (event.rank, event.generation) for past in state.faults.raised):
        return state, ()  # said twice
    stage, version = state.positions.stage(event.rank), state.steps.version
    if event.rank in state.roster.joining:
        verdict = Verdict.EVICT  # no stage needs it yet, and no member has met this exception
    elif not state.has_resumed:
        verdict = Verdict.OWN
    else:
        has_peer = bool(state.holding(stage, without={event.rank}))
        past, retries = state.faults.raised, state.faults.retries
        verdict = judge_exception(event, stage, version, past, has_peer, retries)
    state = state.with_faults(raised=remember_exception(event, stage, version, state.faults.raised))
    where = event.operation if event.step == messages.OUTSIDE else f"{event.operation} of step {event.step}"
    cause = f"it raised {event.summary} ({where})"
    if verdict is Verdict.EVICT:
        return state, (Evict(event.rank, cause),)
    judged = Send((event.rank,), messages.Judged(event.generation, verdict is Verdict.OWN))
    if verdict is Verdict.OWN:
        return state, (judged,)
    commands = (judged, Record("retried", version, event.rank, {"cause": cause}))
    if event.generation < state.generation.number:
        return state, commands  # the newer one waits for its report
    return after(commands, begin_generation(state))


# ---------------------------------------------------------------------- broken connections without a death


_MAX_TRIES = 2000  # sets tried; the coordinator must not think for long. Up to 20 broken pairs or so, a few dozen do


def choose_evictions(
    pairs: Collection[Pair],
    holders: Iterable[Collection[int]],
    leader: int,
    can_recover: Callable[[frozenset[int]], bool] = lambda evicted: True,
) -> tuple[int, ...] | None:
    """The ranks, in order, whose eviction leaves no broken pair; None if impossible.

    Of the smallest sets it takes the one that repeatedly evicts the worker in most of the remaining pairs; among equals
    one that holds no state yet, then one that is not the leader, then the highest rank. With too many pairs to try all
    sets the result may be larger than necessary. ``pairs``: a worker that must go is paired with itself. ``holders``:
    for each stage, the ranks that hold its state. ``can_recover``: whether all others could go on together without
    these ranks.
    """
    stages = [frozenset(stage) for stage in holders]
    holding = frozenset[int]().union(*stages)
    best: frozenset[int] | None = None
    tries = 0

    def search(evicted: frozenset[int], unrepaired: frozenset[Pair]) -> None:
        """Tries all sets that contain ``evicted``, to repair the pairs ``unrepaired``."""
        nonlocal best, tries
        tries += 1
        if tries > _MAX_TRIES or not all(stage - evicted for stage in stages):
            return
        if best is not None and len(evicted) + _min_evictions(unrepaired) >= len(best):
            return
        if not unrepaired:
            best = evicted if can_recover(evicted) else best
            return
        broken = Counter(rank for pair in unrepaired for rank in pair)
        worst = max(broken, key=lambda rank: (broken[rank], rank not in holding, rank != leader, rank))
        partners = frozenset(rank for pair in unrepaired if worst in pair for rank in pair) - {worst}
        partner_sets = () if (worst, worst) in unrepaired else (partners,)
        for removed in (frozenset({worst}), *partner_sets):  # either it goes, or all that it cannot reach
            search(evicted | removed, frozenset(pair for pair in unrepaired if removed.isdisjoint(pair)))

    search(frozenset(), frozenset(pairs))
    return None if best is None else tuple(sorted(best))


def _min_evictions(pairs: Collection[Pair]) -> int:
    """Least number of evictions for ``pairs``: one per pair without common worker."""
    seen: set[int] = set()
    for pair in sorted(pairs):
        if seen.isdisjoint(pair):
            seen.update(pair)
    return len(seen) // 2


MAX_DISTURBANCES = 3
"""Regroups in a row without a loss and without a committed step, after which the run is abandoned."""


def on_broken(state: MembershipState, event: messages.Broken) -> Next:
    """A worker lost connections of this generation: a death may still explain it."""
    if not state.generation.runs(event.generation):
        return state, ()
    pairs = {(min(event.rank, other), max(event.rank, other)) for other in event.unreachable}
    state = state.with_generation(broken_pairs=state.generation.broken_pairs | pairs)
    return state, (StartGrace(event.generation, f"worker {state.positions.name(event.rank)}: {event.reason}"),)


def on_grace_elapsed(state: MembershipState, event: GraceElapsed) -> Next:
    """A connection broke between live workers: connect again, or evict the fewest."""
    if not state.generation.runs(event.generation):
        return state, ()
    pairs = state.generation.broken_pairs
    if pairs:  # they were told to check their links: reconnecting has been tried
        evicted = _choose_evictions(state)
        if evicted is not None:
            return state, tuple(Evict(rank, _cut_off_from(state, rank)) for rank in evicted)
    if state.faults.disturbances >= MAX_DISTURBANCES:
        return end(state, Failed(_why_given_up(state, event.reason)))
    state = state.with_faults(disturbances=state.faults.disturbances + 1)
    details: dict[str, Any] = {"cause": event.reason}
    if pairs:
        details["broken_pairs"] = tuple((state.positions.place(a), state.positions.place(b)) for a, b in sorted(pairs))
    if state.generation.becomes:  # no layout is so important that what breaks it may end the run
        details["layers_stay"] = state.generation.becomes
        state = state.with_layout(wanted=None)
    record: Command = Record("disturbance", state.steps.version, None, details)
    return after((record,), begin_generation(state))


def _choose_evictions(state: MembershipState) -> tuple[int, ...] | None:
    """Workers without which no broken pair is left; None if some pair must stay.

    Whole positions are evicted. Of each the member in most broken pairs is named, as its siblings go with it.
    """
    pairs, positions = state.generation.broken_pairs, state.positions
    first = {rank: positions.rank(positions.position(rank)) for rank in state.roster.live}
    between = {(min(first[a], first[b]), max(first[a], first[b])) for a, b in pairs}
    holders = [{positions.rank(one) for one in state.holding(stage)} for stage in range(state.positions.grid.stages)]
    gone = choose_evictions(between, holders, first.get(state.roster.leader, -1), partial(_can_recover, state))
    if gone is None:
        return None
    broken = Counter(rank for pair in pairs for rank in pair if first[rank] in gone)
    worst = {first[rank]: rank for rank in sorted(broken, key=lambda rank: (broken[rank], rank))}
    return tuple(sorted(worst.values()))


def _can_recover(state: MembershipState, evicted: frozenset[int]) -> bool:
    """Whether the others could go on from their reports, valid until they connect."""
    evicted = state.positions.all_members(evicted)
    statuses = {
        rank: report.status
        for rank, report in state.generation.reports.items()
        if rank not in evicted and report.status.version >= 0
    }
    try:
        decide(statuses, state.steps.summed)
    except ReCycleError:
        return False
    return True


def _cut_off_from(state: MembershipState, rank: int) -> str:
    others = sorted({other for pair in state.generation.broken_pairs if rank in pair for other in pair} - {rank})
    names = " and ".join(map(state.positions.name, others))
    return f"it and worker{'s' if len(others) > 1 else ''} {names} cannot reach each other"


def _why_given_up(state: MembershipState, last: str) -> str:
    times, worker = MAX_DISTURBANCES + 1, state.positions.name
    reason = f"Communication between live workers failed {times} times in a row at step {state.steps.version}, "
    reason += f"at last because: {last.rstrip('.')}. "
    if state.generation.broken_pairs:
        pairs = ", ".join(f"{worker(a)} and {worker(b)}" for a, b in sorted(state.generation.broken_pairs))
        reason += f"These cannot reach each other, and the others cannot go on without one of each two: {pairs}. "
    return reason + "Check the network between the workers; the warnings above say what went wrong before."
