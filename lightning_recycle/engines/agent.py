"""Agent of a machine: runs and restarts processes, and reports one exit status.

Each task is a worker, or the coordinator. A worker that lost its coordinator, was evicted or killed is not a fault of
the program: another process takes its place. All other ends are final, and a process that keeps dying at once is given
up. Statuses are those of :mod:`subprocess`, or 128 + the signal's number, as in a shell.

The run ends when a process finished, when one that is not a replacement failed with an error of its program or the
coordinator stopped it, when the coordinator is given up, or at a signal; from then on no process is started. At the end
of :meth:`Agent.run` those left are killed, the coordinator after 10 s.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any, BinaryIO

from lightning_recycle.control.client import EXIT_INTERRUPTED, EXIT_LEFT, EXIT_LOST_COORDINATOR, EXIT_STOPPED
from lightning_recycle.errors import counted
from lightning_recycle.processes import die_with_parent, name_of

_SIGNALS = range(1, 65)


_QUICK_SECONDS = 20.0  # a process that lasted less died at once
_MOST_QUICK = 5  # such ends in a row, and it is given up


@dataclass(frozen=True)
class RestartRecord:
    """Restarts of a process, quick ends in a row, and seconds before its next start."""

    restarts: int = 0
    quick_ends: int = 0
    pause: float = 0.0


@dataclass(frozen=True)
class FinalStatus:
    """The end of a process that is not started again.

    ``given_up``: why not, if its end alone were no reason; else empty.
    """

    status: int
    given_up: str = ""


def decide_restart(
    record: RestartRecord, status: int, seconds: float, is_ending: bool, max_restarts: int
) -> RestartRecord | FinalStatus:
    """Decision after the end of a process that ran for ``seconds``.

    The pause before its next start doubles with each quick end after the first.
    """
    if is_ending or not is_lost(status):
        return FinalStatus(status)
    quick_ends = record.quick_ends + 1 if seconds < _QUICK_SECONDS else 0
    if record.restarts >= max_restarts:
        return FinalStatus(status, f"it was restarted {counted(record.restarts, 'time')} (--max-restarts)")
    if quick_ends >= _MOST_QUICK:
        return FinalStatus(status, f"it ended {quick_ends} times in a row within {_QUICK_SECONDS:g} s")
    return RestartRecord(record.restarts + 1, quick_ends, 2.0 ** (quick_ends - 2) if quick_ends > 1 else 0.0)


def is_lost(status: int) -> bool:
    """Whether a process was killed, evicted, or lost its coordinator.

    Signals that a program gets by its own fault, such as SIGSEGV, count: their cause may be the machine.
    """
    return status < 0 or status == EXIT_LOST_COORDINATOR or _signal_of(status) is not None


def is_error(status: int) -> bool:
    """Whether a process ended by itself, with an error of its program."""
    return status not in (0, EXIT_STOPPED, EXIT_LEFT, EXIT_INTERRUPTED) and not is_lost(status)


def verdict(ends: Sequence[tuple[int, bool]], asked: int | None, finished: bool = False) -> int:
    """The exit status for all processes together.

    A run with one finished process has finished, whatever was lost on the way; but an error of the program counts, also
    after the training, unless it is a replacement's. ``ends``: the final status of each process, and whether it was the
    first of its slot; ``asked``: the signal to end the run.
    """
    statuses = [status for status, _ in ends]
    finished = finished or 0 in statuses
    errors = [status for status, was_first in ends if is_error(status) and (was_first or not finished)]
    if errors:
        return errors[0]
    if finished:
        return 0
    if asked is not None:
        return 128 + asked
    for wanted in (EXIT_STOPPED, EXIT_LOST_COORDINATOR):
        if wanted in statuses:
            return wanted
    return exit_status(statuses[0]) if statuses else 0


def exit_status(status: int) -> int:
    """``status`` as a process can end with it."""
    return 128 - status if status < 0 else status


def describe_end(status: int) -> str:
    """The end of a process in words, for people."""
    number = -status if status < 0 else _signal_of(status)
    if number is not None:
        try:
            return f"killed by {signal.Signals(number).name}"
        except ValueError:  # a real-time signal
            return f"killed by signal {number}"
    meanings = {
        0: "finished",
        EXIT_LOST_COORDINATOR: "lost its coordinator, or was evicted",
        EXIT_STOPPED: "was stopped, as the run ended otherwise",
        EXIT_LEFT: "left, as it was asked to",
    }
    return f"exit status {status}" + (f", {meanings[status]}" if status in meanings else "")


def _signal_of(status: int) -> int | None:
    """The signal that killed a process, as in a shell; None for polite signals."""
    number = status - 128
    return number if number in _SIGNALS and status not in (EXIT_INTERRUPTED, EXIT_LEFT) else None


_LONGEST_LINE = 1 << 16  # bytes, of a line without an end


class Printer:
    """Output of several processes as whole lines, each with a name if ``names``."""

    def __init__(self, names: bool) -> None:
        self._names = names
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []

    def follow(self, name: str, stream: IO[bytes], to_stderr: bool) -> None:
        """Passes on ``stream`` until it ends, in a thread of its own."""
        thread = threading.Thread(target=self._pass_on, args=(name, stream, to_stderr), daemon=True)
        thread.start()
        self._threads = [*(t for t in self._threads if t.is_alive()), thread]

    def say(self, text: str) -> None:
        """Prints a line of the agent itself."""
        self._write(sys.stderr.buffer, f"recycle-run: {text}\n".encode())

    def finish(self, seconds: float) -> None:
        """Waits until all output is passed on, ``seconds`` for each stream."""
        for thread in self._threads:
            thread.join(seconds)

    def _pass_on(self, name: str, stream: IO[bytes], to_stderr: bool) -> None:
        prefix = f"[{name}] ".encode() if self._names else b""
        target = sys.stderr.buffer if to_stderr else sys.stdout.buffer
        with stream:
            while line := stream.readline(_LONGEST_LINE):
                end = b"" if line.endswith(b"\n") or not prefix else b"\n"
                self._write(target, prefix + line + end)

    def _write(self, target: BinaryIO, line: bytes) -> None:
        with self._lock, contextlib.suppress(OSError, ValueError):  # the reader is gone; the run goes on
            target.write(line)
            target.flush()


# ---------------------------------------------------------------------- child processes


@dataclass(frozen=True)
class ProcessCommand:
    """Command, environment and name of a process.

    If ``listens``, its standard input stays open while this process lives.
    """

    name: str
    command: tuple[str, ...]
    environ: Mapping[str, str] = field(repr=False)
    listens: bool = False


class Child:
    """A process that leads its own group, killed by the kernel with this process.

    To be made by the main thread: the kernel looks at the thread that forked. ``on_end`` gets the status, see
    :class:`subprocess.Popen`, from another thread; without ``printer`` it prints where this process does. Raises
    OSError if there is no such program.
    """

    def __init__(self, task: ProcessCommand, printer: Printer | None, on_end: Callable[[Child, int], None]) -> None:
        self.task = task
        self.began = time.monotonic()
        parent = os.getpid()
        pipe = None if printer is None else subprocess.PIPE

        def prepare() -> None:
            die_with_parent()
            if os.getppid() != parent:  # it died before the kernel was asked
                os._exit(1)

        self.process = subprocess.Popen(
            task.command,
            env=dict(task.environ),
            stdin=subprocess.PIPE if task.listens else subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            start_new_session=True,  # Ctrl-C at a terminal reaches it through this process, and once
            preexec_fn=prepare,
        )
        if printer is not None:
            assert self.process.stdout is not None
            assert self.process.stderr is not None
            printer.follow(task.name, self.process.stdout, to_stderr=False)
            printer.follow(task.name, self.process.stderr, to_stderr=True)
        threading.Thread(target=self._watch, args=(on_end,), daemon=True).start()

    def say(self, text: bytes) -> None:
        """Writes ``text`` to the process's standard input."""
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):  # it has ended
                self.process.stdin.write(text)
                self.process.stdin.flush()

    def signal(self, number: int) -> None:
        """Sends a signal: for Ctrl-C SIGTERM to a script that still imports.

        It has nothing to save, and would show a traceback.
        """
        if number == signal.SIGINT and name_of(self.process.pid).startswith("python"):
            number = signal.SIGTERM
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)

    def kill(self) -> None:
        """Kills the process and its descendants."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # the group has ended
            os.killpg(self.process.pid, signal.SIGKILL)

    def _watch(self, on_end: Callable[[Child, int], None]) -> None:
        status = self.process.wait()
        self.kill()  # its descendants, such as processes that load data
        on_end(self, status)


# ---------------------------------------------------------------------- the agent


OVER, END = b"over\n", b"end\n"
"""The agent's words to its coordinator: there will be no further run; end."""

_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_OTHERS_SECONDS = 15.0  # for the others to end by themselves after one failed, as the coordinator tells them to
_COORDINATOR_SECONDS = 10.0  # for the coordinator to end
_GRACE_SECONDS = 60.0  # for processes to end after a failure, without a grace
_PRINT_SECONDS = 1.0  # for the last output of processes
_LOOK_SECONDS = 1.0  # the longest wait; a signal that comes just before one has its handler run only after it
_BAD_OPTIONS = 2  # of the coordinator: no use in starting it again


@dataclass
class _TaskState:
    """A task, its process if there is one, and its restarts."""

    task: ProcessCommand
    record: RestartRecord = field(default_factory=RestartRecord)
    child: Child | None = None
    start_at: float = 0.0
    status: int = 0  # of the process before
    final: FinalStatus | None = None


class Agent:
    """Runs ``tasks`` to their end.

    After a failure the others have 15 s to end by themselves (none, if the coordinator failed). Then they get SIGTERM,
    and are killed after the grace, or 60 s.

    Args:
        max_restarts: of each process over the whole run.
        grace: seconds for processes to end after a signal; None if the sender signals and awaits all processes: then
            this agent passes on no signal.
        coordinator: the coordinator's process, if this machine hosts it.
        pipes: whether output goes through ``printer``.

    Attributes:
        on_finish: called when the first process has finished.
        heard_signals: the numbers of the signals so far.
    """

    def __init__(
        self,
        tasks: Sequence[ProcessCommand],
        max_restarts: int,
        printer: Printer,
        grace: float | None,
        coordinator: ProcessCommand | None = None,
        pipes: bool = True,
    ) -> None:
        self._task_states = {task.name: _TaskState(task) for task in tasks}
        self._max_restarts = max_restarts
        self._printer = printer
        self._output = printer if pipes else None
        self._grace = grace
        self._coordinator = None if coordinator is None else _TaskState(coordinator)
        self._coordinator_status: int | None = None  # at its end for good
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._end_signal: int | None = None
        self._is_ending = False
        self._has_finished = False
        self._ask_at = math.inf  # when the others are asked to end, after a failure
        self._kill_at = math.inf
        self.on_finish: Callable[[], None] = lambda: None
        self.heard_signals: set[int] = set()

    # ------------------------------------------------------------------ from other threads, and signal handlers

    def child_ended(self, child: Child, status: int) -> None:
        self._events.put(lambda: self._on_end(child, status))

    def ask_to_end(self, number: int) -> None:
        """A signal requests the end of the run; with a grace, the second one at once."""
        self._events.put(lambda: self._on_signal(number))

    def finished_elsewhere(self) -> None:
        """A process of another agent has finished, so the run has."""
        self._events.put(self._finish)

    # ------------------------------------------------------------------ the main thread

    def run(self) -> int:
        """Runs all tasks to their end, hearing signals; returns the exit status."""
        before: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            # SIGUSR2 is submitit's warning; Ctrl-C is not for the background job of a script, which ignores it.
            handled = _FORWARDED if self._grace is not None else (*_FORWARDED, signal.SIGUSR2)
            awaited = [number for number in handled if signal.getsignal(number) is not signal.SIG_IGN]
            before = {n: signal.signal(n, lambda number, _: self.ask_to_end(number)) for n in awaited}
        try:
            while any(state.final is None for state in self._task_states.values()):
                self._start_due()
                self._handle_event()
                self._enforce_deadlines()
        finally:
            for state in self._task_states.values():
                if state.child is not None:
                    state.child.kill()
            self._end_coordinator()
            self._printer.finish(_PRINT_SECONDS)
            for number, handler in before.items():
                signal.signal(number, handler)
        end_states = [(r.final.status, r.record.restarts == 0) for r in self._task_states.values() if r.final]
        status = verdict(end_states, self._end_signal, self._has_finished)
        coordinator = self._coordinator
        if coordinator is not None and coordinator.status == _BAD_OPTIONS and not coordinator.record.restarts:
            return _BAD_OPTIONS  # it never listened: whatever the workers did was not a run
        return status if self._coordinator_status is None or status == 0 else self._coordinator_status

    def _all_tasks(self) -> list[_TaskState]:
        """The coordinator, if it is hosted here, and all tasks."""
        return [*([self._coordinator] if self._coordinator else []), *self._task_states.values()]

    def _start_due(self) -> None:
        """Starts the processes that do not run and may start now."""
        now = time.monotonic()
        for state in self._all_tasks():
            if state.child is not None or state.final is not None or state.start_at > now:
                continue
            try:
                state.child = Child(state.task, self._output, self.child_ended)
            except OSError as error:
                program = state.task.command[0]
                self._printer.say(f"{program!r} cannot be started: {error.strerror or error}.")
                missing = isinstance(error, FileNotFoundError)
                self._end_task(state, FinalStatus(127 if missing else 126), state.task.name)

    def _handle_event(self) -> None:
        """Handles one event, or returns when something else is due."""
        waits = [state.start_at for state in self._all_tasks() if not state.child and not state.final]
        until = min([*waits, self._ask_at, self._kill_at])
        try:
            event = self._events.get(timeout=min(_LOOK_SECONDS, max(0.0, until - time.monotonic())))
        except queue.Empty:
            return
        event()

    def _on_end(self, child: Child, status: int) -> None:
        state = next((each for each in self._all_tasks() if each.child is child), None)
        if state is None:
            return
        now, is_coordinator = time.monotonic(), state is self._coordinator
        name = "The coordinator" if is_coordinator else f"{state.task.name} (process {child.process.pid})"
        state.child, state.status = None, status
        # A coordinator that ends before the run is lost, however it ended.
        judged = -1 if is_coordinator and not self._is_ending and status != _BAD_OPTIONS else status
        decision = decide_restart(state.record, judged, now - child.began, self._is_ending, self._max_restarts)
        if isinstance(decision, RestartRecord):
            state.record, state.start_at = decision, now + decision.pause
            after = f" after {decision.pause:g} s" if decision.pause and not is_coordinator else ""
            self._printer.say(f"{name} {_end_text(status)}; it is started again{after}.")
        elif is_coordinator:
            self._give_up_coordinator(state, decision)
        else:
            self._end_task(state, decision, name)

    def _end_task(self, state: _TaskState, final: FinalStatus, name: str) -> None:
        """The task is over; ends the others if its end requires that."""
        state.final = final
        was_first = state.record.restarts == 0
        if final.given_up:
            self._printer.say(f"{name} {_end_text(final.status)} and is given up: {final.given_up}.")
        elif final.status and not self._has_finished:
            self._printer.say(f"{name} {_end_text(final.status)}.")
        if final.status == 0 and not self._has_finished:
            self.on_finish()
            self._finish()
        elif was_first and (is_error(final.status) or final.status == EXIT_STOPPED) and not self._is_ending:
            self._is_ending = True
            self._ask_at = time.monotonic() + _OTHERS_SECONDS
            self._drop_restarts()

    def _finish(self) -> None:
        """The run has finished: nothing is restarted, the others may end by themselves."""
        if self._has_finished:
            return
        self._has_finished = self._is_ending = True
        if self._coordinator is not None and self._coordinator.child is not None:
            self._coordinator.child.say(OVER)  # latecomers learn that the run has finished
        self._drop_restarts()

    def _drop_restarts(self) -> None:
        """Gives up the processes that wait for their next start, the coordinator too."""
        for state in self._all_tasks():
            if state.child is None and state.final is None:
                state.final = FinalStatus(state.status)

    def _on_signal(self, number: int) -> None:
        self.heard_signals.add(number)
        if self._grace is None:
            self._end_signal, self._is_ending = number, True
            self._drop_restarts()
            return
        if self._end_signal is not None:
            self._kill_at = time.monotonic()
            return
        self._end_signal, self._is_ending = number, True
        self._printer.say(
            f"{signal.Signals(number).name}: the processes have {self._grace:g} s to end; a second signal kills them."
        )
        self._drop_restarts()
        leaves = number == signal.SIGINT and self._coordinator is None  # Ctrl-C would end the run for all machines
        self._signal_all(signal.SIGTERM if leaves else number)
        self._kill_at = time.monotonic() + self._grace

    def _enforce_deadlines(self) -> None:
        """Asks, then forces, processes to end that are past their deadline."""
        now = time.monotonic()
        if now >= self._ask_at:
            self._ask_at, self._kill_at = math.inf, min(self._kill_at, now + (self._grace or _GRACE_SECONDS))
            self._signal_all(signal.SIGTERM)
        if now >= self._kill_at:
            self._kill_at = math.inf
            for state in self._task_states.values():
                if state.child is not None:
                    self._printer.say(f"{state.task.name} did not end and is killed.")
                    state.child.kill()

    def _signal_all(self, number: int) -> None:
        for state in self._task_states.values():
            if state.child is not None:
                state.child.signal(number)

    # ------------------------------------------------------------------ the coordinator

    def _give_up_coordinator(self, coordinator: _TaskState, final: FinalStatus) -> None:
        """The coordinator is over, and with it the run unless that is ending."""
        coordinator.final, why = final, final.given_up or "bad options"
        if not self._is_ending:
            self._printer.say(f"The coordinator {_end_text(coordinator.status)} and is given up: {why}.")
            self._coordinator_status, self._is_ending = max(1, coordinator.status), True
            self._drop_restarts()
            self._ask_at = time.monotonic()

    def _end_coordinator(self) -> None:
        """Asks the coordinator to end, and kills it if it does not."""
        if self._coordinator is None or self._coordinator.child is None:
            return
        child = self._coordinator.child
        child.say(END)
        try:
            self._coordinator.status = child.process.wait(_COORDINATOR_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()


def _end_text(status: int) -> str:
    words = describe_end(status)
    return f"was {words}" if words.startswith("killed") else f"ended ({words})"
