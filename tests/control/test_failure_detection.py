"""Who is given up on suspicion: the rules as tables and stories, and as properties of any sequence of observations."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_recycle.control.coordinator import failure_detector
from lightning_recycle.planning.grid import Grid, Positions

LIMIT, BOUND = 5.0, 60.0  # seconds
WORK_BOUND = 200.0
GRID = Grid(3, 2, 2)  # ranks 0, 2, 4 are stage 0; 1, 3, 5 are stage 1
ALL = frozenset(range(6))
TICK = 0.5


def stands(
    silent: float = 0.0, working: float | None = None, place: failure_detector.StepPoint | None = None
) -> failure_detector.WorkerSigns:
    work = () if working is None else (failure_detector.Sign("it is stuck", working, LIMIT, WORK_BOUND, place),)
    return failure_detector.WorkerSigns(failure_detector.Sign("it is silent", silent, LIMIT, BOUND), work)


def ruled(
    changed: Mapping[int, failure_detector.WorkerSigns], live: frozenset[int] = ALL, holders: frozenset[int] = ALL
) -> failure_detector.Ruling:
    """The first ruling over the workers ``live``, all of which are well except as ``changed``."""
    standings = {rank: changed.get(rank, stands()) for rank in live}
    return failure_detector.review(
        failure_detector.DetectionState(), 100.0, standings, holders & live, Positions(GRID), 7
    )[1]


@pytest.mark.parametrize(("changed", "evicted", "waited"), [
    pytest.param({}, set(), set(), id="all are well"),
    pytest.param({0: stands(5.0)}, set(), set(), id="within the limit"),
    pytest.param({0: stands(5.1)}, {0}, set(), id="one is silent"),
    pytest.param({0: stands(working=5.1)}, {0}, set(), id="one is stuck"),
    pytest.param({0: stands(5.1), 1: stands(5.1)}, {0, 1}, set(), id="a node is silent: each has peers"),
    pytest.param({0: stands(5.1), 2: stands(5.1)}, {0, 2}, set(), id="two of three peers are silent"),
    pytest.param({0: stands(5.1), 2: stands(5.1), 4: stands(5.1)}, set(), {0, 2, 4}, id="a whole stage is silent"),
    pytest.param({r: stands(5.1) for r in ALL}, set(), set(ALL), id="all are silent"),
    pytest.param({r: stands(working=5.1) for r in ALL}, set(), set(ALL), id="all are slow"),
    pytest.param({0: stands(5.1), 2: stands(2.6), 4: stands(2.6)}, set(), {0}, id="the others may be silent too"),
    pytest.param({0: stands(5.1), 2: stands(2.6)}, {0}, set(), id="one is well, which is enough"),
    pytest.param({0: stands(5.1), 2: stands(working=2.6), 4: stands(working=9)}, set(), {0, 4},
        id="the others are slow"),
    pytest.param({r: stands(60.1) for r in (0, 2, 4)}, {0, 2, 4}, set(), id="but not for ever"),
    pytest.param({r: stands(working=200.1) for r in (0, 2, 4)}, {0, 2, 4}, set(), id="nor if they are slow"),
    pytest.param({0: stands(working=100), 2: stands(9), 4: stands(9)}, set(), {0, 2, 4}, id="each has its bound"),
])  # fmt: skip
def test_a_worker_is_given_up_only_if_a_peer_can_do_its_work(changed, evicted, waited):
    found = ruled(changed)
    assert (set(found.evict), set(found.waits)) == (evicted, waited)


def test_a_process_that_is_about_to_join_is_judged_by_the_same_rules():
    assert ruled({0: stands(5.1)}, holders=ALL - {0}).evict.keys() == {0}


def test_reasons_and_limits_are_told():
    found = ruled({0: stands(5.1)}).evict[0]
    assert (found.cause, found.seconds, found.limit) == ("it is silent", 5.1, LIMIT)
    reason = "no other worker that holds stage 0 is well"
    waited = ruled({0: stands(9.0)}, live=ALL - {2, 4}).waits[0]
    assert (waited.cause, waited.limit, waited.reason) == ("it is silent", BOUND, reason)
    found = ruled({0: stands(61.0)}, live=ALL - {2, 4}).evict[0]
    assert found.cause == f"it is silent; it was given 60 s because {reason}"


@pytest.mark.parametrize(("seconds", "evicted"), [(5.1, False), (49.9, False), (50.1, True)])
def test_a_silent_worker_whose_process_computes_may_take_ten_times_as_long(seconds, evicted):
    standing = stands(seconds)
    standing = replace(standing, silence=replace(standing.silence, computes=True))
    found = ruled({0: standing})
    assert (set(found.evict), set(found.waits)) == (({0}, set()) if evicted else (set(), {0}))
    assert not standing.is_well, "it does not stand in for others meanwhile"


# ---------------------------------------------------------------------- stories


class Story:
    """What a coordinator sees second by second: ``tell(seconds, rank=standing at that time, ...)``."""

    def __init__(self, live: frozenset[int] = ALL) -> None:
        self.live, self.now, self.step, self.memory = live, 1000.0, 7, failure_detector.DetectionState()
        self.evicted: dict[int, float] = {}
        self.waited: dict[int, str] = {}
        self.cleared: dict[int, float] = {}
        self.causes: dict[int, str] = {}

    def tell(
        self,
        seconds: float,
        standings: Callable[[float, int], failure_detector.WorkerSigns] = lambda now, rank: stands(),
    ) -> "Story":
        end = self.now + seconds
        while self.now < end:
            self.now += TICK
            seen = {rank: standings(self.now, rank) for rank in self.live}
            self.memory, found = failure_detector.review(
                self.memory, self.now, seen, self.live, Positions(GRID), self.step
            )
            self.live = self.live - found.evict.keys()
            self.evicted.update(dict.fromkeys(found.evict, self.now))
            self.causes.update({rank: given_up.cause for rank, given_up in found.evict.items()})
            self.waited.update({rank: waited.reason for rank, waited in found.waits.items()})
            self.cleared.update(found.cleared)
        return self


def since(
    begin: float, *ranks: int, work: failure_detector.StepPoint | None = None
) -> Callable[[float, int], failure_detector.WorkerSigns]:
    """``ranks`` are silent since ``begin``, or at ``work``."""

    def standing(now: float, rank: int) -> failure_detector.WorkerSigns:
        if rank not in ranks:
            return stands()
        return stands(now - begin) if work is None else stands(working=now - begin, place=work)

    return standing


def test_all_replicas_that_stall_at_once_are_waited_out_also_if_one_wakes_up_a_little_later():
    story = Story().tell(5)
    began = story.now
    story.tell(20, since(began, 1, 3, 5)).tell(2, since(began, 5)).tell(5)
    assert story.evicted == {}
    assert story.waited.keys() == {1, 3, 5}
    assert story.cleared == {1: 20.0, 3: 20.0, 5: 22.0}


def test_one_that_does_not_wake_up_with_the_others_is_given_up():
    story = Story().tell(5)
    began = story.now
    story.tell(20, since(began, 1, 3, 5)).tell(10, since(began, 5))
    assert story.evicted.keys() == {5}
    assert LIMIT / 2 - TICK <= story.evicted[5] - began - 20 <= LIMIT


def test_who_redoes_a_micro_batch_that_held_up_another_may_take_ten_times_as_long():
    story, place = Story(), (7, "micro-batch 3")
    story.tell(6, since(story.now, 1, work=place))
    assert story.evicted.keys() == {1}
    story.tell(40, since(story.now, 3, work=place))
    assert story.evicted.keys() == {1}
    assert story.waited == {3: "worker (0, 1) was held up there before"}
    story.tell(15, since(story.now - 40, 3, work=place))
    assert story.evicted.keys() == {1, 3}
    assert story.causes[3] == "it is stuck; it was given 50 s because worker (0, 1) was held up there before"
    story.tell(199, since(story.now, 5, work=place))
    assert story.evicted.keys() == {1, 3}, "now it is the last one"


def test_a_micro_batch_that_is_slow_in_one_stage_may_be_slow_in_the_next():
    story, place = Story(), (7, "micro-batch 3")
    story.tell(6, since(story.now, 0, work=place)).tell(40, since(story.now + 6, 1, work=place))
    assert story.evicted.keys() == {0}


def test_another_micro_batch_or_step_has_the_usual_limit():
    story = Story()
    story.tell(6, since(story.now, 1, work=(7, "micro-batch 3")))
    story.tell(6, since(story.now, 3, work=(7, "micro-batch 4")))
    assert story.evicted.keys() == {1, 3}


def test_two_that_were_stuck_at_the_same_time_do_not_excuse_each_other():
    story, place = Story(), (7, "STEP")
    began = story.now
    story.tell(1, since(began, 1, work=place))
    both = {1: since(began, 1, work=place), 3: since(began + 1, 3, work=place)}
    story.tell(6, lambda now, rank: both.get(rank, since(0.0))(now, rank))
    assert story.evicted.keys() == {1, 3}


@pytest.mark.parametrize(("after", "evicted"), [(0.0, {1}), (-1.0, {1, 3})])
def test_a_peer_that_falls_silent_in_the_redone_step_is_waited_for_unless_it_fell_silent_before(after, evicted):
    story = Story()
    first = story.now
    second = first + LIMIT + TICK + after
    both = {1: since(first, 1), 3: since(second, 3)}
    story.tell(second - first, both[1])
    story.tell(12, lambda now, rank: both.get(rank, since(0.0))(now, rank))
    assert story.evicted.keys() == evicted


def test_a_peer_that_falls_silent_in_a_later_step_is_given_up_as_ever():
    story = Story()
    story.tell(6, since(story.now, 1))
    story.step += 1
    story.tell(6, since(story.now, 3))
    assert story.evicted.keys() == {1, 3}


def test_a_peer_that_is_late_now_and_then_delays_but_does_not_save_a_dead_worker():
    """On a busy machine heartbeats come late."""
    story = Story(ALL - {4})
    began = story.now

    def standing(now: float, rank: int) -> failure_detector.WorkerSigns:
        if rank == 0:
            return stands(now - began)
        return stands(3.0 if rank == 2 and int(now) % 3 == 0 else 0.0)

    story.tell(20, standing)
    assert story.evicted.keys() == {0}
    assert LIMIT < story.evicted[0] - began < 2 * LIMIT


# ---------------------------------------------------------------------- properties

WORKERS = st.integers(0, GRID.num_workers - 1)
CHANGES = st.lists(  # (seconds until it, who, how it goes on)
    st.tuples(
        st.sampled_from([0.5, 1.0, 3.0, 6.0, 30.0, 70.0]),
        st.lists(WORKERS, min_size=1, max_size=6, unique=True),
        st.sampled_from(["well", "silent", "stuck", "dead"]),
        st.integers(0, 2),
    ),
    max_size=12,
)


class Grown:
    """A run in which workers become silent, stuck, well again or dead, as ``changes`` say."""

    def __init__(self) -> None:
        self.now, self.memory = 0.0, failure_detector.DetectionState()
        self.live = set(ALL)
        self.began: dict[int, tuple[str, float, failure_detector.StepPoint]] = {}

    def standing(self, rank: int) -> failure_detector.WorkerSigns:
        how, began, place = self.began.get(rank, ("well", self.now, (0, "")))
        if how == "silent":
            return stands(self.now - began)
        return stands(working=self.now - began, place=place) if how == "stuck" else stands()

    def look(self) -> tuple[dict[int, failure_detector.WorkerSigns], failure_detector.Ruling]:
        standings = {rank: self.standing(rank) for rank in self.live}
        self.memory, found = failure_detector.review(
            self.memory, self.now, standings, frozenset(self.live), Positions(GRID), 0
        )
        return standings, found


@pytest.mark.long
@settings(max_examples=300, deadline=None)
@given(changes=CHANGES)
def test_nobody_is_given_up_before_its_bound_without_a_peer_that_is_well(changes):
    run = Grown()
    for seconds, ranks, how, microbatch in [*changes, (250.0, [], "well", 0)]:
        for _ in range(int(seconds / TICK)):
            run.now += TICK
            standings, found = run.look()
            for rank in found.evict:
                signs = standings[rank].signs
                peers = [p for p in run.live if p % 2 == rank % 2 and p != rank and standings[p].is_well]
                assert any(sign.seconds > sign.limit for sign in signs)
                assert set(peers) - found.evict.keys() or any(sign.seconds > sign.bound for sign in signs)
            for rank, standing in standings.items():  # nothing is waited for beyond its bound
                assert rank in found.evict or all(sign.seconds <= sign.bound for sign in standing.signs)
            run.live -= found.evict.keys()
        for rank in ranks:
            if how == "dead":
                run.live.discard(rank)
            run.began[rank] = (how, run.now, (0, f"micro-batch {microbatch}"))


@settings(max_examples=100, deadline=None)
@given(changes=CHANGES, lost=st.sampled_from([1, 3]), how=st.sampled_from(["silent", "stuck"]))
def test_whoever_is_lost_is_found_in_time_while_a_peer_is_well(changes, lost, how):
    """Worker (2, 1) stays well, whatever happens to the others; the lost one is at a place of its own."""
    run = Grown()
    for seconds, ranks, change, microbatch in changes:
        for _ in range(int(seconds / TICK)):
            run.now += TICK
            run.live -= run.look()[1].evict.keys()
        for rank in set(ranks) - {5, lost}:
            run.began[rank] = (change, run.now, (0, f"micro-batch {microbatch}"))
    run.began[lost] = (how, run.now, (0, "REDUCE"))
    limit = LIMIT if how == "stuck" else LIMIT * 10**2  # silence of peers in the same step may explain it
    end = run.now + min(limit, BOUND if how == "silent" else WORK_BOUND) + 2 * TICK
    while lost in run.live and run.now < end:
        run.now += TICK
        run.live -= run.look()[1].evict.keys()
    assert lost not in run.live
