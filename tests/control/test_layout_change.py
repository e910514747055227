"""How another layout of the layers comes about, event by event."""

from membership_feed import ALL, feed, messages, records, reports, running
from test_step_boundaries import stop_at

from lightning_recycle.control.protocol import messages as m
from lightning_recycle.control.protocol import state as s

CUTS = (0, 1, 6)


def under_way() -> s.MembershipState:
    """All have stopped at step 2 and got ready for another layout, in generation 1."""
    state, _ = feed(running(), s.LayoutReady(ALL, CUTS))
    state, _ = stop_at(state, 2)
    state, commands = feed(state, *reports(ALL, 1, 2))
    (resume,) = messages(commands, m.Resume)
    assert (state.generation.becomes, resume.becomes, resume.cuts) == (CUTS, CUTS, ())
    return state


def test_all_may_want_the_same():
    state, first = feed(running(), m.LayoutWanted(0, CUTS))
    assert messages(first, m.Pause)
    assert feed(state, *(m.LayoutWanted(rank, CUTS) for rank in ALL)) == (state, [])


def test_a_user_wants_a_layout_also_after_a_loss_and_the_planner_for_its_workers_only():
    state, _ = feed(running(), m.LayoutWanted(0, CUTS), s.Lost(3, "killed"))
    assert state.layout.wanted.is_for((0, 1, 2))
    state, commands = feed(state, *reports((0, 1, 2), 1, 0))
    assert messages(commands, m.Pause)
    state, _ = feed(running(), s.LayoutReady(ALL, CUTS), s.Lost(3, "killed"))
    assert state.layout.wanted is None


def test_a_move_that_breaks_connections_is_given_up():
    state, commands = feed(under_way(), m.Broken(0, 1, "reset", ()), s.GraceElapsed(1, "reset"))
    (record,) = records(commands, "disturbance")
    assert record.details["layers_stay"] == CUTS
    state, commands = feed(state, *reports(ALL, 2, 2))
    assert (state.layout.cuts, state.generation.becomes, state.layout.wanted) == ((), (), None)
    assert not messages(commands, m.Pause)
