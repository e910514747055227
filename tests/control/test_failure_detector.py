"""Failure detector: signs against workers as tables, and the clocks that feed them."""

from collections.abc import Mapping
from typing import Any

import pytest

from lightning_recycle.control.coordinator import failure_detector
from lightning_recycle.control.options import CoordinatorOptions, HeartbeatTimeouts, RecoveryOptions
from lightning_recycle.control.protocol.messages import RECOVER, Activity, Heartbeat, Report, WorkerStatus
from lightning_recycle.control.protocol.state import Generation, MembershipState, Roster
from lightning_recycle.planning.grid import Grid, OpKind, Positions

TIMEOUT = 5.0
USUAL = {"F": 0.1, "B": 1.0}  # seconds


def working(seconds: float, kind: str = "F") -> failure_detector.Observation:
    return failure_detector.Observation(f"{kind or 'hooks'} at work", kind, False, seconds)


def waiting(seconds: float, kind: str = "F", coordinated: bool = False) -> failure_detector.Observation:
    return failure_detector.Observation(f"{kind} waits", kind, True, seconds, coordinated=coordinated)


def exceeds(seen: failure_detector.Observation, usual: Mapping[str, float] = USUAL, timeout: float = TIMEOUT) -> bool:
    sign = failure_detector.sign_of_work(seen, usual.get(seen.kind), timeout)
    return sign is not None and sign.seconds > sign.limit


@pytest.mark.parametrize(("seen", "stuck"), [
    pytest.param(working(4.9), False, id="no operation counts as stuck within the timeout"),
    pytest.param(working(5.1), True, id="a short operation may take the timeout"),
    pytest.param(working(9.9, "B"), False, id="a long one may take ten times its usual duration"),
    pytest.param(working(10.1, "B"), True, id="but no longer"),
    pytest.param(working(1000.0, "W"), False, id="a first step takes what it takes"),
    pytest.param(working(1000.0, ""), False, id="so do hooks, validation, checkpoints and reading data"),
    pytest.param(working(failure_detector.PATIENCE + 1, ""), True, id="but not for ever"),
    pytest.param(working(failure_detector.PATIENCE + 1, "W"), True, id="nor an operation of unknown duration"),
    pytest.param(working(4.9, RECOVER), False, id="a recovery may take the timeout"),
    pytest.param(working(5.1, RECOVER), True, id="and needs no usual duration"),
    pytest.param(waiting(1e6), False, id="who waits is never to blame"),
])  # fmt: skip
def test_a_worker_is_suspected_when_it_is_at_work_for_longer_than_its_work_can_take(seen, stuck):
    assert exceeds(seen) is stuck


def test_the_reason_names_the_operation_and_how_long_it_took_and_may_take():
    sign = failure_detector.sign_of_work(working(12.34), 0.1, TIMEOUT)
    assert sign.cause == (
        "it has been in 'F at work' for 12.3 s without waiting for anybody, more than the 5.0 s that it may take"
    )


def test_a_short_timeout_does_not_cut_a_recovery_short():
    assert not exceeds(working(4.0, RECOVER), timeout=0.5)
    assert exceeds(working(5.5, RECOVER), timeout=0.5)


def test_where_no_peer_is_well_any_work_has_the_patience_of_what_has_no_usual_duration():
    sign = failure_detector.sign_of_work(working(1.0), 0.1, TIMEOUT, patience=77.0)
    assert (sign.limit, sign.bound) == (TIMEOUT, 77.0)


@pytest.mark.parametrize(("observations", "usual", "deadlocked"), [
    pytest.param({0: waiting(11.0), 1: waiting(30.0)}, USUAL, True, id="all wait for longer than they can have to"),
    pytest.param({0: waiting(9.0), 1: waiting(30.0)}, USUAL, False, id="one has begun to wait only now"),
    pytest.param({0: waiting(60.0), 1: working(1.0)}, USUAL, False, id="one is at work"),
    pytest.param({0: waiting(60.0), 1: working(60.0, "")}, USUAL, False, id="one is in a hook"),
    pytest.param({0: waiting(15.0), 1: waiting(15.0)}, {"B": 2.0}, False, id="the others' operations take long"),
    pytest.param({0: waiting(21.0), 1: waiting(21.0)}, {"B": 2.0}, True, id="but not as long as that"),
    pytest.param({0: waiting(1e3, "", True), 1: waiting(1e3, "", True)}, USUAL, False,
        id="all wait for the coordinator"),
    pytest.param({0: waiting(11.0, "", True), 1: waiting(11.0)}, USUAL, True, id="all but one do"),
    pytest.param({}, USUAL, False, id="nobody is seen"),
])  # fmt: skip
def test_if_everybody_waits_and_nobody_is_at_work_nobody_is_to_blame(observations, usual, deadlocked):
    assert failure_detector.all_wait(observations, lambda rank, kind: usual.get(kind), TIMEOUT) is deadlocked


@pytest.mark.parametrize("kind", [str(kind) for kind in OpKind])
def test_everybody_may_wait_for_the_longest_operation_of_any_kind(kind):
    waits = {rank: failure_detector.Observation("receive", "", True, 60.0) for rank in range(2)}
    usual = {kind: 10.0}.get
    assert not failure_detector.all_wait(waits, lambda rank, kind: usual(kind), TIMEOUT)


# ---------------------------------------------------------------------- the clocks

GRID = Grid(2, 2, 1)
ALL = frozenset(range(4))
OPTIONS = CoordinatorOptions(
    heartbeat=HeartbeatTimeouts(TIMEOUT, 60.0),
    report_timeout=50.0,
    patience=200.0,
    recovery=RecoveryOptions(start_timeout=100.0),
)


def state(**changes: object) -> MembershipState:
    """In generation 1; ``changes`` of the roster, or else of the generation."""
    of_roster = {name: value for name, value in changes.items() if name in ("live", "joined", "joining")}
    of_generation = {name: value for name, value in changes.items() if name not in of_roster}
    roster = Roster(ALL, joined=ALL).updated(**of_roster)
    return MembershipState(Positions(GRID), roster, Generation(1).updated(**of_generation))


def regrouping(*reported: int) -> MembershipState:
    return state(regrouping=True, reports={r: Report(r, 1, WorkerStatus(r % 2, 0, False)) for r in reported})


def beat(rank: int, seconds: float, *, waits: bool = False, kind: str = "F", generation: int = 1) -> Heartbeat:
    activity = Activity(3, "F(0, 0)@3", "rank 0" if waits else "", kind)
    return Heartbeat(rank, generation, activity, seconds)


def all_wait_but(
    watch: failure_detector.FailureDetector, culprit: int | None, seconds: float, at: float = 10.0, **more: Any
) -> None:
    for rank in range(4):
        watch.record_heartbeat(
            rank, beat(rank, seconds, waits=rank != culprit, **(more if rank == culprit else {})), at
        )


def ruling(
    watch: failure_detector.FailureDetector,
    now: float,
    case: MembershipState,
    seconds: Mapping[int, Mapping[str, float]],
) -> failure_detector.Ruling:
    return watch.review(now, case, dict.fromkeys(sorted(case.roster.live), 0.0), seconds)


def stuck(
    watch: failure_detector.FailureDetector,
    now: float,
    case: MembershipState,
    seconds: Mapping[int, Mapping[str, float]],
) -> set[int]:
    return set(ruling(watch, now, case, seconds).evict)


def silent(watch: failure_detector.FailureDetector, now: float, *ranks: int) -> dict[int, str]:
    """The causes for which those of ``ranks`` are given up that are; all others are well."""
    for rank in ALL.difference(ranks):
        watch.record_message(rank, now)
    return {rank: given_up.cause for rank, given_up in ruling(watch, now, state(number=-1), {}).evict.items()}


@pytest.fixture
def watch() -> failure_detector.FailureDetector:
    """All four workers have reported once and were heard at 0 s."""
    watch = failure_detector.FailureDetector(Positions(GRID), OPTIONS)
    for rank in range(4):
        watch.record_message(rank, 0.0)
        watch.record_report(rank)
        watch.record_applied(rank)
    return watch


def test_the_first_step_of_a_process_may_take_long_whatever_it_took_its_peers(watch):
    watch.forget(2)
    watch.record_report(2)
    all_wait_but(watch, 2, 15.0, at=0.0)
    seconds = {0: {"F": 0.1}, 1: {"F": 0.1}}
    assert stuck(watch, 0.0, state(), seconds) == set()
    watch.record_applied(2)
    assert stuck(watch, 0.0, state(), seconds) == {2}


def test_a_heartbeat_that_is_older_than_the_workers_last_word_says_nothing(watch):
    seconds = {0: {"F": 0.1}, 1: {"F": 0.1}}
    all_wait_but(watch, 2, 15.0, at=0.0)
    watch.record_activity(2, 0.1)
    assert stuck(watch, 0.2, state(), seconds) == set()
    all_wait_but(watch, 2, 5.9, at=6.0)
    assert stuck(watch, 6.0, state(), seconds) == {2}


def test_an_operation_that_is_new_to_the_plan_may_take_twice_as_long_as_the_longest(watch):
    seconds = {0: {"F": 1.0, "BW": 2.0}, 1: {"F": 1.0}}
    for rank in range(4):
        watch.record_heartbeat(rank, beat(rank, 39.9, waits=rank != 2, kind="W"), 40.0)
    assert stuck(watch, 40.0, state(), seconds) == set()
    assert stuck(watch, 40.2, state(), seconds) == {2}


def test_who_is_silent_for_longer_than_the_timeout_is_named_with_it(watch):
    watch.record_message(1, 2.0)
    assert silent(watch, 5.0, 0, 1) == {}
    assert silent(watch, 6.0, 0, 1) == {0: "it was silent for more than 5 s"}


def test_only_who_is_connected_can_be_silent(watch):
    watch.record_message(0, 100.0)
    assert watch.review(100.0, state(number=-1), {0: 0.0}, {}).evict == {}
    assert watch.review(100.0, state(number=-1), {0: 0.0, 2: 0.0}, {}).evict.keys() == {2}


def test_who_takes_no_messages_is_given_up_only_while_a_peer_is_well(watch):
    for rank in ALL:
        watch.record_message(rank, 10.0)
    one = watch.review(10.0, state(number=-1), {0: 5.1, 1: 0.0, 2: 0.0, 3: 0.0}, {})
    assert {rank: given_up.cause for rank, given_up in one.evict.items()} == {0: "it took no message for more than 5 s"}
    both = watch.review(10.0, state(number=-1), {0: 5.1, 1: 0.0, 2: 5.1, 3: 0.0}, {})
    assert both.evict == {}
    assert both.waits.keys() == {0, 2}


def test_while_it_starts_a_worker_may_be_silent_for_longer():
    watch = failure_detector.FailureDetector(Positions(GRID), OPTIONS)
    watch.record_message(0, 0.0)
    assert silent(watch, 9.9, 0) == {}
    assert silent(watch, 10.1, 0) == {0: "it was silent for more than 10 s"}
    watch.record_report(0)
    watch.record_message(0, 0.0)
    assert silent(watch, 16.0, 0).keys() == {0}


@pytest.mark.parametrize(
    ("looks", "given_up_at"), [("", 5.0), ("SSS", 5.0), ("TTT", 5.0), ("SRS", 50.0), ("SDS", 50.0), ("TRT", 5.0)]
)
def test_a_silent_process_that_computes_is_given_up_later(looks, given_up_at):
    watch = failure_detector.FailureDetector(Positions(GRID), OPTIONS, lambda rank: looks if rank == 0 else "SSS")
    for rank in range(4):
        watch.record_message(rank, 0.0)
        watch.record_report(rank)
    times = [seconds / 2 for seconds in range(1, 200)]
    first = next(now for now in times if silent(watch, now, 0))
    assert first == given_up_at + 0.5


def test_a_process_that_stops_to_compute_is_given_up_as_others_are():
    looks = {"now": "R"}
    watch = failure_detector.FailureDetector(Positions(GRID), OPTIONS, lambda rank: looks["now"])
    for rank in range(4):
        watch.record_message(rank, 0.0)
        watch.record_report(rank)
    for now in range(1, 21):
        assert silent(watch, float(now), 0) == {}
    looks["now"] = "S"
    given_up = [now for now in range(21, 30) if silent(watch, float(now), 0)]
    assert 21 <= given_up[0] <= 23


def test_nobodys_silence_or_work_counts_while_the_coordinator_itself_was_stopped(watch):
    for rank in range(4):
        watch.record_heartbeat(rank, beat(rank, 1.0), 0.0)
    watch.restart_timers(60.0)
    assert stuck(watch, 62.0, state(), {0: {"F": 0.1}, 1: {"F": 0.1}}) == set()
    assert silent(watch, 64.0, 0) == {}
    assert silent(watch, 66.0, 0).keys() == {0}


def test_a_new_process_in_the_place_of_a_lost_one_starts_afresh(watch):
    watch.forget(3)
    assert silent(watch, 100.0, 3) == {}
    watch.record_message(3, 100.0)
    assert silent(watch, 107.0, 3) == {}, "it has not reported yet"


def test_all_replicas_of_a_stage_that_are_silent_are_waited_for_and_named_once(watch):
    assert silent(watch, 6.0, 0, 2) == {}
    watch.record_message(1, 7.0)
    watch.record_message(3, 7.0)
    watch_again = ruling(watch, 7.0, state(number=-1), {})
    assert (dict(watch_again.evict), dict(watch_again.waits)) == ({}, {})
    assert silent(watch, 61.0, 0, 2).keys() == {0, 2}, "but not for ever"


def test_the_last_that_holds_a_stage_is_waited_for_although_one_that_has_no_state_yet_is_well(watch):
    for rank in (1, 2, 3):
        watch.record_message(rank, 6.0)
    found = ruling(watch, 6.0, state(number=-1, joining=frozenset({2})), {})
    assert found.evict == {}
    assert found.waits == {
        0: failure_detector.Overdue(
            "it was silent for more than 5 s", 6.0, 60.0, "no other worker that holds stage 0 is well"
        )
    }


@pytest.mark.parametrize(
    ("now", "joined", "late"), [(99.0, {0, 1}, set()), (101.0, {0, 1}, {2, 3}), (101.0, ALL, set())]
)
def test_who_does_not_start_in_time_is_late(now, joined, late):
    watch = failure_detector.FailureDetector(Positions(GRID), OPTIONS)
    watch.begin_start(0.0)
    found = watch.late_members(now, state(number=-1, joined=frozenset(joined)))
    assert found == dict.fromkeys(late, "it did not start within 100 s")


@pytest.mark.parametrize(("connected", "launched", "reported", "words"), [
    ({0, 1}, True, set(), "workers (1, 0), (1, 1): importing"),
    ({0, 1, 3}, False, {0}, "worker (1, 0): not connected"),
    (ALL, True, {0, 1, 2}, "worker (1, 1): setting up"),
])  # fmt: skip
def test_a_long_start_names_every_20_s_the_workers_that_it_waits_for(connected, launched, reported, words):
    watch = failure_detector.FailureDetector(Positions(GRID), OPTIONS)
    watch.begin_start(100.0)
    for rank in reported:
        watch.record_report(rank)
    beginning = state(number=-1, joined=frozenset(connected))
    said = {now: watch.start_notice(now, beginning, connected, launched) for now in (119.0, 121.0, 130.0, 142.0)}
    assert said == {
        119.0: None,
        121.0: f"Waiting for {words}, 21 s.",
        130.0: None,
        142.0: f"Waiting for {words}, 42 s.",
    }
    for rank in ALL:
        watch.record_report(rank)
    assert watch.start_notice(170.0, beginning, ALL, launched) is None
    watch.forget(0)
    assert watch.start_notice(200.0, beginning, ALL, launched) is None, "a lost worker is another matter"


def test_before_its_first_report_a_worker_sets_up_and_is_not_late(watch):
    watch.forget(2)
    watch.begin_regroup(0.0)
    assert watch.late_members(51.0, regrouping(0, 3)).keys() == {1}


def test_who_is_late_is_named_once_and_nobody_is_for_a_regroup_that_is_over(watch):
    watch.begin_regroup(0.0)
    assert watch.late_members(49.0, regrouping(0, 3)) == {}
    late = dict.fromkeys({1, 2}, "it did not stop for a regroup within 50 s")
    assert watch.late_members(51.0, regrouping(0, 3)) == late
    assert watch.late_members(52.0, regrouping(0, 3)) == {}
    watch.begin_regroup(0.0)
    watch.end_regroup()
    assert watch.late_members(1000.0, state()) == {}


SECONDS = {0: {"F": 0.1}, 1: {"F": 2.0}}  # stage 1 is slow


@pytest.mark.parametrize(("culprit", "began", "found"), [(2, 7.0, False), (2, 6.0, True), (1, 6.0, False)])
def test_the_time_since_the_last_heartbeat_counts_and_the_stage_has_its_own_limits(watch, culprit, began, found):
    all_wait_but(watch, culprit, seconds=10.0 - began)
    assert (culprit in stuck(watch, 11.5, state(), SECONDS)) is found


def test_of_a_silent_worker_nothing_is_known(watch):
    """It may long be done with what it said last; its silence is judged instead."""
    all_wait_but(watch, 2, seconds=1.0)
    for rank in (0, 1, 3):
        watch.record_message(rank, 14.9)
    assert stuck(watch, 14.9, state(), {0: {"F": 0.1}, 1: {"F": 0.1}}) == set()


def test_what_a_worker_said_in_the_end_of_a_silence_says_nothing_of_the_time_before(watch):
    """A library held the interpreter for 8 s in the middle of an operation; the peers were silent too."""
    seconds = {0: {"F": 0.1}, 1: {"F": 0.1}}
    all_wait_but(watch, 2, seconds=0.5, at=10.0)
    for tenths in range(100, 180):
        watch.record_message(1, tenths / 10)
        watch.record_message(3, tenths / 10)
        assert stuck(watch, tenths / 10, state(), seconds) == set()
    all_wait_but(watch, 2, seconds=8.5, at=18.0)
    assert stuck(watch, 18.0, state(), seconds) == set()
    for tenths in range(181, 231):  # it ought to be done, and is not
        all_wait_but(watch, 2, seconds=8.5 + (tenths - 180) / 10, at=tenths / 10)
        found = stuck(watch, tenths / 10, state(), seconds)
    assert found == {2}


def test_what_has_no_usual_duration_gets_the_patience_of_the_options(watch):
    all_wait_but(watch, 2, seconds=199.0)
    assert stuck(watch, 10.0, state(), {}) == set()
    assert stuck(watch, 12.0, state(), {}) == {2}


@pytest.mark.parametrize(
    ("case", "beating"), [(state(number=-1), 4), (state(), 3)], ids=["before the first generation", "one never beat"]
)
def test_nobodys_progress_is_judged(watch, case, beating):
    for rank in range(beating):
        watch.record_heartbeat(rank, beat(rank, 1000.0, waits=rank != 2), 10.0)
    watch.record_message(3, 10.0)
    assert ruling(watch, 10.0, case, SECONDS) == failure_detector.Ruling()
    assert not watch.all_wait(10.0, case, SECONDS)


def test_who_has_reported_waits_for_the_rest_whatever_its_last_heartbeat_said(watch):
    for rank in range(4):
        watch.record_heartbeat(rank, beat(rank, 100.0), 10.0)
    assert stuck(watch, 10.0, regrouping(0, 1, 2), SECONDS) == {3}


def test_all_waiting_is_a_deadlock_but_not_in_a_regroup(watch):
    all_wait_but(watch, None, 100.0)
    assert watch.all_wait(10.0, state(), SECONDS)
    assert not watch.all_wait(10.0, regrouping(0, 1, 2, 3), SECONDS)
    assert ruling(watch, 10.0, state(), SECONDS) == failure_detector.Ruling()


def test_it_is_no_deadlock_if_one_that_is_silent_may_be_at_work(watch):
    all_wait_but(watch, None, 100.0)
    for rank in (0, 1, 2):
        watch.record_message(rank, 13.0)
    assert not watch.all_wait(13.0, state(), SECONDS)


def test_waits_of_the_generation_before_are_no_deadlock_of_this_one(watch):
    """Right after the regroup that ended a deadlock, the newest heartbeats may still tell of it."""
    for rank in range(4):
        watch.record_heartbeat(rank, beat(rank, 100.0, waits=True, generation=0), 10.0)
    assert not watch.all_wait(10.2, state(), SECONDS)


def test_who_goes_on_waiting_though_a_generation_was_announced_is_stuck(watch):
    """Every wait ends with that; should one not, nobody would ever be told to stop waiting for this worker."""
    watch.begin_regroup(10.0)

    def judged(received: float, seconds: float, *, waits: bool = True, generation: int = 0) -> set[int]:
        for rank in range(4):
            watch.record_heartbeat(rank, beat(rank, 0.1, waits=True, generation=1), received)
        watch.record_heartbeat(1, beat(1, seconds, waits=waits, generation=generation), received)
        return stuck(watch, received, regrouping(0, 2, 3), {})

    assert judged(14.9, seconds=7.0) == set()
    assert judged(15.1, seconds=5.0) == set()  # it began after the announcement: another one will end it
    assert judged(15.1, seconds=7.0, waits=False) == set()  # it reads data, or is in a hook
    assert judged(15.1, seconds=7.0) == {1}


def test_who_waits_in_a_hook_for_a_sibling_that_works_there_is_not_stuck():
    grid = Grid(2, 1, 1)
    watch = failure_detector.FailureDetector(Positions(grid, 2), OPTIONS)
    reports = {rank: Report(rank, 1, WorkerStatus(rank % 2, 0, False)) for rank in (2, 3)}
    case = MembershipState(Positions(grid, 2), Roster(ALL, joined=ALL), Generation(1, True, reports))
    watch.begin_regroup(10.0)

    def judged(sibling_waits: bool) -> set[int]:
        for rank in range(4):
            watch.record_message(rank, 16.0)
            watch.record_report(rank)
            watch.record_heartbeat(rank, beat(rank, 0.1, waits=True), 16.0)
        for rank, waits in ((0, True), (1, sibling_waits)):
            watch.record_heartbeat(rank, beat(rank, 8.0, waits=waits, kind="", generation=0), 16.0)
        return stuck(watch, 16.0, case, {})

    assert judged(sibling_waits=False) == set()
    assert judged(sibling_waits=True) == {0, 1}
