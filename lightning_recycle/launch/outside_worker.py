"""Worker from outside: a process that a user or a cluster manager started, and its way into a run.

It connects to a coordinator, waits as a spare until there is a position for it, runs the Trainer's function, and goes
on as an ordinary process. Its run request describes the run that its script asks for; the coordinator refuses what it
cannot do.

A worker that loses its coordinator looks for it for ``RECYCLE_RECONNECT_SECONDS``, 60 by default, and keeps all that it
holds: a coordinator that was killed and started again goes on with it
(:mod:`~lightning_recycle.control.protocol.coordinator_restart`). After that it tries for ``RECYCLE_REJOIN_SECONDS`` to
get back in; with 0, the default, the process ends instead. What the worker holds is worthless then, and its main thread
may be blocked anywhere. So the process replaces itself by a new run of its own program (``exec``), which is the one way
to let go of everything at once: the model, the device with its context, threads and connections. Its process id stays,
so its starter sees one process. The new program comes to its entry point as any worker does and waits there as a spare.

A worker tries for ``RECYCLE_CONNECT_SECONDS`` to reach its coordinator at first.
"""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn, TypeVar

from lightning_recycle.callbacks import PlanMonitor
from lightning_recycle.control.client import EXIT_LOST_COORDINATOR, ControlClient
from lightning_recycle.control.joining.run_config import settings_of
from lightning_recycle.control.monitoring.json_logs import describe_process
from lightning_recycle.control.network.addresses import shown
from lightning_recycle.control.network.handshake import Refused, VersionMismatch
from lightning_recycle.control.options import HeartbeatTimeouts
from lightning_recycle.control.payload import unpack
from lightning_recycle.control.protocol.messages import Assign, RunRequest, Setting
from lightning_recycle.engines.discovery import Discovered
from lightning_recycle.errors import ConfigurationError
from lightning_recycle.launch.run_preparation import PreparedRun
from lightning_recycle.launch.worker_process import crashes_reported, log_fields, run_worker
from lightning_recycle.session.configuration import Place, RunSetup

__all__ = [
    "connect_seconds",
    "patiently",
    "reconnect_seconds",
    "rejoin_seconds",
    "run_outside",
    "start_afresh",
    "take_deadline",
]

log = logging.getLogger(__name__)

_T = TypeVar("_T")

_VARIABLE = "RECYCLE_REJOIN_SECONDS"
_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 2.0  # seconds between two attempts
_DEADLINE = "_RECYCLE_REJOIN_UNTIL"  # from the process before to the one after: seconds of the machine's clock
_BETWEEN_RUNS_SECONDS = 3.0  # in which the coordinator of a run that ended may still listen, to no use
_run_ended = -_BETWEEN_RUNS_SECONDS  # when this process, an outside worker, ended a run


def run_outside(outside: Discovered, run: PreparedRun) -> Any:
    """Runs as a worker in this process, which was started by hand or by a cluster manager.

    Waits as a spare until there is a position for it. Afterwards the module in this process is whole again.

    Args:
        outside: the place of this process, from its environment.
        run: the run that this script asks for.

    Raises:
        ConfigurationError: if no coordinator listens there, the key is not the run's, another version runs there, or
            the run is not what ``run`` asks for.
        SystemExit: if this worker was cut off and could not get back in, or ended by an exception.
    """
    global _run_ended
    address = outside.coordinator
    looks_for = reconnect_seconds()
    patience, rejoin_until, trying = rejoin_seconds(), take_deadline(), connect_seconds()
    if (since := time.monotonic() - _run_ended) < _BETWEEN_RUNS_SECONDS:
        time.sleep(_BETWEEN_RUNS_SECONDS - since)
    # While it starts, or between two runs, nobody listens; its name and the route to it may come later, too. On the way
    # back in, even who listens may be another one for a while.
    passing = (OSError,) if rejoin_until is None else (OSError, Refused)
    deadline = time.monotonic() + trying if rejoin_until is None else rejoin_until
    try:
        client = patiently(
            lambda: ControlClient(
                None,
                address,
                outside.key,
                heartbeat_interval=0.5,
                survives=True,
                node=outside.node,
                wants=_run_request(run),
                patience=looks_for,
            ),
            passing,
            deadline,
            shown(address),
        )
    except VersionMismatch as error:
        raise ConfigurationError(f"RECYCLE_COORDINATOR={shown(address)}: {error}.") from error
    except (OSError, Refused) as error:
        if rejoin_until is not None:
            log.warning("This worker could not get back into its run within %g s and ends: %s", patience, error)
            sys.exit(EXIT_LOST_COORDINATOR)
        tried = f", after {trying:g} s" if isinstance(error, OSError) else ""
        raise ConfigurationError(
            f"RECYCLE_COORDINATOR={shown(address)}: no run can be joined there ({type(error).__name__}:"
            f" {error}{tried}). Start a recycle-coordinator there, or the launching process with RECYCLE_LISTEN set to"
            " that address, and give RECYCLE_KEY the same value here and there."
        ) from error
    if patience:
        client.on_lost = partial(start_afresh, patience)
    assignment = client.await_assignment()
    describe_process(partial(log_fields, client))
    returned = None
    with crashes_reported(client, shows=True):
        setup = _own_setup(run.setup, assignment) if assignment.setup is None else unpack(assignment.setup)
        client.heartbeat_interval = setup.heartbeat_interval
        place = Place(client.rank, assignment.incarnation, outside.device, outside.host or client.local_host)
        returned = run_worker(client, setup, place, run.call, goes_on=True, reports=assignment.takes_results)
    _run_ended = time.monotonic()
    return returned


def rejoin_seconds() -> float:
    """For how long a worker that was cut off tries to get back in; 0 for not at all.

    Raises:
        ConfigurationError: if ``RECYCLE_REJOIN_SECONDS`` is no such number.
    """
    return _seconds(_VARIABLE, "0")


def connect_seconds() -> float:
    """For how long a worker tries to reach its coordinator at first.

    Raises:
        ConfigurationError: if ``RECYCLE_CONNECT_SECONDS`` is no such number.
    """
    return _seconds("RECYCLE_CONNECT_SECONDS", "60")


def reconnect_seconds() -> float:
    """For how long a worker looks for a coordinator that is gone and may be started again; 0 for not at all.

    Raises:
        ConfigurationError: if ``RECYCLE_RECONNECT_SECONDS`` is no such number.
    """
    return _seconds("RECYCLE_RECONNECT_SECONDS", "60")


def _seconds(variable: str, default: str) -> float:
    text = os.environ.get(variable, default)
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise ConfigurationError(f"{variable}={text!r}: give a number of seconds, for example {variable}=600.")
    return seconds


def patiently(connect: Callable[[], _T], passing: tuple[type[Exception], ...], deadline: float, whom: str) -> _T:
    """The result of ``connect``, tried again after errors that may pass, at growing intervals.

    Args:
        connect: the attempt.
        passing: the errors that may pass; a VersionMismatch never does.
        deadline: on the monotonic clock; the error of an attempt that ends later is raised.
        whom: the address, for the log.
    """
    pause = _FIRST_PAUSE
    while True:
        try:
            return connect()
        except VersionMismatch:
            raise
        except passing as error:
            left = deadline - time.monotonic()
            if left <= 0:
                raise
            if pause == _FIRST_PAUSE:
                log.warning("No coordinator can be reached at %s yet (%s); trying for %.0f s.", whom, error, left)
        time.sleep(min(left, pause * random.uniform(0.5, 1.0)))  # many workers do not come at the same moment
        pause = min(2 * pause, _LONGEST_PAUSE)


def start_afresh(seconds: float) -> NoReturn:
    """Runs this process's program again in its place; it has ``seconds`` to get back in. From any thread."""
    for child in multiprocessing.active_children():  # DataLoader processes: they watch for a parent with another id
        child.kill()
    os.environ[_DEADLINE] = repr(time.monotonic() + seconds)
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def take_deadline() -> float | None:
    """Until when this process may try to get back in, on the monotonic clock; None if it was not cut off.

    None from the second call on: later entry points of a process are ordinary ones.
    """
    text = os.environ.pop(_DEADLINE, None)
    return None if text is None else float(text)


# ---------------------------------------------------------------------- run request


def _own_setup(setup: RunSetup, assignment: Assign) -> RunSetup:
    """The setup of this worker for a coordinator that brings none."""
    return replace(
        setup,
        grid=assignment.grid,
        staggered=setup.staggered and assignment.staggered,
        outsiders=True,
        gathering=replace(setup.gathering, local=False),
    )


def _run_request(run: PreparedRun) -> RunRequest:
    """The run that the script asks for; the coordinator refuses what it cannot do."""
    trainer, options, heartbeat = run.call.trainer, run.options, run.heartbeat
    assert trainer.state.fn is not None
    named = isinstance(options.planning.planner, str)
    planning = replace(
        options.planning, staggered=run.setup.staggered, planner=options.planning.planner if named else "heuristic"
    )
    timeouts = HeartbeatTimeouts(
        float(heartbeat.timeout), float(heartbeat.last_holder_timeout), float(heartbeat.coordinator_timeout)
    )
    drift = PlanMonitor.options_of(trainer)
    settings: dict[str, Setting] = {
        **settings_of("planning", planning),
        **settings_of("recovery", options.recovery),
        **settings_of("verification", options.verification),
        **settings_of("heartbeat", timeouts),
        **({} if drift is None else settings_of("monitor", drift)),
    }
    objects = [] if named else ["PlanningOptions(planner=<an object>)"]
    return RunRequest(
        entry=str(trainer.state.fn.value),
        grid=run.setup.grid,
        microbatches_given=options.num_microbatches is not None,
        settings=settings,
        needs_launcher=(*options.planning.needing_launcher(), *options.recovery.needing_launcher(), *objects),
    )
