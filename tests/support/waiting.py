"""Waiting for what happens elsewhere, with a bound: a test that waits in vain says what it saw so far."""

import contextlib
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from support.forked import ForkedProcess

PATIENCE = 480.0
"""Seconds for what surely comes, on a machine with twenty times as much to do as it can; no test's subject."""


def wait_for(condition: Callable[[], Any], seconds: float = 60.0, pause: float = 0.01) -> Any:
    """The answer of ``condition``, as soon as it is true, and at the latest after ``seconds``: assert it."""
    deadline = time.monotonic() + seconds
    while not (answer := condition()) and time.monotonic() < deadline:
        time.sleep(pause)
    return answer


def next_line(process: subprocess.Popen[Any] | ForkedProcess) -> Any:
    """The next line of the output of ``process``."""
    return line_with(process, lambda _: True)


def line_with(process: subprocess.Popen[Any] | ForkedProcess, wanted: Callable[[Any], Any]) -> Any:
    """The next line of the output of ``process`` that is ``wanted``; if none comes in time, it is killed."""
    read = []
    with _killed_after(process, PATIENCE):
        for line in iter(process.stdout.readline, type(process.stdout.read(0))()):
            if wanted(line):
                return line
            read.append(str(line))
    raise AssertionError(f"the line did not come; {process.args} said:\n{''.join(read)}")


@contextlib.contextmanager
def _killed_after(process: subprocess.Popen[Any] | ForkedProcess, seconds: float) -> Iterator[None]:
    timer = threading.Timer(seconds, process.kill)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
