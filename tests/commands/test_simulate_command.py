"""``recycle-simulate`` as a user meets it: figures, files, sweeps, and one line for bad input."""

import json
import re
import sys
from dataclasses import asdict, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from command_driver import check_refused, run, run_all
from hydra import compose, initialize_config_dir
from hydra.utils import get_class, instantiate
from omegaconf import OmegaConf
from support.scripts import completed

from lightning_recycle.commands.simulate import model_from
from lightning_recycle.simulation import Cluster, FailureRate, Poisson, Restart, available_models, get_model, repeat

pytestmark = pytest.mark.long

CONF = Path(__file__).parents[2] / "conf" / "simulation"
SMALL = ["model=gpt3_medium", "duration=6h", "seeds=3"]


def simulate(directory: Path, *arguments: str) -> str:
    return run("recycle-simulate", directory, *arguments)


def result_in(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "result.json").read_text())


def options(group: str) -> list[str]:
    return sorted(file.stem for file in (CONF / group).glob("*.yaml"))


def composed(*overrides: str) -> dict[str, Any]:
    with initialize_config_dir(str(CONF), version_base=None):
        return OmegaConf.to_container(compose("simulate", overrides=list(overrides)), resolve=True)


def test_each_job_says_at_its_start_what_its_failures_mean_and_nothing_else(tmp_path):
    """A unit that was forgotten is seen at once: "failure every 2 s" runs for minutes."""
    few = ["-m", "model=gpt3_medium", "policy=restart", "duration=10s", "seeds=1"]
    ((code, out, err),) = run_all("recycle-simulate", tmp_path, [*few, "failures.mtbf=2,2h"])
    assert (code, err.splitlines()) == (
        0,
        [f"simulating gpt3_medium, Restart (1F1B), failure every {every}: 1 run of 10 s" for every in ("2 s", "2 h")],
    )
    assert "simulating" not in out


@pytest.fixture(scope="module")
def one(tmp_path_factory) -> tuple[str, Path]:
    """What one run prints, and its folder."""
    directory = tmp_path_factory.mktemp("one")
    out = simulate(directory, *SMALL, "policy=restart", "policy.restart=2min", "failures.mtbf=30min", "output=here")
    return out, directory / "here"


def test_what_is_written_is_what_the_simulator_says(one):
    result = result_in(one[1])
    model = get_model("gpt3_medium")
    expected = repeat(model, Cluster.of(model), Restart(restart="2min"), Poisson("30min"), "6h", range(3))
    assert result["throughput"] == expected.mean("throughput")
    assert result["ratio"] == expected.ratio
    assert result["deviation"] == expected.deviation
    assert [run["throughput"] for run in result["runs"]] == [each.throughput for each in expected.results]
    assert "checkpoint_every" in result["policy"].pop("durations")
    assert result["policy"] == {"name": "Restart", "settings": asdict(Restart(restart="2min")), "changed": ["restart"]}
    assert result["policy"]["settings"]["schedule"] == "1f1b"
    assert result["mfu"] == expected.mean("mfu")
    assert result["model"]["efficiency"] == model.efficiency
    assert sum(result["gpu_seconds"].values()) == pytest.approx(32 * 6 * 3600)
    assert sum(result["losses"].values()) == pytest.approx(result["fault_free_throughput"] - result["throughput"])


def test_what_is_printed_is_what_is_written(one):
    out, folder = one
    result = result_in(folder)
    lines = {re.split(r"  |, | \(", line)[0].strip(" │"): line for line in out.splitlines()}
    assert f"{result['throughput']:.2f} samples/s" in out
    assert f"{result['ratio']:.3f}" in out
    assert "Restart (1F1B, 2 min)" in out
    for shown in ("global batch 128", "of the peak of an A100-80GB", "100 Gb/s"):
        assert shown in out
    assert f"{result['goodput']:.3f}, {result['ettr']:.3f}, {result['mfu']:.3f}" in out
    for cause, lost in result["losses"].items():
        if cause == "slower steps":  # the others stand in two tables
            assert f"{lost:.3f}" in lines[cause]
    for cause, seconds in result["gpu_seconds"].items():
        assert f"{seconds / 3600:,.2f}" in lines[cause], cause


def test_a_run_without_a_kept_step_says_why_and_shows_no_negative_zero(tmp_path):
    tiny = ["model=gpt3_medium", "seeds=1", "duration=10s"]
    out = simulate(tmp_path, *tiny, "policy=restart", "failures=scripted", "failures.outages=[[0.1,[0],null]]")
    assert "nothing was trained: a failure undid every step" in out
    assert "-0.0" not in out
    out = simulate(tmp_path, *tiny, "policy=restart", "failures=fraction", "failures.part=1")
    assert "nothing was trained: too few workers for a pipeline" in out


def test_rows_say_what_a_gain_is_and_that_checkpoints_pause_too(tmp_path):
    few = ["model=gpt3_medium", "seeds=1", "duration=6h", "failures=fraction", "failures.part=0"]
    out = simulate(tmp_path, *few, "policy=recycle", "policy.effort=0", "schedule=planned")
    assert re.search(r"^slower steps \(negative: faster\) +-", out, re.MULTILINE)
    out = simulate(tmp_path, *few, "policy=restart")
    assert re.search(r"^reconfiguring, checkpoints +0\.0[1-9]", out, re.MULTILINE)


def test_outages_are_given_one_by_one(tmp_path):
    ((code, _, err),) = run_all("recycle-simulate", tmp_path, ["failures=scripted"])
    assert code == 2
    assert err == (
        "recycle-simulate: failures.outages=[]: give [[begin, [nodes], end]], such as [[3600,[0],null]]:"
        " node 0 fails after an hour, for good.\n"
    )


def test_the_timeline_has_no_gap(one):
    _, folder = one
    result = result_in(folder)
    intervals = result["timeline"]["intervals"]
    assert intervals[0]["begin"] == 0
    assert intervals[-1]["end"] == pytest.approx(6 * 3600)
    assert all(before["end"] == after["begin"] for before, after in pairwise(intervals))
    failures = [event for event in result["timeline"]["events"] if event["kind"] == "failure"]
    assert sum(len(event["nodes"]) for event in failures) == result["runs"][0]["node_failures"] > 0


def test_a_sweep_over_all_policies_has_a_folder_for_each_and_a_table(tmp_path):
    out = simulate(tmp_path, "-m", *SMALL, "seeds=1", "policy=glob(*)", "failures.mtbf=2h,30min", "output=jobs")
    policies = options("policy")
    found = [result_in(tmp_path / "jobs" / str(job)) for job in range(2 * len(policies))]
    classes = [str(OmegaConf.load(CONF / "policy" / f"{name}.yaml")._target_).split(".")[-1] for name in policies]
    assert [each["policy"]["name"] for each in found] == [name for name in classes for _ in range(2)]
    assert [each["failures"]["settings"]["mtbf"] for each in found] == [7200.0, 1800.0] * len(policies)
    table = out[out.index("Sweep") :].splitlines()
    assert len([line for line in table if line.startswith("gpt3_medium")]) == len(found)
    (spares,) = [each for each in found if each["policy"]["name"] == "Spares"][:1]
    assert spares["cluster"]["nodes"] == 33


@pytest.mark.parametrize("schedule", [[], ["schedule=planned"]])
def test_a_sweep_with_unlike_schedules_warns_of_them(tmp_path, schedule):
    few = [*SMALL, "seeds=1", "policy=recycle,restart", *schedule]
    assert ("compare policies with the same one" in " ".join(simulate(tmp_path, "-m", *few).split())) is (not schedule)


def test_a_sweep_over_all_failure_sources(tmp_path):
    simulate(tmp_path, "-m", *SMALL, "policy=drop_replica", "failures=glob(*,exclude=scripted)", "output=jobs")
    names = [name for name in options("failures") if name != "scripted"]
    found = [result_in(tmp_path / "jobs" / str(job)) for job in range(len(names))]
    assert [len(each["runs"]) for each in found] == [1 if name == "trace" else 3 for name in names]
    rates = dict(zip(names, found, strict=True))
    assert rates["fraction"]["node_failures"] == 2
    assert rates["trace"]["node_failures"] > 10


def test_nothing_is_written_unless_it_is_asked_for(tmp_path):
    few = [*SMALL, "seeds=1", "policy=restart"]
    for arguments in (few, ["-m", *few, "failures.mtbf=1h,2h"], ["--help"], ["--version"]):
        assert "wrote" not in simulate(tmp_path, *arguments)
        assert list(tmp_path.iterdir()) == [], arguments


def test_jobs_return_a_number_that_a_sweeper_can_optimize(tmp_path):
    code = (
        "import sys; from lightning_recycle.commands import simulate as s; f = s.simulate_and_show\n"
        "s.simulate_and_show = lambda config: print('VALUE', repr(f(config)))\n"
        "sys.argv = ['x', 'output=here', *sys.argv[1:]]; s.main()"
    )
    command = [sys.executable, "-c", code, *SMALL, "policy=fault_free"]
    done = completed(command, cwd=tmp_path, check=True)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("VALUE")]
    assert float(line.split()[1]) == pytest.approx(27.58)


@pytest.mark.parametrize("group", ["policy", "failures"])
def test_configuration_names_every_constant_with_the_value_that_the_class_has(group):
    for name in options(group):
        settings = composed(f"{group}={name}")[group]
        kind = get_class(settings.pop("_target_"))
        assert set(settings) == {item.name for item in fields(kind)}, name
        usual = FailureRate("rsc1") if name == "rsc1" else kind()
        assert kind(**settings) == usual, name
        assert instantiate({"_target_": f"{kind.__module__}.{kind.__name__}", **settings}) == usual


def test_configuration_of_models_is_that_of_the_catalogue():
    assert set(options("model")) == set(available_models())
    for name in available_models():
        settings = composed(f"model={name}")["model"]
        model = get_model(name)
        assert model_from(settings) == model
        assert set(settings) == {item.name for item in fields(model)}
    changed = composed("model=gpt3_6_7b", "model.efficiency=0.5", "model.gpu=H100-80GB")["model"]
    assert (model_from(changed).efficiency, model_from(changed).device.name) == (0.5, "H100-80GB")


BAD = [
    (["model=gpt5"], "unknown model 'gpt5': choose one of gpt3_3_35b, gpt3_6_7b, gpt3_medium, megatron_"),
    (["policy=hope"], "unknown policy 'hope': choose one of auto, bamboo, drop_replica, elastic"),
    (["policy=bambo"], ", varuna. Did you mean 'bamboo'?"),
    (["failures=never"], "unknown failures 'never': choose one of fraction, llama3, mtbf, regular, rsc1"),
    (
        ["failures=trace", "failures.trace=aws"],
        "failures.trace=aws: there is no such trace: choose one of aws-g4dn, aws-p2, aws-p3",
    ),
    (["failures=trace", "failures.trace=aws-p4"], "the path of a file. Did you mean aws-p"),
    (["failures.mtfb=1h"], "'failures.mtfb': choose one of mtbf, repair. Did you mean 'failures.mtbf'?"),
    (["failures.mtbf=often"], "failures.mtbf=often: give a duration above 0, e.g. 90, 30min or 6h."),
    (["failures=llama3", "failures.rate=llama4"], "one of llama3, rsc1. Did you mean llama3?"),
    (["failures=trace", "failures.start=2d"], "failures.start=172800 s: the trace aws-p3 ends after"),
    (["policy.adaptive=maybe"], "policy.adaptive=maybe: use true or false"),
    (["policy=spares", "policy.spares=two"], "policy.spares=two: give an integer of at least 0"),
    (["policy=spares", "cluster.extra_nodes=0"], "policy.spares=1: the cluster has 0 nodes more than gpt3_6_7b needs"),
    (["model.name=mine", "model.throughput=null"], "give model.throughput or model.efficiency"),
    (["duration=long"], "duration=long: give"),
    (["model.gpu=A10"], "model.gpu=A10: use V100-16GB, "),
    (["schedule=planed"], "schedule=planed: use 1f1b or planned. Did you mean planned?"),
    (["policy.schedule=best"], "policy.schedule=best: use 1f1b or planned."),
    (["seeds=0"], "seeds=0: give an integer of at least 1"),
]


def test_bad_input_ends_with_one_line_and_exit_code_2(tmp_path):
    check_refused("recycle-simulate", tmp_path, BAD, "output=here")
    assert not (tmp_path / "here" / "result.json").exists()


@pytest.mark.parametrize("sweep", [[], ["-m", "seeds=1,2"]])
def test_a_folder_that_cannot_be_made_is_refused(tmp_path, sweep):
    (tmp_path / "plan.json").write_text("{}")
    calls = [
        (
            [*sweep, *SMALL, "output=plan.json"],
            "output=plan.json: plan.json is a file, not a folder: give another path.",
        ),
        ([*sweep, *SMALL, "output=plan.json/x"], "output=plan.json/x: plan.json is a file, not a folder: give another"),
        ([*sweep, *SMALL, "output=/proc/x"], "output=/proc/x: nothing can be written in /proc (No such file"),
        ([*sweep, *SMALL, "output=mistyped/here"], "no folder mistyped"),
    ]
    check_refused("recycle-simulate", tmp_path, calls)
    assert not (tmp_path / "mistyped").exists()


def test_a_folder_that_cannot_be_written_is_bad_input(tmp_path):
    (tmp_path / "here" / "result.json").mkdir(parents=True)
    ((code, _, err),) = run_all("recycle-simulate", tmp_path, [*SMALL, "policy=fault_free", "output=here"])
    assert (code, err.count("\n")) == (2, 2)
    assert err.splitlines()[1].startswith("recycle-simulate: cannot write to ")
