from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest
from process_tree import descendants, orphans

MARK = "RECYCLE_TEST_RUN", str(os.getpid())
os.environ.update([MARK])


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
    return {**{pid: command for pid, command in descendants().items() if pid not in before}, **orphans(*MARK)}
