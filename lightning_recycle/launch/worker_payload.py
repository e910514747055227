"""Payload of a worker: environment, settings, pickled Trainer; exceptions back.

The fork server has the environment of the first run, so each run's variables travel with every worker, before it
imports the user's script. Global settings (dtype, precision, determinism, OmegaConf's resolvers, warning filters, log
levels) made under the script's main guard reach the launching process alone. The Trainer and its function are pickled
once, in a file in memory whose descriptor workers inherit.

An exception comes back as a pickle, and its traceback as text from the user's code on.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import io
import logging
import math
import mmap
import os
import pickle
import re
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from multiprocessing import reduction
from pathlib import Path
from traceback import StackSummary, TracebackException
from types import FunctionType, ModuleType, NoneType
from typing import IO, Any, cast

import cloudpickle
import lightning.fabric
import lightning.pytorch
import torch
from omegaconf.basecontainer import BaseContainer
from torch import Tensor

from lightning_recycle.control.monitoring.logs import LogForwarding, LogSender
from lightning_recycle.errors import ConfigurationError, ReCycleError
from lightning_recycle.lightning_names import name_here
from lightning_recycle.pickling import MainModule, MainPickler, dumps, enter_main
from lightning_recycle.runtime.stage import Stage
from lightning_recycle.session.lightning_internals import GlobalStateSnapshot, default_profiler_schedule
from lightning_recycle.session.object_attributes import slots_of
from lightning_recycle.torch_internals import is_compiled, reduce_without_compilation

log = logging.getLogger(__name__)

_HYDRA = "hydra.core.hydra_config"
_THREADS = "OMP_NUM_THREADS"
_threads_at_import = os.environ.get(_THREADS)  # in a worker: what torch has gone by in the fork server
_has_entered = False
_environment_lock = threading.Lock()  # or a second thread would keep what the first has set


class NameWithEnvironment(str):
    """The name of a worker process, which brings its environment along.

    A process is sent its name first, before it imports the main module (``multiprocessing.spawn.prepare``).
    """

    environment: Mapping[str, str]

    def __new__(cls, name: str, environment: Mapping[str, str]) -> NameWithEnvironment:
        made = super().__new__(cls, name)
        made.environment = environment
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return _set_environment, (str(self), dict(self.environment))


def _set_environment(name: str, environment: dict[str, str]) -> str:
    """Sets the environment in the worker once, as its name comes twice."""
    global _has_entered
    if not _has_entered:
        _has_entered = True
        for variable in os.environ.keys() - environment.keys():
            del os.environ[variable]
        os.environ.update(environment)
    return name


def set_num_threads(workers: int) -> None:
    """Lets torch use the number of threads in this worker's environment.

    If there is none, this worker's share of the processors, and for child processes as well.
    """
    wanted = os.environ.get(_THREADS)
    if wanted is None:
        wanted = os.environ[_THREADS] = str(max(1, len(os.sched_getaffinity(0)) // workers))
    if wanted != _threads_at_import:
        with contextlib.suppress(ValueError):  # a list, or nonsense, which OpenMP itself takes or leaves
            torch.set_num_threads(int(wanted))


@contextlib.contextmanager
def modules_found() -> Iterator[None]:
    """Python processes that start in the block find this one's modules.

    The fork server does not get ``sys.path`` before Python 3.13; and the working directory, such as a checkout of this
    package, would come first (before Python 3.11 it still does).
    """
    wanted = {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path), "PYTHONSAFEPATH": "1"}
    with _environment_lock:
        before = {name: os.environ.get(name) for name in wanted}
        os.environ.update(wanted)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


# ---------------------------------------------------------------------- settings


@dataclass(frozen=True)
class Settings:
    """Settings of a process, captured there and restored in another one."""

    lightning: Any
    dtype: torch.dtype
    matmul_precision: str
    filters: tuple[Any, ...]
    levels: dict[str, int]
    disabled: int
    resolvers: dict[str, Any]
    hydra: Any
    """The configuration that ``HydraConfig.get()`` reads; None without."""

    @classmethod
    def capture(cls) -> Settings:
        known = {name: logging.getLogger(name) for name in ["", *logging.root.manager.loggerDict]}
        return cls(
            lightning=GlobalStateSnapshot.capture(),
            dtype=torch.get_default_dtype(),
            matmul_precision=torch.get_float32_matmul_precision(),
            filters=tuple(warnings.filters),
            levels={name: logger.level for name, logger in known.items() if logger.level != logging.NOTSET},
            disabled=logging.root.manager.disable,
            resolvers={
                name: resolver for name, resolver in BaseContainer._resolvers.items() if _is_own(name, resolver)
            },
            hydra=sys.modules[_HYDRA].HydraConfig.instance().cfg if _HYDRA in sys.modules else None,
        )

    def restore(self) -> None:
        self.lightning.restore()
        torch.set_default_dtype(self.dtype)
        torch.set_float32_matmul_precision(self.matmul_precision)
        # The script's own logger, where multiprocessing has imported the script under another name.
        logger = logging.root.manager.loggerDict["__main__"] = logging.getLogger("__mp_main__")
        logger.name = "__main__"
        for name, level in self.levels.items():
            logger = logging.getLogger(name_here(name))
            if logger.level != level:  # each change empties the caches of all loggers
                logger.setLevel(level)
        logging.disable(self.disabled)
        BaseContainer._resolvers.update(self.resolvers)
        if self.hydra is not None:
            importlib.import_module(_HYDRA).HydraConfig.instance().cfg = self.hydra
        warnings.filters[:] = self.filters  # type: ignore[index]
        with warnings.catch_warnings():
            pass  # lets Python know that the filters have changed: it remembers what it has shown


def _is_own(name: str, resolver: Any) -> bool:
    """Whether a resolver is none of OmegaConf's, and can be sent."""
    if name.startswith("oc."):
        return False
    try:
        cloudpickle.dumps(resolver)
    except Exception as error:
        log.debug("The resolver %r stays in this process: %s", name, error)
        return False
    return True


def ignore_deprecations_of_lightning() -> None:
    """Hides newer torch's deprecations in Lightning 2.6."""
    warnings.filterwarnings("ignore", message=r".*treespec, LeafSpec.*")


def ignore_untrue_warnings() -> None:
    """Hides warnings of Lightning that do not hold in a worker."""
    ignore_deprecations_of_lightning()
    # Data is addressed: any epoch can resume in the middle.
    warnings.filterwarnings("ignore", message=r"(?s).*ended before the epoch ended and your dataloader is not resum.*")
    # Every PipelineModule has a validation_step, whether or not validation is wanted.
    warnings.filterwarnings("ignore", "You defined a `validation_step` but have no `val_dataloader`")


# ---------------------------------------------------------------------- Trainer, module and data


class WorkerPayload:
    """A value for all workers, in a nameless file in memory; there a ReceivedPayload.

    Raises ConfigurationError if it cannot be pickled.
    """

    def __init__(self, value: Any, main: MainModule) -> None:
        self._file: IO[bytes] = os.fdopen(os.memfd_create("lightning_recycle"), "w+b")
        self.logs: LogForwarding | None = None
        try:
            dump(value, main, self._file)
        except ConfigurationError:
            self.close()
            raise
        self.logs = LogForwarding()

    def close(self) -> None:
        self._file.close()
        if self.logs is not None:
            self.logs.close()

    def __reduce__(self) -> tuple[Any, ...]:
        """Only as an argument of a new process, to which the descriptor travels."""
        return ReceivedPayload, (reduction.DupFd(self._file.fileno()), self.logs)


class ReceivedPayload:
    """A :class:`WorkerPayload` in a worker."""

    def __init__(self, descriptor: Any, logs: LogSender) -> None:
        self._descriptor, self.logs = descriptor, logs

    def load(self) -> Any:
        """The value; may be called once.

        The position in the file is common to all processes, so it is mapped.
        """
        descriptor = self._descriptor.detach()
        try:
            with mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) as data:
                return load(data)
        finally:
            os.close(descriptor)


def dump(value: Any, main: MainModule, file: IO[bytes]) -> None:
    """Pickles ``value``, whose first item is the Trainer's call, for :func:`load`.

    Raises ConfigurationError with the path of an unpicklable member.
    """
    try:
        _dump(value, main, file)
        file.flush()
    except Exception as error:
        raise ConfigurationError(
            f"{_find_unpicklable(value, main) or 'The Trainer, model or data'} cannot be sent to the worker processes:"
            f" {type(error).__name__}: {error}. Open files and connections in setup() instead of __init__, and keep"
            " what cannot be pickled out of the global variables that the functions of your script read."
        ) from None


def _dump(value: Any, main: MainModule, file: Any) -> None:
    pickler = _PayloadPickler(file, main)
    pickler.definitions.update(_settings(main))
    pickler.dump((value, pickler.definitions))  # these are complete once the value is pickled


def load(data: Any) -> Any:
    """The value pickled as ``data``, with the user's ``__main__``; once in a process."""
    enter_main()
    value, definitions = pickle.loads(data)
    _define(definitions)
    return value


_PLAIN = (bool, int, float, str, bytes, tuple, list, dict, NoneType)
_MOST_BYTES = 100_000_000


def _settings(main: MainModule) -> dict[str, Any]:
    """The script's settings that can be pickled; of other modules plain values only."""
    script: Any = sys.modules["__main__"]
    found: dict[str, Any] = {}
    for dotted in sorted(main.settings):
        path: list[str] = []
        owner = value = script
        for name in dotted.split("."):
            if isinstance(value, type | ModuleType):
                path.append(name)
                owner, value = value, getattr(value, name, None)
        if "." in dotted and (owner is script or isinstance(value, type | ModuleType)):
            continue
        is_own = owner is script or (isinstance(owner, type) and owner.__module__ == "__main__")
        if (is_own or isinstance(value, _PLAIN)) and _may_be_sent(value, main):
            found[".".join(path)] = value
    return found


def _may_be_sent(value: Any, main: MainModule) -> bool:
    if type(value).__module__.startswith("lightning"):
        return False
    try:
        _PayloadPickler(cast(Any, _NullFile(_MOST_BYTES)), main).dump(value)
    except Exception as error:
        log.debug("A global variable (%s) stays in this process: %s", type(value).__name__, error)
        return False
    return True


def _define(definitions: Mapping[str, Any]) -> None:
    """Gives dotted names in ``__main__`` their values; a dict keeps its identity.

    Functions of a script that multiprocessing has imported read another dict, of which the module's is a copy.
    """
    main: Any = sys.modules["__main__"]
    script = vars(main)
    classes = [value for value in script.values() if isinstance(value, type)]
    members = [member for owner in (script, *map(vars, classes)) for member in owner.values()]
    functions = [inspect.unwrap(member) for member in members if isinstance(member, FunctionType)]
    read = next((f.__globals__ for f in functions if f.__globals__.get("__name__") == "__mp_main__"), script)
    for dotted, value in definitions.items():
        *path, name = dotted.split(".")
        owner = functools.reduce(lambda owner, name: getattr(owner, name, None), path, main)
        known = getattr(owner, name, None)
        if isinstance(known, dict) and isinstance(value, dict):
            content = dict(value)  # it may be the same dict
            known.clear()
            known.update(content)
        elif owner is main:
            script[name] = read[name] = value
        elif owner is not None:
            setattr(owner, name, value)


class _PayloadPickler(MainPickler):
    """Keeps ``PyTorchProfiler``'s default schedule; refuses open files."""

    def reducer_override(self, value: Any) -> Any:
        if value is default_profiler_schedule()():
            return default_profiler_schedule(), ()
        if isinstance(value, io.TextIOWrapper) and value not in (sys.stdout, sys.stderr):
            raise TypeError("cannot pickle an open file")  # cloudpickle would send a copy of its content
        if isinstance(value, lightning.pytorch.LightningModule) and is_compiled(value):
            return reduce_without_compilation(value)
        return super().reducer_override(value)


# ---------------------------------------------------------------------- what cannot be sent


class _NullFile(io.RawIOBase):
    """Takes ``most`` bytes, and keeps none."""

    def __init__(self, most: float = math.inf) -> None:
        self._room = most

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        self._room -= size
        if self._room < 0:
            raise ValueError("it is too large")
        return size


def _find_unpicklable(payload: Any, main: MainModule) -> str | None:
    """Path of the member that cannot be pickled, such as ``model.helpers['db']``.

    Members are pickled one by one, down to the one in which nothing else fails.
    """
    call = payload[0] if isinstance(payload, tuple) and payload else None
    roots = dict(getattr(call, "arguments", {}))
    trainer = getattr(call, "trainer", None)
    if trainer is not None:
        roots |= {"trainer.callbacks": trainer.callbacks, "trainer.loggers": trainer.loggers, "trainer": trainer}
    seen: set[int] = set()

    def path_from(path: str, value: Any) -> str | None:
        if id(value) in seen or isinstance(value, Tensor):
            return None
        seen.add(id(value))
        try:
            _dump(value, main, _NullFile())
        except Exception:  # of whatever kind: the caller has the one that is reported
            with contextlib.suppress(Exception):  # by one that shows nothing of what it has
                inner = (path_from(f"{path}{step}", member) for step, member in _members(value))
                return next(filter(None, inner), path)
            return path
        return None

    return next(filter(None, (path_from(name, value) for name, value in roots.items())), None)


def _members(value: Any) -> Iterator[tuple[str, Any]]:
    """Objects that are pickled with ``value``, each with its path."""
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", member) for key, member in value.items())
    elif isinstance(value, list | tuple):
        yield from ((f"[{index}]", member) for index, member in enumerate(value))
    elif isinstance(value, FunctionType):
        variables = inspect.getclosurevars(value)
        for name, member in {**variables.globals, **variables.nonlocals}.items():
            yield f", which uses the variable {name}", member
    else:
        get_state = getattr(value, "__getstate__", None)  # objects have one from Python 3.11 on
        state = get_state() if callable(get_state) else getattr(value, "__dict__", None)
        for name, member in (state if isinstance(state, dict) else {}).items():
            if name == "_modules":
                yield from ((f".{child}", module) for child, module in member.items())
            else:
                yield f".{name}", member


# ---------------------------------------------------------------------- exceptions on their way home


_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class that is not built into Python


def dump_exception(error: BaseException) -> bytes | None:
    """Pickle of ``error`` without unpicklable attributes; None for such a class.

    Python's own pickles of exceptions call the class with ``args`` again, which fails for an ``__init__`` with other
    arguments. So a class with an ``__init__`` is rebuilt without calling it, unless it defines its own pickling.
    """
    with contextlib.suppress(Exception):
        return _checked_dumps(error)
    args = tuple(value if _can_be_sent(value) else repr(value) for value in error.args)
    state = {name: value for name, value in _state(error).items() if _can_be_sent(value)}
    with contextlib.suppress(Exception):
        return _checked_dumps(_ReducedException(type(error), args, state))
    return None


class _ExceptionPickler(MainPickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, BaseException) and _has_own_init(type(value)):
            return _ReducedException(type(value), value.args, _state(value)).__reduce__()
        return super().reducer_override(value)


class _ReducedException:
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


def _checked_dumps(value: Any) -> bytes:
    """Pickles ``value`` and tries to load it."""
    data = dumps(value, _ExceptionPickler)
    pickle.loads(data)
    return data


def _can_be_sent(value: Any) -> bool:
    try:
        _checked_dumps(value)
    except Exception:
        return False
    return True


# ---------------------------------------------------------------------- tracebacks


_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"
_PACKAGES = (lightning.fabric, lightning.pytorch, torch)
_LIBRARIES = [f"{Path(str(package.__file__)).parent}{os.sep}" for package in _PACKAGES]
_STAGE = Stage.forward.__code__.co_filename
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


def is_internal(traceback: str) -> bool:
    """Whether a formatted traceback shows no code but this package's."""
    return all(file.startswith(_PACKAGE) for file in _FILES.findall(traceback))


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
