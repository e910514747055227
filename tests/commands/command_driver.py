"""Runs a command as a user does, several calls in one process: each then costs a tenth of a second."""

import json
import os
import subprocess
import sys
from pathlib import Path

_DRIVER = """
import contextlib, importlib, io, json, sys
module, name = sys.argv[1:3]
main = importlib.import_module(module).main
answers = []
for arguments in json.load(sys.stdin):
    sys.argv = [name, *arguments]
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
    answers.append([code, out.getvalue(), err.getvalue()])
print(json.dumps(answers))
sys.exit("torch was imported" if "torch" in sys.modules else 0)
"""

_MODULES = {
    "recycle-plan": "lightning_recycle.commands.plan",
    "recycle-report": "lightning_recycle.commands.report",
    "recycle-simulate": "lightning_recycle.commands.simulate",
}

Answer = tuple[int, str, str]


def run_all(command: str, directory: Path, *calls: list[str]) -> list[Answer]:
    """Exit code, output and errors of each call; fails when any of them has imported torch."""
    done = subprocess.run(
        [sys.executable, "-c", _DRIVER, _MODULES[command], command],
        input=json.dumps(calls),
        capture_output=True,
        text=True,
        cwd=directory,
        env={**os.environ, "COLUMNS": "160"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [tuple(answer) for answer in json.loads(done.stdout)]


def run(command: str, directory: Path, *arguments: str) -> str:
    """Output of one call, which must succeed without a word on standard error."""
    ((code, out, err),) = run_all(command, directory, list(arguments))
    assert (code, err) == (0, ""), err
    return out


def check_refused(command: str, directory: Path, bad: list[tuple[list[str], str]], *more: str) -> None:
    """Each of these calls ends with exit code 2 and one line that says what is wrong."""
    answers = run_all(command, directory, *([*arguments, *more] for arguments, _ in bad))
    for (arguments, message), (code, _, err) in zip(bad, answers, strict=True):
        assert code == 2, (arguments, err)
        assert err.startswith(f"{command}: "), (arguments, err)
        assert err.count("\n") == 1, (arguments, err)
        assert message in err, (arguments, err)
