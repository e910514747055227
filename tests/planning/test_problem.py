"""Costs from hardware numbers, limits from bytes, slow workers."""

import json
from collections.abc import Callable

import pytest

from lightning_recycle import planning as p
from lightning_recycle.errors import ConfigurationError, PlanningError
from lightning_recycle.planning.plan_files import read_schedule

GRID = p.Grid(3, 4, 6)
UNIT = p.Costs.uniform(4)
GIB = 1024.0**3


def slow(factors: dict[p.Worker, float], **changes: object) -> p.Problem:
    return p.Problem(GRID, UNIT, worker_factors=factors, **changes)  # type: ignore[arg-type]


def test_communication_is_latency_plus_bytes_over_bandwidth_of_the_largest_message() -> None:
    assert p.communication_seconds(1e6, latency_seconds=1e-4, bandwidth_bytes_per_second=1e9) == pytest.approx(1.1e-3)
    sizes = [1e6, 4e6, 2e6]
    assert p.communication_seconds(sizes, latency_seconds=0.0, bandwidth_bytes_per_second=1e9) == pytest.approx(4e-3)


def test_the_in_flight_limit_is_what_fits_after_forward_and_after_backward() -> None:
    memory = p.Memory(
        capacity=(16 * GIB,) * 3,
        fixed=(4 * GIB, 4 * GIB, 0.0),
        after_forward=(2 * GIB, 1 * GIB, 0.0),
        after_backward=(1 * GIB, 5 * GIB, 0.0),
    )
    assert memory.in_flight_limit(most=18) == (6, 2, 18)
    assert memory.in_flight_limit(most=5) == (5, 2, 5)


def test_a_slow_worker_gets_less_and_the_plan_says_so() -> None:
    problem = slow({p.Worker(1, 2): 2.0, p.Worker(0, 0): 1.0})
    assert problem.worker_factors == ((p.Worker(1, 2), 2.0),)
    assert problem == slow({p.Worker(1, 2): 2.0})
    assert (problem.factor(p.Worker(1, 2)), problem.factor(p.Worker(0, 0))) == (2.0, 1.0)
    assert problem.duration(p.OpKind.FORWARD, p.Worker(1, 2)) == 2.0
    schedule = p.heuristic(problem)
    p.validate(schedule)
    assert sum(op.kind is p.OpKind.FORWARD for op in schedule.program(p.Worker(1, 2))) == 4
    assert schedule.period == 24  # 4 x 3 x 2 slots; without giving up any it would be 36
    data = json.loads(json.dumps(p.plan_to_json(schedule)))
    assert data["worker_factors"] == [[1, 2, 2.0]]
    assert read_schedule(data) == schedule
    del data["worker_factors"]
    with pytest.raises(p.InvalidScheduleError, match="duration: "):
        p.validate(read_schedule(data))


def test_the_step_of_a_stage_waits_for_its_slowest_worker_and_reduce_is_common() -> None:
    costs = p.Costs.uniform(1, reduce=1.0, optimizer=0.5)
    problem = p.Problem(p.Grid(2, 1, 2), costs, worker_factors={p.Worker(1, 0): 3.0})  # type: ignore[arg-type]
    assert problem.duration(p.OpKind.REDUCE, p.Worker(1, 0)) == 1.0
    assert problem.duration(p.OpKind.STEP, p.Worker(1, 0)) == 1.5
    schedule = p.heuristic(problem)
    p.validate(schedule)
    assert schedule.period == 9.0 + 1.0 + 1.5  # shares 3 and 1


def test_1f1b_runs_at_the_pace_of_the_slow_worker() -> None:
    schedule = p.one_f_one_b(slow({p.Worker(0, 3): 2.0}, technique=p.Technique(False, False)))
    p.validate(schedule)
    assert schedule.period == 3 + 6 * 6 + 6


def memory(**changes: object) -> p.Memory:
    values: dict[str, object] = {"capacity": (8.0,), "fixed": (1.0,), "after_forward": (1.0,), "after_backward": (1.0,)}
    return p.Memory(**{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: slow({p.Worker(3, 0): 2.0}), ConfigurationError, r"worker_factors.*\(3, 0\).*0\.\.2"),
        (lambda: slow({p.Worker(0, 0): 0.0}), ConfigurationError, r"worker_factors\[\(0, 0\)\]=0\.0.*above 0"),
        (lambda: slow({p.Worker(0, 0): float("inf")}), ConfigurationError, "finite"),
        (
            lambda: p.communication_seconds(-1.0, latency_seconds=0, bandwidth_bytes_per_second=1),
            ConfigurationError,
            "-1",
        ),
        (
            lambda: p.communication_seconds(1.0, latency_seconds=0, bandwidth_bytes_per_second=0),
            ConfigurationError,
            "=0",
        ),
        (lambda: memory(fixed=(1.0, 2.0)), ConfigurationError, "fixed.*2 numbers.*1"),
        (lambda: memory(after_forward=(-1.0,)), ConfigurationError, "after_forward"),
        (lambda: memory(after_forward=1.0), ConfigurationError, "per stage"),
        (lambda: memory(fixed=(9.0,)).in_flight_limit(4), PlanningError, "stage 0 has 8 bytes, needs 9"),
        (lambda: memory(after_backward=(8.0,)).in_flight_limit(4), PlanningError, "8 more with one micro-batch"),
    ],
)
def test_bad_input_names_the_value_and_the_remedy(
    make: Callable[[], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make()
