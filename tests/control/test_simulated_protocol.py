"""The protocol of coordinator and workers in a simulated world, over random histories; and that breaking it is noticed.

A history is a number: ``python tests/control/simulated_run.py NUMBER`` replays it and prints what happens; with
``kills`` one in which the coordinator is killed, at any moment, and started again.
All 100,000 of them, and all mutations: ``pytest -m "long or exhaustive" tests/control/test_simulated_protocol.py``.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from simulated_promises import Violation
from simulated_run import Run, check_histories
from simulated_workers import SimulatedWorker
from support.sampling import sampled

from lightning_recycle.control import journal
from lightning_recycle.control.protocol import (
    control_collectives,
    fault_attribution,
    membership,
    messages,
    recovery,
    state,
    step_commit,
)
from lightning_recycle.control.protocol.member import Member, MessageRecord

SOURCES = str(Path(__file__).parents[2])
SAMPLE = (range(250), range(250, 1000))  # histories in the ordinary run, and those of the long one
SAMPLE_OF_VARIANTS = (range(80), range(80, 1000))
SAMPLE_WHEN_KILLED = (range(200, 350), range(350, 1550))  # what the coordinator's death does to who is leaving is rare
SAMPLE_WITH_FEWER = (range(50), range(50, 1000))
SAMPLE_OF_MEMBERS = (range(50), range(50, 1000))
HUNT = 6000  # within so many a broken protocol must be noticed
HUNT_FROM = {  # where what seldom matters is known to matter; otherwise from the first history on
    "a batch that only lost workers have begun hides the one before": 103_100,
    "a worker forgets what a recovery told of a commit": 1_500,
    "answers to an earlier pause count": 19_300,
    "passes of earlier generations count": 12_600,
    "what a lost one took part in is kept": 6_400,
    "a step that was confirmed before a loss is speculative again": 66_400,
    "contributions that confirm a step are not heard with the resumption": 66_400,
    "the dead arrive where nobody else does": 10_500,
    "what was on its way to the last holder is forgotten": 115_200,
}
MEETS = {  # what the sample must have met, or it says nothing about it
    "Crashed", "Failed", "Finished", "StageLost", "adoption", "ahead", "candidate lost", "cut", "disturbance",
    "donor hit", "evicted", "evicted after an exception", "failure", "healed", "joiner hit", "left",
    "loss computed again", "loss during a change of plan", "loss during a pause", "paused", "rejoined", "replanned",
    "retried", "undone",
}  # fmt: skip


def over(sample: tuple[range, range]) -> pytest.MarkDecorator:
    """``histories``: few in the ordinary run, further ones in a long one."""
    few, more = sample
    return pytest.mark.parametrize("histories", [few, pytest.param(more, marks=pytest.mark.long)], ids=["few", "more"])


OUTCOMES = ("Finished", "Ended", "StageLost", "Failed", "Crashed")


def play(histories: range, **options: Any) -> Counter[str]:
    """Runs ``histories``, each of which has one outcome; returns in how many each kind of event was met."""
    met = check_histories(histories, **options)
    assert sum(met[outcome] for outcome in OUTCOMES) == len(histories)
    return met


def named(options: dict[str, Any]) -> str:
    return " and ".join(f"{name}={value}" if value > 1 else name for name, value in options.items() if value) or "plain"


@over(SAMPLE)
def test_every_promise_holds_in_a_sample_of_histories_which_meets_every_kind_of_trouble(histories: range) -> None:
    met = play(histories)
    assert met["Failed"] < len(histories) / 25, "that takes a link that nobody can do without"
    assert not {kind for kind in MEETS if not met[kind]}


KILLS_AND_STOPS = {"kills": True, "stops": True, "plans_late": True}

MEETS_WHEN_KILLED = {
    "Answer told again", "CANDIDATE returns", "LEFT returns", "LOST returns", "STARTER returns",
    "StepLoss told again", "coordinator killed again", "coordinator killed during a pause", "did not return",
    "revived", "the end told again",
}  # fmt: skip


@pytest.mark.parametrize("stops", [pytest.param(False, marks=pytest.mark.long), True])
@over(SAMPLE_WHEN_KILLED)
def test_every_promise_holds_when_the_coordinator_is_killed_at_any_moment(histories: range, stops: bool) -> None:
    met = play(histories, kills=True, stops=stops)
    assert met["Finished"] > len(histories) / 2
    assert histories.start > 200 or not {kind for kind in MEETS_WHEN_KILLED if not met[kind]}
    assert bool(met["StopVerdict told again"]) == stops


VARIANTS: list[tuple[str, dict[str, bool], dict[str, float]]] = [
    ("all end after one step", {"ends": True}, {"Ended": 1 / 3}),
    ("workers stop at the same place", {"stops": True}, {"stopped at once": 1 / 20, "stop_requested": 1 / 20}),
    ("all stop or end", {"ends": True, "stops": True}, {"stopped at once": 1 / 20, "stop_requested": 1 / 20}),
    *(
        (f"{name}{' and kills' * kills}", {"kills": kills, **options}, shares)
        for kills in (False, True)
        for name, options, shares in (
            ("a plan takes long", {"plans_late": True}, {"held": 1 / 2}),
            ("a checkpoint is complete or given up once for all", {"saves": True}, {
                **dict.fromkeys(("rejoined", "save complete", "save given up", "save asked for again"), 0),
                "Finished": 1 / 2, "save without a name": 0,
            }),
            ("layers move", {"layouts": True}, {"layers_moved": 1 / 20, "layers under way": 1 / 20}),
            ("few have micro-batches and links break", {"idle": True}, {"cut": 1 / 2, "disturbance": 1 / 5}),
            ("nobody keeps a wrong result", {"checks": True}, {"evicted after an error": 1 / 10}),
            ("who joins has other values", {"strays": True}, {"dismissed": 1 / 10, "miscopied": 1 / 50}),
        )
    ),
]  # fmt: skip
"""What histories have, and in which share of them what must be met, or they say nothing about it."""


@pytest.mark.parametrize(("options", "shares"), [each[1:] for each in VARIANTS], ids=[name for name, *_ in VARIANTS])
@over(SAMPLE_OF_VARIANTS)
def test_every_promise_holds_when(histories: range, options: dict[str, bool], shares: dict[str, float]) -> None:
    met = play(histories, **options)
    assert not {kind for kind, share in shares.items() if met[kind] <= share * len(histories)}
    if "layouts" in options:
        assert met["layers under way"] > met["layers_moved"], "none was undone"
        assert met["stranger"] or not histories.start, "rare"


@pytest.mark.parametrize(
    "more",
    [{}, {"ends": True}, {"layouts": True}, {"strays": True}, {"kills": True, "stops": True}, KILLS_AND_STOPS],
    ids=named,
)
@pytest.mark.parametrize("lanes", [False, True], ids=["", "more lanes than pipelines"])
@over(SAMPLE_WITH_FEWER)
def test_every_promise_holds_when_the_run_begins_with_fewer_workers(
    histories: range, lanes: bool, more: dict[str, bool]
) -> None:
    met = play(histories, quorum=True, lanes=lanes, **more)
    assert met["began with fewer"] > len(histories) / 2
    assert met["rejoined"] > len(histories) / 10


MEETS_WITH_MEMBERS = {"a stage ahead in part", "rejoined", "released"}


@pytest.mark.parametrize("more", [{}, {"ends": True}, {"strays": True}, {"kills": True, "stops": True}], ids=named)
@over(SAMPLE_OF_MEMBERS)
def test_every_promise_holds_where_positions_have_two_members(histories: range, more: dict[str, bool]) -> None:
    met = play(histories, members=2, plans_late=True, **more)
    assert not {kind for kind in MEETS_WITH_MEMBERS if not met[kind]}


@over(SAMPLE_OF_MEMBERS)
def test_every_promise_holds_where_positions_have_three_members(histories: range) -> None:
    met = play(histories, members=3)
    assert not {kind for kind in MEETS_WITH_MEMBERS if not met[kind]}


MEETS_IN_HOOKS = {"hook", "hook goes on", "left in a hook", "rejoined"}


@pytest.mark.parametrize("members", [pytest.param(2, marks=pytest.mark.long), 3])
@pytest.mark.parametrize("kills", [False, True])
@over(SAMPLE_OF_MEMBERS)
def test_a_hook_that_runs_collectives_of_its_position_runs_once(histories: range, members: int, kills: bool) -> None:
    met = play(histories, members=members, kills=kills, hooks=True)
    assert not {kind for kind in MEETS_IN_HOOKS if not met[kind]}
    assert bool(met["HookEntered told again"]) == kills


KILLS: dict[str, bool] = {"kills": True}
EXHAUSTIVE: list[dict[str, Any]] = [
    *({**kills, **stops} for kills in ({}, KILLS) for stops in ({}, {"stops": True})),
    *({"layouts": True, **kills} for kills in ({}, KILLS)),
    *({"checks": True, **kills, **more} for kills in ({}, KILLS) for more in ({}, {"layouts": True}, {"stops": True})),
    *(
        {"members": 2, **kills, **more}
        for kills in ({}, KILLS)
        for more in ({}, {"stops": True}, {"strays": True}, {"hooks": True})
    ),
    *({"quorum": True, "lanes": lanes, **more} for lanes in (False, True) for more in ({}, KILLS, KILLS_AND_STOPS)),
]


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("options", EXHAUSTIVE, ids=named)
@pytest.mark.parametrize("tens_of_thousands", range(10))
def test_every_promise_holds_in_100_000_histories(tens_of_thousands: int, options: dict[str, Any]) -> None:
    first = 10_000 * tens_of_thousands
    play(range(first, first + 10_000), **options)


@pytest.mark.parametrize("ends", [False, True])
def test_a_step_that_was_confirmed_before_a_loss_is_not_speculative_again(ends: bool) -> None:
    assert check_histories([11_670], ends=ends)["Ended" if ends else "Finished"]


@pytest.mark.parametrize("listener", [0, 2], ids=["released", "member"])
def test_an_answer_is_given_once_unless_only_those_have_heard_it_that_are_no_members_any_more(listener: int) -> None:
    """Rank 1 does not return to the next coordinator, which releases its sibling 0 as all others are there."""
    run = Run(0, members=2)
    promises, before, after = run.promises, run.state, run.state.without({1})

    def answer(ranks: tuple[int, ...]) -> messages.Answer:
        return messages.Answer(0, dict.fromkeys(ranks), ranks[-1])

    for rank, worker in run._connections.items():
        promises.on_arrival(worker, messages.Arrive(rank, 0, "barrier", None))
    promises.on_message(before.roster.ranks, answer(before.roster.ranks), before)
    promises.on_heard(run._connections[listener], answer(before.roster.ranks))
    promises.on_all_returned(after)
    with pytest.raises(Violation, match="collective 0 is answered twice") if listener else nullcontext():
        promises.on_message(after.roster.ranks, answer(after.roster.ranks), after)


@pytest.mark.parametrize("is_member", [False, True], ids=["released", "member"])
def test_all_begin_a_batch_with_the_same_holders_but_those_that_are_no_members_any_more(is_member: bool) -> None:
    """A released worker may have heard of other holders, and lives until it hears that it is released."""
    run = Run(0, members=2)
    promises, workers = run.promises, run._connections

    def begin_generation(number: int, of: state.MembershipState) -> None:
        ranks = of.roster.ranks
        promises.on_message(ranks, messages.Regroup(number, ranks, max(ranks)), of)

    begin_generation(0, run.state)
    promises.on_saves_begun(workers[0], (0, 1), False)
    begin_generation(1, run.state if is_member else run.state.without({1}))
    with pytest.raises(Violation, match="begins batch") if is_member else nullcontext():
        promises.on_saves_begun(workers[max(workers)], (2, 3), False)


def test_a_history_is_reproduced_by_its_number() -> None:
    def lines(seed: int) -> list[str]:
        told: list[str] = []
        Run(seed, trace=told.append).run()
        return told

    assert lines(7) == lines(7)
    assert lines(7) != lines(8)


# ---------------------------------------------------------------------- a broken protocol

# fmt: off
MUTATIONS: list[tuple[str, Any, str, str, str]] = [
    ("all stop at a step that some have begun", step_commit, "on_paused",
     "max(pause.begun.values()) + 1", "max(pause.begun.values())"),
    ("a step that was confirmed before a loss is speculative again", membership, "_known_commits",
     "return payloads, True", "pass"),
    ("contributions that confirm a step are not heard with the resumption", Member, "_receive",
     "if message.confirmed:", "if False:"),
    ("all stop at the earliest step", step_commit, "on_paused", "max(max(pause.begun", "max(min(pause.begun"),
    ("one answer is enough for a boundary", step_commit, "on_paused",
     "pause.begun.keys() != state.roster.live", "not pause.begun"),
    ("not everybody is awaited at the boundary", step_commit, "on_at_boundary",
     "pause.arrived != state.roster.live", "False"),
    ("a pause survives a new generation", recovery, "begin_generation",
     "becomes=becomes)", "becomes=becomes, pause=state.generation.pause)"),
    ("nobody is let in", step_commit, "pause_if_wanted", "not any(_changes(state))", "not state.roster.leaving"),
    ("a plan for other workers is taken", step_commit, "on_plan_ready",
     "event.roster == state.roster.ranks and ", ""),
    ("a plan survives a new generation", recovery, "begin_generation",
     "becomes=becomes)", "becomes=becomes, plan=state.generation.plan)"),
    ("a plan begins one step early", step_commit, "_change_plan",
     "(state.generation.number, boundary)", "(state.generation.number, boundary - 1)"),
    ("answers to an earlier pause count", step_commit, "on_paused",
     "(event.generation, event.number) != (state.generation.number, pause.number)",
     "event.generation != state.generation.number"),
    ("the last holder of a stage may leave", step_commit, "_changes",
     "without=leave | {rank}", "without=()"),
    ("the leader changes though it lives", recovery, "with_leader", "roster.leader in roster.live and", "False and"),
    ("the dead leader speaks", membership, "_settle_and_regroup", "recovery.with_leader(", "("),
    ("nobody is evicted for a broken link", fault_attribution, "on_grace_elapsed", "evicted is not None", "False"),
    ("nobody checks its links", recovery, "begin_generation", "state.faults.disturbances > 0", "False"),
    ("broken links survive a new generation", recovery, "begin_generation",
     "becomes=becomes)", "becomes=becomes, broken_pairs=state.generation.broken_pairs)"),
    ("the last holder of a stage is evicted for a link", fault_attribution, "choose_evictions",
     "not all(stage - evicted for stage in stages)", "False"),
    ("more are evicted than necessary", fault_attribution, "choose_evictions",
     "(frozenset({worst}), *partner_sets)", "(frozenset({worst}).union(*partner_sets),)"),
    ("an exception that is said twice counts twice", fault_attribution, "on_raised",
     "return state, ()  # said twice", "pass"),
    ("a worker that raised does not let the others know", fault_attribution, "on_raised",
     "event.generation < state.generation.number", "True"),
    ("a joiner's exception is judged like a member's", fault_attribution, "on_raised",
     "event.rank in state.roster.joining", "False"),
    ("exceptions are not remembered", fault_attribution, "remember_exception", "<= _REMEMBERED_STEPS), new)",
     "<= _REMEMBERED_STEPS),)"),
    ("an exception never is the user's own", fault_attribution, "judge_exception",
     "at_place >= retries or since_commit > retries",
     "False"),
    ("an exception always is the user's own", fault_attribution, "judge_exception",
     "at_place >= retries or", "True or"),
    ("the last holder of a stage is evicted for an exception", fault_attribution, "judge_exception",
     "has_peer and (", "True and ("),
    ("a worker that raised stays though it has a peer", fault_attribution, "judge_exception",
     "has_peer and (", "False and ("),
    ("all that raise in a step are evicted", fault_attribution, "judge_exception",
     "raised.sticky or not since_commit", "True"),
    ("what cannot be repeated is repeated", fault_attribution, "judge_exception", "raised.exact and not", "not"),
    ("a lost device is used again", fault_attribution, "judge_exception", "exact and not raised.sticky", "exact"),
    ("a loss changes nothing for the others", membership, "_settle_and_regroup",
     "recovery.begin_generation(state)", "state, ()"),
    ("the first report decides", membership, "_on_report", "reports.keys() != state.roster.live", "not reports"),
    ("reports of old generations count", membership, "_on_report",
     "event.generation != state.generation.number or", ""),
    ("who joins counts as having the state", state.MembershipState, "holders",
     "self.roster.live - self.roster.joining", "self.roster.live"),
    ("the donor is anybody", membership, "_resume", "min(state.holders(state.positions.column(rank)))",
     "min(state.roster.live)"),
    ("a stage without a holder goes on", membership, "_on_report", "not state.holders(column)", "False"),
    ("where all go on is what the fastest can reach", recovery, "committed_version",
     "min(_reachable(statuses).values())", "max(_reachable(statuses).values())"),
    ("a step without its loss is committed", recovery, "committed_version",
     "min(version, known_losses)", "version"),
    ("nobody adopts a gradient", recovery, "decide", "adoptions.append(", "(lambda _: None)("),
    ("a gradient is adopted from who lacks it", recovery, "decide", "min(donors)", "min(workers.keys() - has)"),
    ("a loss is told without all of its parts", step_commit, "_sum_up", "< state.positions.grid.global_microbatches",
     "< 1"),
    ("a step counts when the first has applied it", step_commit, "count_steps",
     "min(steps.applied", "max(steps.applied"),
    ("a commit does not wait for all", step_commit, "on_commit", "commits.keys() != state.roster.live", "False"),
    ("commits that come twice count twice", step_commit, "on_commit",
     "or event.step <= state.generation.commit_answered", ""),
    ("nobody is told that some have speculated", step_commit, "on_commit", "speculative = any(",
     "speculative = False and any("),
    ("a wrong speculation changes nothing for the others", step_commit, "on_undo",
     "begin_generation(state)", "(state, ())"),
    ("what those who have speculated tell is dropped", messages.WorkerStatus, "commit_step",
     "self.version - 1 if self.speculative else None", "None"),
    ("a collective does not wait for all", control_collectives, "_answer_if_complete",
     "not state.roster.live <= arrived.keys()", "False"),
    ("a collective is answered twice", control_collectives, "on_arrive",
     "event.number < state.collectives.next", "False"),
    ("parts of two generations are put together", control_collectives, "forget_retracted",
     "arrive.generation is None", "True"),
    ("a death completes what it should retract", membership, "_settle_and_regroup",
     "control_collectives.forget_retracted(", "("),
    ("one stage's result is enough", control_collectives, "_answer_if_complete", "< state.positions.columns", "< 1"),
    ("the dead are waited for", control_collectives, "_answer_if_complete",
     "state.roster.live <=", "state.roster.joined | state.roster.causes.keys() <="),
]
"""What breaks, the object with the function, the function, and what is replaced in its source."""

WORKERS: list[tuple[str, Any, str, str, str]] = [
    ("a worker begins steps while it should pause", Member, "begin", "if not paused or", "if True or"),
    ("a worker takes a plan before its step", Member, "begin", "if plan.step <= step", "if True"),
    ("a worker never takes a plan", Member, "begin", "due[-1].program if due else None", "None"),
    ("a worker keeps the plans of an old generation", Member, "enter", "self.plans.clear()", "pass"),
    ("a worker applies a gradient without the loss", Member, "loss",
     "self._losses.get(step)", "self._losses.get(step, messages.StepLoss(step, 0.0))"),
    ("a worker obeys the Resume of an old generation", Member, "resume_message",
     "self._resume.generation == self.generation", "True"),
    ("a worker takes the commit of another step for its own", Member, "commit_answer",
     "(found.generation, found.step) == (self.generation, step)", "True"),
    ("a worker comes to the same collective again", Member, "answer",
     "max(self.next_collective, number + 1)", "number"),
    ("a worker ignores a pause", Member, "_receive", "pause > self._newest_pause", "False"),
    ("a worker takes an old verdict for a new one", Member, "exception_verdict",
     "self._judged.generation == self.generation", "True"),
    ("a redo overwrites what is done", recovery, "part_of", "step + 1 if done else step", "step"),
    ("a worker that is ahead reduces again", recovery, "part_of", "step < version or reduced", "False"),
    ("a worker goes on without the others' redo", recovery, "actions", "version > decision.version", "False"),
    ("a worker keeps its part of a sum over tied stages", recovery, "actions", "if tied and", "if False and"),
    ("a sum over stages that share layers is made again", SimulatedWorker, "begin_shared",
     "ahead = ahead if step == again else frozenset()", "ahead = frozenset()"),
    ("a stage adopts a gradient without the sums over others", SimulatedWorker, "carry_out",
     "self.shared[step % 2] = (step, gradient), dict(shared)", "_ = (step, gradient), dict(shared)"),
    ("a speculative step is confirmed before all have told", recovery, "actions",
     "status.speculative and (version == decision.version or confirmed)", "status.speculative"),
    ("a speculative step is never confirmed in a recovery", recovery, "actions", "if status.speculative and",
     "if False and"),
    ("losses are told that may follow from a speculative step", SimulatedWorker, "program",
     "if step == self.version:\n        yield from self.know_newest()", "if False:\n        pass"),
    ("a joiner does not take its state", recovery, "actions", "planned.append(Take(donors[rank]))", "pass"),
    ("a donor gives nothing", recovery, "actions", "planned.append(Give(receivers))", "pass"),
    ("a worker does not apply what it adopted", recovery, "actions", "if version < decision.version:", "if False:"),
    ("adopted micro-batches are dropped", SimulatedWorker, "program",
     "16**m for m in", "m // self.grid.stages == self.rank // self.grid.stages and 16**m for m in"),
    ("a joiner begins at the first step", SimulatedWorker, "carry_out",
     "list(self.parameters), self.position", "list(self.parameters), 1"),
]
"""As above, for the worker's half: the product's, but for those of SimulatedWorker, which is the simulated world's."""

STOPPING: list[tuple[str, Any, str, str, str]] = [
    ("one wish stops all at once", control_collectives, "_settle_stop", "not state.roster.live <= stop.wanted",
     "False"),
    ("those that wait are not told that others went on", control_collectives, "_add_answer",
     "return _stop_later(state, stop.point, min(stop.wanted))", "return state, ()"),
    ("nobody asks the others", control_collectives, "_add_request", "ask = (Send(", "_ = (Send("),
    ("a wish that not all have is forgotten", control_collectives, "_stop_later",
     "after_step=AfterStep.STOP", "applied_below=0"),
    ("a wish at an earlier point counts for a later one", control_collectives, "_add_request",
     "(stop is not None and event.point < stop.point)", "False"),
    ("the wish of the dead counts", control_collectives, "_settle_stop",
     "return state.with_collectives(stop_round=None), ()", "return _stop_later(state, stop.point, min(stop.wanted))"),
    ("a death does not complete an agreement", step_commit, "settle_steps",
     "control_collectives.settle_collectives(state)",
     "(state, ())"),
    ("the dead arrive where nobody else does", control_collectives, "forget_retracted",
     " and rank in live", ""),
    ("a worker does not say that it went on", Member, "_receive", "return self._answer_stop_request()", "pass"),
    ("a worker that was asked says nothing when it goes on", Member, "pass_stop_point",
     "return self._answer_stop_request()", "return ()"),
    ("a joiner does not know that a stop is agreed", SimulatedWorker, "carry_out",
     "self.version, self.stop_agreed, saves)\n", "self.version, False, saves)\n"),
]
"""As above, in histories in which workers want to stop early."""

QUORUM: list[tuple[str, Any, str, str, str]] = [
    ("the run begins before each stage has enough", membership, "_on_start_due",
     "in_stage[stage] < event.least", "False"),
    ("workers that have joined are not waited for", membership, "_on_start_due",
     "(event.vacant - state.roster.joined)", "event.vacant"),
    ("the run does not begin with those that are there", membership, "_settle_and_regroup",
     "recovery.begin_generation(state)", "(state, ())"),
    ("those that do not come are waited for in a collective", membership, "_settle_and_regroup",
     "return state, begins + settled", "return state, begins"),
    ("one stage that has enough is enough", membership, "_on_start_due", "any(in_stage", "all(in_stage"),
    ("those that are not there yet are given up", membership, "_on_start_due",
     "live=expected", "live=state.roster.live - event.vacant"),
    ("nobody is given up", membership, "_on_start_due", "state.with_roster(live=expected)", "state"),
]
"""As above, in histories in which the run begins with fewer workers."""

REVIVAL: list[tuple[str, Any, str, str, str]] = [
    ("a generation is used again", membership, "rebuilt", "number=generation)", "number=generation - 1)"),
    ("the first that returns is enough", membership, "transition",
     "state.roster.live <= state.returned.keys()", "state.returned"),
    ("nobody is told again what was answered", membership, "_resend_missed", "if answer is not None:", "if False:"),
    ("nobody is told again what the loss was", membership, "_resend_missed", "yield Resend(receivers, loss)", "pass"),
    ("the losses that were told do not count", membership, "rebuilt", "*(step + 1 for step in losses), ", ""),
    ("the answers that were given do not count", membership, "rebuilt",
     "max(each.next_collective for each", "min(each.next_collective for each"),
    ("a commit that was answered is forgotten", membership, "rebuilt", "if newest_commit is None else", "if True else"),
    ("who joins has applied nothing", membership, "rebuilt",
     "min(newest, default=members[rank].joins_after)", "-1"),
    ("exceptions are forgotten", journal, "revived_state", "retries=retries)", "retries=retries, raised=())"),
    ("exceptions without a verdict count as judged", membership, "rebuilt", "not in unanswered", "is not None"),
    ("nobody speaks for the run", journal, "revived_state", "(roster=roster", "(roster=roster.updated(leader=-1)"),
    ("a worker's part of a collective is forgotten", membership, "returned_events",
     "one(member.arrival)", "()"),
    ("exceptions wait for a verdict forever", membership, "_go_on_with_returned",
     "member.raised is not None", "False"),
    ("a worker forgets its part of a collective", MessageRecord, "record_sent", "self._keep(arrival=message)", "pass"),
    ("a worker forgets the answer", MessageRecord, "record_received",
     "self._keep(answer=message)", "pass"),
    ("a worker forgets the answer too soon", MessageRecord, "record_begun", "step >= self._answered_at +", "True or"),
    ("a worker forgets the loss", MessageRecord, "record_received",
     "self._step_losses[message.step] = message", "pass"),
    ("a worker forgets a commit", MessageRecord, "record_received", "self._keep(newest_commit=message)", "pass"),
    ("a worker forgets what a recovery told of a commit", MessageRecord, "record_received",
     "if message.commits:", "if False:"),
    ("a worker does not say what it applied", MessageRecord, "record_sent", ", applied=message.step", ""),
    ("a worker does not say where it got its state", MessageRecord, "record_sent",
     "self._keep(applied=kept.joins_after)", "pass"),
    ("what was on its way to the last holder is forgotten", membership, "rebuilt", "default=members[rank].joins_after",
     "default=-1"),
    ("a worker forgets its exception", MessageRecord, "record_sent", "self._keep(raised=message)", "pass"),
]
"""As above, in histories in which the coordinator is killed. Who may return to it: see test_admission.py."""

LAYOUTS: list[tuple[str, Any, str, str, str]] = [
    ("a layout counts as soon as one worker holds its layers", step_commit, "on_layers_held",
     "state.generation.layers_held != state.roster.live", "False"),
    ("a loss undoes nothing", membership, "_settle_and_regroup", "recovery.begin_generation(state)",
     "recovery.begin_generation(state.with_layout(cuts=state.generation.becomes or state.layout.cuts))"),
    ("steps go on while layers are under way", SimulatedWorker, "recover", "if resume.becomes:", "if False:"),
    ("who joins keeps its layers", membership, "_resume", "if cuts and reports", "if False and reports"),
    ("layers are given before all say what they hold", step_commit, "on_at_boundary",
     "begin_generation(state, layout.cuts)", "begin_generation(state.with_layout(cuts=layout.cuts), layout.cuts)"),
    ("a worker drops its layers before all hold theirs", SimulatedWorker, "get_ready",
     "self.beside = (resume.becomes, self.version)", "self.cuts = resume.becomes"),
]
"""As above, in histories in which layers move."""

CHECKS: list[tuple[str, Any, str, str, str]] = [
    ("losses are told before all have passed the step", step_commit, "_sum_up", "if step == steps.unproven",
     "if False"),
    ("one pass is enough", step_commit, "_sum_up",
     "state.generation.passes != state.roster.live", "not state.generation.passes"),
    ("passes of earlier steps count", step_commit, "_sum_up", "with_generation(passes=frozenset())",
     "with_generation()"),
    ("passes of earlier generations count", step_commit, "on_passed",
     "not state.generation.runs(event.generation) or", "state.generation.regrouping or"),
    ("passes survive a new generation", recovery, "begin_generation",
     "becomes=becomes)", "becomes=becomes, passes=state.generation.passes)"),
    ("losses of earlier generations count", step_commit, "on_losses",
     "not state.generation.runs(event.generation)", "False"),
    ("losses that not all have passed are kept", step_commit, "forget_unproven",
     "steps.unproven < steps.summed", "True"),
    ("a gradient that not all have passed is kept", SimulatedWorker, "leaves_open", "step == self.open", "False"),
]
"""As above, in histories in which workers check each other's computations."""

STRAYS: list[tuple[str, Any, str, str, str]] = [
    ("a step is applied before the one before is compared", step_commit, "_sum_up",
     "state.roster.newcomers and steps.version < step", "False"),
    ("what a worker with other values took part in is kept", fault_attribution, "dismiss", "doubt(state)", "state"),
    ("what a lost one took part in is kept", membership, "_lose", "fault_attribution.doubt(state)", "state"),
    ("the newest is right", step_commit, "_judge_newcomers", "since = min(", "since = max("),
    ("most are right", step_commit, "_judge_newcomers", "if newcomers.get(rank, -1) == since", "if True"),
    ("nobody is told to drop that", recovery, "begin_generation",
     "state.steps.unproven if state.steps.unproven >= state.steps.summed else -1", "-1"),
    ("the wrong worker stays", step_commit, "_judge_newcomers", "if not wrong:", "if True:"),
]
"""As above, in histories in which workers that join have other values than the others."""

MEMBERS: list[tuple[str, Any, str, str, str]] = [
    ("a position that lost a member stays in the roster", state.MembershipState, "without",
     "self.positions.all_members(ranks)", "frozenset(ranks)"),
    ("a member of a position enters alone", step_commit, "_changes",
     "positions.whole(ready)", "{positions.position(rank) for rank in ready}"),
    ("a worker that is ahead leaves its sibling alone", recovery, "part_of",
     "not (done and siblings_done)", "not done"),
]
"""As above, in histories in which positions have two members."""

HOOKS: list[tuple[str, Any, str, str, str]] = [
    ("one member is enough to enter a hook", control_collectives, "on_in_hook",
     "all(hooks.get(rank) == event.step for rank in members)", "True"),
    ("members of other positions count", control_collectives, "on_in_hook",
     "{event.rank, *state.positions.siblings(event.rank)}", "hooks"),
    ("a question from an earlier generation counts", control_collectives, "on_in_hook",
     "not state.generation.runs(event.generation) or", ""),
    ("what is said twice counts for the next hook", control_collectives, "on_in_hook",
     "hooks.get(event.rank, -1) >= event.step", "False"),
    ("who asked survives a new generation", recovery, "begin_generation",
     "becomes=becomes)", "becomes=becomes, hooks=state.generation.hooks)"),
    ("an earlier answer counts", Member, "try_enter_hook",
     "(hook.generation, hook.number) == (self.generation, self.hook_count)", "hook.generation == self.generation"),
    ("a hook ends with its generation", Member, "_receive", "self._hook, self.in_hook = message, True",
     "self._hook = message"),
    ("a hook is over when a generation is announced", Member, "enter",
     "self._published.clear()", "self._published.clear(); self.in_hook = False"),
    ("hooks are not counted", Member, "try_enter_hook", "self.hook_count += entered", "pass"),
]
"""As above, and some hooks run collectives of their position."""

HOOKS_REVIVAL: list[tuple[str, Any, str, str, str]] = [
    ("siblings are not told again that they are in a hook", membership, "_resend_missed",
     "if each.hook is not None:", "if False:"),
    ("a worker forgets that it is in a hook", Member, "report_return", "if self.in_hook:", "if False:"),
]
"""As above, and the coordinator is killed."""

SAVES: list[tuple[str, Any, str, str, str]] = [
    ("a loss of the writer decides nothing", control_collectives, "settle_saves", "saves.is_over or", "True or"),
    ("an announced file is given up", control_collectives, "settle_saves",
     "None if index in saves.announced else lost", "lost"),
    ("a file that was not announced is complete", control_collectives, "settle_saves", "else lost", "else None"),
    ("nobody names an announced file", control_collectives, "settle_saves", "unnamed=unnamed", "unnamed={}"),
    ("the writer is not answered", control_collectives, "on_save_announced",
     "return state, (answer,)", "return state, ()"),
    ("an announcement is forgotten", control_collectives, "on_save_announced",
     "event.index: event.temporary", "-1: event.temporary"),
    ("the outcome is told before it is known", control_collectives, "save_status", "saves.is_over else", "True else"),
    ("a failure is told as a success", control_collectives, "on_save_ended",
     "{event.index: event.failure}", "{event.index: None}"),
    ("a later batch does not begin", control_collectives, "on_save_begun",
     "event.batch < before.batch or", "before.paths or"),
    ("an answer tells nothing of checkpoints", Member, "answer", "self._adopt_save_status(found.saves)", "pass"),
]
"""As above, and checkpoints are written in the background."""

SAVES_REVIVAL: list[tuple[str, Any, str, str, str]] = [
    ("announcements are forgotten", journal, "revived_state", "saves=written.saves,", ""),
    ("a batch that only lost workers have begun hides the one before", control_collectives, "batch_begun_by",
     "== begun >= 0", "is ..."),
    ("announcements are not written down", journal, "journal_entry", "state.saves,", "SaveState(),"),
    ("a worker forgets the batch that it has begun", MessageRecord, "record_sent",
     "self._keep(save=message, announced=(), saves_ended=())", "pass"),
    ("a writer forgets its announcement", MessageRecord, "record_sent",
     "self._keep(announced=(*kept.announced, message))", "pass"),
    ("a writer forgets that it is done", MessageRecord, "record_sent",
     "self._keep(saves_ended=(*kept.saves_ended, message))", "pass"),
]
"""As above, and the coordinator is killed."""

LAYOUTS_REVIVAL: list[tuple[str, Any, str, str, str]] = [
    ("the layout is forgotten", journal, "revived_state", "cuts=written.cuts", ""),
]
"""As above, and the coordinator is killed."""

STOPPING_REVIVAL: list[tuple[str, Any, str, str, str]] = [
    ("a worker forgets its wish to stop", MessageRecord, "record_sent", "self._keep(request=message)", "pass"),
    ("nobody is told again that all stop", membership, "_resend_missed",
     "yield Resend(state.roster.ranks, messages.StopVerdict(stop.point, stop.agreed))", "pass"),
    ("all are told again that they stop", membership, "_resend_missed", "stop.agreed", "True"),
    ("a stop after the next step is forgotten", journal, "revived_state",
     "Steps(after_step=written.after_step)", "Steps()"),
]
"""As above, in histories in which workers want to stop early, too."""

IDLE = [("nobody waits for a worker without micro-batches", recovery, "part_of", "idle_peer)", "False)")]
"""As above, in histories in which most workers have no micro-batches, and links break."""
# fmt: on


def broken(owner: Any, name: str, old: str, new: str) -> Any:
    """Function ``name`` of a module or class, with ``old`` replaced by ``new`` in its source."""
    original = getattr(owner, name)
    is_property = isinstance(original, property)
    source = textwrap.dedent(inspect.getsource(original.fget if is_property else original))
    assert source.count(old) == 1, f"{name} has changed: it contains {old!r} {source.count(old)} times"
    module = owner if isinstance(owner, ModuleType) else inspect.getmodule(owner)
    assert module is not None
    names: dict[str, Any] = {}
    code = "from __future__ import annotations\n" + source.replace("@property\n", "").replace(old, new)
    exec(compile(code, f"{name}, broken", "exec"), vars(module), names)
    return names[name] if not is_property else property(names[name])


HUNTS: list[tuple[dict[str, Any], list[tuple[str, Any, str, str, str]]]] = [
    ({}, [*MUTATIONS, *WORKERS]),
    ({"stops": True}, STOPPING),
    ({"kills": True}, REVIVAL),
    ({"stops": True, "kills": True}, STOPPING_REVIVAL),
    ({"layouts": True}, LAYOUTS),
    ({"layouts": True, "kills": True}, LAYOUTS_REVIVAL),
    ({"checks": True}, CHECKS),
    ({"saves": True}, SAVES),
    ({"saves": True, "kills": True}, SAVES_REVIVAL),
    ({"quorum": True}, QUORUM),
    ({"idle": True}, IDLE),
    ({"strays": True}, STRAYS),
    ({"members": 2}, MEMBERS),
    ({"members": 2, "hooks": True}, HOOKS),
    ({"members": 2, "hooks": True, "kills": True}, HOOKS_REVIVAL),
]
ALL = [(options, *mutation) for options, mutations in HUNTS for mutation in mutations]


def test_every_mutation_applies_to_the_protocol_as_it_is() -> None:
    for _, _, owner, name, old, new in ALL:
        broken(owner, name, old, new)


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "mutation", "owner", "name", "old", "new"), sampled(ALL, 40), ids=[mutation for _, mutation, *_ in ALL]
)
def test_it_is_noticed_when(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], mutation: str, owner: Any, name: str, old: str, new: str
) -> None:
    original, function = getattr(owner, name), broken(owner, name, old, new)
    for namespace in [vars(module) for module in list(sys.modules.values())]:
        if str(namespace.get("__file__", "")).startswith(SOURCES):
            bound = [key for key, value in namespace.items() if value is original]
            for key in bound:  # wherever it is imported by name
                monkeypatch.setitem(namespace, key, function)
    for handlers in (membership._HANDLERS, membership._MEMBER_HANDLERS, membership._MILESTONE_HANDLERS):
        for kind, handler in handlers.items():
            if handler is original:
                monkeypatch.setitem(handlers, kind, function)  # type: ignore[arg-type]
    monkeypatch.setattr(owner, name, function)
    first = HUNT_FROM.get(mutation, 0)
    plans_late = "members" in options and not first  # what is known of later ones was met without
    with pytest.raises(Violation, match="history"):
        check_histories(range(first, first + HUNT), plans_late=plans_late, **options)
