"""The life of a worker process: it connects, runs the Trainer's function, delivers its part of the result."""

from __future__ import annotations

import contextlib
import gc
import logging
import multiprocessing
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

from lightning_recycle.control.client import (
    EXIT_INTERRUPTED,
    EXIT_RAISED,
    ControlClient,
)
from lightning_recycle.control.monitoring.json_logs import describe_process, install_if_wanted
from lightning_recycle.control.network.addresses import machine_name
from lightning_recycle.control.payload import in_words
from lightning_recycle.control.protocol.messages import Crash
from lightning_recycle.errors import ControlPlaneError, InjectedFaultError
from lightning_recycle.launch.outcome import dump_exception, from_users_code
from lightning_recycle.launch.run_preparation import ConfiguredStrategy, TrainerCall
from lightning_recycle.launch.trainer_results import STAY_IN_THE_WORKERS, WEIGHTS_STAY
from lightning_recycle.launch.worker_payload import ignore_untrue_warnings, set_num_threads
from lightning_recycle.launch.worker_results import UserObjects, leader_result, stage_result, way_home
from lightning_recycle.model.weights import weights_of
from lightning_recycle.processes import set_title
from lightning_recycle.runtime.machine_errors import readers_may_die
from lightning_recycle.session.collectives import WorkerContext
from lightning_recycle.session.configuration import ResultRoute, RunSetup, WorkerIdentity
from lightning_recycle.session.session import Session

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WorkerStart:
    """Start argument of a worker process.

    ``payload``: the :class:`~lightning_recycle.launch.worker_payload.WorkerPayload` of the run, which is
    :class:`~lightning_recycle.launch.worker_payload.ReceivedPayload` in the worker.
    """

    place: WorkerIdentity
    joining: bool
    setup: RunSetup
    address: tuple[str, int]
    authkey: bytes
    payload: Any


def worker_main(start: WorkerStart) -> None:
    """Runs in a process that the supervisor started."""
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
    set_title(f"recycle worker {worker} of {Path(sys.argv[0]).name}", f"recycle {worker.pipeline},{worker.stage}")
    with crashes_reported(client):
        ignore_untrue_warnings()  # the script is imported now, too; its filters come with the settings
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
    goes_on: bool = False,
    reports: bool = True,
) -> Any:
    """Runs the function in this worker; returns its result.

    Args:
        client: the connection to the coordinator.
        setup: settings that all workers share.
        place: the place of this worker.
        call: the function.
        goes_on: whether this process goes on as a launching process.
        reports: whether there is a launching process that wants the result.
    """
    trainer = call.trainer
    set_num_threads(setup.positions.num_workers)
    ignore_untrue_warnings()
    strategy = cast(ConfiguredStrategy, trainer.strategy)
    session = Session(WorkerContext(strategy.options, setup, place, client, trainer))
    strategy.enter(session)
    user = UserObjects(call, keeps_large=reports)
    with session.settled():
        returned = call()
        session.checkpoints.weights.release()
        way = way_home(session, setup.gathering)
        whole = None
        if setup.outsiders and way is ResultRoute.MESSAGES:
            whole = session.checkpoints.joined("weights", weights_of(session.module))
        part: Callable[[], Any] = partial(stage_result, session, user, way, setup.gathering.folder)
        extras: Callable[[], Any] = partial(leader_result, session, user, way, setup.gathering.large_bytes, returned)
        session.checkpoints.deliver_result(part if reports else _nothing, extras if reports else _nothing)
    client.leave()
    if goes_on:
        session.leave()
        strategy.enter(None)
        if call.fits:
            strategy.optimizers, strategy.lr_scheduler_configs = [], []  # of one stage, whose parameters are gone
            strategy.missing_optimizers = STAY_IN_THE_WORKERS
        strategy.missing_weights = WEIGHTS_STAY if whole is None else None
        if whole is not None:
            session.parts.rebuild(whole)
    return returned


def _nothing() -> None:
    """No result, where there is no launching process."""


def log_fields(client: ControlClient) -> dict[str, int]:
    """Fields that each line of a worker's JSON log has."""
    return {"rank": client.rank, "generation": client.generation}


@contextlib.contextmanager
def crashes_reported(client: ControlClient, shows: bool = False) -> Any:
    """Reports an exception of this worker to the coordinator, and ends it with the status for that.

    ``shows``: whether the traceback is shown here; otherwise the supervisor decides.
    """
    status = EXIT_RAISED
    try:
        yield
    except BaseException as error:
        with readers_may_die():  # otherwise the process could end without a word
            # A worker that has not entered yet cannot end the run: no member has met this error.
            fault = isinstance(error, (InjectedFaultError, ControlPlaneError)) or client.joining
            summary, text = in_words(error, from_users_code(error))
            data = dump_exception(error)  # without one, the summary and the traceback must do
            status = EXIT_INTERRUPTED if isinstance(error, KeyboardInterrupt) else EXIT_RAISED
            if shows:  # first, as the end of the run may end this process at any moment from now on
                print(text, file=sys.stderr, end="", flush=True)
            client.leave(status)
            client.send(Crash(client.rank, fault, summary, data, text))
            if not fault:
                client.finish_saves()
        sys.exit(status)
