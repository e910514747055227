"""Memory: what a worker holds, counted in it by itself, stays below the limit, whoever fails and whenever."""

import logging

import pytest
from support.held import EACH, Heavy, Peaks, peaks
from support.sampling import sampled
from support.training import exact_fit, failures

from lightning_recycle.callbacks import Fault
from lightning_recycle.control.plans.run_plans import RunPlans
from lightning_recycle.planning.failure_distribution import usual_limit

pytestmark = pytest.mark.long


def no_plans_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every plan is made when it is needed, for what has been measured by then."""
    monkeypatch.setattr(RunPlans, "plan_ahead", lambda self: None)


GRIDS = [(2, 2, (0, 0)), (2, 2, (1, 1)), (3, 2, (1, 0)), (2, 3, (1, 1)), (4, 1, (2, 0))]
CASES = [(*grid, fit_in) for grid in GRIDS for fit_in in (1, 3)]


@pytest.mark.parametrize(("pipelines", "stages", "worker", "fit_in"), sampled(CASES, 2), ids=str)
def test_no_worker_holds_more_than_the_limit(pipelines, stages, worker, fit_in, tmp_path, monkeypatch):
    """Where the survivor of a failure takes over all micro-batches of its stage, or some; and the result is exact."""
    no_plans_ahead(monkeypatch)
    each = 1 if stages > 1 else 2
    limit = fit_in * each * EACH + EACH // 2
    faults = [Fault("kill", *worker, step=5)]
    strategy = {"split_backward": True, "memory": limit}
    run = exact_fit(Heavy().double(), pipelines, stages, faults, callbacks=[Peaks(tmp_path)], strategy=strategy)
    assert failures(run) == [worker]
    before, after = run.strategy.schedules
    assert after.problem.in_flight_limit is None, "bytes are the only limit"
    assert after.problem.memory.capacity == (limit,) * stages
    assert max(after.peak_memory(survivor) for survivor in after.live_workers) <= limit
    held = peaks(tmp_path)
    assert max(held[name] for name in held if "before" in name) <= each * max(usual_limit(before.grid, ()) or ())
    left = f"{pipelines * stages - 1} measured"
    assert held[left] <= fit_in * each


@pytest.mark.parametrize("step", [0, 1])
def test_before_anything_is_measured_a_survivor_holds_what_1f1b_does(step, tmp_path, monkeypatch):
    no_plans_ahead(monkeypatch)
    run = exact_fit(Heavy().double(), 2, 2, [Fault("kill", 1, 1, step=step)], callbacks=[Peaks(tmp_path)])
    assert run.strategy.schedules[1].problem.in_flight_limit == (2, 1)
    assert max(peaks(tmp_path).values()) <= 2


def test_what_does_not_fit_is_said_and_one_microbatch_at_a_time_goes_on(tmp_path, monkeypatch, caplog):
    no_plans_ahead(monkeypatch)
    with caplog.at_level(logging.WARNING):
        faults = [Fault("kill", 0, 1, step=4)]
        strategy = {"split_backward": True, "memory": EACH // 2}
        run = exact_fit(Heavy().double(), 2, 2, faults, callbacks=[Peaks(tmp_path)], strategy=strategy)
    assert run.strategy.schedules[1].problem.in_flight_limit == (1, 1)
    assert peaks(tmp_path)["3 measured"] == 1
    assert "fits into memory: a worker of stage 0 has 1,048,576 bytes" in caplog.text
    assert "use smaller micro-batches" in caplog.text


def test_an_in_flight_limit_of_the_users_counts_alone(tmp_path, monkeypatch):
    no_plans_ahead(monkeypatch)
    faults = [Fault("kill", 1, 0, step=4)]
    strategy = {"split_backward": True, "memory": "4 micro-batches"}
    run = exact_fit(Heavy().double(), 2, 2, faults, callbacks=[Peaks(tmp_path)], strategy=strategy)
    assert [schedule.problem.in_flight_limit for schedule in run.strategy.schedules] == [(4, 4), (4, 4)]
    assert 1 < peaks(tmp_path)["3 measured"] <= 4, "by the memory alone it would be 1"
