"""Keeps the garbage collector out of the way while a large schedule is made or checked.

Concept: a schedule of 2,000 workers has a million small objects, none of them cyclic garbage. CPython's collector
traverses all of them each time their number has grown by a quarter, which doubles the time (measured: 4.4 s
instead of 2.2 s to validate 590,000 operations). Reference counting still frees memory.

Must not know: what is being made. Internal to ``planning``.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["collector_paused"]


@contextmanager
def collector_paused() -> Iterator[None]:
    """No automatic collection inside the block; changes nothing if it was off already."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
