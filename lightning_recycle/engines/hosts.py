"""Bare machines: which there are, and how an agent is started on each through ssh.

Concept: a file names the hosts, ``host [slots=N]`` a line. On each, ssh starts ``recycle-run --agent`` in the same
folder with the same Python. It is told the key on its standard input, never in a command line that others can read; and
as long as that input is open, the one who started it lives.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_recycle.control.addresses import shown
from lightning_recycle.engines.children import Task
from lightning_recycle.errors import ConfigurationError

__all__ = ["Host", "agent_task", "parse_hosts"]

_LINE = re.compile(r"(?P<name>[^\s#=]+)(?:\s+slots=(?P<slots>\d+))?")
_PASSED_ON = re.compile(r"(PYTHONPATH|OMP_NUM_THREADS|RECYCLE_(?!KEY|COORDINATOR|NODE|HOST|LISTEN)\w+)")
_PROGRAM = "import sys; from lightning_recycle.engines.run import main; sys.exit(main())"


@dataclass(frozen=True)
class Host:
    """A machine, and how many workers it gets."""

    name: str
    slots: int


def parse_hosts(text: str, slots: int | None, path: str) -> list[Host]:
    """The hosts of a file.

    Args:
        text: its content; what follows a ``#`` is a comment.
        slots: of the hosts that do not say how many workers they get (``--nproc-per-node``).
        path: its name, for errors.

    Raises:
        ConfigurationError: for a line that is no host, a host that is named twice, and a file without any.
    """
    hosts: list[Host] = []
    for number, line in enumerate(text.splitlines(), 1):
        line = line.partition("#")[0].strip()
        if not line:
            continue
        match = _LINE.fullmatch(line)
        if match is None or match["name"].startswith("-"):
            raise ConfigurationError(f"{path}, line {number}: {line!r} is not of the form: host [slots=N].")
        if match["name"] in (host.name for host in hosts):
            raise ConfigurationError(f"{path}, line {number}: {match['name']} is named twice: give it more slots=.")
        count = int(match["slots"]) if match["slots"] else (slots or 1)
        if count < 1:
            raise ConfigurationError(f"{path}, line {number}: slots={count}: give at least 1, or leave the host out.")
        hosts.append(Host(match["name"], count))
    if not hosts:
        raise ConfigurationError(f"{path} names no host: give one line for each, as in: node1 slots=4.")
    return hosts


def agent_task(
    host: Host,
    ssh: str,
    address: tuple[str, int],
    key: str,
    folder: str,
    options: Sequence[str],
    command: Sequence[str],
    environ: Mapping[str, str],
) -> Task:
    """The agent on ``host``.

    Args:
        host: the machine.
        ssh: the command that runs another one on a machine: ``ssh HOST COMMAND`` with options; ``{host}`` stands for
            the name, which otherwise follows.
        address: of the coordinator.
        key: of the run.
        folder: where the agent and the workers run.
        options: further options of ``recycle-run``.
        command: what each worker runs.
        environ: the environment of this process, of which what matters to workers is passed on.
    """
    words = shlex.split(ssh)
    placed = [word.replace("{host}", host.name) for word in words]
    if placed == words:
        placed.append(host.name)
    passed_on = [f"{name}={value}" for name, value in sorted(environ.items()) if _PASSED_ON.fullmatch(name)]
    agent = ["env", *passed_on, sys.executable, "-c", _PROGRAM, "--agent", shown(address), "--node", host.name]
    agent += ["--nproc-per-node", str(host.slots), *options, "--", *command]
    remote = f"cd {shlex.quote(folder)} && exec {shlex.join(agent)}"
    return Task(host.name, (*placed, remote), environ, said=f"{key}\n".encode())
