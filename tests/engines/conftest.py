import os
from collections.abc import Iterator

import pytest
from support.process_tree import descendants, left_after_a_while

MARK = "RECYCLE_TEST_RUN", str(os.getpid())
os.environ.update([MARK])


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    """Every test must leave no process behind, whatever it killed."""
    before = set(descendants())
    yield
    for _ in range(12):  # a busy machine takes its time even with processes that are killed
        if not (left := left_after_a_while(before, *MARK)):
            break
    assert not left, f"orphan processes: {left}"
