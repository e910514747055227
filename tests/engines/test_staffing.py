"""How many workers an engine is asked for, and which it is to end."""

from lightning_recycle.engines.staffing import Staffing, staffing

A, B, C, D = ("n1", 1), ("n1", 2), ("n2", 1), ("n2", 2)
FULL = {0: A, 1: B, 2: C, 3: D}
WORKERS = {10: A, 11: B, 12: C, 13: D}
NOBODY = dict.fromkeys(range(4))


def decide(positions=FULL, workers=WORKERS, placed=(10, 11, 12, 13), going=()) -> Staffing:  # type: ignore[no-untyped-def]
    return staffing(positions, workers, placed, going)


def todo(request: int = 0, leave: tuple[str, ...] = (), end: tuple[int, ...] = ()) -> Staffing:
    return Staffing(request, frozenset(leave), frozenset(end))


def test_a_run_begins_with_a_worker_for_each_position() -> None:
    assert decide(NOBODY, {}, ()) == todo(request=4)
    assert decide(NOBODY, dict.fromkeys(range(4)), ()) == todo()  # on their way
    assert decide(NOBODY, WORKERS, ()) == todo()  # there, and not placed yet


def test_a_full_grid_needs_nothing() -> None:
    assert decide() == todo()


def test_a_dead_worker_is_asked_for_once() -> None:
    left = {10: A, 12: C, 13: D}
    assert decide({**FULL, 1: None}, left) == todo(request=1)
    assert decide({**FULL, 1: None}, {**left, 14: None}) == todo()


def test_a_dead_worker_that_the_run_still_counts_on_is_not_replaced_yet() -> None:
    assert decide(FULL, {10: A, 12: C, 13: D}) == todo()


def test_a_worker_that_was_given_up_is_ended_and_replaced() -> None:
    assert decide({**FULL, 1: None}) == todo(request=1, end=(11,))
    assert decide({**FULL, 1: ("n3", 7)}, {**WORKERS, 14: ("n3", 7)}) == todo(end=(11,))


def test_who_waits_as_a_spare_is_left_alone() -> None:
    assert decide(FULL, {**WORKERS, 14: ("n3", 7)}) == todo()


def test_workers_of_a_machine_that_goes_leave_and_are_replaced_before() -> None:
    assert decide(going=("n1",)) == todo(request=2, leave=("n1",))
    assert decide(workers={**WORKERS, 14: None}, going=("n1",)) == todo(request=1, leave=("n1",))
    assert decide(workers={**WORKERS, 14: None, 15: ("n3", 5)}, going=("n1",)) == todo(leave=("n1",))


def test_a_spare_of_a_machine_that_goes_is_of_no_use() -> None:
    assert decide({**FULL, 1: None}, {10: A, 12: C, 13: D, 14: ("n9", 1)}, going=("n9",)) == todo(request=1, end=(14,))


def test_between_two_runs_of_a_script_nobody_is_given_up() -> None:
    assert decide(NOBODY, WORKERS, placed=()) == todo()
