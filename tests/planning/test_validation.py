"""The validator rejects a schedule that breaks any one rule, and says which."""

import pickle
from collections.abc import Callable
from dataclasses import replace

import pytest

from lightning_recycle import planning

GRID = planning.Grid(3, 4, 6)
FAILED = frozenset({planning.Worker(1, 2)})
F, B, W, BW = (
    planning.OpKind.FORWARD,
    planning.OpKind.BACKWARD_INPUT,
    planning.OpKind.BACKWARD_WEIGHT,
    planning.OpKind.BACKWARD,
)
Programs = dict[planning.Worker, list[planning.ScheduledOp]]


def good(**changes: object) -> planning.Schedule:
    costs = planning.Costs.uniform(4, reduce=2.0, optimizer=1.0, communication=0.5)
    return planning.heuristic(replace(planning.Problem(GRID, costs, FAILED), **changes))


def with_programs(schedule: planning.Schedule, change: Callable[[Programs], None]) -> planning.Schedule:
    programs = {worker: list(ops) for worker, ops in schedule.workers.items()}
    change(programs)
    return replace(schedule, workers={worker: tuple(ops) for worker, ops in programs.items()})


def violations(schedule: planning.Schedule) -> tuple[str, ...]:
    with pytest.raises(planning.InvalidScheduleError) as caught:
        planning.validate(schedule)
    return caught.value.violations


def find(ops: list[planning.ScheduledOp], kind: planning.OpKind, microbatch: planning.Microbatch | None = None) -> int:
    return next(i for i, s in enumerate(ops) if s.op.kind is kind and microbatch in (None, s.op.microbatch))


def shift(scheduled: planning.ScheduledOp, by: float) -> planning.ScheduledOp:
    return planning.ScheduledOp(scheduled.op, scheduled.start + by, scheduled.end + by)


def drop_worker(programs: Programs) -> None:
    del programs[planning.Worker(0, 0)]


def revive_the_dead(programs: Programs) -> None:
    programs[planning.Worker(1, 2)] = [shift(op, 0.0) for op in programs[planning.Worker(0, 2)][-2:]]


def swap_order(programs: Programs) -> None:
    ops = programs[planning.Worker(0, 0)]
    ops[0], ops[1] = ops[1], ops[0]


def forget_weight_gradient(programs: Programs) -> None:
    ops = programs[planning.Worker(0, 1)]
    del ops[find(ops, W)]


def forget_everything_of_a_microbatch(programs: Programs) -> None:
    home = planning.Microbatch(0, 3)
    for worker, ops in programs.items():
        programs[worker] = [op for op in ops if op.op.microbatch != home]


def run_twice(programs: Programs) -> None:
    source, target = programs[planning.Worker(0, 0)], programs[planning.Worker(1, 0)]
    target.append(shift(source[find(source, F)], 1000.0))


def split_a_microbatch(programs: Programs) -> None:
    source, target = programs[planning.Worker(0, 1)], programs[planning.Worker(1, 1)]
    moved = source.pop(find(source, W, planning.Microbatch(0, 5)))
    target.append(moved)
    target.sort(key=lambda scheduled: scheduled.start)


def foreign_stage(programs: Programs) -> None:
    ops = programs[planning.Worker(0, 1)]
    ops[0] = replace(ops[0], op=replace(ops[0].op, stage=0))


def foreign_microbatch(programs: Programs) -> None:
    ops = programs[planning.Worker(0, 1)]
    ops[0] = replace(ops[0], op=planning.Op(F, 1, planning.Microbatch(0, 6)))


def two_steps(programs: Programs) -> None:
    ops = programs[planning.Worker(0, 1)]
    ops.append(shift(ops[-1], 1.0))


def no_reduce(programs: Programs) -> None:
    del programs[planning.Worker(0, 1)][-2]


def work_after_step(programs: Programs) -> None:
    ops = programs[planning.Worker(0, 1)]
    ops.append(replace(ops.pop(find(ops, W)), start=1000.0, end=1001.0))


def too_short(programs: Programs) -> None:
    ops = programs[planning.Worker(0, 0)]
    ops[0] = replace(ops[0], end=ops[0].start + 0.5)


def not_a_number(programs: Programs) -> None:
    ops = programs[planning.Worker(0, 0)]
    ops[0] = replace(ops[0], end=float("nan"))


def before_the_iteration(programs: Programs) -> None:
    programs[planning.Worker(0, 0)][0] = shift(programs[planning.Worker(0, 0)][0], -1.0)


def overlap(programs: Programs) -> None:
    ops = programs[planning.Worker(0, 2)]
    at = find(ops, W)
    ops[at] = shift(ops[at], 0.5)
    ops[at + 1] = replace(ops[at + 1], start=ops[at].start + 0.25, end=ops[at].end + 0.25)


def early(kind: planning.OpKind, stage: int) -> Callable[[Programs], None]:
    """Let the first operation of this kind start 0.4 slots too early (less than the communication)."""

    def change(programs: Programs) -> None:
        ops = programs[planning.Worker(0, stage)]
        at = find(ops, kind)
        ops[at] = shift(ops[at], -0.4)

    return change


def backward_before_own_forward(programs: Programs) -> None:
    ops = programs[planning.Worker(0, 3)]
    f, b = find(ops, F, planning.Microbatch(0, 2)), find(ops, B, planning.Microbatch(0, 2))
    ops[f], ops[b] = replace(ops[f], op=ops[b].op), replace(ops[b], op=ops[f].op)


def weight_before_input_gradient(programs: Programs) -> None:
    ops = programs[planning.Worker(0, 1)]
    b, w = find(ops, B, planning.Microbatch(0, 2)), find(ops, W, planning.Microbatch(0, 2))
    ops[b], ops[w] = replace(ops[b], op=ops[w].op), replace(ops[w], op=ops[b].op)


@pytest.mark.parametrize(("change", "rule"), [
    (drop_worker, "workers: live worker (0, 0) has no program"),
    (revive_the_dead, "workers: (1, 2) has a program"),
    (swap_order, "workers: on (0, 0)"),
    (forget_weight_gradient, "F+B, not F+B+W"),
    (forget_everything_of_a_microbatch, "has nothing, not F+B+W"),
    (run_twice, "once: F(0, 0)@0 runs on"),
    (split_a_microbatch, "is split between (0, 1), (1, 1)"),
    (foreign_stage, "an operation of another stage"),
    (foreign_microbatch, "outside the grid"),
    (two_steps, "one REDUCE and one STEP"),
    (no_reduce, "one REDUCE and one STEP"),
    (work_after_step, "one REDUCE and one STEP"),
    (too_short, "duration: F(0, 0)@0 on (0, 0) takes 0.5 instead of 1"),
    (not_a_number, "duration: F(0, 0)@0 on (0, 0) takes nan"),
    (before_the_iteration, "before the iteration"),
    (overlap, "overlap:"),
    (early(F, 1), "dependency: F"),
    (early(B, 1), "dependency: B"),
    (early(planning.OpKind.REDUCE, 1), "dependency: REDUCE"),
    (early(planning.OpKind.STEP, 1), "dependency: STEP"),
    (backward_before_own_forward, "dependency: B(0, 2)@3"),
    (weight_before_input_gradient, "dependency: W(0, 2)@1"),
], ids=lambda value: getattr(value, "__name__", None))  # fmt: skip
def test_a_broken_rule_is_found_and_named(change, rule):
    schedule = good()
    planning.validate(schedule)
    found = violations(with_programs(schedule, change))
    assert any(rule in violation for violation in found), found


def test_reduce_waits_for_the_slowest_peer():
    """A REDUCE that is right for its own worker but too early for a peer."""
    schedule = good()
    peers = [worker for worker in schedule.workers if worker.stage == 2]
    other = min(peers, key=lambda worker: schedule.workers[worker][-3].end)

    def hurry(programs: Programs) -> None:
        programs[other][-2:] = [shift(op, -0.25) for op in programs[other][-2:]]

    broken = with_programs(schedule, hurry)
    assert any(f"REDUCE@2 on {other}" in violation for violation in violations(broken))


def test_memory_limit():
    schedule = good()
    peak = schedule.peak_in_flight(planning.Worker(0, 1))
    tight = replace(schedule, problem=replace(schedule.problem, in_flight_limit=(18, peak - 1, 18, 18)))
    assert any("memory: (0, 1) holds" in violation for violation in violations(tight))
    planning.validate(replace(schedule, problem=replace(schedule.problem, in_flight_limit=(18, peak, 18, 18))))


def test_period_shorter_than_a_stage_needs():
    schedule = good()
    found = violations(replace(schedule, period=schedule.period - 0.1))
    assert any("overlap:" in violation for violation in found)
    assert any("period:" in violation and "STEP" in violation for violation in found)


def test_stage_steps_before_any_of_its_workers_goes_on():
    """No worker is too busy for this period, but one begins while a peer has not stepped yet."""
    grid = planning.Grid(2, 1, 1)
    costs = planning.Costs.uniform(1, optimizer=1.0)
    schedule = planning.heuristic(planning.Problem(grid, costs))
    late = {
        worker: tuple(shift(op, 1.0) if worker.pipeline == 1 or op.op.microbatch is None else op for op in ops)
        for worker, ops in schedule.workers.items()
    }
    found = violations(planning.Schedule(schedule.problem, late, schedule.period))
    assert any("the next iteration begins stage 0" in violation for violation in found)
    planning.validate(planning.Schedule(schedule.problem, late, schedule.period + 1.0))


def test_without_staggering_the_period_is_the_makespan():
    schedule = good(technique=planning.Technique(staggered=False))
    for period in (schedule.makespan - 1.0, schedule.makespan + 1.0, float("nan")):
        assert any("period:" in violation for violation in violations(replace(schedule, period=period)))


def test_a_fused_plan_has_only_fused_backwards():
    schedule = good()
    fused_problem = replace(schedule.problem, technique=planning.Technique(split_backward=False))
    assert any("not split" in violation for violation in violations(replace(schedule, problem=fused_problem)))
    fused = good(technique=planning.Technique(split_backward=False))
    planning.validate(replace(fused, problem=schedule.problem))  # splitting is a permission, not an obligation


def test_programs_that_wait_for_each_other_are_found_even_without_durations():
    grid = planning.Grid(1, 2, 2)
    a, b = planning.Microbatch(0, 0), planning.Microbatch(0, 1)
    problem = planning.Problem(
        grid, planning.Costs.uniform(2, 0.0, 0.0, 0.0), technique=planning.Technique(split_backward=False)
    )

    def schedule(*programs: list[tuple[planning.OpKind, planning.Microbatch]]) -> planning.Schedule:
        workers = {}
        for stage, program in enumerate(programs):
            ops = [planning.Op(kind, stage, microbatch) for kind, microbatch in program]
            ops += [planning.Op(planning.OpKind.REDUCE, stage), planning.Op(planning.OpKind.STEP, stage)]
            workers[planning.Worker(0, stage)] = tuple(planning.ScheduledOp(op, 0.0, 0.0) for op in ops)
        return planning.Schedule(problem, workers, 0.0)

    in_turn = [(F, a), (BW, a), (F, b), (BW, b)]
    planning.validate(schedule(in_turn, in_turn))
    found = violations(schedule(in_turn, [(F, a), (F, b), (BW, a), (BW, b)]))
    assert any("waits forever before" in violation for violation in found)


def test_the_error_lists_some_violations_counts_all_and_survives_pickling():
    schedule = good()
    with pytest.raises(planning.InvalidScheduleError, match=r"and \d+ more") as caught:
        planning.validate(replace(schedule, workers={}))
    copy = pickle.loads(pickle.dumps(caught.value))
    assert str(copy) == str(caught.value)
    assert copy.violations == caught.value.violations
