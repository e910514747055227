"""Waiting for what happens elsewhere, with a bound."""

import time
from collections.abc import Callable
from typing import Any

__all__ = ["wait_for"]


def wait_for(condition: Callable[[], Any], seconds: float = 10.0, pause: float = 0.01) -> Any:
    """The answer of ``condition``, as soon as it is true, and at the latest after ``seconds``: assert it."""
    deadline = time.monotonic() + seconds
    while not (answer := condition()) and time.monotonic() < deadline:
        time.sleep(pause)
    return answer
