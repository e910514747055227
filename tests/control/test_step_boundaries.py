"""How workers join, leave and move: all at a step boundary, event by event."""

from collections.abc import Iterable

import pytest
from membership_feed import all_losses, applied, feed, messages, report, reports, running_without_3

from lightning_recycle.control.protocol import messages as m
from lightning_recycle.control.protocol import state as s
from lightning_recycle.control.protocol.membership import transition

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


def joining_3(step: int = 2) -> s.MembershipState:
    """Worker 3 joins the others at ``step`` in generation 2; worker 1 is to give it its state."""
    state, _ = feed(running_without_3(), m.Ready(3))
    state, _ = stop_at(state, step)
    state, _ = feed(state, *reports(THREE, 2, step), report(3, 2, -1))
    assert state.roster.joining == {3}
    return state


# ---------------------------------------------------------------------- late and twice


@pytest.mark.parametrize(
    ("state", "words"),
    [
        pytest.param(
            feed(running_without_3(), m.Ready(3), *paused(THREE, 1, 0))[0],
            [
                m.Paused(0, 0, 0), m.Paused(3, 1, 0), at_boundary(0, 1, 0), at_boundary(0, 1, 2), at_boundary(0, 0, 1),
                at_boundary(3, 1, 1), entered(0, 1), m.Ready(0), m.Ready(3), m.Paused(0, 1, 7),
            ],
            id="of-another-generation-step-or-worker",
        ),
        pytest.param(
            feed(joining_3(2), entered(3, 2))[0],
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
def test_words_that_are_late_early_or_of_another_change_nothing(state, words):
    for event in words:
        assert transition(state, event) == (state, ()), event


# ---------------------------------------------------------------------- another plan


PLAN = s.PlanReady(THREE, "a plan", {"gain": 0.3})


def test_a_newer_plan_replaces_one_that_has_not_begun():
    _, commands = feed(running_without_3(), PLAN, s.PlanReady(THREE, "a better one"), *paused(THREE, 1, 0))
    assert [c for c in commands if isinstance(c, s.Send)][1:] == [s.Send(THREE, m.Boundary(1, 1), "a better one")]
    assert len(messages(commands, m.Pause)) == 1
