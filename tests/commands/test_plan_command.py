"""``recycle-plan`` as a user meets it: files, tables, sweeps, and one line and exit code 2 for bad input."""

import os
import re
import sys
from pathlib import Path

import pytest
from command_driver import check_refused, run, run_all
from hydra import compose, initialize_config_module
from hydra.utils import instantiate
from support.pipes import without_reader
from support.scripts import completed

from lightning_recycle import __version__, planning
from lightning_recycle.commands import plan as plan_command
from lightning_recycle.commands import report as report_command
from lightning_recycle.engines import recycle_run
from lightning_recycle.errors import counted


def plan(directory: Path, *arguments: str) -> str:
    return run("recycle-plan", directory, *arguments)


def test_the_installed_script_plans_the_running_example(tmp_path):
    script = Path(sys.executable).with_name("recycle-plan")
    if not script.exists():
        pytest.skip("the package is not installed with its scripts")
    arguments = ["grid.pipelines=3", "grid.stages=4", "grid.microbatches=6", "failures=[[1,2]]", "planner=highs"]
    done = completed([script, *arguments, "output=plan.json"], cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "HYDRA" not in done.stdout, "the log of the planner is not an output of the command"
    for number in ("period", "27", "29", "0% (optimal)", "peak memory, micro-batches", "3/3/6/1", "1.000", "0.778"):
        assert number in done.stdout
    assert {file.name for file in tmp_path.iterdir()} == {"plan.json", "plan.svg"}
    result = planning.load_plan(tmp_path / "plan.json")
    assert result.schedule.failed == {planning.Worker(1, 2)}
    assert (result.backend, result.status, result.schedule.period) == ("highs", "optimal", 27)
    assert (tmp_path / "plan.svg").read_text().startswith("<svg")


def test_nothing_is_written_unless_it_is_asked_for(tmp_path):
    for arguments in (["failures=1"], ["-m", "failures=0,1"], ["--help"], ["--version"]):
        plan(tmp_path, *arguments)
        assert list(tmp_path.iterdir()) == [], arguments


def test_help_has_its_own_groups_and_the_comments_of_the_settings(tmp_path):
    shown = plan(tmp_path, "planner=highs", "--help")
    usage, _, purpose, _, *examples = shown.splitlines()[:7]
    assert usage.startswith("usage: recycle-plan [-m] ")
    assert purpose.startswith("Plan one iteration of training")
    assert all(line.startswith("  recycle-plan ") for line in examples)
    assert "\n  * highs            HiGHS through python-mip: the extra milp.\n" in shown
    assert "# Seconds, after which the best plan so far is used.\n    time_limit: 60.0" in shown
    assert "    # Per pipeline and iteration.\n    microbatches: 6\n" in shown
    for foreign in ("trainer", "hydra", "_target_", "${", "$$"):
        assert foreign not in shown
    assert plan(tmp_path, "--version") == f"recycle-plan {__version__}\n"


@pytest.mark.parametrize(("command", "arguments"), [
    (plan_command, ["--help"]),
    pytest.param(plan_command, ["failures=0"], marks=pytest.mark.long),
    (plan_command, ["-m", "failures=0,1"]),
    pytest.param(report_command, ["--help"], marks=pytest.mark.long),
    (recycle_run, ["--help"]),
])  # fmt: skip
def test_a_reader_that_has_seen_enough_ends_the_command_without_a_traceback(command, arguments, tmp_path):
    assert without_reader(command, *arguments, cwd=tmp_path) == (141, "")


def test_costs_memory_and_technique_reach_the_plan(tmp_path):
    (tmp_path / "out").mkdir()
    plan(
        tmp_path, "grid.pipelines=2", "grid.stages=2", "grid.microbatches=3", "costs.forward=[1.0,1.5]",
        "costs.backward_weight=0.5", "costs.communication=0.25", "memory.in_flight=[3,2]", "technique.staggered=false",
        "failures=[[0,0]]", "output=out/mine.json", "picture=null",
    )  # fmt: skip
    problem = planning.load_plan(tmp_path / "out" / "mine.json").schedule.problem
    assert problem.grid == planning.Grid(2, 2, 3)
    assert problem.costs.forward == (1.0, 1.5)
    assert problem.costs.backward_weight == (0.5, 0.5)
    assert problem.costs.communication == 0.25
    assert problem.in_flight_limit == (3, 2)
    assert (problem.technique.split_backward, problem.technique.staggered) == (True, False)
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["mine.json"]


def test_costs_and_memory_of_a_profile(tmp_path):
    stage = planning.StageProfile(0.010, 0.011, 0.009, activation_bytes=1000, output_bytes=500)
    planning.save_profile(tmp_path / "profile.json", planning.Profile((stage, stage), latency=0.001, bandwidth=1e6))
    arguments = ["grid.stages=2", "costs=profile", "costs.path=profile.json", "memory.bytes=4500"]
    out = plan(tmp_path, *arguments, "output=plan.json")
    problem = planning.load_plan(tmp_path / "plan.json").schedule.problem
    assert problem.costs.forward == (0.010, 0.010)
    assert problem.costs.communication == pytest.approx(0.0015)
    assert problem.in_flight_limit is None
    assert problem.memory == planning.Memory((4500, 4500), (0, 0), (1000, 1000), (1000, 1000))
    assert "4000 of 4500" in out


def test_one_of_a_thing_is_no_plural(tmp_path):
    few = ["grid.pipelines=1", "grid.stages=1", "grid.microbatches=1", "memory.in_flight=1"]
    row = next(line for line in plan(tmp_path, *few).splitlines() if "peak memory" in line)
    assert row.split()[1:-1] == ["peak", "memory,", "micro-batches", "│", "1", "of", "1"]
    assert [counted(count, noun) for count, noun in ((1, "call"), (0, "call"), (2000, "micro-batch"))] == [
        "1 call",
        "0 calls",
        "2,000 micro-batches",
    ]


def test_a_sweep_has_a_folder_for_each_job_and_a_table_of_all(tmp_path):
    out = plan(
        tmp_path, "-m", "planner=heuristic,cbc,highs", "failures=0,1", "output=plan.json", "hydra.sweep.dir=jobs"
    )
    assert sorted(file.name for file in (tmp_path / "jobs").iterdir() if file.is_dir()) == list("012345")
    plans = [planning.load_plan(tmp_path / "jobs" / str(job) / "plan.json") for job in range(6)]
    assert [plan.backend for plan in plans] == ["heuristic"] * 2 + ["cbc"] * 2 + ["highs"] * 2
    assert [len(plan.schedule.failed) for plan in plans] == [0, 1] * 3
    assert all((tmp_path / "jobs" / str(job) / "plan.svg").exists() for job in range(6))
    summary = out[out.index("Sweep") :].splitlines()
    assert len([line for line in summary if line.startswith(("heuristic", "cbc", "highs"))]) == 6
    assert not (tmp_path / "plan.json").exists()


def plans_of_library(out: str) -> list[list[str]]:
    """The cells of each row of the table of a library."""
    head, *lines = out[out.index("Plan library, 3 x 4 x 6, heuristic") :].splitlines()[1:]
    assert head.split()[:3] == ["failed", "in", "flight"]
    return [line.split() for line in lines if re.match(r"\d/", line)]


def test_a_sweep_with_an_impossible_job_runs_none(tmp_path):
    bad = [
        (["-m", "failures=0,1,99"], "failures=99 leaves a stage"),
        (["-m", "planner=heuristic,highs", "planner.effort=0,-1"], "planner.effort"),
        (["-m", "costs.forward=1,abc", "failures=0,1"], "costs.forward=abc: give a finite number of at least 0"),
        (["-m", "grid.stages=2,three"], "grid.stages=three: give an integer of at least 1."),
    ]
    assert [out for _, out, _ in check_refused("recycle-plan", tmp_path, bad, "hydra.sweep.dir=jobs")] == [""] * 4


def test_a_library_has_the_likeliest_plans_if_there_are_too_many(tmp_path):
    arguments = ["failures=3", "library=plans", "library_plans=6", "output=null", "planner.effort=0"]
    ((code, out, _),) = run_all("recycle-plan", tmp_path, arguments)
    assert code == 0
    rows = plans_of_library(out)
    assert len({(failed, in_flight) for failed, in_flight, *_ in rows}) == len(rows), "no two rows look alike"
    shown = [failed for failed, *_ in rows]
    assert shown[::2] == shown[1::2]
    assert shown[::2] == ["0/0/0/0", *("0/0/0/1", "1/0/0/0", "0/1/0/0"), "0/0/1/1", "0/1/1/1"]


def test_settings_of_planners_are_those_of_a_run_without_settings(monkeypatch):
    """Else the plans of a library made offline are not found at run time."""
    monkeypatch.setattr("mip.gurobi.has_gurobi", True)
    for name in ("heuristic", "cbc", "highs", "gurobi"):
        with initialize_config_module("lightning_recycle.conf", version_base=None):
            settings = compose("plan", [f"planner={name}"])
        assert instantiate(settings.planner) == planning.get_planner(name)


@pytest.mark.skipif("GUROBI_HOME" in os.environ, reason="Gurobi is there")
def test_a_solver_that_is_not_there_is_refused(tmp_path):
    ((code, _, err),) = run_all("recycle-plan", tmp_path, ["planner=gurobi", "failures=[[1,2]]"])
    assert (code, err.count("\n")) == (2, 1)
    assert err.startswith("recycle-plan: The planner 'gurobi' needs Gurobi")


BAD = [
    (["failures=[[0,1],[1,1],[2,1]]"], "all 3 replicas of stage 1 have failed"),
    (["failures=[[1]]"], "list of [pipeline,stage]"),
    (["failures=some"], "failures='some'"),
    (["failures=9"], "failures=9 leaves a stage of the grid 3 x 4 x 6 without a worker"),
    (["failures=true"], "failures=True"),
    (["memory.in_flight=0"],
     "memory.in_flight=0: give an integer of at least 1, or null for no limit, or a list of 4, one for each stage."),
    (["memory.in_flight=[4,4]"], "or a list of 4, one for each stage."),
    (["memory.bytes=1000"], "memory.bytes needs costs=profile"),
    (["costs.forward=-1"], "costs.forward=-1: give a finite number"),
    (["costs.forward=abc"], "=abc: give a finite number of at least 0, or a list of 4, one for each stage."),
    (["costs.forward=[1,abc,1,1]"], "costs.forward=[1,abc,1,1]: give a finite number of at least 0, or a list of 4"),
    (["costs.backward_input=null"], "costs.backward_input=null: give a finite number"),
    (["costs.forward=[1,2]"],
     "costs.forward=[1,2]: give a finite number of at least 0, or a list of 4, one for each stage."),
    (["costs.communication=fast"], "costs.communication=fast: "),
    (["~costs.reduce"], "~costs.reduce: "),
    (["costs=profile"],
     "costs.path=null: give a file that PlanningOptions(profile=...) wrote, e.g. costs.path=profile.json."),
    (["costs=profile", "costs.path=none.json"], "cannot read the profile none.json"),
    (["costs=measured"], "unknown costs 'measured': choose one of profile, uniform"),
    (["planner=magic"], "unknown planner 'magic': choose one of cbc, gurobi, heuristic, highs"),
    (["planner=highs", "planner.time_limit=-1"], "planner.time_limit=-1: give"),
    (["grid.stages=four"], "grid.stages=four: give an integer of at least 1."),
    (["planner.time_limit=5"],
     "choose one of compact_from, effort (of planner=heuristic; cbc, gurobi and highs have time_limit)."),
    (["costs.path=profile.json"], "reduce (of costs=uniform; profile has path)."),
    (["grid.pipeline=3"], "grid.pipeline"),
    (["technique.staggered=maybe"], "technique.staggered=maybe: use true or false"),
    (["output=bad.json/plan.json"], "output=bad.json/plan.json: bad.json is a file, not a folder: give another path."),
    (["library=bad.json"], "library=bad.json: bad.json is a file, not a folder: give another path."),
    (["output=mistyped/plan.json"], "there is no folder mistyped"),
    (["library=mistyped/plans"], "there is no folder mistyped"),
    (["output=[]"], "output=[]"),
    (["--output=plan.json"], "--output=plan.json. Settings are NAME=VALUE, without dashes; see recycle-plan --help"),
    (["plan.json"], "cannot read 'plan.json': settings are NAME=VALUE"),
    (["picture=plan.gif"], "picture=plan.gif: give a name that ends with .svg, or null."),
    (["output=plan.pdf"], "output=plan.pdf: give a name that ends with .json, or null."),
    (["failures=["], "check its brackets and quotes"),
]  # fmt: skip


def test_bad_input_ends_with_one_line_and_exit_code_2(tmp_path):
    (tmp_path / "bad.json").write_text("{")
    check_refused("recycle-plan", tmp_path, BAD)


def test_forwards_are_computed_again_where_memory_is_short(tmp_path):
    arguments = ["grid.pipelines=3", "grid.stages=4", "grid.microbatches=6", "memory.in_flight=2"]
    plan(tmp_path, *arguments, "output=without.json")
    shown = plan(tmp_path, *arguments, "memory.checkpoint=0.1", "output=with.json")
    without, found = (planning.load_plan(tmp_path / name).schedule for name in ("without.json", "with.json"))
    planning.validate(found)
    assert found.period < without.period
    assert sum(len(found.recomputed(worker)) for worker in found.live_workers) > 0
    assert "forwards computed again" in shown
    assert "R  forward, again" in (tmp_path / "with.svg").read_text()
    check_refused(
        "recycle-plan", tmp_path, [(["memory.checkpoint=0.1"], "memory.checkpoint=0.1: with memory.in_flight")]
    )
