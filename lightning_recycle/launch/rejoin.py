"""A worker from outside that is cut off from its run starts afresh, and tries for a while to get back in.

Concept: where its coordinator was, there may be one again: the network heals, or a stopped machine wakes up and was
declared dead meanwhile. What the worker holds is worthless then, and its main thread may be blocked anywhere. So the
process replaces itself by a new run of its own program (``exec``), which is the one way to let go of everything at
once: the model, the device with its context, threads and connections. Its process id stays, so whoever started it sees
one process. The new program comes to its entry point as any worker does and waits there as a spare.

Before that it looks for its coordinator for ``RECYCLE_RECONNECT_SECONDS``, 60 by default, and keeps all that it holds:
a coordinator that was killed and started again goes on with it
(:mod:`~lightning_recycle.control.protocol.coordinator_restart`).

``RECYCLE_REJOIN_SECONDS`` says for how long; 0, the default, means that the process ends instead. For how long a worker
tries to connect that has not been in a run yet, ``RECYCLE_CONNECT_SECONDS`` says: all parts of a job start at the same
time, and the coordinator's name, the route to it and itself may come last.
"""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Callable
from typing import NoReturn, TypeVar

from lightning_recycle.control.network.handshake import VersionMismatch
from lightning_recycle.errors import ConfigurationError

__all__ = ["connect_seconds", "patiently", "reconnect_seconds", "rejoin_seconds", "start_afresh", "take_deadline"]

log = logging.getLogger(__name__)

_T = TypeVar("_T")

_VARIABLE = "RECYCLE_REJOIN_SECONDS"
_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 2.0  # seconds between two attempts
_DEADLINE = "_RECYCLE_REJOIN_UNTIL"  # from the process before to the one after: seconds of the machine's clock


def rejoin_seconds() -> float:
    """For how long a worker that was cut off tries to get back in; 0 for not at all.

    Raises:
        ConfigurationError: if ``RECYCLE_REJOIN_SECONDS`` is no such number.
    """
    return _seconds(_VARIABLE, "0")


def connect_seconds() -> float:
    """For how long a worker tries to reach its coordinator at first.

    Raises:
        ConfigurationError: if ``RECYCLE_CONNECT_SECONDS`` is no such number.
    """
    return _seconds("RECYCLE_CONNECT_SECONDS", "60")


def reconnect_seconds() -> float:
    """For how long a worker looks for a coordinator that is gone and may be started again; 0 for not at all.

    Raises:
        ConfigurationError: if ``RECYCLE_RECONNECT_SECONDS`` is no such number.
    """
    return _seconds("RECYCLE_RECONNECT_SECONDS", "60")


def _seconds(variable: str, default: str) -> float:
    text = os.environ.get(variable, default)
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise ConfigurationError(f"{variable}={text!r}: give a number of seconds, for example {variable}=600.")
    return seconds


def patiently(connect: Callable[[], _T], passing: tuple[type[Exception], ...], deadline: float, whom: str) -> _T:
    """What ``connect`` returns, tried again after errors that may pass, at growing intervals.

    Args:
        connect: the attempt.
        passing: the errors that may pass; a VersionMismatch never does.
        deadline: on the monotonic clock; the error of an attempt that ends later is raised.
        whom: the address, for the log.
    """
    pause = _FIRST_PAUSE
    while True:
        try:
            return connect()
        except VersionMismatch:
            raise
        except passing as error:
            left = deadline - time.monotonic()
            if left <= 0:
                raise
            if pause == _FIRST_PAUSE:
                log.warning("No coordinator can be reached at %s yet (%s); trying for %.0f s.", whom, error, left)
        time.sleep(min(left, pause * random.uniform(0.5, 1.0)))  # many workers do not come at the same moment
        pause = min(2 * pause, _LONGEST_PAUSE)


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
