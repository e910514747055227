"""Exact planners: they find the optimum by themselves, agree with each other, and nothing a solver does can hurt."""

import itertools
import os
import random
import re
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import pytest
from support.process_tree import is_alive
from support.sampling import sampled
from support.waiting import wait_for
from test_running_example import FUSED, SPLIT, STAGGERED
from test_running_example import GRID as EXAMPLE
from test_running_example import TABLE as ONE_DEAD

from lightning_recycle import planning
from lightning_recycle.errors import ConfigurationError
from lightning_recycle.planning import exact_planner as exact_module
from lightning_recycle.planning.exact_planner import common_slot, discretize
from lightning_recycle.planning.schedule import best_of
from lightning_recycle.planning.timing import BACKWARD, FORWARD, WEIGHT, Codes, assemble, best_timing

BACKENDS = ["cbc", "highs"]


def one_at_a_time(problem: planning.Problem) -> planning.Schedule:
    """The worst plan: each micro-batch when the one before is through."""
    codes = Codes(problem, planning.reroute(problem.grid, problem.failed), fused=not problem.technique.split_backward)
    stages = range(problem.grid.stages)
    sequence = []
    for number in range(codes.n):
        sequence += [codes.code(FORWARD, stage, number) for stage in stages]
        sequence += [codes.code(BACKWARD, stage, number) for stage in reversed(stages)]
        if problem.technique.split_backward:
            sequence += [codes.code(WEIGHT, stage, number) for stage in stages]
    return assemble(codes, sequence, best_timing(codes, sequence))


def lopsided() -> planning.Schedule:
    """One micro-batch at a time, and every one without a home on the same peer: no plan with these routes is shorter
    than 19, where 16 are possible."""
    grid = planning.Grid(3, 2, 3)
    problem = planning.Problem(grid, planning.Costs.uniform(2), frozenset({planning.Worker(1, 1)}), SPLIT, (3, 2))
    homes = {mb: planning.Worker(mb.pipeline, 0) for mb in grid.all_microbatches()}
    peers = {mb: planning.Worker(2 * (mb.pipeline == 2), 1) for mb in grid.all_microbatches()}
    codes = Codes(problem, [homes, peers], fused=False)
    order = [(FORWARD, 0), (FORWARD, 1), (BACKWARD, 1), (BACKWARD, 0), (WEIGHT, 0), (WEIGHT, 1)]
    sequence = [codes.code(kind, stage, number) for number in range(codes.n) for kind, stage in order]
    return assemble(codes, sequence, best_timing(codes, sequence))


def forwards_first(problem: planning.Problem) -> planning.Schedule:
    """GPipe: as long as 1F1B with fused backwards, but every micro-batch is in flight."""
    codes = Codes(problem, planning.reroute(problem.grid, problem.failed), fused=True)
    numbers, stages = range(codes.n), range(problem.grid.stages)
    sequence = [codes.code(FORWARD, stage, number) for number in numbers for stage in stages]
    sequence += [codes.code(BACKWARD, stage, number) for number in numbers for stage in reversed(stages)]
    return assemble(codes, sequence, best_timing(codes, sequence))


def example(technique: planning.Technique, stage: int | None, limit: int | None = None) -> planning.Problem:
    failed = frozenset() if stage is None else frozenset({planning.Worker(1, stage)})
    limits = None if limit is None else (limit,) * EXAMPLE.stages
    return planning.Problem(EXAMPLE, planning.Costs.uniform(EXAMPLE.stages), failed, technique, limits)


def random_problem(seed: int, *, instant: bool = False) -> planning.Problem:
    draw = random.Random(seed)
    grid = planning.Grid(draw.randint(1, 3), draw.randint(1, 3), draw.randint(1, 3))

    def per_stage(least: int, most: int) -> tuple[float, ...]:
        return tuple(float(draw.randint(least, most)) for _ in range(grid.stages))

    work = 0 if instant else 1
    costs = planning.Costs(
        per_stage(work, 3), per_stage(work, 3), per_stage(work, 3), per_stage(0, 1), per_stage(0, 1), draw.randint(0, 1)
    )
    failed = frozenset(
        planning.Worker(draw.randrange(grid.pipelines), stage)
        for stage in range(grid.stages)
        if grid.pipelines > 1 and draw.random() < 0.4
    )
    limits = tuple(draw.randint(1, 3) for _ in range(grid.stages)) if draw.random() < 0.5 else None
    slow = {worker: 2.0 for worker in grid.workers() if draw.random() < 0.1}
    technique = planning.Technique(draw.random() < 0.5, draw.random() < 0.5)
    return planning.Problem(grid, costs, failed, technique, limits, tuple(slow.items()))


def check_agreement(problem: planning.Problem) -> None:
    start = planning.heuristic(problem)
    found = {}
    for backend in BACKENDS:
        result = planning.ExactPlanner(backend, time_limit=20.0, threads=1).improve(start)
        planning.validate(result.schedule)
        assert result.warning is None
        assert result.status == "optimal"
        assert result.schedule.period == pytest.approx(result.lower_bound)
        assert result.schedule.period <= start.period
        found[backend] = result.schedule.period
    assert len({round(period, 6) for period in found.values()}) == 1, found


@pytest.mark.parametrize("seed", sampled(range(5), 1, rest=pytest.mark.long))
def test_all_solvers_find_the_same_optimum_and_prove_it(seed):
    check_agreement(random_problem(seed))


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(5, 120))
def test_all_solvers_find_the_same_optimum_in_many_problems(seed):
    check_agreement(random_problem(seed, instant=seed % 4 == 0))


TABLE = [  # of the running example: what may be done, the stage that lost a worker, the limit, and the slots
    *((technique, stage, limit, slots[stage]) for technique, limit, slots in ONE_DEAD for stage in range(4)),
    (FUSED, None, None, 27),
    (SPLIT, None, 4, 21),
    (STAGGERED, None, None, 19),
]
QUICKEST = {("cbc", SPLIT, 2, None), ("highs", FUSED, 0, 4)}


@pytest.mark.timeout(700)
@pytest.mark.parametrize(
    ("backend", "technique", "stage", "limit", "slots"),
    [
        pytest.param(
            backend, *row, marks=pytest.mark.long if (backend, *row[:3]) in QUICKEST else pytest.mark.exhaustive
        )
        for backend, row in itertools.product(BACKENDS, TABLE)
    ],
)
def test_a_solver_finds_the_running_example_s_optimum_from_the_worst_plan(backend, technique, stage, limit, slots):
    start = one_at_a_time(example(technique, stage, limit))
    planning.validate(start)
    assert start.period > 4 * slots
    # Ten seconds alone; what counts is that it ends, not when.
    result = planning.ExactPlanner(backend, time_limit=600.0).improve(start)
    planning.validate(result.schedule)
    assert (result.schedule.period, result.backend, result.found_by) == (slots, backend, backend)
    assert result.status == "optimal"
    assert result.solver.calls > 0
    assert 0 < result.solver.seconds <= result.seconds


@pytest.mark.parametrize("backend", BACKENDS)
def test_which_peer_runs_a_rerouted_microbatch_is_decided_and_bounds_hold_whatever_the_routing(backend):
    start = lopsided()
    planning.validate(start)
    result = planning.ExactPlanner(backend, time_limit=100.0).improve(start)
    planning.validate(result.schedule)
    assert (result.schedule.period, result.lower_bound, result.found_by) == (16, 16, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_plan_that_got_shorter_holds_no_more_than_it_needs(backend):
    result = planning.ExactPlanner(backend, time_limit=60.0).improve(one_at_a_time(example(FUSED, None)))
    assert (result.schedule.period, result.schedule.demand[0]) == (27, 4)


def test_of_equal_plans_the_one_that_holds_least_is_the_best_and_never_a_longer_one():
    problem = planning.Problem(planning.Grid(1, 3, 5), planning.Costs.uniform(3), technique=FUSED)
    wasteful, frugal = forwards_first(problem), planning.heuristic(problem)
    assert (wasteful.demand, frugal.demand) == ((5, 15), (3, 6))
    assert best_of([wasteful, frugal]) is frugal
    assert best_of([frugal, wasteful]) is frugal
    almost_equal, longer = (replace(frugal, period=factor * frugal.period) for factor in (1.0005, 1.002))
    assert best_of([wasteful, almost_equal]) is almost_equal
    assert best_of([wasteful, longer]) is wasteful
    slow_to_end = one_at_a_time(problem)
    assert slow_to_end.demand == (1, 3)
    assert best_of([wasteful, replace(slow_to_end, period=wasteful.period)]) is wasteful, "its makespan is longer"


@pytest.mark.parametrize("backend", BACKENDS)
def test_by_name_a_solver_is_asked_only_where_bound_and_heuristic_differ(backend, monkeypatch):
    assert backend in planning.available_planners()
    monkeypatch.setattr(exact_module, "SOLVE", "no_such_module:solve")
    result = planning.solve(example(STAGGERED, 2), backend)
    assert (result.schedule.period, result.status, result.warning) == (27, "optimal", None)
    assert (result.backend, result.found_by, result.solver.calls, result.solver.seconds) == (backend, "heuristic", 0, 0)
    assert result.solver.reason == "the plan meets the lower bound"
    assert planning.plan(example(STAGGERED, 2), backend) == planning.heuristic(example(STAGGERED, 2))


@pytest.mark.long
def test_durations_without_a_common_slot_are_rounded_and_the_order_is_timed_with_the_real_ones():
    costs = planning.Costs.uniform(3, 1.0, 1.0872345671, 0.9123456789, 0.1, 0.05, 0.1034567)
    problem = planning.Problem(planning.Grid(2, 3, 4), costs, frozenset({planning.Worker(0, 1)}), SPLIT, (3, 3, 3))
    start = one_at_a_time(problem)
    assert not discretize(start, 500).exact
    result = planning.ExactPlanner("highs", time_limit=15.0, max_variables=4_000).improve(start)
    planning.validate(result.schedule)
    assert result.schedule.period <= 1.05 * planning.heuristic(problem).period
    assert result.lower_bound <= result.schedule.period
    assert (result.status == "optimal") == (result.lower_bound == result.schedule.period)


def test_common_slot():
    assert common_slot([1.0, 1.1, 0.9, 0.2]) == pytest.approx(0.1)
    assert common_slot([6.0, 0.0, 4.0]) == 2.0
    assert common_slot([0.0]) == 0.0


def test_a_problem_of_only_instant_operations():
    problem = planning.Problem(
        planning.Grid(2, 2, 2), planning.Costs.uniform(2, 0.0, 0.0, 0.0), frozenset({planning.Worker(0, 1)})
    )
    assert planning.solve(problem, "highs").status == "optimal"


# What solvers do wrong. The fakes are functions like `milp.solve`.
FAKES = """
    import os, signal, sys, time

    def missing(task, report):
        import a_solver_that_is_not_installed

    def crash(task, report):
        signal.raise_signal(signal.SIGSEGV)  # in this thread, which must not answer before it is delivered

    def leave(task, report):
        sys.exit("the licence has expired")

    def error(task, report):
        raise RuntimeError("a bug in the solver")

    def hang(task, report):
        with open(os.environ["FAKE_PID"], "w") as file:
            file.write(str(os.getpid()))
        time.sleep(600)

    def placements(problem, start):
        for family in problem.families:
            for number in family.microbatches:
                for at, (kind, stage) in enumerate(problem.steps):
                    yield kind, stage, number, family.hosts[stage][0], start(at)

    def nonsense(task, report):
        report("solution", list(placements(task.problem, lambda at: 0.0)))

    def backwards(task, report):
        report("solution", list(placements(task.problem, lambda at: -at)))

    def good_then_crash(task, report):
        from lightning_recycle.planning.milp import solve
        solve(task, report)
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    (tmp_path / "fake_solvers.py").write_text(textwrap.dedent(FAKES))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("FAKE_PID", str(tmp_path / "pid"))
    monkeypatch.setattr(exact_module, "GRACE", 0.5)

    def use(name: str) -> planning.ExactPlanner:
        monkeypatch.setattr(exact_module, "SOLVE", f"fake_solvers:{name}")
        return planning.ExactPlanner("highs", time_limit=0.5 if name == "hang" else 120.0)

    return use


@pytest.mark.parametrize(("name", "reason"), [
    ("missing", "not available: No module named 'a_solver_that_is_not_installed'"),
    ("crash", "crashed (signal 11)"),
    ("leave", "SystemExit: the licence has expired"),
    ("error", "RuntimeError: a bug in the solver"),
    ("hang", "ran past its time limit"),
])  # fmt: skip
def test_a_solver_that_fails_is_a_warning_and_the_plan_stays(fake, name, reason, caplog):
    start = one_at_a_time(example(SPLIT, 1))
    began = time.monotonic()
    result = fake(name).improve(start)
    assert time.monotonic() - began < 10.0
    assert result.schedule is start
    assert result.status == "feasible"
    assert reason in result.warning
    assert "\n" not in result.warning
    pid = Path(os.environ["FAKE_PID"])
    if name == "hang" and pid.exists():  # on a busy machine it ends before it has begun to hang
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid.read_text()), 0)


NO_C_INTERFACE = """
    import _cffi_backend
    __file__ = _cffi_backend.__file__  # a library without HiGHS' C interface, as that of highspy 1.16
"""


@pytest.fixture
def highspy_without_c(tmp_path, monkeypatch) -> Path:
    (tmp_path / "highspy").mkdir()
    (tmp_path / "highspy" / "__init__.py").touch()
    (tmp_path / "highspy" / "_core.py").write_text(textwrap.dedent(NO_C_INTERFACE))
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_highs_is_found_whichever_highspy_is_installed(highspy_without_c):
    result = planning.ExactPlanner("highs").improve(one_at_a_time(example(FUSED, None, 2)))
    assert (result.warning, result.status, result.found_by) == (None, "optimal", "highs")


def test_without_a_library_of_highs_the_warning_names_versions_and_remedy(highspy_without_c):
    (highspy_without_c / "highsbox.py").write_text("raise ImportError('broken')")
    start = one_at_a_time(example(FUSED, None, 2))
    result = planning.ExactPlanner("highs").improve(start)
    assert result.schedule is start
    assert result.warning is not None
    assert re.search(
        r"python-mip [\d.]+ cannot load it \(.*; highsbox [\d.]+, highspy .*\): pip install 'highsbox>=1.10'",
        result.warning,
    )


def test_the_warning_is_logged_by_plan(fake, caplog):
    problem = example(STAGGERED, 2, 4)  # 29, while no arithmetic bound is above 28
    assert fake("missing").plan(problem) == planning.heuristic(problem)
    if planning.heuristic(problem).period > planning.solve(problem).lower_bound:
        assert "not available" in caplog.text


@pytest.mark.parametrize("name", ["nonsense", "backwards"])
def test_a_solver_that_lies_is_not_believed(fake, name):
    start = one_at_a_time(example(SPLIT, 1))
    result = fake(name).improve(start)
    planning.validate(result.schedule)
    assert result.schedule.period <= start.period


@pytest.mark.long
def test_what_a_solver_found_before_it_crashed_counts(fake):
    result = fake("good_then_crash").improve(one_at_a_time(example(SPLIT, 1)))
    assert (result.schedule.period, result.status) == (28, "optimal")
    assert "signal 9" in result.warning


def test_a_solver_does_not_outlive_the_process_that_asked(fake, tmp_path):
    pid = Path(os.environ["FAKE_PID"])
    code = (
        "from lightning_recycle.planning.child_process import run_in_child;"
        "run_in_child('fake_solvers:hang', None, print)"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    parent = subprocess.Popen([sys.executable, "-c", code], env=environment)
    assert wait_for(lambda: pid.exists() and pid.read_text())
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert wait_for(lambda: not is_alive(int(pid.read_text())))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("reason", ["more than max_operations=20", "larger than max_variables=20", "least_gap=20"])
def test_a_plan_that_is_too_large_for_a_solver_or_close_to_the_bound_is_kept_with_the_reason(backend, reason):
    start = one_at_a_time(example(SPLIT, 1))
    option, value = reason.split()[-1].split("=")
    result = planning.ExactPlanner(backend, **{option: int(value)}).improve(start)
    assert result.schedule is start
    assert (result.found_by, result.solver.calls, result.warning) == ("given", 0, None)
    assert reason in result.solver.reason


@pytest.mark.parametrize(("arguments", "message"), [
    ({"backend": "glpk"}, r"backend='glpk'.*use 'cbc', 'highs' or 'gurobi'"),
    ({"time_limit": -1.0}, r"time_limit=-1\.0"),
    ({"time_limit": float("nan")}, "time_limit=nan"),
    ({"threads": 0}, "threads=0.*at least 1"),
    ({"max_variables": 1.5}, r"max_variables=1\.5"),
])  # fmt: skip
def test_bad_settings(arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        planning.ExactPlanner(**arguments)
