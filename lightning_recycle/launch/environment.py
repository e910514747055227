"""The environment of the workers: that of the launching process when their run starts.

The fork server that they come from has the environment of the first run. So the variables of each run, those that are
set and those that are not, travel with every worker of it, also with one that is started later. A worker has them
before it imports the user's script.

What a library read when the fork server imported it does not follow. ``OMP_NUM_THREADS`` does, see
:func:`set_num_threads`.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch

__all__ = ["NameWithEnvironment", "modules_found", "set_num_threads"]

_THREADS = "OMP_NUM_THREADS"
_threads_at_import = os.environ.get(_THREADS)  # in a worker: what torch has gone by in the fork server
_has_entered = False


class NameWithEnvironment(str):
    """The name of a worker process, on whose way there its environment arrives.

    A process is sent its name first, before what makes it import the main module (``multiprocessing.spawn.prepare``);
    there is no other place for what it must have by then.

    Args:
        name: the name.
        environment: all of the variables that the worker is to have.
    """

    environment: Mapping[str, str]

    def __new__(cls, name: str, environment: Mapping[str, str]) -> NameWithEnvironment:
        made = super().__new__(cls, name)
        made.environment = environment
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return _enter, (str(self), dict(self.environment))


def _enter(name: str, environment: dict[str, str]) -> str:
    """Runs in the worker. Its name comes twice, but what the script sets when it is imported stays."""
    global _has_entered
    if not _has_entered:
        _has_entered = True
        for variable in os.environ.keys() - environment.keys():
            del os.environ[variable]
        os.environ.update(environment)
    return name


def set_num_threads() -> None:
    """Lets torch use as many threads as the environment of this worker says, if the fork server's said otherwise."""
    wanted = os.environ.get(_THREADS)
    if wanted is not None and wanted != _threads_at_import:
        with contextlib.suppress(ValueError):  # a list, or nonsense, which OpenMP itself takes or leaves
            torch.set_num_threads(int(wanted))


@contextlib.contextmanager
def modules_found() -> Iterator[None]:
    """Python processes that start in the block find the modules that this one finds.

    The fork server needs that: it is not told ``sys.path`` before Python 3.13, so of a package that only the script's
    own ``sys.path`` leads to it would import nothing.
    """
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
