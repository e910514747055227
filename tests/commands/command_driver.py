"""Runs commands as a user does, all of them in one process: a call then costs a tenth of a second."""

import atexit
import functools
import json
import os
import subprocess
import sys
from pathlib import Path

_DRIVER = """
import contextlib, importlib, io, json, os, sys
for request in sys.stdin:
    module, name, directory, calls = json.loads(request)
    os.chdir(directory)
    main = importlib.import_module(module).main
    answers = []
    for arguments in calls:
        sys.argv = [name, *arguments]
        out, err, code = io.StringIO(), io.StringIO(), 0
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                main()
            except SystemExit as end:
                code = end.code or 0
        answers.append([code, out.getvalue(), err.getvalue()])
    assert "torch" not in sys.modules, "torch was imported"
    print(json.dumps(answers), flush=True)
"""

_MODULES = {
    "recycle-plan": "lightning_recycle.commands.plan",
    "recycle-report": "lightning_recycle.commands.report",
    "recycle-simulate": "lightning_recycle.commands.simulate",
}

Answer = tuple[int, str, str]


@functools.cache
def _driver() -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    env = {**os.environ, "COLUMNS": "160"}
    process = subprocess.Popen([sys.executable, "-c", _DRIVER], stdin=pipe, stdout=pipe, text=True, env=env)
    atexit.register(process.communicate)  # it ends with its input
    return process


def run_all(command: str, directory: Path, *calls: list[str]) -> list[Answer]:
    """Exit code, output and errors of each call; fails when any of them has imported torch."""
    driver = _driver()
    print(json.dumps([_MODULES[command], command, str(directory), calls]), file=driver.stdin, flush=True)
    answers = driver.stdout.readline()
    assert answers, "the process has ended; its traceback is above"
    return [tuple(answer) for answer in json.loads(answers)]


def run(command: str, directory: Path, *arguments: str) -> str:
    """Output of one call, which must succeed; on standard error, only simulations are announced."""
    ((code, out, err),) = run_all(command, directory, list(arguments))
    assert (code, _unannounced(err)) == (0, ""), err
    return out


def _unannounced(err: str) -> str:
    return "".join(line for line in err.splitlines(keepends=True) if not line.startswith("simulating "))


def check_refused(command: str, directory: Path, bad: list[tuple[list[str], str]], *more: str) -> list[Answer]:
    """Each of these calls ends with exit code 2 and one line that says what is wrong; returns their answers."""
    answers = run_all(command, directory, *([*arguments, *more] for arguments, _ in bad))
    for (arguments, message), (code, _, err) in zip(bad, answers, strict=True):
        assert code == 2, (arguments, err)
        err = _unannounced(err)
        assert err.startswith(f"{command}: "), (arguments, err)
        assert err.count("\n") == 1, (arguments, err)
        assert message in err, (arguments, err)
    return answers
