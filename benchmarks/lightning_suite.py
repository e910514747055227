"""Runs Lightning's own tests with another default strategy, and compares which ones pass.

``python benchmarks/lightning_suite.py CHECKOUT`` takes the path of a checkout of Lightning's repository, and runs parts
of its ``tests/tests_pytorch`` twice: with ``strategy="recycle"`` and one stage in the place of the default, and with
``ddp_forkserver`` there. Nothing else of the tests is changed. It prints, by folder, how many of the tests that pass
there pass here, too, and names the others.

As a pytest plugin (``-p lightning_suite``, with ``LIGHTNING_SUITE_STRATEGY``) it only replaces the default.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from typing import Any

PARTS = ("callbacks", "checkpointing", "loggers", "trainer", "tuner", "loops", "core")
STRATEGY = "LIGHTNING_SUITE_STRATEGY"


def pytest_configure(config: Any) -> None:
    """Replaces the default strategy of every Trainer that is made afterwards in this process."""
    import lightning.pytorch as pl

    wanted = os.environ[STRATEGY]
    original = pl.Trainer.__init__
    signature = inspect.signature(original)

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        bound = signature.bind(self, *args, **kwargs)
        if bound.arguments.get("strategy", "auto") == "auto":
            bound.arguments["strategy"] = _strategy(wanted)
        original(*bound.args, **bound.kwargs)

    pl.Trainer.__init__ = init  # type: ignore[method-assign]


def _strategy(name: str) -> Any:
    if name == "recycle":
        from lightning_recycle import ReCycleStrategy

        return ReCycleStrategy(pipeline_parallel_size=1)
    if name == "ddp_forkserver":  # has no name in Lightning
        from lightning.pytorch.strategies import DDPStrategy

        return DDPStrategy(start_method="forkserver")
    return name


def run(checkout: Path, part: str, strategy: str, out: Path, arguments: list[str]) -> dict[str, str]:
    """Runs ``part`` with ``strategy``; returns "passed", "failed" or "skipped" by test."""
    report = out / f"{part.replace('/', '-').removesuffix('.py')}-{strategy}.xml"
    here = Path(__file__).resolve().parent
    path = os.pathsep.join([str(here), str(checkout / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "lightning_suite", f"--junitxml={report}", *arguments]
    with open(report.with_suffix(".log"), "w") as log:
        subprocess.run(
            [*command, f"tests_pytorch/{part}"],
            cwd=checkout / "tests",
            env={**os.environ, STRATEGY: strategy, "PYTHONPATH": path},
            stdout=log,
            stderr=subprocess.STDOUT,
            check=False,
        )
    return results(report)


def results(report: Path) -> dict[str, str]:
    """The outcomes in a report of pytest."""
    found: dict[str, str] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        found[f"{case.get('classname')}::{case.get('name')}"] = outcome
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="the checkout of Lightning's repository")
    parser.add_argument("parts", nargs="*", default=PARTS, help="folders or files of tests_pytorch")
    parser.add_argument("--beside", default="ddp_forkserver", help="the strategy to compare with")
    parser.add_argument("--out", type=Path, default=Path("outputs/lightning_suite"))
    parser.add_argument("--pytest", default="--timeout=120", help="further arguments of pytest, in one string")
    options = parser.parse_args()
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    lost: list[str] = []
    totals: Counter[str] = Counter()
    for part in options.parts:
        there = run(options.checkout.resolve(), part, options.beside, out, options.pytest.split())
        here = run(options.checkout.resolve(), part, "recycle", out, options.pytest.split())
        passed = {test for test, outcome in there.items() if outcome == "passed"}
        both = {test for test in passed if here.get(test) == "passed"}
        lost += sorted(passed - both)
        totals.update(there=len(passed), both=len(both), here=sum(o == "passed" for o in here.values()))
        print(f"{part}: {len(both)} of {len(passed)} that pass with {options.beside}", flush=True)
    print(f"All: {totals['both']} of {totals['there']}; {totals['here']} pass with recycle.")
    print("\n".join(lost))


if __name__ == "__main__":
    main()
