"""How workers join, leave and move: all at a step boundary, event by event."""

from collections.abc import Iterable

import pytest
from membership_feed import (
    ALL,
    all_losses,
    applied,
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
from lightning_recycle.planning.grid import Grid

THREE = (0, 1, 2)


def paused(ranks: Iterable[int], generation: int, step: int) -> list[m.Paused]:
    return [m.Paused(rank, generation, step) for rank in ranks]


def arrived(ranks: Iterable[int], generation: int, step: int) -> list[m.Reached]:
    return [at_boundary(rank, generation, step) for rank in ranks]


def at_boundary(rank: int, generation: int, step: int) -> m.Reached:
    return m.Reached(rank, generation, m.Milestone.AT_BOUNDARY, step)


def entered(rank: int, generation: int) -> m.Reached:
    return m.Reached(rank, generation, m.Milestone.ENTERED)


def finish(ranks: tuple[int, ...], steps: Iterable[int]) -> list[s.MembershipEvent]:
    """The ``steps``, done by ``ranks``."""
    return [
        event for step in steps for event in (all_losses(step, max(r for r in ranks if r % 2)), *applied(ranks, step))
    ]


def stop_at(state: s.MembershipState, step: int) -> tuple[s.MembershipState, list[s.Command]]:
    """The pause that is under way, to its end: all stop at ``step``."""
    assert state.generation.pause is not None
    ranks = state.roster.ranks
    state, _ = feed(
        state, *finish(ranks, range(state.steps.version, step)), *paused(ranks, state.generation.number, step - 1)
    )
    return feed(state, *arrived(ranks, state.generation.number, step))


def without_state(rank: int, generation: int) -> m.Report:
    return report(rank, generation, -1)


def joining_3(step: int = 2) -> s.MembershipState:
    """Worker 3 joins the others at ``step`` in generation 2; worker 1 is to give it its state."""
    state, _ = feed(running_without_3(), m.Ready(3))
    state, _ = stop_at(state, step)
    state, _ = feed(state, *reports(THREE, 2, step), without_state(3, 2))
    assert state.roster.joining == {3}
    return state


def rejoined_3(step: int = 2) -> s.MembershipState:
    return feed(joining_3(step), entered(3, 2))[0]


# ---------------------------------------------------------------------- joining


def test_nobody_is_asked_to_stop_while_nobody_is_ready() -> None:
    state, commands = feed(running_without_3(), *finish(THREE, range(3)), m.Arrive(0, 0, "log", None))
    assert messages(commands, m.Pause) == []
    assert state.generation.pause is None


def test_all_are_asked_to_stop_when_a_worker_is_ready() -> None:
    _, commands = feed(running_without_3(), m.Ready(3))
    assert commands == [s.Send(THREE, m.Pause(1))]


def test_who_is_ready_before_the_first_generation_or_in_a_regroup_waits_for_its_end() -> None:
    state, _ = feed(running(), s.Lost(3, "gone"))
    state, commands = feed(state, m.Ready(3), *reports((0, 1), 1))
    assert messages(commands, m.Pause) == []
    _, commands = feed(state, report(2, 1))
    assert [type(c.message) for c in commands if isinstance(c, s.Send)] == [m.Resume, m.Pause]


def test_workers_that_have_begun_nothing_stop_at_the_first_step() -> None:
    given(running_without_3(), m.Ready(3)).when(*paused(THREE, 1, -1)).then(m.Boundary(1, 0))


def test_a_generation_with_who_is_ready_begins_when_all_wait_at_the_boundary() -> None:
    state, _ = feed(running_without_3(), m.Ready(3), *finish(THREE, range(2)), *paused(THREE, 1, 1))
    state, commands = feed(state, *arrived((0, 2), 1, 2))
    assert commands == []
    state, commands = feed(state, *arrived((1,), 1, 2))
    assert commands == [s.Record("paused", 2), s.Send(ALL, m.Regroup(2, ALL, 1))]
    assert (state.roster.live, state.roster.joining, state.roster.ready, state.generation.pause) == (
        {0, 1, 2, 3},
        {3},
        frozenset(),
        None,
    )


def test_the_state_comes_from_the_lowest_peer_that_has_it_and_nothing_is_redone() -> None:
    state, _ = feed(running_without_3(), m.Ready(3))
    state, _ = stop_at(state, 2)
    state, commands = feed(state, without_state(3, 2), *reports(THREE, 2, 2))
    (resume,) = messages(commands, m.Resume)
    assert (resume.roster, resume.donors) == (ALL, {3: 1})
    assert (resume.decision.version, resume.decision.ahead, resume.decision.adoptions) == (2, frozenset(), ())
    assert records(commands, "step") == []


def test_several_workers_join_together() -> None:
    state, _ = feed(running(), s.Lost(3, "gone"), s.Lost(2, "gone"), *reports((0, 1), 2), m.Ready(3), m.Ready(2))
    state, commands = stop_at(state, 1)
    assert messages(commands, m.Regroup) == [m.Regroup(3, ALL, 1)]
    _, commands = feed(state, *reports((0, 1), 3, 1), without_state(2, 3), without_state(3, 3))
    assert messages(commands, m.Resume)[0].donors == {2: 0, 3: 1}


def test_who_has_joined_is_recorded_once_it_has_its_state() -> None:
    state, commands = feed(joining_3(), entered(3, 2))
    assert commands == [s.Record("rejoined", 2, 3)]
    assert state.roster.joining == frozenset()
    assert state.holders(1) == {1, 3}


def test_who_becomes_ready_while_another_one_gets_its_state_waits_for_that() -> None:
    state, _ = feed(running(), s.Lost(3, "gone"), s.Lost(2, "gone"), *reports((0, 1), 2), m.Ready(3))
    state, _ = stop_at(state, 1)
    state, _ = feed(state, *reports((0, 1), 3, 1), without_state(3, 3))
    state, commands = feed(state, m.Ready(2))
    assert commands == []
    given(state).when(entered(3, 3)).then(m.Pause(3))


# ---------------------------------------------------------------------- who speaks


def test_the_leader_leads_as_long_as_it_lives_also_when_a_lower_pipeline_comes_back() -> None:
    state, commands = feed(running(), s.Lost(1, "gone"), *reports((0, 2, 3), 1), m.Ready(1))
    assert messages(commands, m.Regroup) == [m.Regroup(1, (0, 2, 3), 3)]
    state, commands = stop_at(state, 1)
    assert messages(commands, m.Regroup) == [m.Regroup(2, ALL, 3)]
    state, _ = feed(state, *reports((0, 2, 3), 2, 1), without_state(1, 2), entered(1, 2))
    _, commands = feed(state, *(m.Arrive(rank, 0, "log", None) for rank in ALL), s.Lost(3, "gone"))
    assert messages(commands, m.Answer)[0].leader == 3
    assert messages(commands, m.Regroup) == [m.Regroup(3, (0, 1, 2), 1)]


def test_a_worker_without_its_state_does_not_become_leader() -> None:
    grid = Grid(3, 1, 1)
    live = frozenset({0, 1, 2})
    roster = s.Roster(live, joined=live, leader=2, joining=frozenset({0}))
    state = s.MembershipState(grid, roster, s.Generation(1), s.Steps(applied={1: 0, 2: 0}, summed=1))
    given(state).when(s.Lost(2, "gone")).then(m.Regroup(2, (0, 1), 1))


# ---------------------------------------------------------------------- leaving


def test_who_had_to_stay_leaves_when_another_one_has_entered() -> None:
    state, _ = feed(running_without_3(), m.Leave(1), m.Ready(3))
    state, commands = stop_at(state, 2)
    assert records(commands, "left") == []
    state, commands = feed(state, *reports(THREE, 2, 2), without_state(3, 2))
    assert messages(commands, m.Pause) == [], "worker 3 has no state yet"
    state, commands = feed(state, entered(3, 2))
    assert messages(commands, m.Pause) == [m.Pause(2)]
    _, commands = stop_at(state, 3)
    assert records(commands, "left") == [s.Record("left", 3, 1)]
    assert messages(commands, m.Regroup) == [m.Regroup(3, (0, 2, 3), 3)]


def test_a_worker_that_dies_before_it_could_leave_is_a_failure_and_is_waited_for_no_longer() -> None:
    state, _ = feed(running(), m.Leave(3), *paused(THREE, 0, 0))
    state, commands = feed(state, s.Lost(3, "killed"))
    assert len(records(commands, "failure")) == 1
    state, commands = feed(state, *reports(THREE, 1))
    assert messages(commands, m.Pause) == []
    assert state.roster.leaving == frozenset()


# ---------------------------------------------------------------------- losses meanwhile


def test_a_candidate_lost_during_the_pause_is_not_let_in() -> None:
    state, _ = feed(running_without_3(), m.Ready(3), *paused(THREE, 1, 0), s.Lost(3, "gone"))
    state, commands = feed(state, *applied(THREE, 0), *arrived(THREE, 1, 1))
    (regroup,) = messages(commands, m.Regroup)
    assert regroup == m.Regroup(2, THREE, 1), "all go on together from where they stopped"
    assert state.roster.joining == frozenset()


def test_a_candidate_lost_before_the_pause_begins_is_forgotten() -> None:
    given(running(), s.Lost(3, "gone"), m.Ready(3), s.Lost(3, "gone")).when(*reports(THREE, 1)).then(no=m.Pause)


STAGES_OF_A_PAUSE: dict[str, list[s.MembershipEvent]] = {
    "when it is asked for": [],
    "while some have answered": paused((0, 1), 1, 0),
    "when the boundary is known": paused(THREE, 1, 0),
    "while some are at the boundary": [*paused(THREE, 1, 0), *applied((0, 1), 0), *arrived((0, 1), 1, 1)],
}


@pytest.mark.parametrize("events", STAGES_OF_A_PAUSE.values(), ids=STAGES_OF_A_PAUSE)
def test_a_loss_during_a_pause_cancels_it_and_it_is_asked_for_again_after_the_next_resume(
    events: list[s.MembershipEvent],
) -> None:
    state, _ = feed(running_without_3(), m.Ready(3), *events)
    assert state.generation.pause is not None
    state, commands = feed(state, s.Lost(2, "gone"))
    assert messages(commands, m.Regroup) == [m.Regroup(2, (0, 1), 1)], "worker 3 does not enter in the middle of a step"
    assert state.generation.pause is None
    state, commands = feed(state, *reports((0, 1), 2))
    assert [type(c.message) for c in commands if isinstance(c, s.Send)] == [m.Resume, m.Pause]
    state, commands = feed(state, *paused((0, 1), 2, 0), *applied((0, 1), 0), *arrived((0, 1), 2, 1))
    assert messages(commands, m.Regroup) == [m.Regroup(3, (0, 1, 3), 1)]


def test_without_another_holder_the_donors_death_before_the_transfer_loses_the_stage() -> None:
    state, commands = feed(joining_3(), s.Lost(1, "killed"))
    assert messages(commands, m.Regroup) == [m.Regroup(3, (0, 2, 3), 3)], "worker 3 may have got the state"
    state, commands = feed(state, *reports((0, 2), 3, 2), without_state(3, 3))
    assert commands[-1] == s.StageLost(1, {1: "killed", 3: "gone"})
    assert len(records(commands, "stage_lost")) == 1
    assert messages(commands, m.Resume) == []


def test_the_donors_death_after_the_transfer_loses_nothing_even_if_nobody_heard_of_it_yet() -> None:
    state, _ = feed(joining_3(), s.Lost(1, "killed"))
    _, commands = feed(state, *reports((0, 2, 3), 3, 2))
    (resume,) = messages(commands, m.Resume)
    assert (resume.decision.version, resume.donors) == (2, {})


# ---------------------------------------------------------------------- late and twice


def pausing(*events: s.MembershipEvent) -> s.MembershipState:
    """All but worker 3 are asked to stop, so that it can join."""
    return feed(running_without_3(), m.Ready(3), *events)[0]


@pytest.mark.parametrize(
    ("state", "words"),
    [
        pytest.param(
            pausing(*paused(THREE, 1, 0)),
            [
                m.Paused(0, 0, 0), m.Paused(3, 1, 0), at_boundary(0, 1, 0), at_boundary(0, 1, 2), at_boundary(0, 0, 1),
                at_boundary(3, 1, 1), entered(0, 1), m.Ready(0), m.Ready(3), m.Paused(0, 1, 7),
            ],
            id="of-another-generation-step-or-worker",
        ),
        pytest.param(
            rejoined_3(),
            [m.Paused(0, 1, 0), at_boundary(0, 1, 2), entered(3, 2), m.Ready(3), entered(0, 2)],
            id="of-a-pause-that-is-over",
        ),
        pytest.param(
            running_without_3(),
            [m.Paused(0, 1, 0), at_boundary(0, 1, 1), entered(0, 1), s.Lost(3, "gone"), entered(3, 1)],
            id="that-nobody-asked-for",
        ),
    ],
)  # fmt: skip
def test_words_that_are_late_early_or_of_another_change_nothing(
    state: s.MembershipState, words: list[s.MembershipEvent]
) -> None:
    for event in words:
        assert transition(state, event) == (state, ()), event


def test_words_that_come_twice_do_not_stand_for_another_one() -> None:
    _, commands = feed(pausing(), *paused((0, 0, 2, 2), 1, 0))
    assert commands == []
    _, commands = feed(pausing(*applied(THREE, 0), *paused(THREE, 1, 0)), *arrived((0, 0, 2, 2), 1, 1))
    assert commands == []


# ---------------------------------------------------------------------- another plan


PLAN = s.PlanReady(THREE, "a plan", {"gain": 0.3})


def test_another_plan_begins_at_a_step_that_nobody_has_begun_and_nobody_stops_there() -> None:
    state, commands = feed(running_without_3(), PLAN)
    assert commands == [s.Send(THREE, m.Pause(1, 0))]
    state, commands = feed(state, *paused((0, 2), 1, 4))
    assert commands == []
    state, commands = feed(state, m.Paused(1, 1, 3))
    assert commands == [s.Send(THREE, m.Boundary(1, 5), "a plan"), s.Record("replanned", 5, None, {"gain": 0.3})]
    assert (state.generation.number, state.generation.pause, state.generation.plan, state.generation.regrouping) == (
        1,
        None,
        None,
        False,
    )


def test_who_waits_to_be_let_in_goes_before_a_plan() -> None:
    """It is for workers that will not be alone any more."""
    state, commands = feed(running_without_3(), PLAN, m.Ready(3))
    assert len(messages(commands, m.Pause)) == 1
    state, commands = feed(state, *paused(THREE, 1, 4))
    assert messages(commands, m.Boundary) == [m.Boundary(1, 5)]
    state, commands = feed(state, *arrived(THREE, 1, 5))
    assert messages(commands, m.Regroup)[0].roster == ALL
    assert state.generation.plan is None


def test_a_plan_that_needs_other_connections_begins_with_a_generation_at_the_boundary() -> None:
    plan = s.PlanReady(THREE, "a plan", {"gain": 0.3}, reconnects=True)
    state, _ = feed(running_without_3(), plan, *finish(THREE, range(5)))
    state, commands = feed(state, *paused(THREE, 1, 4))
    assert commands == [s.Send(THREE, m.Boundary(1, 5))], "all stop there"
    state, commands = feed(state, *arrived(THREE, 1, 5))
    assert commands[:2] == [s.Record("paused", 5), s.Record("replanned", 5, None, {"gain": 0.3})]
    assert [(r.generation, r.roster) for r in messages(commands, m.Regroup)] == [(2, THREE)]
    assert state.generation.plan is None
    _, commands = feed(state, *reports(THREE, 2, 5))
    (resume,) = messages(commands, m.Resume)
    assert (resume.decision.version, resume.decision.adoptions) == (5, ()), "nothing is redone"


def test_who_comes_right_after_a_change_of_plan_is_let_in_by_a_pause_of_its_own() -> None:
    state, _ = feed(running_without_3(), PLAN, *paused(THREE, 1, 4))
    state, commands = feed(state, m.Ready(3))
    assert commands == [s.Send(THREE, m.Pause(1, 1))]
    late = paused(THREE, 1, 4)
    assert feed(state, *late) == (state, []), "these are answers to the first one"
    _, commands = feed(state, *(m.Paused(rank, 1, 5, number=1) for rank in THREE))
    assert commands == [s.Send(THREE, m.Boundary(1, 6))]


def test_a_newer_plan_replaces_one_that_has_not_begun() -> None:
    _, commands = feed(running_without_3(), PLAN, s.PlanReady(THREE, "a better one"), *paused(THREE, 1, 0))
    assert [c for c in commands if isinstance(c, s.Send)][1:] == [s.Send(THREE, m.Boundary(1, 1), "a better one")]
    assert len(messages(commands, m.Pause)) == 1
