"""Worker group: all worker processes of one run, and how they start and end.

Callable from any thread. Once :meth:`WorkerGroup.end` has begun, no new worker is taken. On this machine a fork server
with the slow imports forks the workers, which do not depend on it: each ends with the launching process, which sees the
end of each by itself. If the server dies, the next start brings up a new one, and only its workers' exit codes are
lost. A server that was stopped is killed.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import termios
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from multiprocessing import forkserver, process, resource_tracker
from multiprocessing.connection import wait
from multiprocessing.context import BaseContext
from typing import Any

from typing_extensions import Self, override

from lightning_recycle.control.client import EXIT_STOPPED
from lightning_recycle.control.coordinator.coordinator import Coordinator
from lightning_recycle.control.options import WorkerProcess
from lightning_recycle.errors import ConfigurationError, WorkerStartError
from lightning_recycle.launch.worker_payload import NameWithEnvironment, WorkerPayload, modules_found
from lightning_recycle.pickling import import_of_main, main_module
from lightning_recycle.processes import die_when_closed, end_with, process_space, thread_states

log = logging.getLogger(__name__)

_EXIT_SECONDS = 10.0  # for a killed worker to be gone


class WorkerGroup(ABC):
    """The worker processes of one run. A context manager: none survives it.

    ``payload``: part of each worker's argument; ``host``: this machine's address for the workers; ``without_room``:
    ranks of first workers that are not started for lack of room.
    """

    payload: Any
    host: str
    without_room = frozenset[int]()

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.closed = threading.Event()
        self._workers: list[Any] = []

    @abstractmethod
    def start(self, argument: Any, name: str) -> WorkerProcess:
        """Starts a worker, from any thread; WorkerStartError if that is impossible."""

    @abstractmethod
    def attend(self, coordinator: Coordinator) -> None:
        """The coordinator serves from now on, and may be asked to let workers leave."""

    def add(self, worker: WorkerProcess) -> bool:
        """Takes ``worker`` in; if it returns False, the run is over: kill the worker."""
        with self.lock:
            if not self.closed.is_set():
                for over in [worker for worker in self._workers if worker.is_over]:
                    self._workers.remove(over)
                    over.close()
            self._workers.append(worker)
            return not self.closed.is_set()

    def living(self) -> list[Any]:
        with self.lock:
            return [worker for worker in self._workers if worker.describe_exit(0.0) is None]

    def end(self, awaited: Collection[WorkerProcess] = (), patience: float = 0.0) -> None:
        """Ends all workers; ``awaited`` may take ``patience`` seconds to end themselves."""
        with self.lock:
            self.closed.set()
            workers = list(self._workers)
        for worker in workers:
            if worker not in awaited:
                worker.kill()
        _await_exits(awaited, patience)
        for worker in workers:
            worker.kill()
        _await_exits(workers, _EXIT_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        for worker in self._workers:
            worker.close()


def _await_exits(workers: Iterable[WorkerProcess], patience: float) -> None:
    deadline = time.monotonic() + patience
    for worker in workers:
        worker.describe_exit(max(0.0, deadline - time.monotonic()))


_STATUS_SECONDS = 1.0  # for the fork server to report how a process ended
_STOPPED_SECONDS = 5  # that a fork server may be stopped while a worker is to start
_SLOW_SECONDS = 60  # to fork a worker; the imports of the fork server come before its first one
_START_ATTEMPTS = 3  # of one worker, if the fork server dies in each


def process_context() -> BaseContext:
    """A fork server that has done the slow imports."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["lightning_recycle.launch.forkserver_preload"])
    return context


class LocalWorker(WorkerProcess):
    """A process of this machine that runs ``target(argument)`` and dies with this one.

    With ``imports_main`` it imports the script of this process first.
    """

    def __init__(
        self, context: BaseContext, target: Callable[[Any], None], argument: Any, name: str, imports_main: bool = True
    ) -> None:
        self._imports_main = imports_main
        self._process = self._start(context, partial(_run_worker, os.getpid(), target, argument), name)
        self._pidfd = _open_pidfd(self._process.pid)
        self.sentinel = self._process.sentinel if self._pidfd is None else self._pidfd
        self._end: str | None = None

    def _start(self, context: BaseContext, target: Callable[[], None], name: str) -> Any:
        for attempt in range(1, _START_ATTEMPTS + 1):
            try:
                # Before the process is made: then that has the same folder for sockets as this process, which removes
                # it in the end, and a killed worker leaves none of its own.
                _ensure_fork_server()
                # Not daemonic: DataLoader processes are its children.
                made = context.Process(target=target, name=name, daemon=False)  # type: ignore[attr-defined]
                with import_of_main(self._imports_main), _fork_server_watched():
                    made.start()
            except (ConnectionError, EOFError):  # the fork server has just died; the next attempt brings up a new one
                if attempt == _START_ATTEMPTS:
                    raise
            else:
                # Whoever starts a process, or calls active_children(), asks all of these how they ended, and the fork
                # server's answer can be read only once.
                process._children.discard(made)  # type: ignore[attr-defined]
                return made
        raise AssertionError("unreachable")

    @property
    def pid(self) -> int | None:
        pid: int | None = self._process.pid
        return pid

    @override
    def describe_exit(self, timeout: float) -> str | None:
        if self._end is None and wait([self.sentinel], timeout):
            self._end = self._describe_exit()
        return self._end

    def _describe_exit(self) -> str:
        """The fork server, the parent, passes on the exit code of the kernel."""
        if not wait([self._process.sentinel], _STATUS_SECONDS) or not self._has_exit_code():
            return "it ended; how is not known, because the fork server that started it did not report it"
        self._process.join(_STATUS_SECONDS)
        code: int = self._process.exitcode
        if code < 0:
            return f"it was killed by {signal.Signals(-code).name}"
        return "it was told to stop" if code == EXIT_STOPPED else f"it exited with code {code}"

    def _has_exit_code(self) -> bool:
        waiting = fcntl.ioctl(self._process.sentinel, termios.FIONREAD, bytes(4))
        return int.from_bytes(waiting, sys.byteorder) > 0

    @override
    def kill(self) -> None:
        if self.describe_exit(0.0) is None:
            with contextlib.suppress(ProcessLookupError):
                if self._pidfd is None:
                    assert self.pid is not None
                    os.kill(self.pid, signal.SIGKILL)
                else:
                    signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    @override
    def close(self) -> None:
        if self._pidfd is not None:
            os.close(self._pidfd)
        with contextlib.suppress(ValueError):  # not even killing ended it, so it cannot be closed
            self._process.close()


def _open_pidfd(pid: int | None) -> int | None:
    try:
        return os.pidfd_open(pid)  # type: ignore[arg-type]
    except (AttributeError, OSError):
        return None  # the sentinel of multiprocessing must do


def _ensure_fork_server() -> None:
    """Starts the fork server if there is none; it and its children ignore Ctrl-C.

    It ignores SIGINT only after its imports, which take seconds; its children until then would not.
    """
    if multiprocessing.current_process().daemon:
        raise ConfigurationError(
            "fit() starts worker processes, and this process may have none: it is daemonic, as those of"
            " multiprocessing.Pool are. Use concurrent.futures.ProcessPoolExecutor, or Process(daemon=False)."
        )
    resource_tracker.ensure_running()  # unblocks SIGINT if it starts
    earlier_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        with modules_found():
            try:
                forkserver.ensure_running()
            except ChildProcessError:  # this process was forked from the one that started it
                server: Any = forkserver._forkserver
                os.close(server._forkserver_alive_fd)
                server._forkserver_pid = server._forkserver_alive_fd = server._forkserver_address = None
                forkserver.ensure_running()
    except OSError as error:
        if "too long" not in str(error):
            raise
        raise WorkerStartError(
            f"The worker processes cannot be started: the path of the folder for temporary files,"
            f" {tempfile.gettempdir()}, is too long for a socket in it. Set TMPDIR to a shorter one, such as /tmp."
        ) from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, earlier_mask)


def _fork_server_pid() -> int | None:
    pid: int | None = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    return pid


def _is_stopped(pid: int | None) -> bool:
    return pid is not None and set(thread_states(pid, process_space())) == {"T"}


@atexit.register
def _end_stopped_fork_server() -> None:
    """Kills a stopped fork server, which would not notice the end of this process."""
    with forkserver._forkserver._lock:  # type: ignore[attr-defined]  # whoever holds it may find the process dead
        pid = _fork_server_pid()
        if pid is None or not _is_stopped(pid):
            return
        log.warning("The fork server that starts the workers (process %d) was stopped; it is killed.", pid)
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


@contextlib.contextmanager
def _fork_server_watched() -> Iterator[None]:
    """Within the block, kills a stopped fork server and warns of a slow one."""
    started = threading.Event()
    threading.Thread(target=_watch_fork_server, args=(started,), name="recycle-fork-server-watch", daemon=True).start()
    try:
        yield
    finally:
        started.set()


def _watch_fork_server(started: threading.Event) -> None:
    seconds = stopped = 0  # counted in looks: this process may be stopped, too
    while not started.wait(1.0):
        seconds += 1
        pid = _fork_server_pid()
        stopped = stopped + 1 if _is_stopped(pid) else 0
        if stopped >= _STOPPED_SECONDS:
            _end_stopped_fork_server()
            stopped = 0
        if seconds % _SLOW_SECONDS == 0:
            log.warning(
                "The fork server that starts the workers (process %s) has not started one for %d s: it still imports,"
                " or hangs.", pid, seconds,
            )  # fmt: skip


def _run_worker(launcher: int, target: Callable[[Any], None], argument: Any) -> None:
    """The main function of a worker process, which ends with process ``launcher``."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the launching process decides
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    parent = multiprocessing.parent_process()
    if parent is not None:
        die_when_closed(parent.sentinel)
        if wait([parent.sentinel], 0.0):
            os._exit(EXIT_STOPPED)  # it was closed before
    end_with(launcher, EXIT_STOPPED)  # the pipe may be held by others, and not every system kills so
    target(argument)


class LocalWorkerGroup(WorkerGroup):
    """The worker processes that one run starts here, with this process's environment.

    Raises ConfigurationError if the payload cannot be pickled, or there is no room for it.
    """

    host = "127.0.0.1"

    def __init__(self, target: Callable[[Any], None], payload: Any) -> None:
        super().__init__()
        self._target = target
        self._context = process_context()
        self._main = main_module()
        self.payload = WorkerPayload(payload, self._main)
        self._environment = dict(os.environ)  # a pickled logger may have added where its service listens

    @override
    def start(self, argument: Any, name: str) -> LocalWorker:
        named = NameWithEnvironment(name, self._environment)
        worker = LocalWorker(self._context, self._target, argument, named, self._main.imported)
        if not self.add(worker):
            worker.kill()
            raise WorkerStartError("The run is over.")
        return worker

    @override
    def attend(self, coordinator: Coordinator) -> None:
        """Workers of this machine need nothing else."""

    @override
    def end(self, awaited: Collection[WorkerProcess] = (), patience: float = 0.0) -> None:
        _end_stopped_fork_server()  # it would report the end of none
        super().end(awaited, patience)

    @override
    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self.payload.close()
