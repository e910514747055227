"""Which exceptions a fault of the machine may explain, and what the option says of it."""

import errno
import os
import runpy
import signal
import socket
import subprocess
import time

import pytest
import torch

from lightning_recycle import ConfigurationError, RecoveryOptions, ReCycleStrategy
from lightning_recycle.errors import InjectedFaultError, StageLostError
from lightning_recycle.runtime import machine_errors
from lightning_recycle.runtime.communicator import CommunicationError
from lightning_recycle.runtime.machine_errors import (
    is_device_error,
    is_machine_error,
    place_of,
    readers_may_die,
    suspicion_of,
)

DeviceLost = getattr(torch, "AcceleratorError", RuntimeError)  # torch before 2.8 has no class of its own

MACHINE = [
    OSError(errno.EIO, "Input/output error"),
    FileNotFoundError(errno.ENOENT, "No such file"),
    BrokenPipeError(),
    socket.gaierror(-2, "Name or service not known"),
    TimeoutError(),
    EOFError(),
    MemoryError(),
    torch.OutOfMemoryError("CUDA out of memory."),
    RuntimeError("DataLoader worker (pid 16698) is killed by signal: Killed. "),
    RuntimeError(
        "DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that dataloader's workers..."
    ),
    RuntimeError("DataLoader worker (pid(s) 7, 8) exited unexpectedly"),
    RuntimeError("DataLoader timed out after 30 seconds"),
    RuntimeError("unable to allocate shared memory(shm) for file </torch_1>: No space left on device (28)"),
    RuntimeError("unable to open shared memory object </torch_1> in read-write mode: Too many open files (24)"),
    RuntimeError("unable to mmap 80 bytes from file <filename not specified>: Cannot allocate memory (12)"),
    RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."),
    RuntimeError("received 0 items of ancdata"),
    RuntimeError("Too many open files. Communication with the workers is no longer possible."),
    RuntimeError("can't start new thread"),
]
DEVICE = [
    DeviceLost("CUDA error: an illegal memory access was encountered"),
    RuntimeError("CUDA error: device-side assert triggered"),
    RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
    RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
]
OWN = [
    TypeError("forward() missing 1 required positional argument"),
    ValueError("CUDA error"),
    KeyError("Too many open files"),
    RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x8 and 4x16)"),
    RuntimeError("Caught CustomError in DataLoader worker process 0.\nOriginal Traceback ..."),
    NotImplementedError("DataLoader worker (pid 7) is killed by signal: Killed."),
    InjectedFaultError("as asked"),
    StageLostError("gone"),
    KeyboardInterrupt(),
]


@pytest.mark.parametrize("error", [*MACHINE, *DEVICE], ids=repr)
def test_suspected(error):
    assert is_machine_error(error)
    assert is_device_error(error) is (error in DEVICE)


@pytest.mark.parametrize("error", OWN, ids=repr)
def test_not_suspected(error):
    assert not is_machine_error(error)


def raised_from(error: Exception, cause: BaseException) -> Exception:
    error.__cause__ = cause
    return error


def test_what_is_raised_from_a_suspected_exception_is_suspected_except_for_this_packages_own():
    assert is_machine_error(raised_from(ValueError("bad shard"), OSError("gone")))
    assert is_device_error(raised_from(ValueError("bad"), DEVICE[0]))
    assert not is_machine_error(raised_from(CommunicationError("reset"), OSError("gone")))
    circle = ValueError("a")
    raised_from(circle, raised_from(ValueError("b"), circle))
    assert not is_machine_error(circle)


class StorageError(Exception):
    pass


def only_storage(error: BaseException) -> bool:
    return isinstance(error, StorageError)


@pytest.mark.parametrize(("option", "storage", "os_error"), [
    ((), False, True),
    ([StorageError], True, True),
    ([f"{__name__}.StorageError", "builtins.KeyError"], True, True),
    (only_storage, True, False),
])  # fmt: skip
def test_the_option_adds_classes_or_decides_alone(option, storage, os_error):
    is_suspect = suspicion_of(option)
    assert (is_suspect(StorageError()), is_suspect(OSError())) == (storage, os_error)
    assert not suspicion_of(lambda _: True)(InjectedFaultError())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"machine_errors": "OSError"}, ["'OSError'", "list"]),
        ({"machine_errors": OSError}, ["OSError", "list"]),
        ({"machine_errors": 3}, ["3", "list"]),
        ({"machine_errors": ["os.path"]}, ["'os.path'"]),
        ({"machine_errors": ["socket.timeoutt"]}, ["'socket.timeoutt'", "dotted name"]),
        ({"machine_errors": ["OSErrr"]}, ["'OSErrr' is not an exception class", "dotted name"]),
        ({"machine_errors": [int]}, ["int", "Exception"]),
        ({"machine_errors": [KeyboardInterrupt]}, ["KeyboardInterrupt"]),
        ({"machine_error_retries": -1}, ["machine_error_retries=-1", "at least 0"]),
        ({"machine_error_retries": True}, ["machine_error_retries=True"]),
    ],
)
def test_wrong_options_are_refused_at_once(options, words):
    with pytest.raises(ConfigurationError) as caught:
        RecoveryOptions(**options)
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_name_of_a_module_that_is_not_loaded_is_refused_by_the_strategy():
    options = RecoveryOptions(machine_errors=["botocore.ClientErrr"])
    with pytest.raises(ConfigurationError, match=r"'botocore.ClientErrr' is not an exception class.* dotted name"):
        ReCycleStrategy(recovery=options)


def test_a_place_in_the_code_does_not_depend_on_what_was_called_with():
    def hook(path: str) -> None:
        os.stat(path)

    places = []
    for path in ("/nowhere/a", "/nowhere/b"):
        try:
            hook(path)
        except OSError as error:
            places.append(place_of(error))
    assert places[0] == places[1]
    assert "hook" in places[0]
    assert "test_machine_error_classes.py" in places[0]


def test_the_death_of_a_reader_raises_nothing_where_an_exception_is_dealt_with():
    raised: list[int] = []
    before = signal.signal(signal.SIGCHLD, lambda signum, _: raised.append(signum))
    try:
        with readers_may_die():
            subprocess.run(["true"], check=True)
            time.sleep(0.05)
        assert raised == []
        subprocess.run(["true"], check=True)
        os.sched_yield()
        assert raised == [signal.SIGCHLD]
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_a_torch_without_a_class_for_lost_devices_is_known_by_what_it_says(monkeypatch):
    monkeypatch.delattr(torch, "AcceleratorError", raising=False)  # before 2.8
    older = runpy.run_path(machine_errors.__file__)
    assert older["is_device_error"](RuntimeError("CUDA error: device-side assert triggered"))
    assert not older["is_device_error"](ValueError("CUDA error"))
    assert older["is_machine_error"](torch.OutOfMemoryError("CUDA out of memory."))
