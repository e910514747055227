"""Runs the commands of README and documentation as they stand, each page's in order, in a fresh clone of HEAD.

``python docs/run_commands.py [PAGE ...]`` prints one line for each command and exits with the number of those that
failed. The clone uses the virtual environment of the interpreter. What is not run is listed with the reason: all of
that is run elsewhere, by the target or test that is named.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
TIMEOUT = 900.0  # seconds for a command

ELSEWHERE = {
    r"make test\b": "what CI runs",
    r"make chaos$": "half an hour; benchmarks/RESULTS.md has its results",
    r"lightning_suite|pytorch-lightning": "needs a clone of Lightning: tests/benchmarks/test_lightning_suite.py",
    r"^pip install": "tests/test_packaging.py",
    r"kubectl|pdsh": "needs the machines that it names",
    r"make install": "a clone without an environment makes it: CI's first step",
    r"10\.0\.0\.1|recycle-run|RECYCLE_COORDINATOR|RECYCLE_KEY|torchrun|srun|SBATCH|#!/bin/bash": "needs the machines "
    "that it names: tests/integration/test_workers_from_outside.py and test_kubernetes_environment.py",
    r"consolidate_checkpoint": "tests/integration/test_resume.py, with a checkpoint of its own",
}


def shell_lines(page: Path) -> list[str]:
    """The commands in the blocks for a shell."""
    found: list[str] = []
    for code in re.findall(r"^```(?:bash|console)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S):
        lines = code.replace("\\\n", " ").splitlines()
        found += [re.sub(r"\s+# .*", "", line.removeprefix("$ ")) for line in lines if line.strip()]
    return found


def main() -> int:
    """Runs what is asked for; returns the number of commands that failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    parser.add_argument("pages", nargs="*", type=Path, default=pages)
    parser.add_argument("--list", action="store_true", help="only show what would be run")
    options = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "clone"
        if not options.list:
            subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
            (clone / ".venv").symlink_to(Path(sys.executable).parents[1])
            for name in ("pyproject.toml", "constraints.txt"):  # or make would install the clone in the environment
                os.utime(clone / name, (0, 0))
            # The package is installed in editable mode: what runs is ROOT's, and must be what was cloned.
            if subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True).stdout:
                print("note: the tree has changes that are not committed")
        environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
        done: set[str] = set()
        for page in options.pages:
            for command in shell_lines(page):
                if command in done:
                    continue
                done.add(command)
                where = page.name
                reason = next((why for pattern, why in ELSEWHERE.items() if re.search(pattern, command)), None)
                if reason is not None:
                    print(f"{where}: not run: {command}\n    ({reason})")
                elif options.list:
                    print(f"{where}: {command}")
                else:
                    failed += not _run(command, where, clone, environment)
    return failed


def _run(command: str, where: str, clone: Path, environment: dict[str, str]) -> bool:
    started = time.monotonic()
    try:
        result = subprocess.run(
            ["bash", "-c", command],
            cwd=clone,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )
        status, output = f"exit {result.returncode}", result.stdout
    except subprocess.TimeoutExpired as error:
        status, output = f"not done after {TIMEOUT:.0f} s", str(error.output)
    print(f"{where}: {status}, {time.monotonic() - started:.0f} s: {command}", flush=True)
    if status == "exit 0":
        return True
    print("    " + "\n    ".join(output.splitlines()[-20:]))
    return False


if __name__ == "__main__":
    sys.exit(main())
