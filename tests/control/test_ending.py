"""A run that was told to end does so after one step, the same for all workers, and only when all have come there."""

from membership_feed import ALL, GRID, feed, messages, reports, running

from lightning_recycle.control.protocol import messages as m
from lightning_recycle.control.protocol import state as s

GO_ON, END = m.AfterStep.GO_ON, m.AfterStep.END


def losses(step: int) -> list[m.Losses]:
    return [m.Losses(1, step, {0: 1.0, 2: 1.0}), m.Losses(3, step, {1: 1.0, 3: 1.0})]


def test_before_the_first_generation_there_is_nothing_to_save():
    state, commands = feed(s.initial_state(GRID), s.Joined(0), s.EndWanted())
    assert (state.outcome, commands) == (s.Ended(), [s.Ended()])
    assert m.StopReason.of(state.outcome) is m.StopReason.ENDED


def test_it_ends_after_the_first_step_if_all_are_told_before():
    start = s.initial_state(GRID)
    _, commands = feed(start, s.Joined(0), m.EndRun(0), *(s.Joined(rank) for rank in (1, 2, 3)), *reports(ALL, 0))
    assert not any(isinstance(command, s.Ended) for command in commands)
    state, _ = feed(start, s.Joined(0), m.EndRun(0), *(s.Joined(rank) for rank in (1, 2, 3)), *reports(ALL, 0))
    assert messages(feed(state, *losses(0))[1], m.StepLoss)[0].after_step is END


def test_the_run_ends_once_all_leave_with_it():
    state, _ = feed(running(), *(m.Leave(rank, with_run=True) for rank in (0, 1, 2)))
    assert state.steps.after_step is GO_ON
    assert feed(state, m.Leave(3, with_run=True))[0].steps.after_step is END
    assert feed(state, s.Lost(3, "gone"))[0].steps.after_step is END
    assert feed(state, m.Leave(3))[0].steps.after_step is GO_ON  # one goes on until somebody replaces it
