"""How another layout of the layers comes about, event by event."""

import pytest
from membership_feed import ALL, GRID, feed, messages, records, reports, running
from test_step_boundaries import stop_at

from lightning_recycle.control.protocol import messages as m
from lightning_recycle.control.protocol import state as s
from lightning_recycle.control.protocol.relayout import is_for

CUTS = (0, 1, 6)


def copied(ranks: tuple[int, ...] = ALL, generation: int = 0, cuts: m.Cuts = CUTS) -> list[m.LayersCopied]:
    return [m.LayersCopied(rank, generation, cuts) for rank in ranks]


def under_way() -> s.MembershipState:
    """All have stopped at step 2 and got ready for another layout, in generation 1."""
    state, _ = feed(running(), s.LayoutReady(ALL, CUTS))
    state, _ = stop_at(state, 2)
    state, commands = feed(state, *reports(ALL, 1, 2))
    (resume,) = messages(commands, m.Resume)
    assert (state.becomes, resume.becomes, resume.cuts) == (CUTS, CUTS, ())
    return state


def test_it_begins_at_the_next_step_boundary() -> None:
    _, commands = feed(running(), s.LayoutReady(ALL, CUTS))
    assert messages(commands, m.Pause)
    assert not messages(commands, m.CopyLayers)


def test_layers_that_are_copied_ahead_are_awaited() -> None:
    state, commands = feed(running(), s.LayoutReady(ALL, CUTS, ahead=True))
    assert messages(commands, m.CopyLayers) == [m.CopyLayers(0, CUTS)]
    assert not messages(commands, m.Pause)
    state, commands = feed(state, *copied(ALL[:-1]), *copied(ALL[-1:], generation=-1), *copied(ALL, cuts=(0, 2, 6)))
    assert not messages(commands, m.Pause)
    _, commands = feed(state, *copied(ALL[-1:]))
    assert messages(commands, m.Pause)


@pytest.mark.parametrize("ahead", [True, False])
def test_all_may_want_the_same(ahead: bool) -> None:
    state, first = feed(running(), m.LayoutWanted(0, CUTS, ahead))
    again, second = feed(state, *(m.LayoutWanted(rank, CUTS, ahead) for rank in ALL))
    assert (again, messages(second, m.CopyLayers)) == (state, [])
    assert len(messages(first, m.CopyLayers)) == ahead


def test_a_wish_at_a_step_boundary_waits_for_no_copies() -> None:
    state, _ = feed(running(), m.Ready(0), m.Leave(3))
    assert state.pause is not None
    state, commands = feed(state, s.LayoutReady(ALL, CUTS, ahead=True))
    assert not messages(commands, m.CopyLayers)
    assert state.layout is not None


def test_a_loss_ends_the_copies_and_what_a_user_wants_comes_without_them() -> None:
    state, _ = feed(running(), m.LayoutWanted(0, CUTS, True), s.Lost(3, "killed"))
    assert is_for(state.layout, (0, 1, 2))
    state, commands = feed(state, *reports((0, 1, 2), 1, 0))
    assert messages(commands, m.Pause)
    state, _ = feed(running(), s.LayoutReady(ALL, CUTS, ahead=True), s.Lost(3, "killed"))
    assert state.layout is None


def test_it_is_decided_when_all_hold_their_layers() -> None:
    state, commands = feed(under_way(), *(m.LayersHeld(rank, 1, rank % 2) for rank in ALL))
    (record,) = records(commands, "layers_moved")
    assert (record.details["cuts"], record.details["ahead"]) == (CUTS, GRID.num_workers // 2)
    assert (state.cuts, state.becomes, state.generation) == (CUTS, (), 2)


def test_connections_stay_while_all_wait_for_it() -> None:
    state, _ = feed(running(), s.LayoutReady(ALL, CUTS))
    state, commands = stop_at(state, 2)
    assert messages(commands, m.Regroup) == [m.Regroup(1, ALL, 1, keeps_connections=True)]
    state, _ = feed(state, *reports(ALL, 1, 2))
    _, commands = feed(state, *(m.LayersHeld(rank, 1) for rank in ALL))
    assert messages(commands, m.Regroup) == [m.Regroup(2, ALL, 1, keeps_connections=True)]
    _, commands = feed(state, s.Lost(3, "SIGKILL"))
    assert not messages(commands, m.Regroup)[0].keeps_connections


def test_layers_of_another_generation_do_not_count() -> None:
    state, _ = feed(under_way(), *(m.LayersHeld(rank, 1) for rank in ALL[:-1]), m.LayersHeld(ALL[-1], 0))
    assert (state.cuts, state.becomes) == ((), CUTS)


def test_a_move_that_breaks_connections_is_given_up() -> None:
    state, commands = feed(under_way(), m.Broken(0, 1, "reset", ()), s.GraceElapsed(1, "reset"))
    (record,) = records(commands, "disturbance")
    assert record.details["layers_stay"] == CUTS
    state, commands = feed(state, *reports(ALL, 2, 2))
    assert (state.cuts, state.becomes, state.layout) == ((), (), None)
    assert not messages(commands, m.Pause)
