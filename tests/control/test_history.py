"""History of a run: its events, and what they add up to."""

import json
import logging
from collections.abc import Callable

import pytest

from lightning_recycle.control.monitoring import history as module
from lightning_recycle.control.monitoring.history import Digest, Event, History
from lightning_recycle.control.protocol.messages import FaultInjected
from lightning_recycle.control.protocol.state import Generation, MembershipState, Record, Roster, Steps
from lightning_recycle.planning.grid import Grid, Positions

GRID = Grid(2, 2, 1)
STATE = MembershipState(Positions(GRID), Roster(frozenset({0, 1, 2})), Generation(4), Steps(version=7))


class Recorder:
    """A history with a clock that the test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(module.time, "time", lambda: self.now)
        self.history = History(GRID)

    def at(self, now: float, kind: str, step: int = 7, rank: int | None = None, **details: object) -> Event:
        """The event that comes of a record at that time."""
        self.now = now
        number = len(self.history.events)
        if kind == "failure":
            details = {"cause": "killed", **details}
        elif kind == "resumed":
            details = {"roster": (0, 1, 2), "ahead": (), "redone": True, **details}
        self.history.record(Record(kind, step, rank, details), STATE)
        return next(event for event in self.history.events[number:] if event.kind == kind)

    def kinds(self) -> list[str]:
        return [event.kind for event in self.history.events]


@pytest.fixture
def recorder(monkeypatch) -> Recorder:
    return Recorder(monkeypatch)


def test_a_suspicion_that_is_waited_out_is_recorded_and_logged_with_its_limit_and_reason(recorder, caplog):
    cause, reason = "it was silent for more than 5 s", "no other worker that holds stage 0 is well"
    recorder.history.suspect(2, cause, 5.125, 300.0, reason, STATE)
    recorder.history.clear(2, 8.25, STATE)
    details = {"cause": cause, "seconds": 5.125, "limit": 300.0, "waits": reason}
    assert recorder.history.events == [
        Event("suspected", 1000.0, 4, 7, (1, 0), None, details),
        Event("cleared", 1000.0, 4, 7, (1, 0), 8.25, {}),
    ]
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [
        "Worker (1, 0) is suspected at step 7: it was silent for more than 5 s. It is waited for until 300 s have"
        " passed, because no other worker that holds stage 0 is well.",
        "Worker (1, 0) is well again after 8.2 s.",
    ]


def test_a_step_takes_from_the_end_of_the_one_before(recorder):
    assert not recorder.history.digest.counts["step"]
    recorder.at(1000.0, "resumed", 0)
    assert not recorder.history.digest.counts["step"]
    assert [recorder.at(1002.0, "step", 0).seconds, recorder.at(1005.0, "step", 1).seconds] == [2.0, 3.0]
    assert recorder.history.digest.counts["step"]


def test_a_recovery_counts_from_the_failure_to_the_first_committed_step(recorder):
    recorder.at(1000.0, "step", 6)
    assert recorder.at(1001.0, "failure", rank=3).seconds == 0.0
    assert recorder.at(1001.5, "resumed", ahead=(0,)).seconds == 0.5
    recorder.now = 1001.75
    recorder.history.connected(STATE)
    recorder.at(1003.0, "step")
    recovered = recorder.history.events[-1]
    assert recorder.kinds() == ["step", "failure", "redone", "resumed", "regrouped", "step", "recovered"]
    assert (recovered.kind, recovered.seconds, recovered.step) == ("recovered", 2.0, 7)
    assert next(event for event in recorder.history.events if event.kind == "regrouped").seconds == 0.75
    assert next(event for event in recorder.history.events if event.kind == "redone").details == {"ahead": (0,)}


def test_an_injected_fault_happened_when_it_was_announced(recorder):
    recorder.history.fault_injected(FaultInjected(3, "kill", "F(0, 0)@7", 1000.25))
    failure = recorder.at(1001.0, "failure", rank=3)
    assert failure.seconds == 0.75
    assert failure.details == {"cause": "killed", "kind": "kill", "operation": "F(0, 0)@7"}
    assert recorder.at(1002.0, "resumed").seconds == 1.75
    again = recorder.at(1003.0, "failure", rank=3)
    assert (again.seconds, again.details["kind"]) == (0.0, "unknown"), "the announcement was for the process before"


def test_a_second_failure_belongs_to_the_recovery_from_the_first(recorder):
    for now, kind in ((1000.0, "failure"), (1000.5, "resumed"), (1001.0, "failure")):
        recorder.at(now, kind, rank=3 if kind == "failure" else None)
    assert recorder.at(1002.0, "resumed").seconds == 2.0
    recorder.at(1004.0, "step")
    assert [event.seconds for event in recorder.history.events if event.kind == "recovered"] == [4.0]
    assert recorder.history.counters["failures"] == 2.0
    assert recorder.history.counters["recovery_seconds"] == 4.0


def test_a_failure_after_a_recovery_is_counted_anew(recorder):
    for now, kind in ((0.0, "failure"), (1.0, "resumed"), (2.0, "step"), (10.0, "failure"), (11.0, "resumed")):
        recorder.at(now, kind, rank=3 if kind == "failure" else None)
    recorder.at(14.0, "step", 8)
    assert [event.seconds for event in recorder.history.events if event.kind == "recovered"] == [2.0, 4.0]
    assert recorder.history.counters["recovery_seconds"] == 6.0
    assert recorder.history.counters["redone_steps"] == 2.0


def test_a_step_that_a_death_completes_is_not_yet_the_recovery(recorder):
    recorder.at(1000.0, "failure", rank=3)
    recorder.at(1000.0, "step", 6)
    assert recorder.kinds() == ["failure", "step"]
    recorder.at(1001.0, "resumed")
    recorder.at(1002.0, "step")
    assert recorder.kinds()[-2:] == ["step", "recovered"]


def test_who_rejoins_says_how_long_the_others_waited(recorder):
    recorder.at(1000.0, "paused")
    assert recorder.at(1000.5, "resumed", redone=False).seconds is None
    assert recorder.at(1001.5, "rejoined", rank=3).seconds == 1.5
    assert recorder.history.counters["rejoined_workers"] == 1.0
    assert recorder.history.counters["redone_steps"] == 0.0
    assert "redone" not in recorder.kinds()


@pytest.mark.parametrize(
    ("kind", "level"), [("step", logging.DEBUG), ("failure", logging.INFO), ("left", logging.INFO)]
)
def test_every_event_is_a_line_of_json_in_the_log(recorder, caplog, kind, level):
    with caplog.at_level(logging.DEBUG, logger="lightning_recycle.events"):
        recorder.at(1003.0, kind, rank=3)
    (line,) = [entry for entry in caplog.records if entry.name == "lightning_recycle.events"]
    assert line.levelno == level
    told = json.loads(line.getMessage())
    expected = {"kind": kind, "time": 1003.0, "generation": 4, "step": 7, "worker": [1, 1]}
    assert {name: told[name] for name in expected} == expected


def test_a_loss_is_a_warning_that_says_who_why_and_how_many_are_left(recorder, caplog):
    recorder.at(1003.0, "failure", rank=3)
    (line,) = [entry for entry in caplog.records if entry.levelno == logging.WARNING]
    assert line.getMessage() == "Worker (1, 1) was lost at step 7: killed. Live workers: 3 of 4."


def test_before_the_first_generation_awaited_workers_do_not_count(caplog):
    roster = Roster(frozenset({0, 1, 2}), joined=frozenset({1, 3}))
    History(GRID).record(Record("failure", 0, 3, {"cause": "killed"}), MembershipState(Positions(GRID), roster))
    assert caplog.messages == ["Worker (1, 1) was lost at step 0: killed. Connected workers: 1 of 4."]


def test_events_of_a_worker_name_the_process_that_holds_the_position(caplog):
    history, state = History(GRID), STATE
    history.introduce(3, "node7", 4711)
    history.record(Record("failure", 7, 3, {"cause": "killed"}), state)
    assert "killed (process 4711 on node7). Live" in caplog.text
    history.introduce(3, "node8", 12)
    history.record(Record("rejoined", 8, 3), state)
    history.record(Record("rejoined", 8, 2), state)
    history.record(Record("step", 8), state)
    assert [(e.host, e.pid) for e in history.events] == [("node7", 4711), ("node8", 12), (None, None), (None, None)]


def test_details_that_json_does_not_know_do_not_stop_the_run(recorder):
    what: Callable[[], None] = lambda: None  # noqa: E731
    assert recorder.at(1003.0, "left", rank=3, what=what).details == {"what": what}


def test_of_many_steps_the_newest_are_kept_and_of_everything_else_all(recorder, monkeypatch):
    monkeypatch.setattr(module, "_STEPS_KEPT", 10)
    for step in range(100):
        recorder.now += 1.0
        recorder.history.record(Record("step", step, None, {}), STATE)
        if step % 30 == 0:
            recorder.at(recorder.now, "left", step=step, rank=3)
        assert recorder.history.digest.counts["step"]
    steps = [event.step for event in recorder.history.events if event.kind == "step"]
    assert steps == list(range(100 - len(steps), 100))
    assert 10 <= len(steps) <= 20
    assert [event.step for event in recorder.history.events if event.kind == "left"] == [0, 30, 60, 90]
    assert sorted(event.time for event in recorder.history.events) == [event.time for event in recorder.history.events]


def test_the_most_memory_of_each_stage_is_recorded_at_the_end(recorder):
    history = recorder.history
    for rank, peak in ((0, 100), (2, 300), (2, 250), (1, 0)):
        history.held(rank, peak)
    assert history.peaks == {0: 100, 2: 250}
    history.introduce(2, "here", 77)
    assert history.peaks == {0: 100}, "it is another process"
    for _ in range(2):  # a run ends once
        history.ended(STATE)
    assert recorder.kinds() == ["memory"]
    assert history.events[0].details == {"peak_bytes": (300, None)}


# ---------------------------------------------------------------------- the digest


def step(number: int, time: float, seconds: float | None = 1.0, loss: float = 0.5) -> Event:
    return Event("step", time, 0, number, None, seconds, {"loss": loss})


def test_a_million_events_are_kept_in_bounds():
    digest = Digest(4, 0.0)
    for number in range(20_000):
        digest.add(step(number, float(number)), 4, False)
        digest.add(Event("saved", float(number), 0, number), 4, False)
        digest.add(Event("failure", float(number), 0, number, (0, 0), 0.0, {"cause": "killed"}), 4, False)
    assert len(digest.events) <= 200
    assert len(digest.failures) <= 20
    assert digest.counts["saved"] == digest.counts["step"] == 20_000
    assert (digest.step, digest.loss) == (19_999, 0.5)


def test_the_time_of_a_step_is_that_of_the_present_plan_without_what_held_it_up():
    digest = Digest(4, 0.0)
    assert digest.step_seconds is None
    for number in range(3):
        digest.add(step(number, number + 1.0), 4, False)
    assert digest.step_seconds == 1.0
    digest.add(Event("resumed", 9.0, 1, 3, details={"plan": "ahead"}), 3, False)
    assert (digest.step_seconds, digest.found_by) == (None, "ahead")
    digest.add(step(3, 10.0, seconds=7.0), 3, False)  # with the recovery
    digest.add(step(4, 12.0, seconds=2.0), 3, False)
    assert digest.step_seconds == 2.0


def test_a_suspicion_lasts_until_it_is_cleared_or_proven():
    digest = Digest(4, 0.0)
    waits = {"cause": "silence", "seconds": 5.0, "waits": "it is the last"}
    for worker in ((0, 0), (0, 1)):
        digest.add(Event("suspected", 10.0, 0, 1, worker, None, waits), 4, False)
    assert digest.suspected == {(0, 0): (5.0, "silence"), (0, 1): (5.0, "silence")}
    digest.add(Event("cleared", 11.0, 0, 1, (0, 0), 6.0), 4, False)
    digest.add(Event("failure", 12.0, 0, 1, (0, 1), 0.0, {"cause": "silence"}), 3, False)
    assert digest.suspected == {}
