"""What a worker finds in its environment: whose run it takes part in, and where it is.

Concept: whoever starts a worker (a user, ``recycle-run``, SLURM, Kubernetes, Ray) says everything in environment
variables, and this is the one module that reads them. So an engine only sets them, and the rest of the package asks
:func:`discover`.

Contract: no variable ``RECYCLE_COORDINATOR`` means that the process takes part in nobody's run. What is there and
cannot be right is a :class:`~lightning_recycle.errors.ConfigurationError` that names the variable and its value.

Must not know: what any engine is, sockets, torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from lightning_recycle.control.network.addresses import address_from, machine_name
from lightning_recycle.control.network.handshake import key_from_environment
from lightning_recycle.engines.interfaces import address_at
from lightning_recycle.errors import ConfigurationError

__all__ = ["Discovered", "discover", "port_range"]

BY_HAND = "hand"
"""The engine of a worker that nobody has named one for."""


@dataclass(frozen=True)
class Discovered:
    """A worker's place in the world.

    Args:
        engine: who started it, for logs (``RECYCLE_ENGINE``).
        coordinator: (host, port) of the coordinator (``RECYCLE_COORDINATOR``).
        key: the secret of the run (``RECYCLE_KEY``, or the content of ``RECYCLE_KEY_FILE``).
        node: the name of its machine (``RECYCLE_NODE``).
        device: the index of its device (``LOCAL_RANK``, or ``SLURM_LOCALID``).
        device_from: the variable that says so; empty if none does.
        host: the address for other workers (``RECYCLE_HOST``, or that of ``RECYCLE_INTERFACE``); None for the one that
            the coordinator reaches.
    """

    engine: str
    coordinator: tuple[str, int]
    key: bytes = field(repr=False)
    node: str
    device: int
    device_from: str
    host: str | None

    def check_device(self, devices: int) -> None:
        """Raises ConfigurationError unless this worker's device is one of the ``devices`` of each machine."""
        if self.device >= devices:
            raise ConfigurationError(
                f"{self.device_from}={self.device} does not fit Trainer(devices={devices}): the devices of each machine"
                f" are numbered from 0, so give devices={self.device + 1} or more, or start {devices} workers on each"
                " machine."
            )


def discover(environ: Mapping[str, str] = os.environ) -> Discovered | None:
    """What ``environ`` says about this worker; None for a process that was not started as one.

    Raises:
        ConfigurationError: for values that cannot be right, and if there is no key.
    """
    where = environ.get("RECYCLE_COORDINATOR")
    if where is None:
        return None
    device, device_from = _device(environ)
    return Discovered(
        engine=environ.get("RECYCLE_ENGINE") or BY_HAND,
        coordinator=address_from(where, "RECYCLE_COORDINATOR"),
        key=key_from_environment(environ),
        node=machine_name(environ),
        device=device,
        device_from=device_from,
        host=_host(environ),
    )


def port_range(environ: Mapping[str, str] = os.environ) -> range | None:
    """The ports at which workers may listen for each other (``RECYCLE_PORTS``, such as 30000-30100); None for any.

    Raises:
        ConfigurationError: if it is no range of ports.
    """
    text = environ.get("RECYCLE_PORTS")
    if not text:
        return None
    first, dash, last = text.partition("-")
    numbers = [int(part) if part.isascii() and part.isdigit() else 0 for part in (first, last)]
    if not dash or not 0 < numbers[0] <= numbers[1] < 1 << 16:
        raise ConfigurationError(f"RECYCLE_PORTS={text!r}: give the first and the last port, such as 30000-30100.")
    return range(numbers[0], numbers[1] + 1)


def _host(environ: Mapping[str, str]) -> str | None:
    host, interface = environ.get("RECYCLE_HOST"), environ.get("RECYCLE_INTERFACE")
    if host and interface:
        raise ConfigurationError(
            f"RECYCLE_HOST={host!r} and RECYCLE_INTERFACE={interface!r} both say where the other workers reach this"
            " one: give one of them."
        )
    return address_at(interface, "RECYCLE_INTERFACE") if interface else host or None


def _device(environ: Mapping[str, str]) -> tuple[int, str]:
    for name in ("LOCAL_RANK", "SLURM_LOCALID"):
        if name in environ:
            text = environ[name]
            if not (text.isascii() and text.isdigit()):
                raise ConfigurationError(f"{name}={text!r}: give the index of this worker's device, 0 or more.")
            return int(text), name
    return 0, ""
