"""The traceback of an exception in a worker as its user reads it: from the first line of their own code on.

What led there, from the process's start through Lightning's loops and this package's executor, is the same for every
exception of a hook. It is left out only if it ends in somebody else's code; an exception of Lightning or of this
package itself is shown with all of it.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from traceback import StackSummary, TracebackException

import lightning
import torch

__all__ = ["from_users_code"]

_FOLDERS = [Path(str(package.__file__)).parent for package in (lightning, torch)] + [Path(__file__).parents[1]]
_INTERNAL = (*(f"{folder}{os.sep}" for folder in _FOLDERS), str(contextlib.__file__))


def from_users_code(error: BaseException) -> str:
    """The formatted traceback of ``error`` and of the exceptions that it was raised from."""
    shown = TracebackException.from_exception(error)
    links: list[TracebackException | None] = [shown]
    while links:
        link = links.pop()
        if link is not None:  # a chain that has a loop is cut by the standard library
            link.stack = _from_users_code(link.stack)
            links += [link.__cause__, link.__context__]
    return "".join(shown.format())


def _from_users_code(stack: StackSummary) -> StackSummary:
    users = (index for index, frame in enumerate(stack) if not frame.filename.startswith(_INTERNAL))
    return StackSummary.from_list(stack[next(users, 0) :])
