"""A worker from outside that is cut off from its run starts afresh, and tries for a while to get back in.

Concept: where its coordinator was, there may be one again: the network heals, or a stopped machine wakes up and was
declared dead meanwhile. What the worker holds is worthless then, and its main thread may be blocked anywhere. So the
process replaces itself by a new run of its own program (``exec``), which is the one way to let go of everything at
once: the model, the device with its context, threads and connections. Its process id stays, so whoever started it sees
one process. The new program comes to its entry point as any worker does and waits there as a spare.

``RECYCLE_REJOIN_SECONDS`` says for how long; 0, the default, means that the process ends instead.
"""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
import sys
import time
from typing import NoReturn

from lightning_recycle.errors import ConfigurationError

__all__ = ["rejoin_seconds", "start_afresh", "take_deadline"]

log = logging.getLogger(__name__)

_VARIABLE = "RECYCLE_REJOIN_SECONDS"
_DEADLINE = "_RECYCLE_REJOIN_UNTIL"  # from the process before to the one after: seconds of the machine's clock


def rejoin_seconds() -> float:
    """For how long a worker that was cut off tries to get back in; 0 for not at all.

    Raises:
        ConfigurationError: if ``RECYCLE_REJOIN_SECONDS`` is no such number.
    """
    text = os.environ.get(_VARIABLE, "0")
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise ConfigurationError(f"{_VARIABLE}={text!r}: give a number of seconds, for example {_VARIABLE}=600.")
    return seconds


def start_afresh(seconds: float) -> NoReturn:
    """Runs this process's program again in its place; it has ``seconds`` to get back in. From any thread."""
    for child in multiprocessing.active_children():  # DataLoader processes: they watch for a parent with another id
        child.kill()
    os.environ[_DEADLINE] = repr(time.monotonic() + seconds)
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def take_deadline() -> float | None:
    """Until when this process may try to get back in, on the monotonic clock; None if it was not cut off.

    Only the first call of a process says so: its later entry points are ordinary ones.
    """
    text = os.environ.pop(_DEADLINE, None)
    return None if text is None else float(text)
