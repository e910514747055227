from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from support import descendants


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    """Every test must leave no process behind, whatever it killed."""
    before = set(descendants())
    yield
    deadline = time.monotonic() + 5.0
    while (
        left := {pid: cmd for pid, cmd in descendants().items() if pid not in before}
    ) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left, f"orphan processes: {left}"
