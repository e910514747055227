"""Runs Lightning's own tests with another default strategy, and compares which ones pass.

``python benchmarks/lightning_suite.py CHECKOUT`` takes the path of a checkout of Lightning's repository, and runs parts
of its ``tests/tests_pytorch`` twice: with ``strategy="recycle"`` and one stage in the place of the default, and with
``ddp_forkserver`` there. Nothing else of the tests is changed. It prints, by part, how many of the tests that pass
there pass here, too, and names the others. With ``--markdown`` it writes that as a page, with the reasons that
``lightning_suite_reasons.txt`` gives.

Outcomes are kept in ``--out`` as they come, and tests that have one do not run again: a run that was interrupted goes
on, and deleting a strategy's file of a part runs the part anew. A test that takes too long is ended with its process,
and the others go on in another.

This file is also the pytest plugin that the processes which run Lightning's tests load (``-p lightning_suite``):
another default strategy for every Trainer, and a note of each test as it ends. Variables tell it what to do:
``DEFAULT_STRATEGY`` is the strategy's name, ``OUTCOMES`` the file of notes, whose tests are left out, ``SHARE`` the
share of tests to run. A note is a line of JSON: ``{"test": ...}`` when a test begins, the same with ``"outcome"``
("passed", "failed" or "skipped") and ``"message"`` when it has ended.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import inspect
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

STRATEGY, OUTCOMES, SHARE = "DEFAULT_STRATEGY", "OUTCOMES", "SHARE"  # variables of the plugin
PARTS = ("callbacks", "checkpointing", "trainer/flags", "loggers", "core", "loops", "trainer")
REASONS = Path(__file__).with_name("lightning_suite_reasons.txt")
_LOOK_SECONDS = 0.5
_START_SECONDS = 120.0
"""What importing and collecting may take."""


@dataclass(frozen=True)
class Outcome:
    """How a test ended: "passed", "failed" or "skipped"; ``message`` says why it failed."""

    outcome: str
    message: str = ""


@dataclass(frozen=True)
class Comparison:
    """The tests of one part that pass with the other strategy (``there``) and with this one (``here``)."""

    part: str
    there: frozenset[str]
    here: frozenset[str]

    @property
    def both(self) -> frozenset[str]:
        return self.there & self.here

    @property
    def lost(self) -> list[str]:
        return sorted(self.there - self.here)

    @classmethod
    def of(cls, part: str, there: Mapping[str, Outcome], here: Mapping[str, Outcome]) -> Comparison:
        passed = [frozenset(t for t, found in side.items() if found.outcome == "passed") for side in (there, here)]
        return cls(part, *passed)


def run(checkout: Path, part: str, strategy: str, out: Path, seconds: float, share: float = 1.0) -> dict[str, Outcome]:
    """The outcome of each test of ``part`` with ``strategy``, by name; a test may take so many ``seconds``. With
    ``share``, of a sample.

    Raises:
        RuntimeError: if pytest ends without a test, for example because a file cannot be imported.
    """
    notes = out / f"{part.replace('/', '-').removesuffix('.py')}-{strategy}.jsonl"
    here = Path(__file__).resolve().parent
    path = os.pathsep.join([str(here), str(checkout / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {
        **os.environ,
        STRATEGY: strategy,
        OUTCOMES: str(notes),
        SHARE: str(share),
        "PYTHONPATH": path,
    }
    apart = [other for other in PARTS if other.startswith(f"{part}/")]
    others = [f"--ignore=tests_pytorch/{other}" for other in apart]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "lightning_suite", "-p", "no:cacheprovider", *others]
    _forget_unfinished(notes)
    while True:
        size = notes.stat().st_size if notes.exists() else 0
        with open(notes.with_suffix(".log"), "a") as log:
            process = subprocess.Popen(
                [*command, f"tests_pytorch/{part}"],
                cwd=checkout / "tests",
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            status = _wait(process, notes, seconds)
        if status in (0, 1, 5):  # all passed, some failed, none was left
            return read(notes)
        if size == (notes.stat().st_size if notes.exists() else 0):
            raise RuntimeError(f"pytest ended with status {status} before its first test: see {log.name}.")


def _forget_unfinished(notes: Path) -> None:
    """Forgets the test that ran when this script was interrupted."""
    lines = notes.read_text().splitlines(keepends=True) if notes.exists() else []
    if lines and "outcome" not in json.loads(lines[-1]):
        notes.write_text("".join(lines[:-1]))


def _wait(process: subprocess.Popen[bytes], notes: Path, seconds: float) -> int:
    """Waits for the end of pytest; ends it and all its children if a test, or the beginning, takes too long."""
    size, since, allowed = 0, time.monotonic(), _START_SECONDS
    try:
        while process.poll() is None:
            time.sleep(_LOOK_SECONDS)
            now = notes.stat().st_size if notes.exists() else 0
            if now != size:
                allowed = seconds if size else max(seconds, _START_SECONDS)
                size, since = now, time.monotonic()
            elif time.monotonic() - since > allowed:
                break
    finally:
        with contextlib.suppress(ProcessLookupError):  # all have ended
            os.killpg(process.pid, signal.SIGKILL)  # its children too, which may outlive it
    return process.wait()


def read(notes: Path) -> dict[str, Outcome]:
    """The outcomes in a file that the plugin has written."""
    found: dict[str, Outcome] = {}
    for line in notes.read_text().splitlines() if notes.exists() else []:
        note = json.loads(line)
        # A test that began and has no end took too long, or ended the process.
        outcome = Outcome(note.get("outcome", "failed"), note.get("message", "it did not end"))
        found[note["test"].rpartition("tests_pytorch/")[2]] = outcome  # whatever pytest takes for its root
    return found


def read_reasons(text: str) -> list[tuple[str, list[str]]]:
    """Reasons with the tests that they explain: a line that begins with "# " is a reason, the lines after it are
    tests, without parameters.
    """
    reasons: list[tuple[str, list[str]]] = []
    for line in filter(None, map(str.strip, text.splitlines())):
        if line.startswith("# "):
            reasons.append((line[2:], []))
        else:
            reasons[-1][1].append(line)
    return reasons


def explained(lost: Iterable[str], reasons: list[tuple[str, list[str]]]) -> list[tuple[str, list[str]]]:
    """``lost`` grouped by reason; those without one come last, under an empty reason."""
    left = list(lost)
    groups: list[tuple[str, list[str]]] = []
    for reason, names in reasons:
        group = [test for test in left if test in names or test.partition("[")[0] in names]
        left = [test for test in left if test not in group]
        groups.append((reason, group))
    return [(reason, group) for reason, group in [*groups, ("", left)] if group]


def table(comparisons: Iterable[Comparison], beside: str) -> list[str]:
    """Rows by part and in all, in Markdown."""
    rows = [
        f"| part | pass with `{beside}` | of these with `recycle` | | pass with `recycle` |",
        "|---|--:|--:|--:|--:|",
    ]
    sums = [0, 0, 0]
    for comparison in comparisons:
        counts = [len(comparison.there), len(comparison.both), len(comparison.here)]
        sums = [total + count for total, count in zip(sums, counts, strict=True)]
        rows.append(_row(comparison.part, counts))
    return [*rows, _row("all", sums)]


def _row(name: str, counts: list[int]) -> str:
    there, both, here = counts
    share = f"{100 * both / there:.1f} %" if there else ""
    return f"| {name} | {there} | {both} | {share} | {here} |"


def page(comparisons: list[Comparison], beside: str, reasons: list[tuple[str, list[str]]], heading: str) -> str:
    """The part of ``benchmarks/LIGHTNING_SUITE.md`` that holds results."""
    lines = ["## Results", "", heading, "", *table(comparisons, beside), "", "## Tests that do not pass here", ""]
    for reason, tests in explained((test for c in comparisons for test in c.lost), reasons):
        lines += [f"**{reason or 'Not explained.'}**", "", *(f"- `{test}`" for test in tests), ""]
    return "\n".join(lines)


def write_page(path: Path, results: str) -> None:
    """Replaces all of the page from its "## Results" on."""
    text = path.read_text() if path.exists() else ""
    path.write_text(text.partition("## Results")[0] + results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="the checkout of Lightning's repository")
    parser.add_argument("parts", nargs="*", default=PARTS, help="folders or files of tests_pytorch")
    parser.add_argument("--beside", default="ddp_forkserver", help="the strategy to compare with")
    parser.add_argument("--out", type=Path, default=Path("outputs/lightning_suite"))
    parser.add_argument("--seconds", type=float, default=90.0, help="what a test may take")
    parser.add_argument("--share", type=float, default=1.0, help="the share of the tests that is run, from 0 to 1")
    parser.add_argument("--markdown", type=Path, help="the page whose results are written")
    options = parser.parse_args()
    out, checkout = options.out.resolve(), options.checkout.resolve()
    out.mkdir(parents=True, exist_ok=True)
    comparisons: list[Comparison] = []
    for part in options.parts:
        there, here = (
            run(checkout, part, name, out, options.seconds, options.share) for name in (options.beside, "recycle")
        )
        comparisons.append(Comparison.of(part, there, here))
        lost = comparisons[-1].lost
        print(f"{part}: {len(comparisons[-1].both)} of {len(comparisons[-1].there)} that pass with {options.beside}")
        for test in lost:
            message = here.get(test, Outcome("failed", "it was not found")).message.strip()
            print(f"  {test}: {message.splitlines()[0][:160] if message else ''}", flush=True)
    print("\n".join(table(comparisons, options.beside)))
    if options.markdown is not None:
        versions = ", ".join(f"{name} {version(name)}" for name in ("lightning", "torch"))
        heading = f"{date.today()}, {versions}, Python {sys.version.split()[0]}."
        write_page(options.markdown, page(comparisons, options.beside, read_reasons(REASONS.read_text()), heading))


# ---------------------------------------------------------------------- the plugin, in pytest's process

_found: dict[str, dict[str, str]] = {}
"""What is known of the test that runs."""


def pytest_configure(config: Any) -> None:
    """Replaces the default strategy of every Trainer that is made afterwards in this process."""
    import lightning.pytorch as pl

    wanted = os.environ[STRATEGY]
    if wanted != "recycle":  # its workers find what they import; with this they do so under any other strategy
        multiprocessing.set_forkserver_preload(["lightning.pytorch"])
    original = pl.Trainer.__init__
    signature = inspect.signature(original)

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        bound = signature.bind(self, *args, **kwargs)
        if bound.arguments.get("strategy", "auto") == "auto":
            bound.arguments["strategy"] = strategy(wanted)
        original(*bound.args, **bound.kwargs)

    pl.Trainer.__init__ = init  # type: ignore[method-assign]


def strategy(name: str) -> Any:
    """What to give a Trainer as ``strategy`` for ``name``."""
    if name == "recycle":
        from lightning_recycle import ReCycleStrategy

        return ReCycleStrategy(pipeline_parallel_size=1)
    if name == "ddp_forkserver":  # has no name in Lightning
        from lightning.pytorch.strategies import DDPStrategy

        return DDPStrategy(start_method="forkserver")
    return name


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Leaves out what has run, is not in the sample, or names a strategy with processes itself and so would be the
    same twice.
    """
    path = Path(os.environ[OUTCOMES])
    known = {json.loads(line)["test"] for line in path.read_text().splitlines()} if path.exists() else set()
    share = float(os.environ.get(SHARE, "1"))
    items[:] = [
        item for item in items if item.nodeid not in known and in_sample(item.nodeid, share) and not _spawns(item)
    ]


def in_sample(test: str, share: float) -> bool:
    """Whether ``test`` belongs to a sample of this share of all tests; the same ones in each run."""
    return zlib.crc32(test.encode()) < share * 2**32


def _spawns(item: Any) -> bool:
    constants = item.function.__code__.co_consts  # of its body, without the other parameters that it is run with
    return any("spawn" in text for text in [item.nodeid, *constants] if isinstance(text, str))


def pytest_runtest_logstart(nodeid: str) -> None:
    _found[nodeid] = {"outcome": "passed", "message": ""}
    _note({"test": nodeid})


def pytest_runtest_logreport(report: Any) -> None:
    found = _found[report.nodeid]
    if report.failed and found["outcome"] != "failed":
        crash = getattr(report.longrepr, "reprcrash", None)
        found.update(outcome="failed", message=str(report.longrepr if crash is None else crash.message))
    elif report.skipped and found["outcome"] == "passed":
        found.update(outcome="skipped")


def pytest_runtest_logfinish(nodeid: str) -> None:
    _note({"test": nodeid, **_found.pop(nodeid)})


def _note(line: dict[str, str]) -> None:
    with open(os.environ[OUTCOMES], "a") as file:
        file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
