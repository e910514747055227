"""Response to wrong bits and to values that are not finite. Pure.

Checks: a check is over when all live workers have applied its step: then their checksums are compared
(:mod:`~lightning_recycle.control.protocol.corruption`). A worker that is found wrong is evicted, or the run ends. If
nothing says who is right, the stage has no state that can be trusted, and counts as lost. In a newcomer's first check
the others are right, as its state was theirs.

Values that are not finite: a worker that meets a NaN or an infinity (NotFinite) stops, so the step is not committed. In
the next generation the step is *inspected*: a worker that makes such a value of finite ones disputes its own result,
and its stage votes. If the peers get finite values it was the device. If they get the same, or none makes the value (it
is in the data, or in the parameters of all), the step is *excused*: it runs again, and is taken as it is. If the value
does not come again, there is nothing left to do. A step is inspected once, unless a loss interrupts that, and a model
that often has such values is soon not asked any more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from lightning_recycle.control.protocol import messages
from lightning_recycle.control.protocol.corruption import (
    EXCUSES_ALL,
    FINITE,
    IS_FINITE,
    MAX_EXCUSED,
    Culprit,
    Dispute,
    Finding,
    Undecided,
    decide,
    differing,
    judge,
    own_error,
)
from lightning_recycle.control.protocol.generation import begin, begin_unless_over
from lightning_recycle.control.protocol.recovery import WorkerStatus
from lightning_recycle.control.protocol.state import (
    Command,
    Evict,
    Failed,
    MembershipState,
    Next,
    Outcome,
    Record,
    StageLost,
    after,
)
from lightning_recycle.control.protocol.step_boundary import dismiss


def add_checked(state: MembershipState, event: messages.Applied) -> MembershipState:
    """A worker told what it holds after a step."""
    if event.facts.checked is None:
        return state
    return state.updated(checks=state.checks.add(event.rank, event.step, event.facts.checked))


def compare(state: MembershipState) -> Next:
    """Compares what workers told of the steps that all live ones have applied."""
    commands: tuple[Command, ...] = ()
    for step in sorted(step for step in state.checks.told if step < state.steps.version):
        told = {rank: one for rank, one in state.checks.told[step].items() if rank in state.roster.live}
        rest = {other: value for other, value in state.checks.told.items() if other != step}
        state = state.with_checks(told=rest)
        found: list[Culprit] = []
        strange: dict[int, str] = {}
        newcomers = {rank for rank, since in state.roster.newcomers.items() if since > state.checks.agreed}
        for column in range(state.columns):
            of_column = {rank: one for rank, one in told.items() if state.column_of(rank) == column}
            known = {rank: one for rank, one in of_column.items() if rank not in newcomers} or of_column
            verdict = judge(known)
            if isinstance(verdict, Undecided):
                record, outcome = _nobody_knows(state, step, column // state.members, verdict)
                return state.updated(outcome=outcome), (*commands, record, outcome)
            found += verdict
            wrong = {culprit.rank for culprit in verdict}
            right = next((one.sums for rank, one in known.items() if rank not in wrong), {})
            for rank in of_column.keys() - known.keys():
                if names := differing(of_column[rank].sums, right):
                    what = " and ".join(names)
                    strange[rank] = f"after step {step} its {what} differ from its peers', and it has joined"
        since = state.checks.agreed
        for culprit in found:
            state, caused = _convict(state, step, culprit, since)
            commands += caused
            if state.outcome is not None:
                return state, commands
        checks = state.checks if found else replace(state.checks, agreed=step)
        state = state.updated(checks=checks.plan(step, state.steps.summed, told))
        if strange:
            state, dismissed = dismiss(state, step, strange)
            commands += dismissed
    return state, commands


def _convict(state: MembershipState, step: int, culprit: Culprit, since: int) -> Next:
    """``culprit`` holds wrong bits after ``step``; after ``since`` it did not."""
    rank, what = culprit.rank, " and ".join(culprit.kinds)
    peers = " and ".join(map(state.name, culprit.right))
    cause = f"after step {step} its {what} differ from those of its peers {peers}, which are equal"
    details = {
        "cause": cause,
        "kind": what,
        "proof": "state",
        "device": culprit.device,
        "since": since,
        "then": "ended" if state.checks.policy == "raise" else "evicted",
    }
    record = Record("corruption", step, rank, details)
    if state.checks.policy == "raise":
        outcome = Failed(f"Worker {state.name(rank)} holds wrong bits: {cause}. {_contaminated(since, step)}")
        return state.updated(outcome=outcome), (record, outcome)
    return state, (record, Evict(rank, cause))


def _nobody_knows(state: MembershipState, step: int, stage: int, found: Undecided) -> tuple[Record, Outcome]:
    what, since = " and ".join(found.kinds), state.checks.agreed
    groups = " ".join(f"[{', '.join(map(state.name, group))}]" for group in found.groups)
    cause = (
        f"After step {step} workers of stage {stage} hold different bits ({what}): {groups}, in groups that agree; no"
        " group is the largest, so it is unknown which of them are right"
    )
    details = {
        "cause": cause, "kind": what, "proof": "undecided", "stage": stage, "since": since, "then": "ended",
    }  # fmt: skip
    record = Record("corruption", step, None, details)
    if state.checks.policy == "raise":
        return record, Failed(f"{cause}. {_contaminated(since, step)}")
    why = f"its {what} differ from its peer's, and it is unknown whose are right"
    return record, StageLost(stage, {rank: why for rank in state.roster.live if state.stage_of(rank) == stage})


def _contaminated(since: int, step: int) -> str:
    before = "before that nothing was compared" if since < 0 else f"they were equal after step {since}"
    return (
        f"{before[0].upper()}{before[1:]}, so results since then, up to step {step}, may be wrong. A device whose"
        " memory or arithmetic errs does this, and so do hooks or callbacks that change weights on some workers only,"
        " or optimizers that are not deterministic. Start again from a checkpoint that is older than that;"
        " VerificationOptions(on_corruption='evict') goes on without the worker where a majority says what is right."
    )


# ---------------------------------------------------------------------- computations


def on_disputed(state: MembershipState, event: messages.Disputed) -> Next:
    """A worker got other bits than the peer that it checked, or twice others than itself before: no peer has to be
    asked then. The step cannot be committed, so a generation begins, or a loss begins one.
    """
    if not state.generation.runs(event.generation):
        return state, ()
    if event.other == event.rank and event.mine != event.theirs:
        dispute = Dispute(event.step, event.microbatch, event.rank, event.rank, {event.rank: event.theirs})
        return _convict_of_computing(state, dispute, own_error(event))
    if event.other not in state.roster.live:
        return state, ()
    claims = {event.rank: event.mine, event.other: event.theirs}
    dispute = Dispute(event.step, event.microbatch, event.rank, event.other, claims, {}, {event.rank: event.device})
    kinds = " and ".join(differing(event.mine, event.theirs))
    details = {"of": state.place(event.other), "microbatch": event.microbatch, "kind": kinds}
    record = Record("disputed", event.step, event.rank, details)
    return after((record,), begin(state.with_checks(dispute=dispute)))


def call_vote(
    state: MembershipState, statuses: Mapping[int, WorkerStatus], version: int
) -> tuple[MembershipState, messages.Vote | None, tuple[Command, ...]]:
    """The vote on a dispute, if all workers of the stage hold the parameters of its step; otherwise it is forgotten:
    the step is computed again, and checked again. A value that is not finite is then kept, or there would be no end.
    """
    dispute = state.checks.dispute
    if dispute is None:
        return state, None, ()
    voters = sorted(state.holders(state.stage_of(dispute.recorder)))
    able = all((statuses[rank].version, statuses[rank].tells_of) == (version, None) for rank in voters)
    if dispute.step != version or not able or not {dispute.recorder, dispute.accused} <= set(voters):
        state = state.with_checks(dispute=None)
        if is_about_numbers(dispute) and dispute.accused in voters:
            state, kept = excuse(state, dispute.step, "its stage has gone on, and cannot tell")
            return state, None, kept
        return state, None, ()
    state = state.with_checks(dispute=replace(dispute, votes={}))
    return state, messages.Vote(dispute.recorder, tuple(voters)), ()


def on_voted(state: MembershipState, event: messages.Voted) -> Next:
    """A worker has computed what is disputed. When all have, a generation begins, unless a loss begins one."""
    dispute = state.checks.dispute
    if not state.generation.runs(event.generation) or dispute is None:
        return state, ()
    votes = {**dispute.votes, event.rank: (event.sums, not event.varies)}
    devices = {**dispute.devices, event.rank: event.device}
    dispute = replace(dispute, votes=votes, devices=devices, varies=event.varies or dispute.varies)
    if votes.keys() != state.holders(state.stage_of(dispute.recorder)):
        return state.with_checks(dispute=dispute), ()
    found = _settle(state.with_checks(dispute=None), dispute)
    return found if any(isinstance(command, Evict) for command in found[1]) else begin_unless_over(*found)


def _settle(state: MembershipState, dispute: Dispute) -> Next:
    """Reaction to the votes of all."""
    if is_about_numbers(dispute):
        return _settle_numbers(state, dispute)
    finding = decide(dispute)
    if finding is Finding.INCOMPARABLE:
        varies = f"{dispute.varies} gives other bits each time"
        return _give_up_comparing(state, varies if dispute.varies else "no worker of a stage agrees with another one")
    if finding is Finding.UNDECIDED:
        return _nobody_computes_right(state, dispute)
    assert not isinstance(finding, Finding)
    commands: tuple[Command, ...] = ()
    for culprit in finding:
        state, caused = _convict_of_computing(state, dispute, culprit)
        commands += caused
        if state.outcome is not None:
            break
    return state, commands


def _settle_numbers(state: MembershipState, dispute: Dispute) -> Next:
    found = who_made_it(dispute)
    if isinstance(found, str):
        return excuse(state, dispute.step, f"worker {state.place(dispute.accused)} made it, and {found}")
    # The step runs again without the culprit, or with none if the run ends.
    state = state.with_checks(inspects=-1)
    return _convict_of_computing(state, dispute, found, "made a value that is not finite of finite ones in the")


def _convict_of_computing(
    state: MembershipState, dispute: Dispute, culprit: Culprit, did: str = "computed a wrong"
) -> Next:
    rank, what = culprit.rank, " and ".join(culprit.kinds)
    others = " and ".join(map(state.name, culprit.right))
    says = f"says {others}" if culprit.right != (rank,) else "and got something else twice"
    cause = f"in step {dispute.step} it {did} {what} of micro-batch {dispute.microbatch}, {says}"
    policy = state.checks.policy
    details = {
        "cause": cause, "kind": what, "proof": "computation", "device": culprit.device, "since": dispute.step - 1,
        "then": "ended" if policy == "raise" else "evicted",
    }  # fmt: skip
    record = Record("corruption", dispute.step, rank, details)
    if policy == "raise":
        outcome = Failed(
            f"Worker {state.name(rank)} computes wrong results: {cause}. That step was not committed. Its device"
            " may be broken; VerificationOptions(on_corruption='evict') goes on without it."
        )
        return state.updated(outcome=outcome), (record, outcome)
    return state, (record, Evict(rank, cause))


def _nobody_computes_right(state: MembershipState, dispute: Dispute) -> Next:
    names = " and ".join(map(state.name, sorted(dispute.claims)))
    what = " and ".join(differing(*dispute.claims.values()))
    cause = (
        f"In step {dispute.step} workers {names} computed a different {what} of micro-batch {dispute.microbatch}, and"
        " did so again; it is unknown which of them is right"
    )
    stage = state.stage_of(dispute.recorder)
    details = {
        "cause": cause,
        "kind": what,
        "proof": "undecided",
        "stage": stage,
        "since": state.checks.agreed,
        "then": "ended",
    }
    outcome = Failed(
        f"{cause}. Steps before this one may have taken wrong gradients, too. A third pipeline would decide; the newest"
        " checkpoints are as good as the checks before them."
    )
    return state.updated(outcome=outcome), (Record("corruption", dispute.step, None, details), outcome)


def on_incomparable(state: MembershipState, event: messages.Incomparable) -> Next:
    """A worker reports that computations cannot be compared."""
    if not state.checks.comparable:
        return state, ()
    found = _give_up_comparing(state, event.cause)
    return found if state.generation.regrouping else begin_unless_over(*found)


def _give_up_comparing(state: MembershipState, why: str) -> Next:
    """Computations are not compared any more."""
    state = state.with_checks(comparable=False, dispute=None)
    return state, (Record("incomparable", state.steps.version, None, {"cause": why}),)


# ---------------------------------------------------------------------- values that are not finite


def on_not_finite(state: MembershipState, event: messages.NotFinite) -> Next:
    """A worker has met a value that is not finite, and waits for another generation."""
    if not state.generation.runs(event.generation):
        return state, ()
    if state.checks.inspects == event.step:
        return begin_unless_over(*excuse(state, event.step, "no worker makes it of finite values"))
    which = f"the loss of micro-batch {event.microbatch}" if event.microbatch >= 0 else "the gradient of its stage"
    details = {"cause": f"{which} is not finite", "then": "inspected"}
    record = Record("not_finite", event.step, event.rank, details)
    return after((record,), begin(state.with_checks(inspects=event.step)))


def is_about_numbers(dispute: Dispute) -> bool:
    """Whether the question is if a value is finite."""
    return dispute.accused == dispute.recorder


def who_made_it(dispute: Dispute) -> Culprit | str:
    """The worker whose device made a value that is not finite; or why none did, in words, when all have voted."""
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
    """If all have applied the inspected step, the value has not come again."""
    step = state.checks.inspects
    if not 0 <= step < state.steps.version:
        return state, ()
    state = state.with_checks(inspects=-1)
    details = {"cause": "all values are finite now; no worker made the other one again", "then": "gone"}
    return state, (Record("not_finite", step, None, details),)
