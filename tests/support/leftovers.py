"""A fixture for tests of real processes, to be imported by a conftest.py."""

import os
from collections.abc import Iterator

import pytest

from support.process_tree import descendants, left_after_a_while

_MARK = "LIGHTNING_RECYCLE_TEST_RUN", str(os.getpid())  # by which those are found that have lost their parents
_SECONDS = 60.0  # a busy machine takes its time even with processes that are killed

os.environ.update([_MARK])


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    """Every test must leave no process behind, whatever it killed."""
    before = set(descendants())
    yield
    left = left_after_a_while(before, *_MARK, seconds=_SECONDS)
    assert not left, f"orphan processes: {left}"
