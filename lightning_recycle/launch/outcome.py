"""Outcome of a run as an exception: a worker's own, or a description of the end."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import re
from collections.abc import Sequence
from pathlib import Path
from traceback import StackSummary, TracebackException
from types import FunctionType
from typing import Any

import lightning.fabric
import lightning.pytorch
import torch

from lightning_recycle.control.monitoring.history import Event
from lightning_recycle.control.protocol import state as outcomes
from lightning_recycle.control.protocol.messages import Crash
from lightning_recycle.errors import (
    ConfigurationError,
    ReCycleError,
    StageLostError,
    UnsupportedFeatureError,
    WorkerStartError,
)
from lightning_recycle.pickling import MainPickler, dumps
from lightning_recycle.planning.grid import Positions
from lightning_recycle.session.object_attributes import slots_of

log = logging.getLogger(__name__)


# ---------------------------------------------------------------------- errors


def error_of(outcome: Any, positions: Positions, history: Sequence[Event], then: str | None = None) -> BaseException:
    """The exception for ``outcome``, with the remedy ``then`` for a lost stage."""
    if isinstance(outcome, outcomes.StageLost):
        causes = "; ".join(f"worker {positions.name(rank)}: {cause}" for rank, cause in sorted(outcome.causes.items()))
        if not any(event.kind in ("step", "resumed") for event in history):
            return WorkerStartError(
                f"The workers of stage {outcome.stage} ended before training began ({causes}). See their output above;"
                " a script that comes to trainer.fit() outside of its `if __name__ == '__main__':` when workers"
                " import it is a common reason."
            )
        if then is None:
            then = (
                "Start again from the newest checkpoint, as a run with a ModelCheckpoint does by itself unless"
                " RecoveryOptions(on_stage_lost='raise'), and use more pipelines (more devices, or a smaller"
                " pipeline_parallel_size) to survive more failures"
            )
        return StageLostError(
            f"All {positions.grid.pipelines} replicas of stage {outcome.stage} are lost ({causes}); its parameters"
            f" exist nowhere else. {then[0].upper()}{then[1:]}."
        )
    if isinstance(outcome, outcomes.Crashed):
        return _exception_from(outcome.crash, positions)
    if isinstance(outcome, outcomes.Failed):
        return ReCycleError(outcome.reason)
    return ReCycleError(f"The run ended in an unknown way: {outcome!r}.")


class WorkerTraceback(Exception):
    """A worker's traceback, shown as the cause of the same exception raised here."""

    __module__ = "builtins"  # so Python shows its name without that of a module

    def __init__(self, worker: str, text: str) -> None:
        self.text = f"In worker {worker}:\n\n{text}"

    def __str__(self) -> str:
        return self.text


def _exception_from(crash: Crash, positions: Positions) -> BaseException:
    error: BaseException | None = None
    if crash.exception is not None:
        try:
            error = pickle.loads(crash.exception)
        except Exception as reason:  # a class whose pickle does not load: only its text is left
            log.debug("The worker's exception could not be loaded: %s", reason)
    has_remedy = isinstance(error, (ConfigurationError, UnsupportedFeatureError))  # its message is enough
    if isinstance(error, SystemExit):
        worker = positions.name(crash.rank)
        if not error.code:  # this process would report success, without a result
            error = ReCycleError(
                f"Worker {worker} called sys.exit({'' if error.code is None else error.code}) before the run was over,"
                " so there is no result. To end training early, set trainer.should_stop = True."
            )
        else:  # it ends this process with that status, as it would on one device, and shows no traceback
            log.error("Worker %s called sys.exit(%r):\n%s", worker, error.code, crash.traceback)
    if error is None:
        error = ReCycleError(crash.summary)
    if not (has_remedy and all(file.startswith(_PACKAGE) for file in _FILES.findall(crash.traceback))):
        error.__cause__ = WorkerTraceback(positions.name(crash.rank), crash.traceback)
    return error


# ---------------------------------------------------------------------- exceptions on their way home


_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class that is not built into Python


def dump_exception(error: BaseException) -> bytes | None:
    """Pickle of ``error`` without unpicklable attributes; None for such a class.

    Python's own pickles of exceptions call the class with ``args`` again, which fails for an ``__init__`` with other
    arguments. So a class with an ``__init__`` is rebuilt without calling it, unless it defines its own pickling.
    """
    with contextlib.suppress(Exception):
        return _dumps(error)
    args = tuple(value if _can_be_sent(value) else repr(value) for value in error.args)
    state = {name: value for name, value in _state(error).items() if _can_be_sent(value)}
    with contextlib.suppress(Exception):
        return _dumps(_Reduced(type(error), args, state))
    return None


class _ExceptionPickler(MainPickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, BaseException) and _has_own_init(type(value)):
            return _Reduced(type(value), value.args, _state(value)).__reduce__()
        return super().reducer_override(value)


class _Reduced:
    """Stands in a pickle for an exception of ``kind``."""

    def __init__(self, kind: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]) -> None:
        self._parts = kind, args, state

    def __reduce__(self) -> tuple[Any, ...]:
        kind, args, state = self._parts
        return _new, (kind, args), state, None, None, _set_state


def _has_own_init(kind: type[BaseException]) -> bool:
    own_pickles = isinstance(kind.__reduce__, FunctionType) or isinstance(kind.__reduce_ex__, FunctionType)
    return isinstance(kind.__init__, FunctionType) and not own_pickles


def _state(error: BaseException) -> dict[str, Any]:
    slots = {name: getattr(error, name) for name in slots_of(type(error)) if hasattr(error, name)}
    if isinstance(error, OSError | ImportError):  # kept outside of both
        kept = ("filename", "filename2", "name", "path")
        slots |= {name: getattr(error, name) for name in kept if getattr(error, name, None) is not None}
    return {**slots, **vars(error)}


def _new(kind: type[BaseException], args: tuple[Any, ...]) -> BaseException:
    builtin: Any = next(base for base in kind.__mro__ if not base.__flags__ & _HEAP_TYPE)
    error: BaseException = builtin.__new__(kind, *args)
    with contextlib.suppress(TypeError):  # of other arguments than the built-in class takes
        builtin.__init__(error, *args)  # fills what it keeps besides args
    object.__setattr__(error, "args", args)  # a frozen dataclass refuses its own
    return error


def _set_state(error: BaseException, state: dict[str, Any]) -> None:
    for name, value in state.items():
        object.__setattr__(error, name, value)


def _dumps(value: Any) -> bytes:
    """Pickles ``value`` and tries to load it."""
    data = dumps(value, _ExceptionPickler)
    pickle.loads(data)
    return data


def _can_be_sent(value: Any) -> bool:
    try:
        _dumps(value)
    except Exception:
        return False
    return True


# ---------------------------------------------------------------------- tracebacks


_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"
_PACKAGES = (lightning.fabric, lightning.pytorch, torch)
_LIBRARIES = [f"{Path(str(package.__file__)).parent}{os.sep}" for package in _PACKAGES]
_STAGE = f"{_PACKAGE}{os.sep.join(('runtime', 'stage', 'stage.py'))}"
_FILES = re.compile(r'^  File "(.+?)", line', re.MULTILINE)
_INTERNAL = (_PACKAGE, *_LIBRARIES, str(contextlib.__file__))


def from_users_code(error: BaseException) -> str:
    """The formatted traceback of ``error`` and its causes, from the user's code on."""
    shown = TracebackException.from_exception(error)
    links: list[TracebackException | None] = [shown]
    while links:
        link = links.pop()
        if link is not None:  # a chain that has a loop is cut by the standard library
            kind = link.exc_type
            has_remedy = isinstance(kind, type) and issubclass(kind, ReCycleError)
            link.stack = _from_users_code(link.stack, has_remedy)
            links += [link.__cause__, link.__context__, *(getattr(link, "exceptions", None) or ())]
    return "".join(shown.format())


def _from_users_code(stack: StackSummary, has_remedy: bool = False) -> StackSummary:
    users = (index for index, frame in enumerate(stack) if not frame.filename.startswith(_INTERNAL))
    first = next(users, None)
    if first is None and has_remedy:
        return StackSummary.from_list(stack[-1:])
    if first is None:  # what a layer of torch raises, or a defect
        runs = [index for index, frame in enumerate(stack) if frame.filename == _STAGE and frame.name == "_run"]
        return StackSummary.from_list(stack[runs[-1] + 1 :]) if runs and stack[-1].filename != _STAGE else stack
    *called, raised = stack[first:]
    return StackSummary.from_list([*(frame for frame in called if not frame.filename.startswith(_PACKAGE)), raised])
