"""The life of a worker process: it connects, runs the function, delivers a result.

The launching process starts it, or a user or a cluster manager; then it waits as a spare for a position, and goes on as
an ordinary process afterwards. It tries for ``RECYCLE_CONNECT_SECONDS``, 60 by default, to reach its coordinator, also
after losing it, and then ends.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import multiprocessing
import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar, cast

from lightning_recycle.callbacks import PlanMonitor
from lightning_recycle.control.client import EXIT_INTERRUPTED, EXIT_RAISED, ControlClient, describe_error, unpack
from lightning_recycle.control.monitoring.logs import describe_process, install_if_wanted
from lightning_recycle.control.network.addresses_and_keys import machine_name, shown
from lightning_recycle.control.network.connection import Refused, VersionMismatch
from lightning_recycle.control.options import settings_of
from lightning_recycle.control.protocol.messages import Assign, Crash, RunRequest, Setting
from lightning_recycle.engines.worker_environment import Discovered, connect_seconds
from lightning_recycle.errors import ConfigurationError, ControlPlaneError, InjectedFaultError
from lightning_recycle.launch import run_results, worker_payload
from lightning_recycle.launch.run_preparation import ConfiguredStrategy, PreparedRun, TrainerCall
from lightning_recycle.model.layers import weights_of
from lightning_recycle.processes import name_process
from lightning_recycle.runtime.machine_errors import readers_may_die
from lightning_recycle.session.configuration import ResultRoute, RunSetup, WorkerIdentity
from lightning_recycle.session.session import Session
from lightning_recycle.session.worker_context import WorkerContext

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WorkerStart:
    """Start argument of a worker process.

    ``payload``: a :class:`~lightning_recycle.launch.worker_payload.WorkerPayload`, which is a
    :class:`~lightning_recycle.launch.worker_payload.ReceivedPayload` in the worker.
    """

    place: WorkerIdentity
    joining: bool
    setup: RunSetup
    address: tuple[str, int]
    authkey: bytes
    payload: Any


def worker_main(start: WorkerStart) -> None:
    """Main function of a process that the supervisor started."""
    # What the fork server imported is never garbage; a collection over it would hold up every thread, even the
    # heartbeat, and copy its pages (measured: 0.7 s with four workers on a busy machine).
    gc.freeze()
    # A fork server's child would start its own for DataLoader processes, which outlives a killed worker.
    multiprocessing.set_start_method("fork", force=True)
    # It may reach the whole job. With SIG_IGN Lightning installs no handler that saves.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    client = ControlClient(
        start.place.rank,
        start.address,
        start.authkey,
        start.setup.heartbeat_interval,
        joining=start.joining,
        node=machine_name(),
    )
    signal.signal(signal.SIGTERM, lambda *_: client.request_leave())
    worker = start.setup.positions.position(start.place.rank)
    name_process(f"recycle {worker.pipeline},{worker.stage}")
    with crashes_reported(client):
        worker_payload.ignore_untrue_warnings()  # the script is imported now, too; its filters come with the settings
        call, settings = start.payload.load()
        settings.restore()
        describe_process(partial(log_fields, client))
        install_if_wanted()
        if start.payload.logs is not None:
            start.payload.logs.install(partial(log_fields, client))
        run_worker(client, start.setup, start.place, call)


def run_worker(
    client: ControlClient,
    setup: RunSetup,
    place: WorkerIdentity,
    call: TrainerCall,
    continues: bool = False,
    reports: bool = True,
) -> Any:
    """Runs the function in this worker; returns its result.

    ``continues``: as a launching process afterwards; ``reports``: to one that wants the result.
    """
    trainer = call.trainer
    worker_payload.set_num_threads(setup.positions.num_workers)
    worker_payload.ignore_untrue_warnings()
    strategy = cast(ConfiguredStrategy, trainer.strategy)
    session = Session(WorkerContext(strategy.options, setup, place, client, trainer))
    strategy.enter(session)
    user = run_results.UserObjects(call, session if reports else None)
    with session.errors_judged():
        returned = call()
        session.checkpoints.weights.release()
        route = run_results.result_route(session, setup.gathering)
        weights = None
        if setup.outsiders and route is ResultRoute.MESSAGES:
            weights = session.checkpoints.joined("weights", weights_of(session.module))
        part: Callable[[], Any] = partial(run_results.stage_result, session, user, route, setup.gathering.folder)
        common: Callable[[], Any] = partial(
            run_results.leader_result, session, user, route, setup.gathering.large_bytes, returned
        )
        session.checkpoints.deliver_result(part if reports else _no_result, common if reports else _no_result)
    client.leave()
    if continues:
        session.leave()
        strategy.enter(None)
        if call.fits:
            strategy.optimizers, strategy.lr_scheduler_configs = [], []  # of one stage, whose parameters are gone
            strategy.missing_optimizers = run_results.WHY_NO_OPTIMIZERS
        strategy.missing_weights = run_results.WHY_NO_WEIGHTS if weights is None else None
        if weights is not None:
            session.parts.rebuild(weights)
    return returned


def _no_result() -> None:
    """No result, where there is no launching process."""


def log_fields(client: ControlClient) -> dict[str, int]:
    """Fields that each line of a worker's JSON log has."""
    return {"rank": client.rank, "generation": client.generation}


@contextlib.contextmanager
def crashes_reported(client: ControlClient, shows: bool = False) -> Any:
    """Reports an exception to the coordinator, and ends with the status for that.

    ``shows``: the traceback is shown here; otherwise the supervisor decides.
    """
    status = EXIT_RAISED
    try:
        yield
    except BaseException as error:
        explain(error)
        with readers_may_die():  # otherwise the process could end without a word
            # A worker that has not entered yet cannot end the run: no member has met this error.
            fault = isinstance(error, (InjectedFaultError, ControlPlaneError)) or client.is_joining
            summary, text = describe_error(error, worker_payload.from_users_code(error))
            if isinstance(error, KeyboardInterrupt):
                text = ""  # where a signal found it is not a fault of that code
            data = worker_payload.dump_exception(error)  # without one, the summary and the traceback must do
            status = EXIT_INTERRUPTED if isinstance(error, KeyboardInterrupt) else EXIT_RAISED
            if shows:  # first, as the end of the run may end this process at any moment from now on
                print(text, file=sys.stderr, end="", flush=True)
            client.leave(status)
            client.send(Crash(client.rank, fault, summary, data, text))
            if not fault:
                client.finish_saves()
        sys.exit(status)


def explain(error: BaseException) -> None:
    """Notes at an error of torch that workers have no process group."""
    if "Default process group has not been initialized" in str(error) and hasattr(error, "add_note"):  # Python 3.11
        error.add_note(
            "ReCycleStrategy's workers have no process group of torch.distributed. What self.log and torchmetrics get"
            " is gathered from all workers; in hooks outside of steps self.all_gather() works."
        )


_T = TypeVar("_T")

_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 2.0  # seconds between two attempts
_BETWEEN_RUNS_SECONDS = 3.0  # in which the coordinator of a run that ended may still listen, to no use
_run_ended = -_BETWEEN_RUNS_SECONDS  # when this process, an outside worker, ended a run


def run_outside(outside: Discovered, run: PreparedRun) -> Any:
    """Runs as a worker in this process, first as a spare until a position is vacant.

    Afterwards the module in this process is whole again. Raises ConfigurationError if no coordinator listens there, the
    key, version or ``run`` is not its own; SystemExit if this worker ended by an exception.
    """
    global _run_ended
    address, seconds = outside.coordinator, connect_seconds()
    if (since := time.monotonic() - _run_ended) < _BETWEEN_RUNS_SECONDS:
        time.sleep(_BETWEEN_RUNS_SECONDS - since)
    try:
        client = retry_connecting(
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
        returned = run_worker(client, setup, place, run.call, continues=True, reports=assignment.takes_results)
    _run_ended = time.monotonic()
    return returned


def retry_connecting(connect: Callable[[], _T], seconds: float, address: str) -> _T:
    """The result of ``connect``, tried for ``seconds`` after an OSError.

    While the coordinator starts, or between two runs, no process listens. ``address``: for the log.
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
                log.warning("No coordinator can be reached at %s yet (%s); trying for %.0f s.", address, error, left)
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
    """The script's requests; the coordinator refuses impossible ones."""
    trainer, options = run.call.trainer, run.options
    assert trainer.state.fn is not None
    named = isinstance(options.planning.planner, str)
    planning = replace(
        options.planning, staggered=run.setup.staggered, planner=options.planning.planner if named else "heuristic"
    )
    groups: dict[str, Any] = {"planning": planning, "recovery": options.recovery, "verification": options.verification}
    groups |= {"heartbeat": run.heartbeat.timeouts, "monitor": PlanMonitor.options_of(trainer)}
    settings: dict[str, Setting] = {}
    for name, group in groups.items():
        settings |= {} if group is None else settings_of(name, group)
    objects = [] if named else ["PlanningOptions(planner=<an object>)"]
    return RunRequest(
        entry=str(trainer.state.fn.value),
        grid=run.setup.grid,
        microbatches_given=options.num_microbatches is not None,
        settings=settings,
        needs_launcher=(*options.planning.needing_launcher(), *options.recovery.needing_launcher(), *objects),
        members=run.setup.positions.members,
        device=trainer.strategy.root_device.type,
    )
