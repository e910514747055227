"""Exceptions that a fault of the machine may explain.

Errors of storage, memory, descriptors, helper processes and the device. A missing file and a lost file system look
alike, so this module only suspects; the coordinator settles it by running the same work elsewhere
(:mod:`~lightning_recycle.control.protocol.fault_attribution`). An exception raised ``from`` a suspected one is
suspected, too; this package's own errors never are.
"""

from __future__ import annotations

import importlib
import re
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from lightning_recycle.control.options import MachineErrors
from lightning_recycle.devices import HARDWARE_ERRORS
from lightning_recycle.errors import ConfigurationError, ReCycleError

_DEVICE_CLASSES: tuple[type[BaseException], ...] = ()
if hasattr(torch, "AcceleratorError"):  # since torch 2.8
    _DEVICE_CLASSES += (torch.AcceleratorError,)
_CLASSES: tuple[type[BaseException], ...] = (OSError, EOFError, MemoryError, torch.OutOfMemoryError, *_DEVICE_CLASSES)

_MACHINE = re.compile(
    r"DataLoader worker \(pid.*(is killed by signal|exited unexpectedly)|DataLoader timed out after"
    r"|Pin memory thread exited unexpectedly|received \d+ items of ancdata|Too many open files"
    r"|unable to (open|allocate|resize|mmap|write).*(shared memory|file <)|can't allocate memory"
    r"|can't start new thread",
    re.DOTALL,
)
"""Texts of RuntimeErrors: torch's DataLoader, shared memory, allocator; threads."""


def is_device_error(error: BaseException) -> bool:
    """Whether the device is lost to this process: such errors stay until its end."""
    return any(
        isinstance(one, _DEVICE_CLASSES) or (type(one) is RuntimeError and HARDWARE_ERRORS.search(str(one)) is not None)
        for one in _with_causes(error)
    )


def is_machine_error(error: BaseException) -> bool:
    """Whether a fault of the machine may explain ``error``.

    The default of ``RecoveryOptions(machine_errors=...)``.
    ``OSError``, ``EOFError``, ``MemoryError`` and all that derive from them; ``torch.OutOfMemoryError``,
    ``torch.AcceleratorError`` and other errors of accelerators; a DataLoader's process that was killed or a DataLoader
    that timed out; shared memory or descriptors that are used up; a thread that cannot be started.
    """
    if isinstance(error, ReCycleError):
        return False
    return is_device_error(error) or any(
        isinstance(one, _CLASSES) or (type(one) is RuntimeError and _MACHINE.search(str(one)) is not None)
        for one in _with_causes(error)
    )


def suspicion_of(machine_errors: MachineErrors) -> Callable[[BaseException], bool]:
    """Predicate of exceptions named in ``machine_errors``; or ConfigurationError."""
    if callable(machine_errors):
        predicate = machine_errors
        return lambda error: not isinstance(error, ReCycleError) and bool(predicate(error))
    classes = tuple(_exception_class(entry) for entry in machine_errors)

    def is_suspect(error: BaseException) -> bool:
        own = isinstance(error, ReCycleError)
        return not own and (is_machine_error(error) or any(isinstance(one, classes) for one in _with_causes(error)))

    return is_suspect


def place_of(error: BaseException) -> str:
    """Where in the code ``error`` was raised, the same in all processes that run it."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{frames[-1].name}, {frames[-1].filename}:{frames[-1].lineno}" if frames else "unknown"
    return f"in {where}"


@contextmanager
def readers_may_die() -> Iterator[None]:
    """Within the block the death of a DataLoader's process raises nothing.

    torch's handler of SIGCHLD raises wherever the main thread is, even while an earlier exception is handled.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # handlers do not run in this thread
        return
    handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL if handler is None else handler)


def _with_causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__


def _exception_class(entry: type[BaseException] | str) -> type[BaseException]:
    found: object = entry
    if isinstance(entry, str):
        module, _, name = entry.rpartition(".")
        try:
            found = getattr(importlib.import_module(module or "builtins"), name)
        except (ImportError, AttributeError, ValueError):
            found = None
    if not (isinstance(found, type) and issubclass(found, Exception)):
        raise ConfigurationError(
            f"RecoveryOptions(machine_errors=...): {entry!r} is not an exception class. Give a class that derives from"
            " Exception, or its full dotted name, such as 'botocore.exceptions.ClientError'."
        )
    return found
