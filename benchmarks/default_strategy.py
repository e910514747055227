"""A pytest plugin: another default strategy for every Trainer, and a note of each test as it ends.

``lightning_suite.py`` loads it into the processes that run Lightning's tests (``-p default_strategy``). Variables tell
it what to do: ``DEFAULT_STRATEGY`` is the strategy's name, ``OUTCOMES`` the file of notes, and tests that have a note
there are left out, so that a run goes on after a test that ended the process. ``SHARE`` is the share of tests to run.

A note is a line of JSON: ``{"test": ...}`` when a test begins, the same with ``"outcome"`` ("passed", "failed" or
"skipped") and ``"message"`` when it has ended.
"""

from __future__ import annotations

import functools
import inspect
import json
import multiprocessing
import os
import zlib
from pathlib import Path
from typing import Any

STRATEGY = "DEFAULT_STRATEGY"
OUTCOMES = "OUTCOMES"
SHARE = "SHARE"

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
