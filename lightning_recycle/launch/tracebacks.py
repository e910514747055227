"""The traceback of an exception in a worker as its user reads it: from the first line of their own code on.

What led there, from the process's start through Lightning's loops and this package's executor, is the same for every
exception of a hook. It is left out only if it ends in somebody else's code; an exception of Lightning or of this
package itself is shown with all of it. Where the user's code calls a layer or a method of Lightning's, and this package
stands between, its frames are left out as well.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from traceback import StackSummary, TracebackException

import lightning.fabric
import lightning.pytorch
import torch

__all__ = ["from_users_code"]

_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"
_PACKAGES = (lightning.fabric, lightning.pytorch, torch)
_LIBRARIES = [f"{Path(str(package.__file__)).parent}{os.sep}" for package in _PACKAGES]
_INTERNAL = (_PACKAGE, *_LIBRARIES, str(contextlib.__file__))


def from_users_code(error: BaseException) -> str:
    """The formatted traceback of ``error`` and of the exceptions that it was raised from."""
    shown = TracebackException.from_exception(error)
    links: list[TracebackException | None] = [shown]
    while links:
        link = links.pop()
        if link is not None:  # a chain that has a loop is cut by the standard library
            link.stack = _from_users_code(link.stack)
            links += [link.__cause__, link.__context__, *(getattr(link, "exceptions", None) or ())]
    return "".join(shown.format())


def _from_users_code(stack: StackSummary) -> StackSummary:
    users = (index for index, frame in enumerate(stack) if not frame.filename.startswith(_INTERNAL))
    first = next(users, None)
    if first is None:
        return stack
    *called, raised = stack[first:]
    return StackSummary.from_list([*(frame for frame in called if not frame.filename.startswith(_PACKAGE)), raised])
