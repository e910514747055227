"""Worker from outside: a process that a user or a cluster manager started.

It connects to a coordinator, waits as a spare until there is a position for it, runs the Trainer's function, and goes
on as an ordinary process. It tries for ``RECYCLE_CONNECT_SECONDS``, 60 by default, to reach its coordinator, and again
for as long when it has lost it; after that the process ends.
"""

from __future__ import annotations

import logging
import math
import os
import random
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from lightning_recycle.callbacks import PlanMonitor
from lightning_recycle.control.client import ControlClient
from lightning_recycle.control.joining.run_config import settings_of
from lightning_recycle.control.monitoring.json_logs import describe_process
from lightning_recycle.control.network.addresses import shown
from lightning_recycle.control.network.handshake import Refused, VersionMismatch
from lightning_recycle.control.payload import unpack
from lightning_recycle.control.protocol.messages import Assign, RunRequest, Setting
from lightning_recycle.engines.discovery import Discovered
from lightning_recycle.errors import ConfigurationError
from lightning_recycle.launch.run_preparation import PreparedRun
from lightning_recycle.launch.worker_process import crashes_reported, log_fields, run_worker
from lightning_recycle.session.configuration import RunSetup, WorkerIdentity

log = logging.getLogger(__name__)

_T = TypeVar("_T")

_VARIABLE = "RECYCLE_CONNECT_SECONDS"
_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 2.0  # seconds between two attempts
_BETWEEN_RUNS_SECONDS = 3.0  # in which the coordinator of a run that ended may still listen, to no use
_run_ended = -_BETWEEN_RUNS_SECONDS  # when this process, an outside worker, ended a run


def run_outside(outside: Discovered, run: PreparedRun) -> Any:
    """Runs as a worker in this process, first as a spare until a position is vacant.

    Afterwards the module in this process is whole again.

    Raises:
        ConfigurationError: if no coordinator listens there, the key is not the run's, another version runs there, or
            the run is not what ``run`` asks for.
        SystemExit: if this worker ended by an exception.
    """
    global _run_ended
    address, seconds = outside.coordinator, connect_seconds()
    if (since := time.monotonic() - _run_ended) < _BETWEEN_RUNS_SECONDS:
        time.sleep(_BETWEEN_RUNS_SECONDS - since)
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
                patience=seconds,
            ),
            seconds,
            shown(address),
        )
    except VersionMismatch as error:
        raise ConfigurationError(f"RECYCLE_COORDINATOR={shown(address)}: {error}.") from error
    except (OSError, Refused) as error:
        tried = f", after {seconds:g} s" if isinstance(error, OSError) else ""
        raise ConfigurationError(
            f"RECYCLE_COORDINATOR={shown(address)}: no run can be joined there ({type(error).__name__}:"
            f" {error}{tried}). Start a recycle-coordinator there, or the launching process with RECYCLE_LISTEN set to"
            " that address, and give RECYCLE_KEY the same value here and there."
        ) from error
    assignment = client.await_assignment()
    describe_process(partial(log_fields, client))
    returned = None
    with crashes_reported(client, shows=True):
        setup = _own_setup(run.setup, assignment) if assignment.setup is None else unpack(assignment.setup)
        client.heartbeat_interval = setup.heartbeat_interval
        place = WorkerIdentity(client.rank, assignment.incarnation, outside.device, outside.host or client.local_host)
        returned = run_worker(client, setup, place, run.call, goes_on=True, reports=assignment.takes_results)
    _run_ended = time.monotonic()
    return returned


def connect_seconds() -> float:
    """For how long a worker tries to reach its coordinator; 0 for not at all.

    Raises:
        ConfigurationError: if ``RECYCLE_CONNECT_SECONDS`` is no such number.
    """
    text = os.environ.get(_VARIABLE, "60")
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise ConfigurationError(f"{_VARIABLE}={text!r}: give a number of seconds, for example {_VARIABLE}=600.")
    return seconds


def patiently(connect: Callable[[], _T], seconds: float, whom: str) -> _T:
    """The result of ``connect``, tried for ``seconds`` after an OSError.

    While the coordinator starts, or between two runs, no process listens. ``whom``: the address, for the log.
    """
    pause, deadline = _FIRST_PAUSE, time.monotonic() + seconds
    while True:
        try:
            return connect()
        except OSError as error:
            left = deadline - time.monotonic()
            if left <= 0:
                raise
            if pause == _FIRST_PAUSE:
                log.warning("No coordinator can be reached at %s yet (%s); trying for %.0f s.", whom, error, left)
        time.sleep(min(left, pause * random.uniform(0.5, 1.0)))  # many workers do not come at the same moment
        pause = min(2 * pause, _LONGEST_PAUSE)


# ---------------------------------------------------------------------- run request


def _own_setup(setup: RunSetup, assignment: Assign) -> RunSetup:
    return replace(
        setup,
        grid=assignment.grid,
        staggered=setup.staggered and assignment.staggered,
        outsiders=True,
        gathering=replace(setup.gathering, local=False),
    )


def _run_request(run: PreparedRun) -> RunRequest:
    """The run that the script asks for; the coordinator refuses what it cannot do."""
    trainer, options = run.call.trainer, run.options
    assert trainer.state.fn is not None
    named = isinstance(options.planning.planner, str)
    planning = replace(
        options.planning, staggered=run.setup.staggered, planner=options.planning.planner if named else "heuristic"
    )
    drift = PlanMonitor.options_of(trainer)
    settings: dict[str, Setting] = {
        **settings_of("planning", planning),
        **settings_of("recovery", options.recovery),
        **settings_of("verification", options.verification),
        **settings_of("heartbeat", run.heartbeat.timeouts),
        **({} if drift is None else settings_of("monitor", drift)),
    }
    objects = [] if named else ["PlanningOptions(planner=<an object>)"]
    return RunRequest(
        entry=str(trainer.state.fn.value),
        grid=run.setup.grid,
        microbatches_given=options.num_microbatches is not None,
        settings=settings,
        needs_launcher=(*options.planning.needing_launcher(), *options.recovery.needing_launcher(), *objects),
        members=run.setup.positions.members,
    )
