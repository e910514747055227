"""The membership state machine, event by event."""

import math
import re

import pytest
from membership_feed import (
    ALL,
    GRID,
    all_losses,
    applied,
    commits,
    dummy,
    feed,
    given,
    messages,
    records,
    report,
    reports,
    running,
    running_without_3,
)

from lightning_recycle.control.protocol import messages as m
from lightning_recycle.control.protocol import state as s
from lightning_recycle.control.protocol.membership import transition
from lightning_recycle.control.protocol.messages import Adoption, Decision
from lightning_recycle.control.protocol.recovery import with_leader

# ---------------------------------------------------------------------- start


def test_the_first_generation_begins_when_the_last_worker_has_joined() -> None:
    state, commands = feed(s.initial_state(GRID), s.Joined(2), s.Joined(0), s.Joined(3))
    assert (state.generation.number, commands) == (-1, [])
    state, commands = feed(state, s.Joined(1))
    assert commands == [s.Send(ALL, m.Regroup(0, ALL, 1))]
    assert state.generation.regrouping


def test_a_worker_lost_during_the_start_is_left_out_of_the_first_generation() -> None:
    _state, commands = feed(s.initial_state(GRID), s.Joined(0), s.Joined(1), s.Joined(2), s.Lost(3, "import failed"))
    assert messages(commands, m.Regroup) == [m.Regroup(0, (0, 1, 2), 1)]
    assert records(commands, "failure") == [s.Record("failure", 0, 3, {"cause": "import failed"})]


def test_a_worker_lost_after_it_joined_does_not_count_as_joined() -> None:
    state, commands = feed(s.initial_state(GRID), s.Joined(0), s.Joined(3), s.Lost(3, "gone"), s.Joined(1))
    assert messages(commands, m.Regroup) == []
    state, commands = feed(state, s.Joined(2))
    assert commands == [s.Send((0, 1, 2), m.Regroup(0, (0, 1, 2), 1))]


def test_the_run_begins_with_those_that_are_there_once_each_stage_has_enough_and_no_other_is_expected() -> None:
    state, commands = feed(s.initial_state(GRID), s.Joined(2), s.StartDue(frozenset({0, 1, 3}), least=1))
    assert commands == [], "stage 1 has no worker"
    state, commands = feed(state, s.Joined(3), s.StartDue(frozenset({0, 1}), least=2))
    assert commands == [], "two of each stage are wanted"
    state, commands = feed(state, s.StartDue(frozenset({0, 1}), least=1))
    assert commands == [s.Send((2, 3), m.Regroup(0, (2, 3), 3))], "the leader is one that is there"
    assert state.vacant == (0, 1)
    assert state.roster.causes == {}, "nobody has failed"


def test_a_run_that_has_begun_is_not_begun_again() -> None:
    before = running_without_3()
    assert feed(before, s.StartDue(frozenset(ALL), least=1)) == (before, [])


def test_the_first_resume_starts_at_step_0_and_nobody_has_anything_to_do() -> None:
    state, commands = feed(s.initial_state(GRID), *map(s.Joined, ALL), *reports((3, 1, 0), 0))
    assert messages(commands, m.Resume) == []
    state, commands = feed(state, report(2, 0))
    (resume,) = messages(commands, m.Resume)
    assert resume == m.Resume(0, ALL, resume.decision, None, {})
    assert resume.decision == Decision(0, frozenset(), ())
    assert [record.kind for record in records(commands, "resumed")] == ["resumed"]


# ---------------------------------------------------------------------- losses


def test_a_loss_while_running_tells_all_survivors_to_regroup_in_the_next_generation() -> None:
    state, commands = feed(running(), s.Lost(2, "killed by SIGKILL"))
    assert messages(commands, m.Regroup) == [m.Regroup(1, (0, 1, 3), 1)]
    assert [c.ranks for c in commands if isinstance(c, s.Send)] == [(0, 1, 3)]
    assert records(commands, "failure") == [s.Record("failure", 0, 2, {"cause": "killed by SIGKILL"})]
    assert state.generation.regrouping


def test_survivors_hear_of_a_loss_before_they_hear_what_it_settles() -> None:
    """Else a coordinator that dies between the two, and whose file is lost, would count the lost worker as live."""
    state, _ = feed(running(), *(m.StopWish(rank, 6, True) for rank in (0, 1, 2)))
    _, commands = feed(state, s.Lost(3, "silent"))
    sent = [type(command.message) for command in commands if isinstance(command, s.Send)]
    assert sent == [m.Regroup, m.StopVerdict]


def test_a_worker_that_is_past_a_point_is_past_all_points_before_it() -> None:
    """It heard of the point where a lost worker wanted to stop, and answers after another round has begun."""
    state, _ = feed(running(), m.StopWish(2, 6, True), s.Lost(2, "killed"))
    given(state, m.StopWish(3, 5, True)).when(m.StopWish(0, 6, False)).then(m.StopVerdict(5, False))


def test_survivors_resume_together_with_what_the_decision_says() -> None:
    state, _ = feed(running(), all_losses(0), s.Lost(3, "gone"))
    state, commands = feed(state, report(0, 1, 0, True), report(1, 1, 0, True))
    assert messages(commands, m.Resume) == []
    state, commands = feed(state, report(2, 1, 0, False))
    (sent,) = [c for c in commands if isinstance(c, s.Send)]
    assert sent.ranks == (0, 1, 2)
    assert (sent.message.generation, sent.message.roster) == (1, (0, 1, 2))
    assert sent.message.decision == Decision(1, frozenset(), (Adoption(0, 0, 0),))
    assert sent.message.commits == {0: "commit of 0", 1: "commit of 1"}
    assert state.steps.version == 0, "a step is complete when it is applied, not when it could be"


@pytest.mark.parametrize("stage_1", [report(1, 2, 0, True), report(1, 2, 1)], ids=["reduced", "applied"])
def test_a_roll_forward_after_a_commit_brings_the_payloads_of_all_stages(stage_1: m.Report) -> None:
    """A second loss interrupts it when stage 1 has applied step 0 or not, and stage 0 has not."""
    state, _ = feed(running(), all_losses(0), *commits(ALL, 0, 0), s.Lost(3, "first"), *reports((0, 1, 2), 1, 0, True))
    state, commands = feed(state, s.Lost(2, "second"), report(0, 2, 0, True), stage_1)
    (resume,) = messages(commands, m.Resume)
    assert resume.decision.version == 1
    assert resume.commits == {0: "payload of 0", 1: "payload of 1"}


def test_a_roll_forward_without_a_commit_brings_the_payload_of_a_stage_that_has_already_applied() -> None:
    """The commit was not answered; the reports of the first regroup brought the payloads."""
    state, _ = feed(running(), all_losses(0), s.Lost(3, "first"), *reports((0, 1, 2), 1, 0, True))
    state, commands = feed(state, s.Lost(2, "second"), report(0, 2, 0, True), report(1, 2, 1))
    (resume,) = messages(commands, m.Resume)
    assert resume.decision.version == 1
    assert set(resume.commits) == {0, 1}, "worker 0 steps without the norm of stage 1"


def test_a_report_counts_the_losses_that_were_told_before_it() -> None:
    state, _ = feed(running(), m.Losses(1, 0, {0: 0.5, 2: 0.5}), m.Losses(3, 0, {1: 0.5}), s.Lost(0, "gone"))
    state, commands = feed(state, m.Losses(3, 0, {3: 0.5}), *reports((1, 2, 3), 1, 0, True))
    assert messages(commands, m.Resume)[0].decision.version == 1


# ---------------------------------------------------------------------- what is over


@pytest.mark.parametrize(
    "stale",
    [
        report(0, 0), m.Commit(0, 0, 0, None), m.Broken(0, 0, "reset"), s.GraceElapsed(0, "reset"), report(3, 1),
        m.Commit(3, 1, 0, None), m.Applied(3, 0, {}), m.Losses(3, 0, {0: 1.0}), m.Arrive(3, 0, "barrier", None),
        m.Broken(3, 1, "reset"), dummy(m.Crash, rank=3), s.Joined(3), s.Lost(3, "again"),
    ],
    ids=repr,
)  # fmt: skip
def test_messages_of_a_past_generation_or_a_lost_worker_change_nothing(stale: s.MembershipEvent) -> None:
    state = running_without_3()
    assert transition(state, stale) == (state, ())


@pytest.mark.parametrize(
    "again",
    [
        report(0, 0), s.Joined(0), m.Applied(0, 0, {}), m.Applied(0, 1, {}), m.Losses(1, 0, {0: 0.5}),
        m.Losses(1, 1, {0: 0.5}), m.Commit(0, 0, 0, "payload of 0"), m.Commit(0, 0, 1, "payload of 0"),
        m.Arrive(0, 0, "first", None), m.Arrive(0, 1, "second", None),
    ],
    ids=repr,
)  # fmt: skip
def test_messages_that_arrive_a_second_time_change_nothing(again: s.MembershipEvent) -> None:
    state = running()
    for step, name in enumerate(("first", "second")):
        events = [all_losses(step), *commits(ALL, 0, step), *applied(ALL, step)]
        state, _ = feed(state, *events, *(m.Arrive(rank, step, name, None) for rank in ALL))
    assert transition(state, again) == (state, ())


@pytest.mark.parametrize(
    "early", [m.Commit(0, 1, 0, None), s.GraceElapsed(1, "reset"), m.Broken(0, 1, "reset")], ids=repr
)
def test_a_regroup_listens_to_reports_only(early: s.MembershipEvent) -> None:
    state, _ = feed(running(), s.Lost(3, "gone"))
    assert transition(state, early) == (state, ())


def test_nothing_happens_after_the_outcome() -> None:
    state, _ = feed(running(), m.Crash(1, False, "ValueError: x", None, ""))
    for event in (
        s.Lost(0, "x"),
        *commits((0,), 0, 0),
        m.Arrive(0, 0, "b", None),
        s.GraceElapsed(0, "reset"),
        s.Joined(1),
    ):
        assert transition(state, event) == (state, ())


# ---------------------------------------------------------------------- the commit


def test_a_commit_is_answered_when_all_live_workers_are_there_with_one_payload_per_stage() -> None:
    state, commands = feed(running(), *commits((3, 0, 1), 0, 0))
    assert commands == []
    state, commands = feed(state, *commits((2,), 0, 0))
    assert commands == [s.Send(ALL, m.Committed(0, 0, {0: "payload of 0", 1: "payload of 1"}))]
    assert state.generation.commits == {}


@pytest.mark.parametrize("who", [(), (2,), (0, 2)])
def test_all_learn_whether_somebody_has_made_a_speculative_step(who: tuple[int, ...]) -> None:
    events = [m.Commit(rank, 0, 0, f"payload of {rank}", speculative=rank in who) for rank in range(4)]
    given(running()).when(*events).then(m.Committed(0, 0, {0: "payload of 0", 1: "payload of 1"}, bool(who)))


def test_a_wrong_speculation_begins_a_generation_with_the_same_workers_once() -> None:
    state, commands = feed(running(), *commits((0, 1, 2, 3), 0, 0), m.Undo(2, 0, 0), m.Undo(1, 0, 0))
    assert [(r.generation, r.roster) for r in messages(commands, m.Regroup)] == [(1, (0, 1, 2, 3))]
    assert records(commands, "undone") == [s.Record("undone", 0)]
    assert state.faults.disturbances == 0
    _, commands = feed(state, *reports((0, 1, 2, 3), 1), m.Undo(1, 0, 0))
    assert not messages(commands, m.Regroup)


def test_commits_of_different_steps_end_the_run_instead_of_mixing_versions() -> None:
    _, commands = feed(running(), *commits((0, 1, 2), 0, 0), *commits((3,), 0, 1))
    (failed,) = commands
    assert isinstance(failed, s.Failed)
    assert "[0, 1]" in failed.reason


# ---------------------------------------------------------------------- steps and losses


def test_a_step_is_completed_by_the_death_of_the_one_that_has_not_applied_it() -> None:
    state, _ = feed(running(), *applied((0, 1, 2), 0))
    state, commands = feed(state, s.Lost(3, "gone"))
    assert records(commands, "step") == [s.Record("step", 0)]


def holds(rank: int, everywhere: dict[str, float], stage: dict[str, float], step: int = 0) -> m.Applied:
    return m.Applied(rank, step, {}, facts=m.Facts(everywhere, stage))


@pytest.mark.parametrize(
    ("first", "second", "named"),
    [
        pytest.param(holds(0, {}, {"lr": 0.1}), holds(2, {}, {"lr": 0.2}), ["lr", "0.1", "0.2", "(0, 0)"], id="peers"),
        pytest.param(holds(0, {}, {"lr": 0.1}), holds(1, {}, {"lr": 0.2}), [], id="options-of-another-stage"),
        pytest.param(holds(0, {"epoch": 1}, {}), holds(1, {"epoch": 2}, {}), ["epoch", "(0, 1)"], id="counters"),
        pytest.param(holds(0, {}, {"lr": 0.1}), holds(2, {}, {"lr": 0.2}, 1), [], id="another-step"),
        pytest.param(holds(0, {}, {"digest": 7}), holds(2, {}, {"lr": 0.1}), [], id="told-by-one-only"),
        pytest.param(holds(0, {}, {"digest": 2**60}), holds(2, {}, {"digest": 2**60 + 1}), ["digest"], id="digests"),
        pytest.param(holds(0, {}, {"lr": 0.1}), holds(2, {}, {"lr": 0.1 + 1e-17}), [], id="rounded"),
        pytest.param(holds(0, {}, {"lr": math.nan}), holds(2, {}, {"lr": math.nan}), [], id="nan"),
    ],
)
def test_workers_that_hold_different_values_after_a_step_end_the_run_and_are_named(
    first: m.Applied, second: m.Applied, named: list[str]
) -> None:
    state, _ = feed(running(), first, second)
    assert isinstance(state.outcome, s.Failed) == bool(named)
    assert all(word in str(state.outcome) for word in named)


@pytest.mark.parametrize(
    ("newcomers", "rates", "wrong"),
    [
        pytest.param({2: 0}, (1, 1, 2, 1), {2}, id="one-against-one"),
        pytest.param({2: 0, 3: 0}, (1, 1, 2, 2), {2, 3}, id="both-stages"),
        pytest.param({0: 3, 1: 3, 2: 5, 3: 3}, (1, 1, 2, 1), {2}, id="nobody-was-there-from-the-beginning"),
        pytest.param({2: 5, 0: 3}, (1, 1, 2, 1), {2}, id="the-older-newcomer"),
        pytest.param({0: 5}, (2, 1, 1, 1), {0}, id="the-first-rank"),
        pytest.param({2: 0}, (2, 1, 1, 1), None, id="it-agrees-with-one-of-those-who-do-not"),
        pytest.param({3: 0}, (1, 1, 2, 2), None, id="an-old-one-differs-too"),
        pytest.param({2: 4, 0: 4}, (1, 1, 2, 1), {2}, id="another-stage-knows"),
    ],
)
def test_the_oldest_are_right_and_newcomers_that_differ_are_dismissed(
    newcomers: dict[int, int], rates: tuple[int, ...], wrong: set[int] | None
) -> None:
    state = running().with_roster(newcomers=newcomers)
    state, commands = feed(state, *(holds(rank, {"rate": rates[rank]}, {"lr": rates[rank]}) for rank in ALL))
    assert isinstance(state.outcome, s.Failed) == (wrong is None)
    assert {record.rank for record in records(commands, "dismissed")} == (wrong or set())
    assert {command.rank for command in commands if isinstance(command, s.Evict)} == (wrong or set())
    for record in records(commands, "dismissed"):
        assert re.search(r"rate is 1 on worker .* and 2 on", record.details["cause"])


def test_a_newcomer_that_is_alone_with_its_stage_ends_the_run_if_it_differs() -> None:
    state, _ = feed(running().with_roster(newcomers={2: 0}), s.Lost(0, "gone"), *reports((1, 2, 3), 1))
    state, _ = feed(state, *(holds(rank, {"epoch": rank == 2}, {}) for rank in (1, 2, 3)))
    assert isinstance(state.outcome, s.Failed)


def test_a_newcomer_that_is_no_copy_is_dismissed_and_the_second_is_the_last_of_its_position() -> None:
    state = running().with_roster(newcomers={3: 0})
    state, commands = feed(state, m.Differs(2, 4, "its weights differ"))
    assert commands == [], "only newcomers have a donor"
    for stays_empty in (False, True):
        state, commands = feed(state, m.Differs(3, 4, "its weights differ"))
        details = {"cause": "its weights differ", "stays_empty": stays_empty}
        assert commands == [s.Record("dismissed", 4, 3, details), s.Evict(3, "its weights differ")]
    state, _ = feed(state, s.Lost(3, "its weights differ"))
    assert state.vacant == ()


def test_what_a_lost_worker_held_is_not_compared_and_no_step_is_remembered_for_long() -> None:
    state, _ = feed(running(), holds(3, {}, {"lr": 0.1}), s.Lost(3, "gone"), *reports((0, 1, 2), 1))
    state, _ = feed(
        state, *(holds(rank, {"epoch": step}, {"lr": 0.2}, step) for step in range(9) for rank in (0, 1, 2))
    )
    assert state.outcome is None
    assert (state.steps.version, state.steps.facts) == (9, {})


def test_the_loss_is_the_mean_over_all_microbatches_and_is_told_to_all_once() -> None:
    state, commands = feed(running(), m.Losses(1, 0, {0: 1.0, 2: 3.0}))
    assert commands == []
    state, commands = feed(state, m.Losses(3, 0, {1: 2.0, 3: 6.0}))
    assert commands == [s.Send(ALL, m.StepLoss(0, 3.0, saves=m.SaveStatus((0, 1), 0)))]
    state, commands = feed(state, m.Losses(1, 0, {0: 1.0, 2: 3.0}), m.Losses(3, 0, {1: 2.0, 3: 6.0}))
    assert commands == []


# ---------------------------------------------------------------------- control collectives


def test_a_collective_is_answered_to_all_live_workers_with_all_payloads() -> None:
    state, commands = feed(running(), *(m.Arrive(rank, 0, "barrier", rank * 10) for rank in (2, 0, 3)))
    assert commands == []
    state, commands = feed(state, m.Arrive(1, 0, "barrier", 10))
    assert commands == [s.Send(ALL, m.Answer(0, {0: 0, 1: 10, 2: 20, 3: 30}, 1, m.SaveStatus((0, 1), 0)))]
    assert state.collectives.open == {}


def test_a_collective_before_the_first_generation_is_answered_too() -> None:
    given(s.initial_state(GRID)).when(*(m.Arrive(rank, 0, "setup", None) for rank in ALL)).then(
        m.Answer(0, dict.fromkeys(ALL), 1, m.SaveStatus((0, 1)))
    )


def test_workers_that_disagree_about_the_next_collective_end_the_run_with_both_names() -> None:
    state, commands = feed(running(), m.Arrive(0, 7, "barrier fit_end", None), m.Arrive(1, 7, "broadcast", None))
    (failed,) = commands
    assert isinstance(failed, s.Failed)
    assert state.outcome == failed
    assert "'barrier fit_end' and 'broadcast'" in failed.reason


def beat(rank: int, begun: int) -> m.Heartbeat:
    return dummy(m.Heartbeat, rank=rank, begun=begun)


def test_a_worker_that_has_begun_a_later_step_than_those_who_wait_for_it_ends_the_run() -> None:
    waits = m.Arrive(1, 3, "self(x)", None, begun=4)
    state, commands = feed(running(), waits, beat(2, 4), beat(1, 4))
    assert commands == []  # it is in the same step and may still come
    state, (failed,) = feed(state, beat(2, 5))
    assert state.outcome == failed
    assert "(0, 1) waits for all others in 'self(x)', and worker (1, 0) does not come" in failed.reason
    assert "gone on to step 5" in failed.reason
    assert "is_global_zero" in failed.reason


def test_nobody_is_missed_who_has_arrived_or_where_nobody_waits() -> None:
    state, _ = feed(running(), m.Arrive(1, 3, "barrier", None, begun=4), m.Arrive(2, 3, "barrier", None, begun=4))
    state, commands = feed(state, beat(2, 5), beat(1, 5))  # an answered one would be as old as this
    assert commands == []
    assert state.outcome is None
    assert feed(running(), beat(2, 9))[1] == []


# ---------------------------------------------------------------------- the end


def test_a_result_without_a_stage_is_asked_for_again() -> None:
    """Worker 1 spoke for stage 1 and died: nobody else brought that stage's part."""
    state, _ = feed(
        running(), m.Arrive(0, 0, s.RESULT, "a"), m.Arrive(1, 0, s.RESULT, "b"), m.Arrive(2, 0, s.RESULT, None)
    )
    state, _ = feed(state, s.Lost(1, "gone"))
    state, commands = feed(state, *reports((0, 2, 3), 1), m.Arrive(3, 0, s.RESULT, None))
    assert messages(commands, m.Answer) == [m.Answer(0, {0: True, 2: False, 3: False}, 3, m.SaveStatus((0, 3), 1))]
    assert state.outcome is None
    state, commands = feed(state, *(m.Arrive(r, 1, s.RESULT, value) for r, value in ((0, "a"), (2, None), (3, "b"))))
    assert commands[-1] == s.Finished({0: "a", 3: "b"})


def test_a_loss_that_completes_the_results_ends_the_run_and_begins_nothing_new() -> None:
    """A worker that regrouped now would wait for reports that nobody sends any more."""
    state, _ = feed(
        running(), m.Arrive(0, 0, s.RESULT, "a"), m.Arrive(1, 0, s.RESULT, "b"), m.Arrive(2, 0, s.RESULT, None)
    )
    state, commands = feed(state, s.Lost(3, "gone"))
    assert state.outcome == s.Finished({0: "a", 1: "b"})
    assert messages(commands, m.Regroup) == []


def test_losing_the_last_replica_of_a_stage_ends_the_run_and_names_stage_and_causes() -> None:
    state, commands = feed(running(), s.Lost(1, "killed by SIGKILL"), *reports((0, 2, 3), 1), s.Lost(0, "unrelated"))
    state, commands = feed(state, s.Lost(3, "it was silent"))
    assert commands[-1] == s.StageLost(1, {1: "killed by SIGKILL", 3: "it was silent"})
    assert messages(commands, m.Regroup) == []
    assert len(records(commands, "stage_lost")) == 1


def test_a_stage_can_be_lost_before_training_begins() -> None:
    _state, commands = feed(s.initial_state(GRID), s.Joined(0), s.Lost(1, "a"), s.Lost(3, "b"))
    assert commands[-1] == s.StageLost(1, {1: "a", 3: "b"})


# ---------------------------------------------------------------------- leaders


@pytest.mark.parametrize(
    ("live", "leader", "of_columns"),
    [
        ((0, 1, 2, 3), 1, {0: 0, 1: 1}),
        ((0, 2, 3), 3, {0: 0, 1: 3}),
        ((1, 2, 3), 1, {0: 2, 1: 1}),
        ((2, 3), 3, {0: 2, 1: 3}),
    ],
)
def test_the_leader_is_the_live_last_stage_worker_of_the_lowest_pipeline(
    live: tuple[int, ...], leader: int, of_columns: dict[int, int]
) -> None:
    state = s.initial_state(GRID).with_roster(live=frozenset(live))
    assert with_leader(state).roster.leader == leader
    assert state.positions.column_leaders(live) == of_columns
