"""``recycle-coordinator``: the coordinator alone, for workers that somebody else starts (SLURM, Kubernetes, torchrun).

    RECYCLE_KEY=... recycle-coordinator --listen 10.0.0.1:29400 --pipelines 4 --stages 2 --microbatches 4

Every worker runs the training script with ``RECYCLE_COORDINATOR=10.0.0.1:29400`` and the same ``RECYCLE_KEY``. The
first D * S of them form the grid, further ones wait as spares; one that is started later replaces a lost one. A script
may run several entry points one after the other: each is a run of its own, and the coordinator serves runs until it is
told to end (SIGINT or SIGTERM), or as many as ``--runs`` says. Needs neither torch nor Lightning.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import resource
import signal
import sys
from collections.abc import Sequence
from typing import Any

from lightning_recycle.control.addresses import address_from, shown
from lightning_recycle.control.coordinator import Coordinator
from lightning_recycle.control.handshake import check_key
from lightning_recycle.control.options import CoordinatorOptions
from lightning_recycle.control.plans.drift import DriftOptions
from lightning_recycle.control.plans.replanning import RunPlanner
from lightning_recycle.control.protocol.state import Crashed, Finished, StageLost
from lightning_recycle.errors import ConfigurationError
from lightning_recycle.planning.grid import Grid
from lightning_recycle.planning.planner import get_planner
from lightning_recycle.planning.problem import Technique

__all__ = ["allow_descriptors", "key_from_environment", "main"]

log = logging.getLogger(__name__)

_OTHER_DESCRIPTORS = 256  # besides one for each worker: strangers, planners in other processes


def key_from_environment() -> bytes:
    """The secret that the workers of a run share.

    Raises:
        ConfigurationError: if ``RECYCLE_KEY`` is not set, or shorter than 16 bytes.
    """
    key = os.environ.get("RECYCLE_KEY", "")
    if not key:
        raise ConfigurationError(
            "RECYCLE_KEY is not set: give the coordinator and all workers the same secret, for example"
            ' RECYCLE_KEY="$(head -c 32 /dev/urandom | base64)".'
        )
    return check_key(key.encode(), "RECYCLE_KEY")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status: 0 if every run finished."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    try:
        grid = Grid(options.pipelines, options.stages, options.microbatches)
        address = address_from(options.listen, "--listen")
        key = key_from_environment()
        get_planner(options.planner)
        if options.machine_error_retries < 0:
            raise ConfigurationError(
                f"--machine-error-retries {options.machine_error_retries}: give an integer of at least 0."
            )
    except ConfigurationError as error:
        print(f"recycle-coordinator: {error}", file=sys.stderr)
        return 2
    allow_descriptors(grid.num_workers + _OTHER_DESCRIPTORS)
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(128 + signum))
    status = 0
    with contextlib.suppress(KeyboardInterrupt):
        runs = 0
        while options.runs is None or runs < options.runs:
            runs += 1
            try:
                outcome = _serve(grid, address, key, options)
            except ConfigurationError as error:
                print(f"recycle-coordinator: {error}", file=sys.stderr)
                return 2
            if isinstance(outcome, Finished):
                log.info("The run finished.")
                continue
            status = 1
            if isinstance(outcome, StageLost):
                log.error("All replicas of stage %d are lost: %s", outcome.stage, dict(outcome.causes))
            elif isinstance(outcome, Crashed):
                crash = outcome.crash
                log.error("Worker %s ended the run: %s\n%s", grid.worker(crash.rank), crash.summary, crash.traceback)
            else:
                log.error("The run ended: %s", outcome)
    return status


def allow_descriptors(count: int) -> None:
    """Lets this process open ``count`` files and sockets, or as many as the system allows it to allow itself."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if most < count:
        log.warning(
            "This process may open %d files and sockets, and needs %d: raise the limit (ulimit -n).", most, count
        )
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _serve(grid: Grid, address: tuple[str, int], key: bytes, options: argparse.Namespace) -> Any:
    """Serves one run to its end."""
    planner = RunPlanner(grid, options.planner, Technique(decoupled=options.decoupled, staggered=options.staggered))
    planner.prepare()
    coordinator = Coordinator(
        grid,
        planner,
        CoordinatorOptions(
            heartbeat_timeout=options.timeout,
            last_holder_timeout=max(options.timeout, options.last_holder_timeout),
            start_timeout=options.start_timeout,
            machine_error_retries=options.machine_error_retries,
            drift=DriftOptions() if options.monitor_plan else None,
        ),
        host=address[0],
        port=address[1],
        authkey=key,
    )
    log.info("Waiting for %d workers at %s.", grid.num_workers, shown(coordinator.address))
    print(f"listening on {shown(coordinator.address)}", flush=True)
    try:
        coordinator.start({})
        return coordinator.wait()
    finally:
        coordinator.close()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("recycle-coordinator", description="The coordinator alone, for workers elsewhere.")
    parser.add_argument("--listen", required=True, metavar="HOST:PORT", help="where the workers find it")
    parser.add_argument("--pipelines", type=int, required=True, metavar="D", help="data-parallel size")
    parser.add_argument("--stages", type=int, required=True, metavar="S", help="pipeline-parallel size")
    parser.add_argument("--microbatches", type=int, required=True, metavar="M", help="per pipeline and step")
    parser.add_argument("--planner", default="heuristic", help="name of the planner")
    parser.add_argument("--timeout", type=float, default=5.0, metavar="SECONDS", help="silence until a worker is lost")
    parser.add_argument(
        "--last-holder-timeout",
        type=float,
        default=300.0,
        metavar="SECONDS",
        help="silence until a worker is lost that no peer can stand in for",
    )
    parser.add_argument(
        "--start-timeout",
        type=float,
        default=300.0,
        metavar="SECONDS",
        help="from the first worker to the last; the run then begins without the missing ones",
    )
    parser.add_argument(
        "--machine-error-retries",
        type=int,
        default=1,
        metavar="N",
        help="how often work that raised an exception of a machine is run again",
    )
    parser.add_argument("--runs", type=int, default=None, help="end after this many runs; by default never")
    parser.add_argument("--no-decoupled", dest="decoupled", action="store_false", help="fused backward")
    parser.add_argument("--no-staggered", dest="staggered", action="store_false", help="all stages step together")
    parser.add_argument("--monitor-plan", action="store_true", help="change the plan when workers become slow or fast")
    return parser


if __name__ == "__main__":
    sys.exit(main())
