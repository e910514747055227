"""The coordinator as a child of the agent that hosts it: how it is started, and where workers find it."""

from __future__ import annotations

import os
import secrets
import socket
import sys
from collections.abc import Mapping

from lightning_recycle.control.network.addresses import shown
from lightning_recycle.engines.children import Task

__all__ = [
    "END",
    "OVER",
    "coordinator_task",
    "family_of",
    "free_port",
    "new_key",
    "own_address_towards",
    "worker_environment",
]

_PROGRAM = "import sys; from lightning_recycle.control.coordinator.standalone import main; sys.exit(main())"
OVER, END = b"over\n", b"end\n"
"""What its agent tells the coordinator: there will be no further run; it is to end."""

_NOT_PASSED_ON = ("RECYCLE_KEY_FILE", "RECYCLE_LISTEN")


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


def family_of(host: str) -> socket.AddressFamily:
    """The family of the address ``host``."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def free_port(host: str) -> int:
    """A port of ``host``, an address of this machine, at which nobody listens now.

    Raises:
        OSError: if this machine has no such address.
    """
    with socket.socket(family_of(host), socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def own_address_towards(host: str) -> str:
    """The address of this machine from which it reaches ``host``; nothing is sent.

    Raises:
        OSError: if there is no way to ``host``.
    """
    family, kind, _, _, where = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(where)
        return str(probe.getsockname()[0])
