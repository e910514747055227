"""Outcome of a run: its summary in a few lines, or the exception that ended it."""

from __future__ import annotations

import contextlib
import logging
import math
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
from lightning_recycle.control.protocol.positions import Positions
from lightning_recycle.errors import (
    ConfigurationError,
    ReCycleError,
    StageLostError,
    UnsupportedFeatureError,
    WorkerStartError,
)
from lightning_recycle.pickling import MainPickler, dumps
from lightning_recycle.session.object_attributes import slots_of

log = logging.getLogger(__name__)


_CAUSES_SHOWN = 5


def summary(history: Sequence[Event], positions: Positions) -> list[str]:
    """The lines on a run with this record; none if it made no step."""
    steps = [event for event in history if event.kind == "step"]
    if not steps:
        return []
    begin = next(event for event in history if event.kind in ("resumed", "step"))
    done, seconds = steps[-1].step + 1, steps[-1].time - begin.time
    lines = [
        f"Run: at step {done:,} after {seconds:.1f} s{_loss(steps)}, {_workers(history, positions)}{_memory(history)}."
    ]
    counts = [
        _count(number, name)
        for kind, name in (("failure", "failure"), ("redone", "redone step"), ("rejoined", "replacement"))
        if (number := sum(event.kind == kind for event in history))
    ]
    lost = sorted(_lost(history).items(), key=lambda entry: -entry[1])
    if counts or lost:
        total = sum(seconds for _, seconds in lost)
        lines.append(f"{', '.join(counts) or 'No failures'}; {total:.1f} s lost{':' if lost else '.'}")
    lines += [f"  {seconds:.1f} s: {cause}" for cause, seconds in lost[:_CAUSES_SHOWN]]
    if others := lost[_CAUSES_SHOWN:]:
        lines.append(f"  {sum(seconds for _, seconds in others):.1f} s: {_count(len(others), 'other cause')}")
    return lines + _backwards(history)


def _memory(history: Sequence[Event]) -> str:
    told = [event.details["peak_bytes"] for event in history if event.kind == "memory"]
    peaks = [(peak, stage) for stages in told for stage, peak in enumerate(stages) if peak is not None]
    if not peaks:
        return ""
    most, stage = max(peaks)
    return f", the largest with {most / 1e9:.3g} GB of memory (stage {stage})"


def _loss(steps: Sequence[Event]) -> str:
    first, last = (step.details.get("loss") for step in (steps[0], steps[-1]))
    if last is None or math.isnan(last):  # a step that optimizes by itself need not return one
        return ""
    if first is None or math.isnan(first) or steps[0].step:
        return f", loss {last:.4g}"
    return f", loss {first:.4g} at first and {last:.4g} now"


def _workers(history: Sequence[Event], positions: Positions) -> str:
    rosters = [event.details["roster"] for event in history if event.kind == "regrouped"]
    alive = len(rosters[-1]) if rosters else positions.num_workers
    if alive == positions.num_workers:
        return _count(alive, "worker")
    left = " left" if any(event.kind in ("failure", "left") for event in history) else ""  # others never came
    return f"{alive} of {positions.num_workers} workers{left}"


def _backwards(history: Sequence[Event]) -> list[str]:
    """The effect of splitting backwards, if the newest plan does so by choice."""
    chosen = [event.details if event.kind == "chosen" else event.details.get("backward") for event in history]
    newest = next((facts for facts in reversed(chosen) if facts), None)
    if newest is None or not newest["split"]:
        return []
    cost, wins = 100 * newest["cost"], 100 * (newest["wins"] or 0.0)
    return [f"The backward pass is split in two, for {cost:.1f} % more computing time and {wins:.1f} % shorter steps."]


def _lost(history: Sequence[Event]) -> dict[str, float]:
    lost: dict[str, float] = {}
    causes: list[str] = []  # of failures that are not recovered from
    stage_lost: Event | None = None

    def add(cause: str, seconds: float) -> None:
        lost[cause] = lost.get(cause, 0.0) + seconds

    for event in history:
        seconds = event.seconds or 0.0
        if event.kind == "failure":
            causes.append(f"worker {event.worker}: {event.details['cause']}")
        elif event.kind == "recovered" and causes:
            add("; ".join(causes), seconds)
            causes = []
        elif event.kind == "rejoined":
            add("replacements were given their state", seconds)
        elif event.kind == "cleared":
            add(f"worker {event.worker} was silent or stuck, and came back", seconds)
        elif event.kind == "stage_lost":
            stage_lost, causes = event, []
        elif event.kind == "step" and stage_lost is not None:
            add(f"stage lost at step {stage_lost.step}, and started again", event.time - stage_lost.time)
            stage_lost = None
    return lost


def _count(number: int, name: str) -> str:
    return f"{number:,} {name}{'' if number == 1 else 's'}"


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

    Python's own pickles of exceptions call the class with ``args`` again, which fails where ``__init__`` takes other
    arguments than it hands on. So a class with an ``__init__`` is rebuilt without calling it, unless it defines its own
    pickling.
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
