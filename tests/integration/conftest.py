from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import descendants

MARK = f"RECYCLE_TEST_RUN={os.getpid()}"
os.environ["RECYCLE_TEST_RUN"] = str(os.getpid())


def orphans() -> dict[int, str]:
    """Living processes of this test run whose parent is gone: pid -> command line."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            state, parent = (entry / "stat").read_text().rsplit(")", 1)[1].split()[:2]
            if parent == "1" and state != "Z" and MARK.encode() in (entry / "environ").read_bytes().split(b"\0"):
                found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # it ended while we looked, or is not ours
    return found


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    """Every test must leave no process behind, whatever it killed."""
    before = set(descendants())
    yield
    deadline = time.monotonic() + 5.0
    while (left := still_there(before)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left, f"orphan processes: {left}"


def still_there(before: set[int]) -> dict[int, str]:
    return {**{pid: command for pid, command in descendants().items() if pid not in before}, **orphans()}
