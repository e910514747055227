"""Random scenarios are exact, and a run that is not would be noticed."""

import copy
import json
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import reduce
from operator import getitem
from typing import Any

import pytest
import torch
from support.sampling import sampled
from support.scripts import completed

from chaos.__main__ import main
from chaos.diary import Entry, audit
from chaos.draws import draw
from chaos.reference import reference
from chaos.report import row, summary
from chaos.run import Result, run_scenario
from chaos.scenario import EPOCH, FAMILIES, SAMPLES, STEPS_IF_STOPPED, Crowd, LateFault, Recipe, Scenario
from chaos.state import compare, missing_checkpoints
from chaos.workplace import NEEDS_SMALL_DISKS, Workplace, workplace

SEEDS = (20029, 20016, 20116, 20082, 20412, 20276, 20028, 20077, 20073, 20478)
SEEDS_WITH_SMALL_DISKS = (20223, 20211)
QUICK = 20000
"""Seeds of scenarios that take little time, at least one of each family."""


@pytest.fixture(scope="module")
def place() -> Iterator[Workplace]:
    with workplace() as made:
        yield made


@pytest.mark.parametrize("seed", sampled(SEEDS, 1, rest=pytest.mark.long))
def test_a_random_scenario_ends_in_the_exact_state_and_leaves_nothing(seed, place):
    assert run_scenario(draw(seed), place).problems == ()


@pytest.mark.long
def test_scenarios_with_small_disks_end_so_too():
    """In a process of its own, which can have a mount namespace."""
    command = [sys.executable, "-m", "chaos", "--only", *map(str, SEEDS_WITH_SMALL_DISKS)]
    done = completed(command)
    if "LEFT OUT" in done.stdout:
        pytest.skip("this system allows no mount namespace")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_samples_hold_every_family():
    assert {draw(seed).family for seed in (*SEEDS, *SEEDS_WITH_SMALL_DISKS)} == FAMILIES.keys() - {"elastic"}


@pytest.mark.parametrize("stages", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_run_begins_with_one_lane_has_six_in_the_middle_and_two_in_the_end(stages, place):
    recipe = Recipe(monitored="train_error", keeps_best=True)
    crowds = (Crowd(5, 6 * stages), Crowd(13, 2 * stages))
    killed = (LateFault("kill", 3, 0, 20),)
    scenario = Scenario(1, "elastic", 3, stages, recipe, late_faults=killed, lanes=6, begins=1, crowds=crowds)
    result = run_scenario(scenario, place)
    assert result.problems == ()
    joined, lost, left = (result.events[kind] for kind in ("rejoined", "failure", "left"))
    assert joined >= 5 * stages + 1
    assert (lost, stages + joined - lost - left) == (1, 2 * stages)


# ---------------------------------------------------------------------- what is drawn


def test_a_scenario_depends_on_its_seed_only():
    assert draw(7) == draw(7)
    assert len({draw(seed) for seed in range(50)}) == 50


def test_scenarios_of_a_run_hold_every_family_kind_of_fault_and_option():
    scenarios = [draw(seed) for seed in range(10_000, 10_300)]
    assert {scenario.family for scenario in scenarios} == FAMILIES.keys()
    kinds = {fault.kind for scenario in scenarios for fault in scenario.faults}
    assert kinds == {"kill", "exit", "exception", "hang", "deadlock", "slow", "partition", "preempt"}
    points = {fault.at for scenario in scenarios for fault in scenario.faults}
    assert {"setup", "recovery", "checkpoint", "end", "forward", "reduce", "optimizer"} <= points
    for option in ("restart_workers", "staggered", "split_backward", "loses_stage", "strangers"):
        assert {bool(getattr(scenario, option)) for scenario in scenarios} == {True, False}
    assert {len(scenario.moves) for scenario in scenarios} == {0, 1, 2, 4}
    assert {flip.target for scenario in scenarios for flip in scenario.flips} == {"message", "matmul"}
    assert {scenario.split_backward for scenario in scenarios} == {True, False, "auto"}
    for option in ("dropout", "clips", "stops", "keeps_best", "saves"):
        assert {bool(getattr(scenario.recipe, option)) for scenario in scenarios} == {True, False}
    assert {scenario.recipe.monitored for scenario in scenarios} == {"", "train_error", "val_error"}
    assert {(3, 3), (2, 2), (1, 2)} <= {(scenario.pipelines, scenario.stages) for scenario in scenarios}
    assert any(scenario.late_faults for scenario in scenarios)
    assert {crowd.kills for scenario in scenarios for crowd in scenario.crowds} == {True, False}
    assert max(len(scenario.faults) for scenario in scenarios) >= 4


ENDS_A_WORKER = ("OSError", "MemoryError", "descriptors", "kill-loader")


def test_in_every_stage_of_a_survivable_scenario_one_worker_is_left_alone():
    for scenario in map(draw, range(1000)):
        fatal = {(fault.pipeline, fault.stage) for fault in scenario.faults if fault.kind != "slow"}
        fatal |= {t.worker for t in scenario.troubles if t.kind in ENDS_A_WORKER and t.worker is not None}
        fallen = [
            stage
            for stage in range(scenario.stages)
            if scenario.pipelines > 1 and all((d, stage) in fatal for d in range(scenario.pipelines))
        ]
        assert bool(fallen) is scenario.loses_stage
        assert all(fault.step is None or fault.step < scenario.recipe.steps for fault in scenario.faults)
        assert all(trouble.step < scenario.recipe.steps for trouble in scenario.troubles)


def test_what_fails_beside_a_slow_worker_fails_before():
    """A peer that is well may cost a slow worker its place; so the peer must not fail afterwards."""
    slow = [s for s in map(draw, range(1000)) if s.family in ("slow-hooks", "slow-microbatches", "held-gil")]
    assert any(scenario.faults for scenario in slow)
    for scenario in slow:
        (trouble,) = scenario.troubles
        assert trouble.seconds > scenario.heartbeat_timeout
        assert all(fault.step is not None and fault.step < trouble.step - 1 for fault in scenario.faults)


def test_only_scenarios_of_a_family_are_drawn_if_it_is_named():
    from chaos.__main__ import _seeds

    found = list(_seeds([1, 2], 3, ["strangers"], ()))
    assert len(found) == 6
    assert {draw(seed).family for seed in found} == {"strangers"}
    assert {seed // 10_000 for seed in found} == {1, 2}
    assert not {draw(seed).family for seed in _seeds([1], 100, None, NEEDS_SMALL_DISKS)} & set(NEEDS_SMALL_DISKS)


# ---------------------------------------------------------------------- the command


@pytest.mark.long
def test_the_command_prints_a_table_and_tells_success(capsys):
    assert main(["--only", str(QUICK)]) == 0
    out = capsys.readouterr().out
    (line,) = (line for line in out.splitlines() if line.split()[:1] == [str(QUICK)])
    assert line.split()[1:3] == [f"{draw(QUICK).pipelines}x{draw(QUICK).stages}", "ok"]
    assert "all exact" in out
    assert all(f"LEFT OUT: {family}" in out for family in NEEDS_SMALL_DISKS)


def test_the_table_counts_by_family_and_names_the_seeds_that_failed():
    good, bad = Result(10_000, (), 2.0, 1e-16, {"failure": 1}), Result(10_001, ("it hung",), 3.0, None, {})
    assert row(bad).splitlines()[1].strip() == "it hung"
    text = summary([good, bad], 5.0)
    assert "FAILED: 1 of 2. Again: --only 10001" in text
    by_family = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line.split()[:1] != []}
    assert by_family[draw(10_000).family][0] in ("1", "2")
    assert json.dumps(good.events)


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


def test_the_audit_accepts_a_redone_step():
    assert problems(good_entries()) == []


def test_the_audit_sees_a_lost_a_doubled_and_a_repeated_sample():
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


def test_the_audit_sees_a_step_that_was_left_out_or_applied_twice():
    entries = good_entries()
    assert "stage 0 never reduced step 1" in problems([e for e in entries if e.what != "reduced" or e.step == 0])
    twice = [*entries, replace(entries[-1], time=99)]
    assert problems(twice) == ["process 2 applied the steps [0, 1, 1]"]


# ---------------------------------------------------------------------- the comparison notices what is wrong

MONITORED = Recipe(monitored="train_error", keeps_best=True)


@pytest.fixture(scope="module")
def undisturbed() -> Iterator[dict[str, Any]]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield reference(MONITORED)
    torch.set_default_dtype(before)


def test_an_undisturbed_training_is_driven_by_what_it_measures(undisturbed):
    epochs = undisturbed["callbacks"]["Tally"]["epochs"]
    assert len({epoch["options"][0]["lr"] for epoch in epochs}) > 1
    assert {float(epoch["metrics"]["train_samples"]) for epoch in epochs} == {SAMPLES}
    assert undisturbed["callbacks"]["Tally"]["calls"]["on_train_batch_end"] == len(epochs) * EPOCH
    assert len(undisturbed["files"]) == 3
    assert reference(replace(MONITORED, stops=True))["progress"]["global_step"] == STEPS_IF_STOPPED


def test_the_same_state_has_no_differences(undisturbed):
    assert list(compare(copy.deepcopy(undisturbed), undisturbed)) == []


PLACES = (
    "final checkpoint['lr_schedulers'][0]['best']",
    "final checkpoint['optimizer_states'][0]['state'][0]['exp_avg']",
    "metrics['callback']['train_error']",
    "callbacks['Tally']['calls']['on_before_optimizer_step']",
    "callbacks['Tally']['epochs'][2]['options'][0]['lr']",
    "rows[3]['train_loss']",
    "files",
    "progress['should_stop']",
)


@pytest.mark.parametrize("where", PLACES)
def test_what_differs_is_named(undisturbed, where):
    state: Any = copy.deepcopy(undisturbed)
    *path, last = (int(key) if key.isdigit() else key for key in re.findall(r"[\w ]+", where))
    holder = reduce(getitem, path, state)
    holder[last] = [*holder[last], "last.ckpt.tmp"] if where == "files" else holder[last] + 1e-6
    (problem,) = compare(state, undisturbed)
    assert problem.startswith(f"{where}: ")


def test_what_one_worker_saw_otherwise_is_named(undisturbed):
    changed = copy.deepcopy(undisturbed)
    (seen,) = undisturbed["workers"].values()
    other = copy.deepcopy(seen)
    other["metrics"]["callback"]["train_samples"] = torch.tensor(SAMPLES - 12.0)
    changed["workers"] = {"0-77": seen, "3-78": other}
    (problem,) = compare(changed, undisturbed)
    assert problem.startswith("worker 3-78['metrics']['callback']['train_samples']: differs by 12")


def test_damaged_missing_and_foreign_checkpoints_are_named(tmp_path):
    names = [f"epoch=0-step={step}.ckpt" for step in (2, 4, 6)]
    torch.save({"global_step": 2}, tmp_path / names[0])
    (tmp_path / names[2]).write_bytes(b"half")
    (tmp_path / ".tmp-1").touch()
    foreign, damaged = missing_checkpoints(tmp_path, names, full=[4])
    assert foreign == ".tmp-1 is in the folder of the checkpoints"
    assert damaged.startswith(f"{names[2]} cannot be read")
    assert f"{names[1]} is missing, though the disk was not full" in missing_checkpoints(tmp_path, names, full=[])


# ---------------------------------------------------------------------- a scenario that is wrong is reported

QUIET = Scenario(seed=1, family="faults", pipelines=1, stages=1)


def test_a_scenario_that_is_not_exact_is_reported(monkeypatch, place):
    from chaos import run

    def wrong(recipe: Recipe) -> dict[str, Any]:
        state = copy.deepcopy(reference(recipe))
        state["weights"]["layers.0.bias"] += 1e-9
        state["progress"]["global_step"] += 1
        return state

    monkeypatch.setattr(run, "reference", wrong)
    found = run_scenario(QUIET, place).problems
    assert len(found) == 2
    assert found[0].startswith("weights['layers.0.bias']: differs by 1")
    assert found[1] == "progress['global_step']: 24 != 25"


def test_what_is_left_in_tmpdir_is_reported(monkeypatch, place):
    from chaos import run

    def leaves_something(*arguments: Any) -> str:
        (place.tmpdir / "payload.pickle").touch()
        return "in an error of its own"

    monkeypatch.setattr(run, "_fit", leaves_something)
    problems = run_scenario(QUIET, place).problems
    assert problems == ("it ended in an error of its own", "left in TMPDIR: payload.pickle")
    assert place.in_tmpdir() == set()


def test_a_scenario_that_hangs_ends_with_its_bound(monkeypatch, place):
    from chaos import run

    monkeypatch.setattr(run.training, "validation_loader", lambda *_: time.sleep(20))
    result = run_scenario(QUIET, place, limit=0.15)
    assert len(result.problems) == 1
    assert "_TooLong: it was not over after 0.15 s" in result.problems[0]
    assert result.seconds < 30
