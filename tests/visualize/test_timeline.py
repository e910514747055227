"""The trace file has the structure that Perfetto reads."""

import json
from pathlib import Path

import pytest

from lightning_recycle.planning import Costs, Grid, Microbatch, Op, OpKind, Problem, Worker, plan
from lightning_recycle.visualize import chrome_trace, save_trace, timed_ops

SCHEDULE = plan(Problem(Grid(3, 4, 6), Costs.uniform(4, reduce=0.5), frozenset({Worker(1, 2)})))


def complete(trace: dict[str, object]) -> list[dict[str, object]]:
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]  # type: ignore[attr-defined]


def test_each_operation_is_an_event_on_the_thread_of_its_worker(tmp_path: Path) -> None:
    path = save_trace(tmp_path / "new" / "trace.json", {"planned": SCHEDULE})
    events = complete(json.loads(path.read_text()))
    assert len(events) == sum(map(len, SCHEDULE.workers.values()))
    assert {(event["pid"], event["tid"]) for event in events} == {(w.pipeline, w.stage) for w in SCHEDULE.workers}
    adopted = [event for event in events if event["name"] == "F 1.2" and event["tid"] == 2]
    planned = next(op for op in SCHEDULE.workers[Worker(0, 2)] if op.op == Op(OpKind.FORWARD, 2, Microbatch(1, 2)))
    where = {"ph": "X", "name": "F 1.2", "cat": "F", "pid": 0, "tid": 2, "ts": planned.start * 1e6, "dur": 1e6}
    assert adopted == [{**where, "args": {"stage": 2, "pipeline": 1, "microbatch": 2, "adopted": True}}]


def test_events_of_a_thread_do_not_overlap() -> None:
    """Overlapping complete events on one thread would be drawn as nested calls."""
    busy_until: dict[tuple[object, object], float] = {}
    for event in complete(chrome_trace({"planned": timed_ops(SCHEDULE, iterations=3)})):
        thread = event["pid"], event["tid"]
        assert event["ts"] >= busy_until.get(thread, 0.0) - 1e-6  # type: ignore[operator]
        busy_until[thread] = event["ts"] + event["dur"]  # type: ignore[operator]


def test_planned_and_measured_tracks_lie_below_each_other() -> None:
    measured = [(worker, op, start + 0.25, end + 0.5) for worker, op, start, end in timed_ops(SCHEDULE)]
    trace = chrome_trace({"planned": SCHEDULE, "measured": measured})
    names = {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert names == {
        **{pipeline: f"planned: pipeline {pipeline}" for pipeline in range(3)},
        **{3 + pipeline: f"measured: pipeline {pipeline}" for pipeline in range(3)},
    }
    threads = {(e["pid"], e["tid"]) for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert threads == {(event["pid"], event["tid"]) for event in complete(trace)}


def test_slots_become_seconds() -> None:
    planned = timed_ops(SCHEDULE, iterations=2, seconds_per_unit=0.02)
    ends = [end for *_, end in planned]
    assert max(ends) == pytest.approx(0.02 * (SCHEDULE.period + SCHEDULE.makespan))


def test_an_empty_measurement_is_an_empty_track() -> None:
    assert chrome_trace({"measured": []})["traceEvents"] == []
