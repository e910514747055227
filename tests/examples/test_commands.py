"""Every command that the documentation shows, run as a user runs it, at a smaller size."""

import csv
import json
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from support.scripts import completed, output_of

from resume_on_another_grid import TOLERANCE, Row, main

ROOT = Path(__file__).parents[2]
SMALL_GPT = ["model.width=32", "model.blocks=2", "model.heads=2", "data.context=32", "data.max_bytes=50000"]
QUIET = "trainer.enable_progress_bar=false"


def run(directory: Path, script: str, *arguments: str, code: int = 0, **environment: str) -> str:
    """What ``python examples/<script> <arguments>`` prints in ``directory``, errors included."""
    variables = {"COLUMNS": "120", "OMP_NUM_THREADS": "1", **environment}
    return output_of(ROOT / "examples" / script, *arguments, code=code, env=variables, cwd=directory)


def losses(metrics: Path, column: str = "train_loss") -> dict[int, float]:
    with metrics.open(newline="") as file:
        return {int(row["step"]): float(row[column]) for row in csv.DictReader(file) if row.get(column)}


def failures(log: Path) -> list[list[int]]:
    """The workers that were lost, sorted, from the events in a job's log file."""
    events = [json.loads(line[line.index("{") :]) for line in log.read_text().splitlines() if "events][INFO" in line]
    return sorted(event["worker"] for event in events if event["kind"] == "failure")


# ---------------------------------------------------------------------- sweeps


def sweep(directory: Path, *varied: str) -> list[Path]:
    """The folders of the jobs of a sweep of the demo, in their order."""
    fixed = ["hydra/launcher=basic", "trainer.max_steps=6", "hydra.sweep.dir=sweep", QUIET, *SMALL_GPT]
    out = run(directory, "train_gpt.py", "-m", *varied, *fixed)
    folders = sorted((path for path in (directory / "sweep").iterdir() if path.is_dir()), key=lambda p: int(p.name))
    assert len(re.findall(r"^wrote .*/model\.pt$", out, re.MULTILINE)) == len(folders)
    assert {path.name for path in directory.iterdir()} == {"sweep"}
    table = [re.split(r"\s*│\s*", line)[1:-1] for line in out[out.rindex("Sweep") :].splitlines() if line[:1] == "│"]
    assert [row[0] for row in table] == [folder.name for folder in folders]
    for folder, (_, differs, result) in zip(folders, table, strict=True):
        assert {override.partition("=")[0] for override in differs.split()} == {v.partition("=")[0] for v in varied}
        # What the job returned, for optimizers: the mean of the last steps' losses.
        last = [loss for step, loss in losses(folder / "metrics" / "metrics.csv").items() if step > 0]
        assert float(result) == pytest.approx(sum(last) / 5, abs=1e-4)
        assert set(losses(folder / "metrics" / "metrics.csv")) == set(range(6))
        written = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
        assert {"model.pt", "train_gpt.log", "schedules.svg", ".hydra/overrides.yaml"} <= written
    return folders


def check_results(folders: list[Path]) -> None:
    """Jobs with the same number of stages end with the same loss, and exactly those with a fault lost a worker."""
    for stages in (0, 1):  # another number of pipelines is another global batch
        last = [losses(folder / "metrics" / "metrics.csv")[5] for folder in folders[stages::2]]
        assert last == pytest.approx([last[0]] * 6, abs=1e-3)
    lost = [failures(folder / "train_gpt.log") for folder in folders]
    for first in (0, 6):
        assert lost[first : first + 4] == [[], [], [[1, 0]], [[1, 0]]]
        assert all(len(workers) <= 1 for workers in lost[first + 4 : first + 6])  # at a random time, or too late


@pytest.mark.exhaustive
def test_sweep_over_planners_faults_and_grids_runs_to_the_end_with_the_same_results(tmp_path):
    varied = "planner=heuristic,highs", "faults=none,kill_one,mtbf", "strategy.pipeline_parallel_size=1,2"
    folders = sweep(tmp_path, *varied)
    assert len(folders) == 12
    check_results(folders)


# ---------------------------------------------------------------------- the demo

RECORDER = """
import os, sys
TRUSTED = tuple(os.environ["RECORD_TRUSTED"].split(os.pathsep))
LOG = os.open(os.environ["RECORD_LOG"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)

def note(kind, what):
    os.write(LOG, f"{kind} {what}\\n".encode())

def hook(event, arguments):
    if event == "open" and isinstance(arguments[0], (str, bytes)):
        path, mode, flags = arguments
        path = os.path.realpath(os.fsdecode(path))
        writes = any(c in (mode or "") for c in "wax+") or (flags or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if not path.startswith(TRUSTED) and not os.path.isdir(path):
            note("wrote" if writes else "read", path)
    elif event == "os.rename":
        note("renamed", os.path.realpath(os.fsdecode(arguments[0])) + " " + os.path.realpath(os.fsdecode(arguments[1])))
    elif event == "socket.connect" and arguments[0].family in (2, 10):
        note("connected", arguments[1][0])
    elif event in ("webbrowser.open", "os.startfile"):
        note("browser", arguments)

sys.addaudithook(hook)
"""


@pytest.mark.long
def test_demo_ends_with_a_comparison_and_opens_nothing_it_did_not_write(tmp_path, request):
    """Watched in all its processes: files beside the installation's and the system's, connections, browsers."""
    # Sockets lie in TMPDIR, and their paths must be short.
    recorder, home, work = tmp_path / "recorder", Path(tempfile.mkdtemp(prefix="demo-")), tmp_path / "work"
    request.addfinalizer(lambda: shutil.rmtree(home))
    for folder in (recorder, work):
        folder.mkdir()
    (recorder / "sitecustomize.py").write_text(RECORDER)
    (work / "outputs").mkdir()
    (work / "outputs" / "metrics.csv").write_text("of somebody else\n")
    installation = [
        sys.prefix,
        sys.base_prefix,
        *(str(ROOT / part) for part in ("lightning_recycle", "conf", "examples")),
    ]
    system = ["/usr", "/lib", "/etc", "/proc", "/sys", "/dev"]
    trusted = [os.path.realpath(path) for path in (*installation, *system, recorder)]
    out = run(
        work, "train_gpt.py", "experiment=demo", "trainer.max_steps=16", QUIET, *SMALL_GPT, HOME=str(home),
        TMPDIR=str(home), PYTHONPATH=str(recorder), RECORD_TRUSTED=os.pathsep.join(trusted),
        RECORD_LOG=str(tmp_path / "log"),
    )  # fmt: skip
    table = out[out.rindex("What the failure costs") :]
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in table.splitlines() if line.startswith("│")]
    found = {row[0]: row[1:] for row in cells}
    assert found["workers at the end"][:2] == ["4", "3"]
    assert found["workers at the end"][3] == "4"
    assert found["steps run again"] == ["0", "1", "1", "3"]  # killed in step 6, checkpoint after 4
    assert all(value.endswith(" s") for value in found["failure until its step is committed"][1:])
    assert all(float(value) < 1e-3 for value in found["difference from the first column"][1:])
    assert "Failures" in out
    assert "Throughput" in out

    wrote, read, others = set(), set(), []
    for line in (tmp_path / "log").read_text().splitlines():
        kind, _, what = line.partition(" ")
        if kind == "wrote":
            wrote.add(what)
        elif kind == "renamed":
            wrote.update(what.split(" "))
        elif kind == "read":
            read.add(what)
        else:
            others.append((kind, what))
    assert any(path.endswith("metrics.csv") for path in read), "the recorder saw nothing"
    assert any(path.endswith(".ckpt") for path in read)
    assert sorted(path for path in read - wrote if os.path.exists(path)) == []
    assert {what for _, what in others} <= {"127.0.0.1"}


# ---------------------------------------------------------------------- vision


@pytest.mark.exhaustive
def test_vision_validates_in_a_pipeline_and_loses_its_leader_or_a_node(tmp_path):
    arguments = ["trainer.max_steps=20", "trainer.val_check_interval=10", "+trainer.limit_val_batches=6", QUIET]
    run(tmp_path, "train_vision.py", "-m", "faults=kill_leader,node", *arguments, "hydra.sweep.dir=sweep")
    run(tmp_path, "train_vision.py", *arguments, "strategy=single_device", "hydra.run.dir=alone")
    folders = [tmp_path / "sweep" / "0", tmp_path / "sweep" / "1"]
    assert [failures(folder / "train_vision.log") for folder in folders] == [[[0, 1]], [[1, 0], [1, 1]]]
    names = ("train_loss", "val_loss", "val_accuracy")
    leader, node = ({name: losses(folder / "metrics" / "metrics.csv", name) for name in names} for folder in folders)
    assert set(leader["val_loss"]) == set(leader["val_accuracy"]) == {9, 19}
    for name in names:
        assert leader[name] == pytest.approx(node[name], abs=1e-3)
    assert leader["val_loss"][19] < leader["val_loss"][9]
    assert set(losses(tmp_path / "alone" / "metrics" / "metrics.csv", "val_loss")) == {9, 19}


# ---------------------------------------------------------------------- resuming


@pytest.mark.long
def test_resume_on_another_grid_after_the_death_of_the_leader_has_the_same_weights(tmp_path, monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "1")
    out = run(tmp_path, "resume_on_another_grid.py", "--directory", "runs")
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if line.startswith("│")]
    assert [row[1:3] for row in rows] == [
        ["1 to 12", "-"],
        ["1 to 8", "(0, 1)"],
        ["9 to 12", "-"],
        ["9 to 12", "-"],
        ["7 to 12", "-"],
    ]
    assert all(float(row[3]) < TOLERANCE for row in rows[2:])
    stopped, whole = (
        torch.load(tmp_path / "runs" / name, weights_only=True)
        for name in ("stopped/step=8.ckpt", "uninterrupted/step=12.ckpt")
    )
    assert stopped["global_step"] == 8
    changed = [(stopped["state_dict"][name] - whole["state_dict"][name]).abs().max() for name in whole["state_dict"]]
    assert max(changed) > 1e-4, "four more steps must change the weights, or equal weights would prove nothing"


@pytest.mark.long
def test_resume_on_another_grid_fails_if_weights_differ(monkeypatch, capsys):
    for difference, code in ((1e-13, 0), (1e-7, 1), (float("nan"), 1)):
        rows = [Row("whole", (1, 2), (), None), Row("resumed", (2, 2), (), difference)]
        monkeypatch.setattr("resume_on_another_grid.compare", lambda _, rows=rows: rows)
        assert main([]) == code
        assert f"{difference:.1e}" in capsys.readouterr().out


# ---------------------------------------------------------------------- LightningCLI


CLI = ["--config", str(ROOT / "examples" / "lightning_cli.yaml"), "--trainer.enable_progress_bar=false"]


def fit_by_cli(directory: Path) -> dict[int, float]:
    """The logged accuracies, by step."""
    pytest.importorskip("jsonargparse")
    steps = ["--trainer.max_steps=40", "--trainer.val_check_interval=20"]
    out = run(directory, "lightning_cli.py", "fit", *CLI, *steps)
    assert "Worker (1, 0) was lost at step 25" in out
    written = {path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()}
    assert written >= {"outputs/cli/checkpoints/last.ckpt", "outputs/cli/metrics/version_0/config.yaml"}
    return losses(directory / "outputs/cli/metrics/version_0/metrics.csv", "val_accuracy")


@pytest.mark.long
def test_lightning_cli_fits_with_the_strategy_of_a_yaml_file(tmp_path):
    assert set(fit_by_cli(tmp_path)) == {19, 39}


@pytest.mark.exhaustive
def test_lightning_cli_validates_what_it_has_fitted(tmp_path):
    logged = fit_by_cli(tmp_path)
    out = run(tmp_path, "lightning_cli.py", "validate", *CLI, "--ckpt_path", "outputs/cli/checkpoints/last.ckpt")
    (accuracy,) = re.findall(r"val_accuracy\s*│\s*([0-9.]+)", out)
    assert float(accuracy) == pytest.approx(logged[39])


# ---------------------------------------------------------------------- mistakes

DRIVER = """
import contextlib, importlib, io, json, os, sys
sys.path.insert(0, sys.argv[1])
import hydra_job
answers = []
for script, arguments in json.load(sys.stdin):
    sys.argv = [f"{script}.py", "hydra.run.dir=out", "hydra/job_logging=none", *arguments]
    err, code = io.StringIO(), 0
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err):
        try:
            hydra_job.run_as_command(importlib.import_module(script).main)
        except SystemExit as end:
            code = end.code
    answers.append([code, [line for line in err.getvalue().splitlines() if line.startswith(f"{script}.py: ")]])
print("ANSWERS" + json.dumps(answers))
"""

MISTAKES = [
    ("train_gpt", ["faults=kil_one"], "unknown faults 'kil_one': choose one of bitflip, broken_device, deadlock, hang"),
    ("train_gpt", ["trainer.max_stepz=3"], "trainer.max_stepz"),
    ("train_gpt", ["strategy.recovery.shadow=nowhere"], "shadow='nowhere'"),
    ("train_gpt", ["strategy.pipeline_parallel_size=3"], "4 devices cannot be divided into pipelines"),
    ("train_gpt", ["faults.faults.0.pipeline=2"], "there is no worker (2, 0) in a grid of 2 pipelines x 2 stages"),
    ("train_gpt", ["faults.faults.0.kind=killl"], "Fault(kind='killl'): use 'kill', "),
    (
        "train_gpt",
        ["strategy.stages=2"],
        "unknown setting 'strategy.stages': write strategy.pipeline_parallel_size=...",
    ),
    ("train_gpt", ["trainer.precision=bf16"], "'trainer.precision': it is not in the configuration; write +trainer."),
    ("train_gpt", ["recovery.max_restarts=3"], "Did you mean 'strategy.recovery'?"),
    ("train_gpt", ["trainer.max_steps=-1"], "trainer.max_steps is -1"),
    ("train_gpt", ["experiment=demo", "strategy=single_device"], "compare is about losing workers"),
    ("train_gpt", ["experiment=demo", "faults=mtbf"], "compare needs one fault at a known step"),
    ("train_gpt", ["experiment=demo", "logger=none"], "compare reads the losses"),
    ("train_gpt", ["experiment=demo", "compare.runs=[rejoined]"], "compare.runs names ['rejoined']"),
    (
        "train_vision",
        ["objective=val_los", "strategy=single_device", "trainer.max_steps=2", "trainer.val_check_interval=2", QUIET],
        "objective=val_los was not logged: choose one of train_loss, val_accuracy, val_loss",
    ),
]


@pytest.mark.long
def test_a_mistake_in_the_call_is_one_line_and_exit_code_2(tmp_path):
    wanted = json.dumps([(script, arguments) for script, arguments, _ in MISTAKES])
    done = completed([sys.executable, "-c", DRIVER, str(ROOT / "examples")], input=wanted, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout.partition("ANSWERS")[2])
    for (script, arguments, message), (code, lines) in zip(MISTAKES, answers, strict=True):
        assert code == 2, (script, arguments)
        (line,) = lines
        assert message in line, line
