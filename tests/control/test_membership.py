"""The membership state machine, event by event."""

import math
import re

import membership_feed as mf
import pytest

from lightning_recycle.control.journal import journal_entry, revived_state
from lightning_recycle.control.protocol import messages as m
from lightning_recycle.control.protocol import state as s
from lightning_recycle.control.protocol.membership import transition
from lightning_recycle.control.protocol.recovery import with_leader
from lightning_recycle.planning.grid import Grid

# ---------------------------------------------------------------------- what is over


@pytest.mark.parametrize(
    "stale",
    [
        mf.report(0, 0), m.Commit(0, 0, 0, None), m.Broken(0, 0, "reset"), s.GraceElapsed(0, "reset"), mf.report(3, 1),
        m.Commit(3, 1, 0, None), m.Applied(3, 0, {}), m.Losses(3, 0, {0: 1.0}), m.Arrive(3, 0, "barrier", None),
        m.Broken(3, 1, "reset"), mf.dummy(m.Crash, rank=3), s.Joined(3), s.Lost(3, "again"),
        s.StartDue(frozenset(mf.ALL), least=1),
    ],
    ids=repr,
)  # fmt: skip
def test_what_is_over_or_of_a_lost_worker_changes_nothing(stale):
    state = mf.running_without_3()
    assert transition(state, stale) == (state, ())


# ---------------------------------------------------------------------- the commit


def test_commits_of_different_steps_end_the_run_instead_of_mixing_versions():
    _, commands = mf.feed(mf.running(), *mf.commits((0, 1, 2), 0, 0), *mf.commits((3,), 0, 1))
    (failed,) = commands
    assert isinstance(failed, s.Failed)
    assert "[0, 1]" in failed.reason


# ---------------------------------------------------------------------- steps and losses


def holds(rank: int, everywhere: dict[str, float], stage: dict[str, float], step: int = 0) -> m.Applied:
    return m.Applied(rank, step, {}, facts=m.Facts(everywhere, stage))


@pytest.mark.parametrize(("first", "second", "named"), [
    pytest.param(holds(0, {}, {"lr": 0.1}), holds(2, {}, {"lr": 0.2}), ["lr", "0.1", "0.2", "(0, 0)"], id="peers"),
    pytest.param(holds(0, {}, {"lr": 0.1}), holds(1, {}, {"lr": 0.2}), [], id="options-of-another-stage"),
    pytest.param(holds(0, {"epoch": 1}, {}), holds(1, {"epoch": 2}, {}), ["epoch", "(0, 1)"], id="counters"),
    pytest.param(holds(0, {}, {"lr": 0.1}), holds(2, {}, {"lr": 0.2}, 1), [], id="another-step"),
    pytest.param(holds(0, {}, {"digest": 7}), holds(2, {}, {"lr": 0.1}), [], id="told-by-one-only"),
    pytest.param(holds(0, {}, {"digest": 2**60}), holds(2, {}, {"digest": 2**60 + 1}), ["digest"], id="digests"),
    pytest.param(holds(0, {}, {"lr": 0.1}), holds(2, {}, {"lr": 0.1 + 1e-17}), [], id="rounded"),
    pytest.param(holds(0, {}, {"lr": math.nan}), holds(2, {}, {"lr": math.nan}), [], id="nan"),
])  # fmt: skip
def test_workers_that_hold_different_values_after_a_step_end_the_run_and_are_named(first, second, named):
    state, _ = mf.feed(mf.running(), first, second)
    assert isinstance(state.outcome, s.Failed) == bool(named)
    assert all(word in str(state.outcome) for word in named)


@pytest.mark.parametrize(("newcomers", "rates", "wrong"), [
    pytest.param({2: 0}, (1, 1, 2, 1), {2}, id="one-against-one"),
    pytest.param({2: 0, 3: 0}, (1, 1, 2, 2), {2, 3}, id="both-stages"),
    pytest.param({0: 3, 1: 3, 2: 5, 3: 3}, (1, 1, 2, 1), {2}, id="nobody-was-there-from-the-beginning"),
    pytest.param({2: 5, 0: 3}, (1, 1, 2, 1), {2}, id="the-older-newcomer"),
    pytest.param({0: 5}, (2, 1, 1, 1), {0}, id="the-first-rank"),
    pytest.param({2: 0}, (2, 1, 1, 1), None, id="it-agrees-with-one-of-those-who-do-not"),
    pytest.param({3: 0}, (1, 1, 2, 2), None, id="an-old-one-differs-too"),
    pytest.param({2: 4, 0: 4}, (1, 1, 2, 1), {2}, id="another-stage-knows"),
])  # fmt: skip
def test_the_oldest_are_right_and_newcomers_that_differ_are_dismissed(newcomers, rates, wrong):
    state = mf.running().with_roster(newcomers=newcomers)
    state, commands = mf.feed(state, *(holds(rank, {"rate": rates[rank]}, {"lr": rates[rank]}) for rank in mf.ALL))
    assert isinstance(state.outcome, s.Failed) == (wrong is None)
    assert {record.rank for record in mf.records(commands, "dismissed")} == (wrong or set())
    assert {command.rank for command in commands if isinstance(command, s.Evict)} == (wrong or set())
    for record in mf.records(commands, "dismissed"):
        assert re.search(r"rate is 1 on worker .* and 2 on", record.details["cause"])


def test_a_newcomer_that_is_no_copy_is_dismissed_and_the_second_is_the_last_of_its_position():
    state = mf.running().with_roster(newcomers={3: 0})
    state, commands = mf.feed(state, m.Differs(2, 4, "its weights differ"))
    assert commands == [], "only newcomers have a donor"
    for stays_empty in (False, True):
        state, commands = mf.feed(state, m.Differs(3, 4, "its weights differ"))
        details = {"cause": "its weights differ", "stays_empty": stays_empty}
        assert commands == [s.Record("dismissed", 4, 3, details), s.Evict(3, "its weights differ")]
    state, _ = mf.feed(state, s.Lost(3, "its weights differ"))
    assert state.vacant == ()


def test_what_a_lost_worker_held_is_not_compared_and_no_step_is_remembered_for_long():
    state, _ = mf.feed(mf.running(), holds(3, {}, {"lr": 0.1}), s.Lost(3, "gone"), *mf.reports((0, 1, 2), 1))
    state, _ = mf.feed(
        state, *(holds(rank, {"epoch": step}, {"lr": 0.2}, step) for step in range(9) for rank in (0, 1, 2))
    )
    assert state.outcome is None
    assert (state.steps.version, state.steps.facts) == (9, {})


def test_the_loss_is_the_mean_over_all_microbatches_and_is_told_to_all_once():
    state, commands = mf.feed(mf.running(), m.Losses(1, 0, {0: 1.0, 2: 3.0}))
    assert commands == []
    state, commands = mf.feed(state, m.Losses(3, 0, {1: 2.0, 3: 6.0}))
    assert commands == [s.Send(mf.ALL, m.StepLoss(0, 3.0, saves=m.SaveStatus((0, 1), 0)))]
    state, commands = mf.feed(state, m.Losses(1, 0, {0: 1.0, 2: 3.0}), m.Losses(3, 0, {1: 2.0, 3: 6.0}))
    assert commands == []


# ---------------------------------------------------------------------- control collectives


def test_workers_that_disagree_about_the_next_collective_end_the_run_with_both_names():
    state, commands = mf.feed(mf.running(), m.Arrive(0, 7, "barrier fit_end", None), m.Arrive(1, 7, "broadcast", None))
    (failed,) = commands
    assert isinstance(failed, s.Failed)
    assert state.outcome == failed
    assert "'barrier fit_end' and 'broadcast'" in failed.reason


def test_an_answer_that_only_a_released_member_has_heard_is_given_anew_by_the_next_coordinator():
    """As if it had been lost itself, like its sibling, which did not return."""
    grid, parts = Grid(2, 1, 1), {0: 5, 2: 7, 3: 8}  # ranks 0 and 1 are one position
    begun = s.initial_state(grid, members=2).with_generation(number=0)
    arrived = [m.Arrive(rank, 0, "barrier", part) for rank, part in parts.items()]
    heard = m.Answer(0, {**parts, 1: 6}, 0)
    scene = mf.given(
        revived_state(grid, journal_entry(begun), members=2),
        mf.dummy(m.Returned, rank=0, generation=0, next_collective=1, answer=heard),
        *(mf.dummy(m.Returned, rank=one.rank, generation=0, arrival=one) for one in arrived[1:]),
    )
    scene.when(s.Lost(1, "it did not return")).then(m.Answer(0, {2: 7, 3: 8}, 2, m.SaveStatus((2, 3), 0)), no=s.Resend)
    assert [record.rank for record in mf.records(scene.commands, "released")] == [0]


def beat(rank: int, begun: int) -> m.Heartbeat:
    return mf.dummy(m.Heartbeat, rank=rank, begun=begun)


def test_a_worker_that_has_begun_a_later_step_than_those_who_wait_for_it_ends_the_run():
    waits = m.Arrive(1, 3, "self(x)", None, begun=4)
    state, commands = mf.feed(mf.running(), waits, beat(2, 4), beat(1, 4))
    assert commands == []  # it is in the same step and may still come
    state, (failed,) = mf.feed(state, beat(2, 5))
    assert state.outcome == failed
    assert "(0, 1) waits for all others in 'self(x)', and worker (1, 0) does not come" in failed.reason
    assert "gone on to step 5" in failed.reason
    assert "is_global_zero" in failed.reason


def test_nobody_is_missed_who_has_arrived_or_where_nobody_waits():
    state, _ = mf.feed(mf.running(), m.Arrive(1, 3, "barrier", None, begun=4), m.Arrive(2, 3, "barrier", None, begun=4))
    state, commands = mf.feed(state, beat(2, 5), beat(1, 5))  # an answered one would be as old as this
    assert commands == []
    assert state.outcome is None
    assert mf.feed(mf.running(), beat(2, 9))[1] == []


# ---------------------------------------------------------------------- leaders


@pytest.mark.parametrize(("live", "leader", "of_columns"), [
    ((0, 1, 2, 3), 1, {0: 0, 1: 1}),
    ((0, 2, 3), 3, {0: 0, 1: 3}),
    ((1, 2, 3), 1, {0: 2, 1: 1}),
    ((2, 3), 3, {0: 2, 1: 3}),
])  # fmt: skip
def test_the_leader_is_the_live_last_stage_worker_of_the_lowest_pipeline(live, leader, of_columns):
    state = s.initial_state(mf.GRID).with_roster(live=frozenset(live))
    assert with_leader(state).roster.leader == leader
    assert state.positions.column_leaders(live) == of_columns


def test_a_leader_that_was_chosen_as_nobody_was_known_to_have_a_state_gives_way_to_one_that_has():
    """Worker 2 had got its state from 0, which is lost before that is known."""

    def at(rank: int, generation: int, version: int) -> m.Report:
        return m.Report(rank, generation, m.WorkerStatus(0, version, False), None)

    joining = s.Roster(frozenset({0, 1, 2}), leader=0, joining=frozenset({1, 2}), newcomers={1: 0, 2: 0})
    state = s.initial_state(Grid(3, 1, 1)).updated(roster=joining, has_resumed=True).with_generation(number=1)
    scene = mf.given(state, s.Lost(0, "gone")).then(m.Regroup(2, (1, 2), 1, False))
    scene.when(m.Reached(2, 1, m.Milestone.ENTERED), at(1, 2, -1), at(2, 2, 0)).then(
        m.Regroup(3, (1, 2), 2, False), no=m.Resume
    )
    scene.when(at(1, 3, -1), at(2, 3, 0))
    (resume,) = mf.messages(scene.commands, m.Resume)
    assert resume.donors == {1: 2}
