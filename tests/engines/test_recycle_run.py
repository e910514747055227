"""``recycle-run`` with real processes: who is started again, how it ends, and that nothing is left behind."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import AbstractContextManager
from pathlib import Path

import psutil
import pytest
import torch
from engine_script import Paced
from support.models import GLOBAL_BATCH, dataset
from support.process_tree import is_alive
from support.scripts import RECYCLE_RUN, started
from support.training import TOLERANCE, difference, plain_loop
from support.waiting import PATIENCE, line_with, next_line, wait_for

from lightning_recycle.engines import recycle_run

pytestmark = pytest.mark.long

HERE = Path(__file__).parent
ELSEWHERE = {"RECYCLE_COORDINATOR": "127.0.0.1:9", "RECYCLE_KEY": "a secret of 16 bytes or more"}
"""With these it hosts no coordinator, which tests of other things need not wait for."""


def running(*arguments: str, env: dict[str, str] | None = None) -> AbstractContextManager[subprocess.Popen[str]]:
    return started([*RECYCLE_RUN, *arguments], env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})})


def run(*arguments: str, env: dict[str, str] | None = None) -> tuple[int, str, str]:
    """The exit status, and what it printed on both streams."""
    with running(*arguments, env={**ELSEWHERE, **(env or {})}) as process:
        output, errors = process.communicate(timeout=PATIENCE)
        return process.returncode, output, errors


def shell(text: str) -> list[str]:
    return ["--", "sh", "-c", text]


def test_every_worker_finds_what_it_needs_in_its_environment() -> None:
    said = 'echo "$LOCAL_RANK $RECYCLE_COORDINATOR ${RECYCLE_KEY_FILE-none}"'
    status, output, _ = run("--nproc-per-node", "2", *shell(said), env={"RECYCLE_KEY_FILE": "/nowhere"})
    assert status == 0
    assert sorted(output.splitlines()) == [f"[worker{n}] {n} 127.0.0.1:9 none" for n in (0, 1)]


def test_python_is_the_one_that_runs_the_command() -> None:
    program = ["--", "python", "-c", "import sys; print(sys.prefix)"]
    assert run(*program, env={"PATH": "/usr/bin:/bin"})[:2] == (0, f"{sys.prefix}\n")


def test_output_without_an_end_of_line_stays_apart_from_that_of_others() -> None:
    _, output, _ = run("--nproc-per-node", "2", *shell("printf 'no end'"))
    assert sorted(output.splitlines()) == [f"[worker{n}] no end" for n in (0, 1)]


def test_after_an_exception_of_one_worker_the_others_are_ended() -> None:
    """They are asked to after a while; the coordinator usually is quicker."""
    began = time.monotonic()
    status, _, errors = run(
        "--nproc-per-node", "2", *shell('if [ "$LOCAL_RANK" = 1 ]; then exit 3; fi; exec sleep 100')
    )
    assert status == 3
    assert re.search(r"worker1 \(process \d+\) ended \(exit status 3\)", errors)
    assert time.monotonic() - began < 50


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "Which program"),
        (["no-such-program"], "There is no program 'no-such-program'"),
        (["no-such-script.py"], "There is no file 'no-such-script.py' in"),
        (["python", "-u", "no-such-script.py", "x.py"], "There is no file 'no-such-script.py' in"),
        (["--nproc-per-node", "0", "x"], "--nproc-per-node 0: give an integer of at least 1."),
        (["--nproc-per-node"], "expected one argument; see recycle-run --help.\n"),
        (["--nproc-per-node", "x"], "--nproc-per-node x: give an integer of at least 1."),
        (["--max-restarts", "-1", "x"], "--max-restarts -1"),
        (["--grace", "0", "x"], "--grace 0"),
        (["--coordinator", "0.0.0.0:1", "true"], "need a single address"),
    ],
)
def test_bad_options_are_refused_in_one_line(arguments: list[str], words: str) -> None:
    done = subprocess.run([*RECYCLE_RUN, *arguments], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 2
    assert done.stderr.startswith("recycle-run: ")
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "variable", ["PORTS=30000", "CONNECT_SECONDS=x", "LOG=jsno", "HTTP=99999", "HOST=x:1", "KEY=short"]
)
def test_what_workers_would_refuse_is_refused_before_they_are_started(variable: str) -> None:
    name, value = variable.split("=")
    environ = {**os.environ, f"RECYCLE_{name}": value}
    done = subprocess.run(
        [*RECYCLE_RUN, *shell("exit 3")], env=environ, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 2
    shown = "" if name == "KEY" else f"='{value}'"
    assert done.stderr.startswith(f"recycle-run: RECYCLE_{name}{shown}")


def test_a_misspelt_variable_is_named_once() -> None:
    environ = {**os.environ, "RECYCLE_CONECT_SECONDS": "1"}
    done = subprocess.run(
        [*RECYCLE_RUN, *shell("exit 0")], env=environ, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0
    assert done.stderr.count("RECYCLE_CONECT_SECONDS") == 1
    assert "has no meaning here. Did you mean 'RECYCLE_CONNECT_SECONDS'?" in done.stderr


# ---------------------------------------------------------------------- signals


@pytest.mark.parametrize(
    ("number", "arrives"),
    [
        (signal.SIGTERM, signal.SIGTERM),
        (signal.SIGINT, signal.SIGTERM),  # of a run that others host: these workers leave it
        (signal.SIGUSR1, signal.SIGUSR1),
    ],
)
def test_a_signal_reaches_every_worker_once_and_ends_the_run(number: signal.Signals, arrives: signal.Signals) -> None:
    script = (
        "import signal, sys, time\n"
        f"signal.signal({int(arrives)}, lambda *_: (print('got it', flush=True), time.sleep(0.5), sys.exit(143)))\n"
        "print('ready', flush=True)\n"
        "while True: time.sleep(0.1)\n"  # a handler of a signal that comes right before a sleep runs after it
    )
    with running("--nproc-per-node", "2", "--", sys.executable, "-c", script, env=ELSEWHERE) as process:
        for _ in range(2):
            assert "ready" in next_line(process)
        process.send_signal(number)
        output, _ = process.communicate(timeout=PATIENCE)
        assert output.count("got it") == 2
        assert process.returncode == 128 + number


def test_nothing_outlives_it_even_if_it_is_killed() -> None:
    program = "print('ready', flush=True)\nimport time; time.sleep(100)"
    with running("--nproc-per-node", "2", "--", sys.executable, "-c", program) as process:
        for _ in range(2):
            line_with(process, lambda line: "ready" in line)
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) == 3  # with the coordinator
        process.kill()
        assert wait_for(lambda: not any(is_alive(child.pid) for child in children), 10)


# ---------------------------------------------------------------------- the coordinator


def coordinator_of(process: subprocess.Popen[str]) -> psutil.Process | None:
    for child in psutil.Process(process.pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended, and waits for its parent to notice
            if "standalone" in " ".join(child.cmdline()):
                return child
    return None


def test_a_coordinator_that_dies_is_started_again_at_the_same_address() -> None:
    with running(*shell('echo "$RECYCLE_COORDINATOR"; exec sleep 100')) as process:
        first = wait_for(lambda: coordinator_of(process), PATIENCE)
        assert first
        address = first.cmdline()[first.cmdline().index("--listen") + 1]
        first.kill()
        second = wait_for(lambda: (c := coordinator_of(process)) and c.pid != first.pid and c, PATIENCE)
        assert address in second.cmdline()


@pytest.mark.parametrize(
    ("options", "environ", "words"),
    [
        (["--coordinator", "192.0.2.1:29400"], {}, "this machine has no address 192.0.2.1"),
        ([], {"RECYCLE_LOG": "xml"}, "RECYCLE_LOG='xml'"),
    ],
)
def test_where_no_coordinator_can_listen_no_worker_is_started(
    options: list[str], environ: dict[str, str], words: str
) -> None:
    with running(*options, *shell("echo hi"), env=environ) as process:
        output, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 2
    assert words in errors
    assert output == ""


@pytest.mark.parametrize(
    ("count", "script", "who"),
    [
        ("1", "sleep 5", "its process"),
        ("2", "sleep 5", "each of its 2 processes"),
        ("2", ":", "each of its 2 processes"),
    ],
)
def test_a_program_that_joins_no_run_is_no_silent_success(count: str, script: str, who: str) -> None:
    with running("--nproc-per-node", count, *shell(script)) as process:
        _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0
    text = f"No worker joined a run: if the program trained, {who} trained by itself."
    assert f"{text} Give its Trainer strategy='recycle'." in errors


def test_ctrl_c_before_the_training_shows_no_traceback_and_no_word_of_runs() -> None:
    importing = [sys.executable, "-c", "import time; print('ready', flush=True); time.sleep(100)"]
    with running("--nproc-per-node", "2", *importing) as process:
        for _ in range(2):
            line_with(process, lambda line: "ready" in line)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=PATIENCE)
    assert "No worker joined" not in errors
    assert "Traceback" not in errors
    assert process.returncode == 130


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["python", "-u", "some/train.py", "--lr", "1"], "train.py"),
        (["/usr/bin/python3", "-m", "package.train"], "package.train"),
        (["/bin/sh", "-c", "exit 0"], "sh"),
    ],
)
def test_a_run_has_the_name_of_its_program(command: list[str], name: str) -> None:
    assert os.path.basename(recycle_run._script_of(command)) == name
    place = recycle_run._RunAddress(("127.0.0.1", 1), "secret", hosts_it=True)
    words = recycle_run._coordinator_task(place, name, 2).command
    assert {f"--name={name}", "--started=2", "--alone"} <= {*words}


def test_how_others_join_is_said_once_the_coordinator_listens() -> None:
    with running(*shell("exec sleep 100")) as process:
        line_with(process, lambda line: line.startswith("[coordinator] listening on"))
        assert next_line(process).startswith("[coordinator] For other machines to join, start recycle-run with")


# ---------------------------------------------------------------------- trainings


@pytest.mark.long
def test_a_killed_worker_of_a_training_is_replaced_and_the_weights_are_those_of_an_undisturbed_run(
    tmp_path: Path,
) -> None:
    output, steps = tmp_path / "weights.pt", 30
    script = [str(HERE / "engine_script.py"), str(output), str(steps), "0.2"]
    with running("--nproc-per-node", "4", *script) as process:
        pids: dict[int, int] = {}
        while (words := next_line(process).split())[1:3] != ["step", "3"]:
            if words[1:2] == ["rank"]:
                pids[int(words[2])] = int(words[4])
        os.kill(pids[2], signal.SIGKILL)
        rest, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors
    assert re.search(rf"worker\d \(process {pids[2]}\) was killed by SIGKILL; it is started again", errors)
    assert re.search(rf"Worker \(1, 0\) was lost .*\(process {pids[2]} on ", errors)
    assert "[worker" in rest
    model = Paced().double()
    expected = plain_loop(model, dataset(GLOBAL_BATCH * steps), steps)
    assert difference(torch.load(output, weights_only=True), expected) < TOLERANCE
    assert "Worker (1, 0) was lost at step" in errors
    assert '"kind"' not in errors, "events are for programs"
    assert "Waiting for workers" not in errors.partition("The run finished.")[2]


def test_sigterm_to_all_workers_of_a_run_ends_it_at_a_step_boundary_with_the_wanted_checkpoint(tmp_path: Path) -> None:
    saved = tmp_path / "saved.ckpt"
    script = [str(HERE / "engine_script.py"), str(tmp_path / "weights.pt"), "400", "0.2"]
    environ = {"XDG_STATE_HOME": str(tmp_path), "SAVED": str(saved), "RECYCLE_LOG": "json"}
    with running("--nproc-per-node", "4", "--grace", str(PATIENCE), *script, env=environ) as process:
        line_with(process, lambda line: "step 3" in line)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 143
    assert torch.load(saved, weights_only=False)["global_step"] < 100
    assert "is killed" not in errors
    assert '"message": "resumed"' in errors
    assert "Its state is in" in errors
    assert list((tmp_path / "lightning_recycle").iterdir()) == []


@pytest.mark.parametrize(
    ("coordinator", "environ", "words"),
    [
        (
            "10.0.0.1:29400",
            {"RECYCLE_KEY_FILE": "a key"},
            "joins by: RECYCLE_COORDINATOR=10.0.0.1:29400 RECYCLE_KEY_FILE='a key' recycle-run",
        ),
        ("10.0.0.1:29400", {"RECYCLE_KEY": "secret"}, "=10.0.0.1:29400 RECYCLE_KEY=... recycle-run"),
        ("10.0.0.1:29400", {}, "--coordinator HOST:PORT and RECYCLE_KEY_FILE"),
        ("127.0.0.1:29400", {}, "--coordinator HOST:PORT and RECYCLE_KEY_FILE"),
        ("127.0.0.1:29400", {"RECYCLE_KEY": "secret"}, "127.0.0.1 is reachable from this machine only: give"),
        ("localhost:29400", {"RECYCLE_KEY": "secret"}, "localhost is reachable from this machine only: give"),
    ],
)
def test_it_says_how_another_machine_joins(coordinator: str, environ: dict[str, str], words: str) -> None:
    host, port = coordinator.split(":")
    place = recycle_run._RunAddress((host, int(port)), "secret", hosts_it=True)
    said = recycle_run._invitation(place, environ)
    assert words in said
    assert "secret" not in said
