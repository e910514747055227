"""Monitor of a run: views from the coordinator's thread, and their web server.

Concept: the coordinator's state belongs to its thread. A reader's request wakes the loop, which makes an immutable view
between two messages, in a fiftieth of its time at most (:class:`Views`). :class:`Monitor` computes slow figures of the
plan outside of that thread, keeps them until the plan changes or some seconds have passed, and omits them for large
plans.

==================  =================================================================================================
``/``               the page
``/status``         :class:`~lightning_recycle.control.monitoring.status.Status` as JSON
``/schedule.svg``   the plan that runs
``/metrics``        for Prometheus; needs the extra ``metrics``
``/healthz``        200 while the coordinator answers, or waits for its next run: otherwise it should be restarted
``/readyz``         200 while workers can join, not only once they have: a Kubernetes service would keep them out
==================  =================================================================================================

A client can cost this process a bounded number of threads for a bounded time, and the run nothing.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, replace
from email.message import Message
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from importlib import resources
from typing import Any

from lightning_recycle.arguments import __version__
from lightning_recycle.control.monitoring.logs import plain
from lightning_recycle.control.monitoring.status import ProcessLocation, Status, metrics
from lightning_recycle.control.network.addresses_and_keys import accept, listen_at, listen_here, machine_name, shown
from lightning_recycle.errors import ConfigurationError, ControlPlaneError, PlanningError
from lightning_recycle.planning.schedule import Schedule

log = logging.getLogger(__name__)

_MOST_TIMED, _MOST_DRAWN = 20_000, 4_000  # operations: about 0.1 s of this process' interpreter
_KEPT_SECONDS = 5.0


class NothingToShow(ControlPlaneError):
    """There is no run, no plan, or it is too large to be drawn."""


class Monitor:
    """Shows the runs of this process, one after the other.

    ``samples_per_step``: if known. ``awaits_runs``: whether workers can come while there is no run.
    """

    def __init__(self, name: str, samples_per_step: int | None = None, awaits_runs: bool = False) -> None:
        self.awaits_runs = awaits_runs
        self._name = name
        self._samples = samples_per_step
        self._place = ProcessLocation(machine_name(), os.getpid())
        self._ask: Callable[[], RunView] | None = None  # how the run is
        self._has_begun = False
        self._lock = threading.Lock()  # computing something twice at the same time is of no use
        self._timed: tuple[int, float, Schedule | None] = (-1, 0.0, None)  # number of the plan, when it was timed
        self._picture: tuple[Schedule | None, str] = (None, "")

    def show(self, ask: Callable[[], RunView] | None) -> None:
        """Shows the run that ``ask`` asks from now on; None between two runs."""
        self._ask = ask
        self._has_begun = True
        with self._lock:
            self._timed = (-1, 0.0, None)

    def status(self) -> Status:
        """Status of the run. Raises NothingToShow, or ControlPlaneError without answer."""
        view = self._view()
        timed = self._timed_plan(view, _MOST_TIMED)
        predicted = None if timed is None else timed.period
        speed = view.status.throughput
        per_second = speed.steps_per_second
        samples = per_second * self._samples if per_second is not None and self._samples is not None else None
        return replace(
            view.status,
            throughput=replace(speed, predicted_step_seconds=predicted, samples_per_second=samples),
            name=self._name,
            coordinator=self._place,
            version=__version__,
        )

    def schedule_svg(self) -> str:
        """The current plan, drawn with the measured times of its operations.

        Raises NothingToShow without a plan or if it is too large, ControlPlaneError if the coordinator does not answer.
        """
        from lightning_recycle.visualize.charts import gantt_svg  # not needed to train

        timed = self._timed_plan(self._view(), _MOST_DRAWN)
        if timed is None:
            raise NothingToShow(f"No plan has been measured yet, or it has more than {_MOST_DRAWN:,} operations.")
        with self._lock:
            if self._picture[0] is not timed:
                self._picture = timed, gantt_svg(timed, unit="s")
            return self._picture[1]

    def _view(self) -> RunView:
        if self._ask is None:
            if self.awaits_runs:
                raise NothingToShow("No run is going on: it waits for workers.")
            what = "The run has ended" if self._has_begun else "The run has not begun: its workers are starting"
            raise NothingToShow(f"{what}.")
        return self._ask()

    def _timed_plan(self, view: RunView, most: int) -> Schedule | None:
        """The plan with measured times; None if there is none, or it is too large."""
        plan = view.status.plan
        if plan is None or view.timed is None or plan.operations > most:
            return None
        with self._lock:
            number, made, schedule = self._timed
            if number != plan.number or time.monotonic() - made > _KEPT_SECONDS:
                try:
                    schedule = view.timed()
                except PlanningError:  # not all stages have measured all operations of this plan yet
                    schedule = None
                self._timed = plan.number, time.monotonic(), schedule
            return schedule


_LEAST_SECONDS = 0.25  # between two views
_SHARE = 50  # between two views, times the seconds that one takes: with 2,000 workers some 10 ms


@dataclass(frozen=True)
class RunView:
    """A run as its coordinator's thread sees it.

    ``status``: without slow parts. ``timed``: gives the current plan with measured times, in other threads, as it may
    take long; None without plan or measurements.
    """

    status: Status
    timed: Callable[[], Schedule] | None


class Views:
    """Snapshots of a run for other threads; ``make`` runs in the loop's thread alone.

    ``wake``: lets the loop call :meth:`answer` soon; called in any thread.
    """

    def __init__(self, make: Callable[[], RunView], wake: Callable[[], None]) -> None:
        self._make, self._wake = make, wake
        self._lock = threading.RLock()
        self._requested_view: Future[RunView] | None = None
        self._newest: Future[RunView] | None = None
        self._fresh_until = 0.0

    def ask(self, timeout: float = 2.0) -> RunView:
        """A view at most a quarter of a second old; the last one after :meth:`close`.

        In any thread. Raises ControlPlaneError if the loop does not answer within ``timeout`` seconds, or could not
        make a view.
        """
        with self._lock:
            asked = self._newest
            if asked is None or time.monotonic() >= self._fresh_until:
                asked, is_asked = self._requested_view or Future(), self._requested_view is not None
                self._requested_view = asked
                if not is_asked:
                    self._wake()
        try:
            return asked.result(timeout)
        except FutureTimeout as error:
            raise ControlPlaneError(f"The coordinator does not answer: it was asked {timeout:g} s ago.") from error
        except Exception as error:
            raise ControlPlaneError(f"The coordinator could not say how it is: {error}") from error

    def answer(self) -> None:
        """In the loop's thread: makes a view if one is wanted."""
        if self._requested_view is not None:
            self._publish()

    def close(self) -> None:
        self._publish()
        self._fresh_until = math.inf

    def _publish(self) -> None:
        began = time.monotonic()
        with self._lock:
            made = self._requested_view = self._requested_view or Future()  # whoever asks meanwhile gets it, too
        try:
            made.set_result(self._make())
        except Exception as problem:  # whoever only looks must not end a run
            log.exception("The status of the run could not be made")
            made.set_exception(problem)
        with self._lock:
            now = time.monotonic()
            self._newest, self._requested_view = made, None
            self._fresh_until = now + max(_LEAST_SECONDS, _SHARE * (now - began))


_MOST_CONNECTIONS = 16  # at the same time, for each address
_CONNECTION_SECONDS = 10.0  # for the whole of it, however slowly the other side speaks
_READ_SECONDS = 5.0
_JOIN_SECONDS = 1.0

# Nothing from elsewhere, nothing but this page, and no other page may show it.
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self';"
        " img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}

Answer = tuple[HTTPStatus, str, bytes]


class StatusServer:
    """Answers at ``listeners`` from ``monitor``; use as a context manager."""

    def __init__(self, monitor: Monitor, listeners: list[socket.socket]) -> None:
        self.monitor = monitor
        self._listeners = listeners
        self._threads: list[threading.Thread] = []
        self._open: dict[socket.socket, threading.Thread] = {}  # connections, and the threads that answer them
        self._is_over = False

    def __enter__(self) -> StatusServer:
        for listener in self._listeners:
            listener.settimeout(None)  # whatever the user's script has made the default
            thread = threading.Thread(target=self._serve, args=(listener,), name="recycle-status", daemon=True)
            thread.start()
            self._threads.append(thread)
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        for listener in self._listeners:  # wakes the threads
            _cut(listener)
        for thread in self._threads:
            thread.join(_JOIN_SECONDS)
        answers = dict(self._open)
        for connection in answers:
            _cut(connection)
        for thread in answers.values():
            if thread.is_alive():
                thread.join(_JOIN_SECONDS)
        for listener in self._listeners:
            listener.close()

    def _serve(self, listener: socket.socket) -> None:
        places = threading.Semaphore(_MOST_CONNECTIONS)
        while not self._is_over:
            if (accepted := accept(listener, "The status server")) is None:
                continue
            connection, _ = accepted
            if places.acquire(blocking=False):
                answers = threading.Thread(target=self._answer, args=(connection, places), daemon=True)
                self._open[connection] = answers
                answers.start()
            else:
                connection.close()

    def _answer(self, connection: socket.socket, places: threading.Semaphore) -> None:
        limit = threading.Timer(_CONNECTION_SECONDS, _cut, (connection,))
        try:
            limit.start()
            connection.settimeout(_READ_SECONDS)
            _Handler(connection, ("", 0), self)  # type: ignore[arg-type]
        except OSError as error:  # the other side has left, or was too slow
            log.debug("A connection to the status server broke: %s", error)
        finally:
            limit.cancel()
            if limit.is_alive():
                limit.join(_JOIN_SECONDS)
            del self._open[connection]
            connection.close()
            places.release()


def _cut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it has just ended
        connection.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    server: StatusServer  # type: ignore[assignment]
    server_version = "lightning-recycle"
    sys_version = ""
    timeout = _READ_SECONDS

    def do_GET(self) -> None:
        status, kind, content = self._answer()
        self.send_response(status)
        for name, value in {**_HEADERS, "Content-Type": kind, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    do_HEAD = do_GET

    def _answer(self) -> Answer:
        if not self._is_addressed():
            return _text(HTTPStatus.FORBIDDEN, "This server answers to the name of this machine's loopback only.")
        route = _ROUTES.get(self.path.partition("?")[0])
        if route is None:
            return _text(HTTPStatus.NOT_FOUND, f"There are {', '.join(_ROUTES)}.")
        try:
            return route(self.server.monitor, self.headers)
        except NothingToShow as error:
            return _text(HTTPStatus.SERVICE_UNAVAILABLE, str(error))
        except ControlPlaneError as error:
            return _text(HTTPStatus.GATEWAY_TIMEOUT, str(error))
        except Exception:
            log.exception("The status server could not answer %r", self.path)
            return _text(HTTPStatus.INTERNAL_SERVER_ERROR, "This is a defect; the log of the run has its traceback.")

    def _is_addressed(self) -> bool:
        """Whether the Host header is this server's; refuses pages that rebind DNS to it."""
        local = self.connection.getsockname()
        if self.connection.family == socket.AF_UNIX or not _is_loopback(str(local[0])):
            return True
        host = self.headers.get("Host", "")
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
        return name in ("", "localhost") or _is_loopback(name.strip("[]"))

    def log_message(self, format: str, *args: Any) -> None:
        log.debug(format, *args)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.partition("%")[0].removeprefix("::ffff:")).is_loopback
    except ValueError:  # a name
        return False


# ---------------------------------------------------------------------- what is answered


def _text(status: HTTPStatus, text: str) -> Answer:
    return status, "text/plain; charset=utf-8", f"{text}\n".encode()


def _page(monitor: Monitor, headers: Message) -> Answer:
    page = resources.files("lightning_recycle.control.monitoring") / "page.html"
    return HTTPStatus.OK, "text/html; charset=utf-8", page.read_bytes()


def _status(monitor: Monitor, headers: Message) -> Answer:
    return HTTPStatus.OK, "application/json", json.dumps(plain(monitor.status()), allow_nan=False).encode()


def _schedule(monitor: Monitor, headers: Message) -> Answer:
    return HTTPStatus.OK, "image/svg+xml; charset=utf-8", monitor.schedule_svg().encode()


def _metrics(monitor: Monitor, headers: Message) -> Answer:
    try:
        status: Status | None = monitor.status()
    except NothingToShow:  # between two runs: no run is not a failure of the scrape
        status = None
    try:
        content, kind = metrics(status, headers.get("Accept", ""))
    except ModuleNotFoundError as error:
        return _text(HTTPStatus.NOT_IMPLEMENTED, str(error))
    return HTTPStatus.OK, kind, content


def _health(monitor: Monitor, headers: Message) -> Answer:
    try:
        monitor.status()
    except NothingToShow as nothing:
        return _text(HTTPStatus.OK, str(nothing))
    return _text(HTTPStatus.OK, "The coordinator answers.")


def _ready(monitor: Monitor, headers: Message) -> Answer:
    try:
        status = monitor.status()
    except NothingToShow as nothing:
        if not monitor.awaits_runs:
            raise
        return _text(HTTPStatus.OK, str(nothing))
    if status.outcome is not None:
        return _text(HTTPStatus.SERVICE_UNAVAILABLE, f"The run is over: {status.outcome}.")
    return _text(HTTPStatus.OK, "Workers can join.")


_ROUTES: dict[str, Callable[[Monitor, Message], Answer]] = {
    "/": _page,
    "/status": _status,
    "/schedule.svg": _schedule,
    "/metrics": _metrics,
    "/healthz": _health,
    "/readyz": _ready,
}


# ---------------------------------------------------------------------- where it listens


@contextlib.contextmanager
def served(
    monitor: Monitor, http: tuple[str, int] | None = None, local: bool = True, setting: str = "RECYCLE_HTTP"
) -> Iterator[StatusServer]:
    """Serves ``monitor`` within the block, to this user and at the address ``http``.

    To this user on this machine if ``local``; at ``http``, if any, to all that can connect there. Raises
    ConfigurationError, with the ``setting`` that gave ``http``, if that cannot be listened at.
    """
    with contextlib.ExitStack() as stack:
        listeners = []
        if local:
            try:
                listeners.append(stack.enter_context(listen_here()))
            except OSError as error:  # to be seen is no condition for a run
                log.info("recycle-status will not find this run: %s", error)
        if http is not None:
            try:
                listeners.append(stack.enter_context(listen_at(http, backlog=_MOST_CONNECTIONS)))
            except ConfigurationError as error:
                raise ConfigurationError(f"{setting}: {error}") from error
            bound = listeners[-1].getsockname()[:2]
            if not _is_loopback(bound[0]):
                log.warning(
                    "The status of this run is at http://%s/, without authentication: everyone who reaches it sees"
                    " hosts, process ids and steps, but cannot change the run.",
                    shown(bound),
                )
            else:
                log.info("The status of this run is at http://%s/.", shown(bound))
        yield stack.enter_context(StatusServer(monitor, listeners))
