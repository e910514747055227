"""How a worker finds its coordinator again: attempts, until one answers or the time is over.

The pauses are short, so that a coordinator that is started again has its workers within half a second, and random, so
that thousands of them do not come in the same millisecond.
"""

from __future__ import annotations

import contextlib
import logging
import random
import time
from collections.abc import Callable, Iterator

from lightning_recycle.control.connection import MessageConnection, connect
from lightning_recycle.control.handshake import Refused

__all__ = ["connections"]

log = logging.getLogger(__name__)

_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 0.5  # seconds between two attempts
_ATTEMPT_SECONDS = 5.0  # for one; a machine that does not answer may be another one by the next


def connections(
    address: tuple[str, int], key: bytes, seconds: float, is_wanted: Callable[[], bool]
) -> Iterator[MessageConnection]:
    """Connections to who listens at ``address`` and knows ``key``, one after the other, for ``seconds``.

    Args:
        address: host and port.
        key: the key of the run.
        seconds: for how long.
        is_wanted: whether another one is still wanted.
    """
    deadline, pause = time.monotonic() + seconds, _FIRST_PAUSE
    while is_wanted() and (left := deadline - time.monotonic()) > 0:
        # Refused: the one before may still be ending, or another one may be there for a moment.
        with contextlib.suppress(OSError, Refused):
            yield connect(address, key, timeout=min(left, _ATTEMPT_SECONDS))
        time.sleep(pause * random.uniform(0.5, 1.0))
        pause = min(1.5 * pause, _LONGEST_PAUSE)
