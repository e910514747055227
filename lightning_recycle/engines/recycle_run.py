"""``recycle-run``: starts the workers of a run, and again those that die.

    recycle-run --nproc-per-node 4 python train.py --lr 0.1        # this machine
    srun recycle-run python train.py                               # a worker in each task of a job of SLURM

It hosts the coordinator (a process of its own), gives every worker the environment in which
:mod:`~lightning_recycle.engines.discovery` finds it, and keeps them alive (:mod:`~lightning_recycle.engines.agent`). If
the environment names a coordinator already, it hosts none, and its workers join that run. Needs neither torch nor
Lightning.
"""

from __future__ import annotations

import argparse
import os
import secrets
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_recycle.arguments import command_parser
from lightning_recycle.control.network.addresses import address_from, shown
from lightning_recycle.control.network.handshake import key_from_environment
from lightning_recycle.engines.agent import Agent, Printer, Task
from lightning_recycle.engines.discovery import free_port
from lightning_recycle.engines.restarts import Policy
from lightning_recycle.engines.slurm import Meeting, SlurmTask, own_address, task_of
from lightning_recycle.errors import ConfigurationError

__all__ = ["RunAddress", "main"]

_PROGRAM = "import sys; from lightning_recycle.control.coordinator.standalone import main; sys.exit(main())"

_NOT_PASSED_ON = ("RECYCLE_KEY_FILE", "RECYCLE_LISTEN")
_BAD_OPTIONS = 2
_HOST = "127.0.0.1"
_MEETING_SECONDS = 120.0  # for task 0 to start


@dataclass(frozen=True)
class RunAddress:
    """Where and with which key the workers of a run meet, and whether this process hosts the coordinator there."""

    address: tuple[str, int]
    key: str
    hosts_it: bool
    engine: str = "recycle-run"
    node: str = ""
    one_per_task: bool = False
    """Whether an engine starts one agent for each worker, and its environment says which device that has."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    options = _parser().parse_args(arguments)
    try:
        command = _command(options.command)
        _check(options)
        task = task_of(os.environ)
        if task is not None and "RECYCLE_COORDINATOR" not in os.environ:
            return _in_slurm(options, command, task)
        return _on_this_machine(options, command, _appointment(options, os.environ))
    except ConfigurationError as error:
        print(f"recycle-run: {error}", file=sys.stderr)
        return _BAD_OPTIONS


def _appointment(options: argparse.Namespace, environ: Mapping[str, str]) -> RunAddress:
    """Where the workers of this machine meet."""
    if "RECYCLE_COORDINATOR" in environ:
        address = address_from(environ["RECYCLE_COORDINATOR"], "RECYCLE_COORDINATOR")
        return RunAddress(address, key_from_environment(environ).decode(), hosts_it=False)
    return RunAddress(_own_address(options.coordinator), new_key(), hosts_it=True)


def _own_address(given: str | None) -> tuple[str, int]:
    """Where this process's coordinator listens; the port is known before it does."""
    host, port = (_HOST, 0) if given is None else address_from(given, "--coordinator")
    if host in ("0.0.0.0", "::"):
        raise ConfigurationError(
            f"--coordinator {given}: workers must be told one address: give one that all machines reach."
        )
    try:
        return host, port or free_port(host)
    except OSError as error:
        raise ConfigurationError(f"--coordinator {given}: {error.strerror or error}.") from error


def _on_this_machine(options: argparse.Namespace, command: Sequence[str], place: RunAddress) -> int:
    """Runs the workers of this machine."""
    agent = _agent(options, _workers(options, command, place), _coordinator(options, place))
    return agent.run()


def _workers(options: argparse.Namespace, command: Sequence[str], place: RunAddress) -> list[Task]:
    count = options.nproc_per_node or 1
    tasks = []
    for device in range(count):
        own = None if place.one_per_task else device
        environ = worker_environment(os.environ, place.address, place.key, place.engine, own, place.node)
        name = f"{place.node}.{device}" if place.node else f"worker{device}"
        tasks.append(Task(name, tuple(command), environ))
    return tasks


def _coordinator(options: argparse.Namespace, place: RunAddress) -> Task | None:
    if not place.hosts_it:
        return None
    return coordinator_task(place.address, place.key, os.environ)


def _agent(
    options: argparse.Namespace,
    tasks: Sequence[Task],
    coordinator: Task | None,
    in_slurm: bool = False,
) -> Agent:
    folder = None if options.log_dir is None else Path(options.log_dir)
    if folder is not None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigurationError(f"--log-dir {folder}: {error.strerror or error}.") from error
    names = len(tasks) + (coordinator is not None) > 1
    policy = Policy(max_restarts=options.max_restarts)
    return Agent(
        tasks,
        policy,
        Printer(names, folder),
        None if in_slurm else options.grace,
        coordinator,
        pipes=names or bool(folder),
    )


def _in_slurm(options: argparse.Namespace, command: Sequence[str], task: SlurmTask) -> int:
    """Runs the worker of one task of a step of srun, and in task 0 the coordinator."""
    if options.nproc_per_node is not None:
        raise ConfigurationError(
            f"--nproc-per-node {options.nproc_per_node}: srun starts one recycle-run for each worker: leave it out, and"
            f" say #SBATCH --ntasks-per-node={options.nproc_per_node}."
        )
    meeting = Meeting(task, options.shared)
    hosts_it = task.rank == 0
    if hosts_it:
        address = own_address(task) if options.coordinator is None else _own_address(options.coordinator)
        key = new_key()
        meeting.announce(address, key)
    else:
        address, key = meeting.wait(_MEETING_SECONDS)
    try:
        place = RunAddress(address, key, hosts_it, "slurm", task.node, one_per_task=True)
        agent = _agent(options, _workers(options, command, place), _coordinator(options, place), in_slurm=True)
        agent.on_finish = meeting.finish
        with meeting.watched(agent.finished_elsewhere):
            status = agent.run()
    finally:
        if hosts_it:
            meeting.close()
    if status and signal.SIGTERM in agent.heard:
        # A job that SLURM preempts is requeued when its time of grace is over, unless it has ended before.
        return meeting.await_end(status)
    return status


# ---------------------------------------------------------------------- processes


def coordinator_task(
    address: tuple[str, int], key: str, environ: Mapping[str, str], options: tuple[str, ...] = ()
) -> Task:
    """The coordinator at ``address``, with further ``options`` of ``recycle-coordinator``; it ends with its parent.

    It obeys words on its standard input, and no signals: SLURM sends those that are for the workers to every process of
    a task, and the coordinator is needed until they have saved what they are to save.
    """
    command = (sys.executable, "-c", _PROGRAM, "--listen", shown(address), "--obey", *options)
    own = {name: value for name, value in environ.items() if name not in _NOT_PASSED_ON}
    return Task("coordinator", command, {**own, "RECYCLE_KEY": key}, listens=True)


def worker_environment(
    environ: Mapping[str, str], address: tuple[str, int], key: str, engine: str, device: int | None, node: str = ""
) -> dict[str, str]:
    """The environment of a worker: everything that :func:`~lightning_recycle.engines.discovery.discover` looks for.

    Args:
        environ: the environment of its agent.
        address: of the coordinator.
        key: of the run.
        engine: the name of the engine.
        device: the index of its device; None if ``environ`` says it.
        node: the name of its machine, if ``environ`` does not say it.
    """
    own = {name: value for name, value in environ.items() if name not in _NOT_PASSED_ON}
    own |= {"RECYCLE_COORDINATOR": shown(address), "RECYCLE_KEY": key, "RECYCLE_ENGINE": engine}
    if device is not None:
        own["LOCAL_RANK"] = str(device)
    if node:
        own.setdefault("RECYCLE_NODE", node)
    own.setdefault("PYTHONUNBUFFERED", "1")  # lines are passed on when they are printed
    # "python" is the one of this program, also where its environment is not activated.
    own["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), own.get("PATH", os.defpath)])
    return own


def new_key() -> str:
    """A key for a run."""
    return secrets.token_urlsafe(32)


# ---------------------------------------------------------------------- options


def _command(words: Sequence[str]) -> list[str]:
    command = list(words[1:] if words[:1] == ["--"] else words)
    if not command:
        raise ConfigurationError("Which program? For example: recycle-run --nproc-per-node 4 python train.py")
    return [sys.executable, *command] if command[0].endswith(".py") else command


def _check(options: argparse.Namespace) -> None:
    """Raises ConfigurationError for options that cannot work."""
    if options.nproc_per_node is not None and options.nproc_per_node < 1:
        raise ConfigurationError(f"--nproc-per-node {options.nproc_per_node}: give a number of at least 1.")
    if options.max_restarts < 0:
        raise ConfigurationError(f"--max-restarts {options.max_restarts}: give a number of at least 0.")
    if not 0 < options.grace < float("inf"):
        raise ConfigurationError(f"--grace {options.grace:g}: give a number of seconds, more than 0.")


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(
        "recycle-run",
        "Starts the workers of a run, and replaces those that die.",
        "recycle-run --nproc-per-node 4 python train.py",
        "srun recycle-run python train.py",
        usage="recycle-run [options] [--] python train.py [arguments]",
        allow_abbrev=False,
    )
    parser.add_argument("--nproc-per-node", type=int, metavar="N", help="workers of this machine (default 1)")
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="where the coordinator listens, on this machine")
    parser.add_argument("--max-restarts", type=int, default=100, metavar="K", help="of each worker (default 100)")
    parser.add_argument(
        "--grace", type=float, default=60.0, metavar="SECONDS", help="for workers to end after a signal (default 60)"
    )
    parser.add_argument("--log-dir", metavar="FOLDER", help="where a file for each worker holds what it printed")
    parser.add_argument(
        "--shared", metavar="FOLDER", help="under srun: one that all nodes see (default: where the job was submitted)"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
