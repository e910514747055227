"""``recycle-run``: starts the workers of a run, and again those that die.

    recycle-run --nproc-per-node 4 python train.py --lr 0.1        # this machine
    srun recycle-run python train.py                               # a worker in each task of a job of SLURM

It hosts the coordinator (a process of its own), gives every worker the environment in which
:mod:`~lightning_recycle.engines.worker_environment` finds it, and keeps them alive
(:mod:`~lightning_recycle.engines.agent`). If the environment names a coordinator already, it hosts none, and its
workers join that run. Needs neither torch nor Lightning.
"""

from __future__ import annotations

import argparse
import os
import re
import secrets
import shlex
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_recycle.arguments import SECONDS, command_parser, flag_value, integer, unknown_variables
from lightning_recycle.control.monitoring.logs import install_if_wanted
from lightning_recycle.control.network import addresses_and_keys as addresses
from lightning_recycle.control.network.addresses_and_keys import key_from_environment
from lightning_recycle.engines.agent import Agent, Printer, ProcessCommand
from lightning_recycle.engines.slurm import Meeting, SlurmTask, own_address, task_of
from lightning_recycle.engines.worker_environment import check_workers_environment
from lightning_recycle.errors import ConfigurationError

_PROGRAM = "import sys; from lightning_recycle.control.coordinator.standalone import main; sys.exit(main())"

_PYTHON = re.compile(r"python[0-9.]*")
_NOT_PASSED_ON = ("RECYCLE_KEY_FILE", "RECYCLE_LISTEN")
_BAD_OPTIONS = 2
_HOST = "127.0.0.1"
_LOOPBACK = (_HOST, "::1", "localhost")
_MEETING_SECONDS = 120.0  # for task 0 to start


@dataclass(frozen=True)
class _RunAddress:
    """Address and key of a run, and whether this process hosts its coordinator."""

    address: tuple[str, int]
    key: str
    hosts_it: bool
    task: SlurmTask | None = None
    """This process's task of SLURM; its environment then names its worker's device."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    options = _parser().parse_args(arguments)
    try:
        _check(options)
        install_if_wanted()
        addresses.http_address_from_environment()
        check_workers_environment()
        for warning in unknown_variables():
            print(f"recycle-run: {warning}", file=sys.stderr, flush=True)
        command = _command(options.command)
        _check_program(command)
        task = task_of(os.environ)
        if task is not None and "RECYCLE_COORDINATOR" not in os.environ:
            return _in_slurm(options, command, task)
        return _agent(options, command, _meeting_address(options, os.environ)).run()
    except ConfigurationError as error:
        print(f"recycle-run: {error}", file=sys.stderr)
        return _BAD_OPTIONS


def _meeting_address(options: argparse.Namespace, environ: Mapping[str, str]) -> _RunAddress:
    if "RECYCLE_COORDINATOR" in environ:
        address = addresses.address_from(environ["RECYCLE_COORDINATOR"], "RECYCLE_COORDINATOR", least_port=1)
        return _RunAddress(address, key_from_environment(environ, "RECYCLE_COORDINATOR").decode(), hosts_it=False)
    key = key_from_environment(environ).decode() if _has_key(environ) else secrets.token_urlsafe(32)
    return _RunAddress(_own_address(options.coordinator), key, hosts_it=True)


def _has_key(environ: Mapping[str, str]) -> bool:
    """Whether others can join the run: they know its key."""
    return not {"RECYCLE_KEY", "RECYCLE_KEY_FILE"}.isdisjoint(environ)


def _invitation(place: _RunAddress, environ: Mapping[str, str]) -> str:
    """Command by which another machine joins, printed by the listening coordinator."""
    key = next((name for name in ("RECYCLE_KEY", "RECYCLE_KEY_FILE") if environ.get(name)), None)
    host = place.address[0]
    if key is not None and host in _LOOPBACK:
        return f"{host} is reachable from this machine only: give --coordinator an address of this machine."
    if key is None:
        return "For other machines to join, start recycle-run with --coordinator HOST:PORT and RECYCLE_KEY_FILE."
    value = shlex.quote(environ[key]) if key == "RECYCLE_KEY_FILE" else "..."  # a secret is not printed
    return (
        f"Another machine joins by: RECYCLE_COORDINATOR={addresses.shown(place.address)} {key}={value} recycle-run"
        " --nproc-per-node N PROGRAM"
    )


def _own_address(given: str | None) -> tuple[str, int]:
    """This process's coordinator's address; the port is known before it listens."""
    host, port = (_HOST, 0) if given is None else addresses.address_from(given, "--coordinator")
    if host in ("0.0.0.0", "::"):
        raise ConfigurationError(
            f"--coordinator {given}: workers need a single address: give one that all machines reach."
        )
    with addresses.listen_at((host, port), 1) as probe:  # refused before any worker starts
        return host, int(probe.getsockname()[1])


def _agent(options: argparse.Namespace, command: Sequence[str], place: _RunAddress) -> Agent:
    in_slurm = place.task is not None

    def worker(device: int) -> ProcessCommand:
        environ = _worker_environment(place, None if in_slurm else device)
        name = f"{place.task.node}.{device}" if place.task is not None else f"worker{device}"
        return ProcessCommand(name, tuple(command), environ)

    tasks = list(map(worker, range(options.nproc_per_node or 1)))
    coordinator = (
        _coordinator_task(place, os.path.basename(_script_of(command)), len(tasks)) if place.hosts_it else None
    )
    names = len(tasks) + (coordinator is not None) > 1
    grace = None if in_slurm else options.grace
    return Agent(tasks, options.max_restarts, Printer(names), grace, coordinator, pipes=names)


def _in_slurm(options: argparse.Namespace, command: Sequence[str], task: SlurmTask) -> int:
    """Runs the worker of one task of a step of srun, and in task 0 the coordinator."""
    if options.nproc_per_node is not None:
        raise ConfigurationError(
            f"--nproc-per-node {options.nproc_per_node}: srun starts one recycle-run for each worker: leave it out, and"
            f" say #SBATCH --ntasks-per-node={options.nproc_per_node}."
        )
    meeting = Meeting(task, options.shared, options.join)
    hosts_it = task.rank == 0 and options.join is None
    if hosts_it:
        address = own_address(task) if options.coordinator is None else _own_address(options.coordinator)
        key = secrets.token_urlsafe(32)
        meeting.announce(address, key)
    else:
        address, key = meeting.wait(_MEETING_SECONDS)
    try:
        agent = _agent(options, command, _RunAddress(address, key, hosts_it, task))
        agent.on_finish = meeting.finish
        with meeting.watched(agent.finished_elsewhere):
            status = agent.run()
    finally:
        if hosts_it:
            meeting.close()
    if status and signal.SIGTERM in agent.heard_signals:
        # A job that SLURM preempts is requeued when its time of grace is over, unless it has ended before.
        return meeting.await_end(status)
    return status


# ---------------------------------------------------------------------- processes


def _coordinator_task(place: _RunAddress, name: str, workers: int) -> ProcessCommand:
    """The coordinator of the run ``name``, with ``workers`` that are started here.

    It obeys words on its standard input, not signals: SLURM sends the workers' signals to every process of a task, and
    the coordinator is needed until they have saved.
    """
    if place.task is not None:
        others = [f"--started={place.task.count}"]
    else:
        others = [f"--started={workers}", "--invitation", _invitation(place, os.environ)]
        others += [] if _has_key(os.environ) else ["--alone"]
    where = ("--listen", addresses.shown(place.address), f"--name={name}")
    command = (sys.executable, "-c", _PROGRAM, *where, "--obey", *others)
    own = {name: value for name, value in os.environ.items() if name not in _NOT_PASSED_ON}
    return ProcessCommand("coordinator", command, {**own, "RECYCLE_KEY": place.key}, listens=True)


def _worker_environment(place: _RunAddress, device: int | None) -> dict[str, str]:
    """The environment that :func:`.worker_environment.discover` reads in a worker."""
    own = {name: value for name, value in os.environ.items() if name not in _NOT_PASSED_ON}
    own |= {"RECYCLE_COORDINATOR": addresses.shown(place.address), "RECYCLE_KEY": place.key, "RECYCLE_AGENT": "1"}
    if device is not None:
        own["LOCAL_RANK"] = str(device)
    if place.task is not None:
        own.setdefault("RECYCLE_NODE", place.task.node)
    own.setdefault("PYTHONUNBUFFERED", "1")  # lines are passed on when they are printed
    own["PATH"] = _search_path(own)
    return own


def _search_path(environ: Mapping[str, str]) -> str:
    """With "python" of this program, also where its environment is not activated."""
    return os.pathsep.join([os.path.dirname(sys.executable), environ.get("PATH", os.defpath)])


# ---------------------------------------------------------------------- options


def _command(words: Sequence[str]) -> list[str]:
    command = list(words[1:] if words[:1] == ["--"] else words)
    if not command:
        raise ConfigurationError("Which program? For example: recycle-run --nproc-per-node 4 python train.py")
    return [sys.executable, *command] if command[0].endswith(".py") else command


def _script_of(command: Sequence[str]) -> str:
    """The script or module that Python runs, or another program."""
    words = [word for word in command[1:] if not word.startswith("-")]
    return words[0] if words and _PYTHON.fullmatch(os.path.basename(command[0])) else command[0]


def _check_program(command: Sequence[str]) -> None:
    program, script = command[0], _script_of(command)
    if shutil.which(program, path=_search_path(os.environ)) is None:
        raise ConfigurationError(f"There is no program {program!r}.")
    if script != program and script.endswith(".py") and not os.path.isfile(script):
        raise ConfigurationError(f"There is no file {script!r} in {os.getcwd()}.")


def _check(options: argparse.Namespace) -> None:
    """Checks the options, and makes numbers of them."""
    if options.nproc_per_node is not None:
        options.nproc_per_node = flag_value("--nproc-per-node", options.nproc_per_node, integer(1))
    options.max_restarts = flag_value("--max-restarts", options.max_restarts, integer(0))
    options.grace = flag_value("--grace", options.grace, SECONDS)
    if options.join is not None and task_of(os.environ) is None:
        raise ConfigurationError(
            f"--join {options.join}: that is for tasks of srun: set RECYCLE_COORDINATOR and RECYCLE_KEY elsewhere."
        )


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(
        "recycle-run",
        "Start the workers of a run and restart any that die.",
        "recycle-run --nproc-per-node 4 python train.py",
        "srun recycle-run python train.py",
        usage="recycle-run [options] [--] python train.py [arguments]",
        statuses={
            0: "the run finished, or the script ended without one",
            1: "the script failed; or with its own status",
            69: "the coordinator was lost",
            75: "the run ended otherwise",
            137: "its workers were killed, by SIGKILL or another signal",
            143: "SIGTERM",
        },
        variables=("COORDINATOR", "KEY", "KEY_FILE", "HTTP", "LOG", "CONNECT_SECONDS", "HOST", "PORTS", "NODE"),
    )
    parser.add_argument("--nproc-per-node", "--nproc_per_node", metavar="N", help="workers on this machine (default 1)")
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="where the coordinator listens, on this machine")
    parser.add_argument("--max-restarts", default=100, metavar="K", help="restarts per worker (default 100)")
    parser.add_argument(
        "--grace",
        default=60.0,
        metavar="SECONDS",
        help="time for workers to end after a signal (default 60)",
    )
    parser.add_argument(
        "--shared", metavar="FOLDER", help="under srun: a folder that all nodes see (default: where it was submitted)"
    )
    parser.add_argument("--join", metavar="JOB", help="under srun: join the run of another job, by its number")
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
