"""The benchmarks are scripts: their directory and that of the examples are on the path as when one of them is run."""

import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

for name in ("examples", "benchmarks"):
    sys.path.insert(0, str(Path(__file__).parents[2] / name))


@pytest.fixture(autouse=True)
def benchmarks_leave_this_process_as_it_was() -> Iterator[None]:
    """They quieten warnings and set the number of threads for their workers."""
    environment = dict(os.environ)
    with warnings.catch_warnings():
        yield
    os.environ.clear()
    os.environ.update(environment)
