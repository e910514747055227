"""The life of a worker process: it connects, runs the Trainer's function, delivers its part of the result."""

from __future__ import annotations

import contextlib
import gc
import logging
import multiprocessing
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeAlias, cast

import lightning.pytorch as pl
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch.optim import Optimizer

from lightning_recycle.control.addresses import shown
from lightning_recycle.control.client import EXIT_LOST_COORDINATOR, ControlClient, in_words
from lightning_recycle.control.handshake import Refused, VersionMismatch
from lightning_recycle.control.payload import unpack
from lightning_recycle.control.protocol.messages import Crash
from lightning_recycle.errors import ConfigurationError, ControlPlaneError, InjectedFaultError
from lightning_recycle.launch import rejoin
from lightning_recycle.launch.delivery import extras_of, part_of
from lightning_recycle.launch.environment import set_num_threads
from lightning_recycle.launch.main_module import dumps
from lightning_recycle.launch.returned_optimizers import STAY_IN_THE_WORKERS
from lightning_recycle.launch.shared_settings import ignore_untrue_warnings
from lightning_recycle.launch.tracebacks import from_users_code
from lightning_recycle.model.weights import weights_of
from lightning_recycle.planning.grid import Grid
from lightning_recycle.runtime.machine_errors import readers_may_die
from lightning_recycle.session.attributes import AttributeCarrier
from lightning_recycle.session.configuration import Options, Place, RunSetup
from lightning_recycle.session.session import Session

__all__ = ["Call", "WorkerStart", "run_outside", "worker_main"]

log = logging.getLogger(__name__)

_BETWEEN_RUNS_SECONDS = 3.0  # in which the coordinator of a run that ended may still listen, to no use
_run_ended = -_BETWEEN_RUNS_SECONDS  # when this process, an outside worker, ended a run


Call: TypeAlias = tuple[pl.Trainer, Callable[..., Any], tuple[Any, ...], dict[str, Any]]
"""What every worker runs: a Trainer, a bound method of it, and the arguments of that method."""


class _Strategy(Protocol):
    """What this module needs from the strategy."""

    options: Options

    def enter(self, session: Session | None) -> None: ...

    optimizers: list[Optimizer]
    lr_scheduler_configs: list[LRSchedulerConfig]
    missing_optimizers: str | None


@dataclass(frozen=True)
class WorkerStart:
    """What a worker process of this machine is started with.

    ``payload``: the :class:`~lightning_recycle.launch.inherited.Payload` of the run, which is
    :class:`~lightning_recycle.launch.inherited.Inherited` in the worker.
    """

    place: Place
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
    if "fork" in multiprocessing.get_all_start_methods():
        # A fork server's child would start its own for DataLoader processes, which outlives a killed worker.
        multiprocessing.set_start_method("fork", force=True)
    if hasattr(signal, "SIGUSR1"):  # may reach the whole job; with SIG_IGN Lightning installs no handler that saves
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    client = ControlClient(
        start.place.rank, start.address, start.authkey, start.setup.heartbeat_interval, joining=start.joining
    )
    signal.signal(signal.SIGTERM, lambda *_: client.request_leave())
    with _crashes_reported(client):
        set_num_threads()
        function_call, settings = start.payload.load()
        settings.restore()
        _run(client, start.setup, start.place, function_call)


def run_outside(
    address: tuple[str, int],
    authkey: bytes,
    host: str | None,
    own_setup: Callable[[Grid], RunSetup],
    function_call: Call,
) -> Any:
    """Runs as a worker in this process, which was started by hand or by a cluster manager.

    Waits as a spare until there is a position for it. Afterwards the module in this process is whole again.

    Args:
        address: the coordinator's address.
        authkey: the key of the run.
        host: the address at which this worker exchanges data; by default the one that the coordinator reaches.
        own_setup: grid -> this process's setup; used if the coordinator knows only the grid.
        function_call: the function to run.

    Raises:
        ConfigurationError: if nobody listens at ``address``, the key is not the run's, or another version runs there.
        SystemExit: if this worker was cut off and could not get back in.
    """
    global _run_ended
    patience, rejoin_until, trying = rejoin.rejoin_seconds(), rejoin.take_deadline(), rejoin.connect_seconds()
    if (since := time.monotonic() - _run_ended) < _BETWEEN_RUNS_SECONDS:
        time.sleep(_BETWEEN_RUNS_SECONDS - since)
    # While it starts, or between two runs, nobody listens; its name and the route to it may come later, too. On the way
    # back in, even who listens may be another one for a while.
    passing = (OSError,) if rejoin_until is None else (OSError, Refused)
    deadline = time.monotonic() + trying if rejoin_until is None else rejoin_until
    try:
        client = rejoin.patiently(
            lambda: ControlClient(None, address, authkey, heartbeat_interval=0.5, survives=True),
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
        client.on_lost = partial(rejoin.start_afresh, patience)
    assignment = client.await_assignment()
    client.limit_silence(assignment.timeout)
    returned = None
    with _crashes_reported(client):
        setup = own_setup(assignment.grid) if assignment.setup is None else unpack(assignment.setup)
        client.heartbeat_interval = setup.heartbeat_interval
        device = int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")))
        place = Place(client.rank, assignment.incarnation, device, host or client.local_host)
        returned = _run(client, setup, place, function_call, keep_model=True)
    _run_ended = time.monotonic()
    return returned


def _run(client: ControlClient, setup: RunSetup, place: Place, function_call: Call, keep_model: bool = False) -> Any:
    trainer, function, args, kwargs = function_call
    _set_num_threads_if_needed(num_processes=setup.grid.num_workers)
    ignore_untrue_warnings()
    strategy = cast(_Strategy, trainer.strategy)
    session = Session(strategy.options, setup, place, client, trainer)
    strategy.enter(session)
    callbacks = list(trainer.callbacks)  # type: ignore[attr-defined]
    with session.settled():
        returned = function(*args, **kwargs)
        session.averages.release()
        session.finetuning.release()
        session.pruning.release()
        whole = session.checkpoints.joined("weights", weights_of(session.module)) if setup.outsiders else None
        carrier = AttributeCarrier(trainer, callbacks)
        part = (lambda: None) if setup.is_trial else partial(part_of, session, carrier)
        session.checkpoints.deliver_result(part, partial(extras_of, session, carrier, returned))
    client.leave()
    if whole is not None and keep_model:
        session.leave()
        strategy.enter(None)
        if trainer.state.fn == TrainerFn.FITTING:
            strategy.optimizers, strategy.lr_scheduler_configs = [], []  # of one stage, whose parameters are gone
            strategy.missing_optimizers = STAY_IN_THE_WORKERS
        session.parts.rebuild(whole)
    return returned


@contextlib.contextmanager
def _crashes_reported(client: ControlClient) -> Any:
    """Tells the coordinator why this worker ends; the supervisor decides whether it shows the traceback."""
    try:
        yield
    except BaseException as error:
        with readers_may_die():  # otherwise the process could end without a word
            # A worker that has not entered yet cannot end the run: no member has met this error.
            fault = isinstance(error, (InjectedFaultError, ControlPlaneError)) or client.joining
            summary, text = in_words(error, from_users_code(error))
            try:
                dumped = dumps(error)
                pickle.loads(dumped)
                data: bytes | None = dumped
            except Exception:  # its class cannot be pickled or loaded: the summary and the traceback must do
                data = None
            client.send(Crash(client.rank, fault, summary, data, text))
            client.leave()
        sys.exit(1)
