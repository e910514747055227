"""Random scenarios are exact, and a run that is not would be noticed."""

from dataclasses import replace

import pytest

from chaos.__main__ import main
from chaos.diary import Entry, audit
from chaos.run import run_scenario
from chaos.scenario import STEPS, draw

SEEDS = (20004, 20010, 20017, 20021, 20025, 20013)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_scenario_ends_with_exact_weights_data_and_processes(seed: int) -> None:
    result = run_scenario(draw(seed))
    assert result.problems == ()


def test_a_scenario_depends_on_its_seed_only() -> None:
    assert draw(7) == draw(7)
    assert len({draw(seed) for seed in range(50)}) == 50


def test_scenarios_of_a_run_hold_every_kind_of_fault_and_every_option() -> None:
    scenarios = [draw(seed) for seed in range(10_000, 10_200)]
    kinds = {fault.kind for scenario in scenarios for fault in scenario.faults}
    assert kinds == {"kill", "exit", "exception", "hang", "deadlock", "slow", "partition", "preempt"}
    points = {fault.at for scenario in scenarios for fault in scenario.faults}
    assert {"setup", "recovery", "checkpoint", "end", "forward", "reduce", "optimizer"} <= points
    for option in ("dropout", "clips", "restart_workers", "normalize", "staggered", "decoupled", "loses_stage"):
        assert {bool(getattr(scenario, option)) for scenario in scenarios} == {True, False}
    assert {(3, 3), (2, 2), (1, 2)} <= {(scenario.pipelines, scenario.stages) for scenario in scenarios}
    assert any(scenario.late_faults for scenario in scenarios)
    assert max(len(scenario.faults) for scenario in scenarios) >= 4


def test_in_every_stage_of_a_survivable_scenario_one_worker_is_left_alone() -> None:
    for scenario in map(draw, range(500)):
        fatal = {(fault.pipeline, fault.stage) for fault in scenario.faults if fault.kind != "slow"}
        fallen = [
            stage
            for stage in range(scenario.stages)
            if scenario.pipelines > 1 and all((d, stage) in fatal for d in range(scenario.pipelines))
        ]
        assert bool(fallen) is scenario.loses_stage
        assert all(fault.step is None or fault.step < STEPS for fault in scenario.faults)


def test_the_command_prints_a_table_and_tells_success(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", "20027"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:3] == ["20027", "1x2", "ok"]
    assert lines[-1].startswith("all exact")


# ---------------------------------------------------------------------- the audit notices what is wrong


def good_entries() -> list[Entry]:
    """Two processes of one stage train on four samples, two micro-batches per step; step 1 is redone because process 1
    died after it had offered its part.
    """
    entries: list[Entry] = []

    def write(what: str, pid: int, generation: int, step: int, *parts: tuple[int, tuple[int, ...]]) -> None:
        entries.append(Entry(what, len(entries), pid, 0, (0, generation), step, parts))

    write("offered", 1, 0, 0, (0, (0,)))
    write("offered", 2, 0, 0, (1, (1,)))
    for pid in (1, 2):
        write("reduced", pid, 0, 0)
        write("applied", pid, 0, 0)
    write("offered", 1, 0, 1, (0, (2,)))
    write("offered", 2, 1, 1, (0, (2,)), (1, (3,)))
    write("reduced", 2, 1, 1)
    write("applied", 2, 1, 1)
    return entries


def problems(entries: list[Entry]) -> list[str]:
    return audit(entries, stages=1, steps=2, microbatches=2, samples=4, global_batch=2)


def test_the_audit_accepts_a_redone_step() -> None:
    assert problems(good_entries()) == []


def test_the_audit_sees_a_lost_a_doubled_and_a_repeated_sample() -> None:
    entries = good_entries()
    lost = [replace(e, microbatches=e.microbatches[:1]) if e.generation == (0, 1) else e for e in entries]
    assert any("reduced the micro-batches [0] in step 1" in problem for problem in problems(lost))
    assert any("other than once: {3: 0}" in problem for problem in problems(lost))
    doubled = [replace(e, generation=(0, 1)) if e.step == 1 else e for e in entries]
    assert any("micro-batches [0, 0, 1] in step 1" in problem for problem in problems(doubled))
    repeated = [
        replace(e, microbatches=((0, (0,)), (1, (3,)))) if e.microbatches and e.generation == (0, 1) else e
        for e in entries
    ]
    assert problems(repeated) == ["stage 0 used samples of epoch 0 other than once: {0: 2, 2: 0}"]


def test_the_audit_sees_a_step_that_was_left_out_or_applied_twice() -> None:
    entries = good_entries()
    assert "stage 0 never reduced step 1" in problems([e for e in entries if e.what != "reduced" or e.step == 0])
    twice = [*entries, replace(entries[-1], time=99)]
    assert problems(twice) == ["process 2 applied the steps [0, 1, 1]"]


def test_a_scenario_that_is_not_exact_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    from chaos import run

    wrong = {name: value + 1e-9 for name, value in run.reference(False, False).items()}
    monkeypatch.setattr(run, "reference", lambda dropout, clips: wrong)
    scenario = replace(draw(1), pipelines=1, stages=1, faults=(), late_faults=(), dropout=False, clips=False)
    scenario = replace(scenario, loses_stage=False, checkpoint_every=0, restart_workers=False)
    assert run_scenario(scenario).problems == ("the weights differ by 1e-09",)


def test_a_scenario_that_hangs_ends_with_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = replace(draw(1), pipelines=1, stages=1, faults=(), late_faults=(), loses_stage=False)
    result = run_scenario(replace(scenario, restart_workers=False), limit=0.15)
    assert len(result.problems) == 1
    assert "_TooLong: it was not over after 0.15 s" in result.problems[0]
    assert result.seconds < 30
