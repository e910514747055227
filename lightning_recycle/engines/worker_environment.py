"""Environment of a worker: its run, its machine, its device; copies of a script.

The starter of a worker (a user, ``recycle-run``, SLURM, Kubernetes, Ray) describes its place in environment variables.
A script without ``RECYCLE_COORDINATOR`` launches its own workers; :func:`check_copies` refuses N starts by
``torchrun``, ``srun`` or ``mpirun``, which would train N times.
"""

from __future__ import annotations

import math
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lightning_recycle.control.network.addresses_and_keys import (
    address_from,
    free_port,
    key_from_environment,
    machine_name,
)
from lightning_recycle.errors import ConfigurationError


@dataclass(frozen=True)
class Discovered:
    """A worker's run, machine and device, from its environment.

    Args:
        coordinator: (host, port) of the coordinator (``RECYCLE_COORDINATOR``).
        key: the secret of the run (``RECYCLE_KEY``, or the content of ``RECYCLE_KEY_FILE``).
        node: the name of its machine (``RECYCLE_NODE``).
        device: the index of its device (``LOCAL_RANK``, or ``SLURM_LOCALID``).
        device_from: the variable with that index; empty if there is none.
        host: the address for other workers (``RECYCLE_HOST``); None for the address that the coordinator reaches.
    """

    coordinator: tuple[str, int]
    key: bytes = field(repr=False)
    node: str
    device: int
    device_from: str
    host: str | None

    def check_device(self, devices: int) -> None:
        """Raises ConfigurationError unless the device is one of ``devices``."""
        if self.device >= devices:
            raise ConfigurationError(
                f"{self.device_from}={self.device} does not fit Trainer(devices={devices}): the devices of each machine"
                f" are numbered from 0, so give devices={self.device + 1} or more, or start {devices} workers on each"
                " machine."
            )


def discover(environ: Mapping[str, str] = os.environ) -> Discovered | None:
    """The place of this worker by ``environ``; None outside of workers.

    Raises ConfigurationError for values that cannot be right, and if there is no key.
    """
    where = environ.get("RECYCLE_COORDINATOR")
    if where is None:
        return None
    device, device_from = _device(environ)
    return Discovered(
        coordinator=address_from(where, "RECYCLE_COORDINATOR", least_port=1),
        key=key_from_environment(environ, "RECYCLE_COORDINATOR"),
        node=machine_name(environ),
        device=device,
        device_from=device_from,
        host=_own_host(environ),
    )


def port_range(environ: Mapping[str, str] = os.environ) -> range | None:
    """Ports at which workers may listen; None: any; ConfigurationError for no range."""
    text = environ.get("RECYCLE_PORTS")
    if not text:
        return None
    first, dash, last = text.partition("-")
    numbers = [int(part) if part.isascii() and part.isdigit() else 0 for part in (first, last)]
    if not dash or not 0 < numbers[0] <= numbers[1] < 1 << 16:
        raise ConfigurationError(f"RECYCLE_PORTS={text!r}: give the first and the last port, such as 30000-30100.")
    return range(numbers[0], numbers[1] + 1)


def connect_seconds(environ: Mapping[str, str] = os.environ) -> float:
    """Seconds for reaching the coordinator; 0: not at all. Raises ConfigurationError."""
    text = environ.get("RECYCLE_CONNECT_SECONDS", "60")
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise ConfigurationError(
            f"RECYCLE_CONNECT_SECONDS={text!r}: give a number of seconds, for example RECYCLE_CONNECT_SECONDS=600."
        )
    return seconds


def is_started_by_hand(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether another program than this package's launcher has started this worker."""
    return "RECYCLE_COORDINATOR" in environ


def has_no_successor(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this worker's starter, ``recycle-run``, replaces none that got SIGTERM."""
    return bool(environ.get("RECYCLE_AGENT"))


def check_workers_environment(environ: Mapping[str, str] = os.environ) -> None:
    """Raises ConfigurationError for a value that workers would refuse."""
    port_range(environ)
    connect_seconds(environ)
    _own_host(environ)


def _own_host(environ: Mapping[str, str]) -> str | None:
    host = environ.get("RECYCLE_HOST") or None
    try:
        if host is not None:
            free_port(host)
    except OSError as error:
        raise ConfigurationError(
            f"RECYCLE_HOST={host!r}: no worker can listen there ({error.strerror or error}): give an address of this"
            " machine, without a port."
        ) from error
    return host


def _device(environ: Mapping[str, str]) -> tuple[int, str]:
    for name in ("LOCAL_RANK", "SLURM_LOCALID"):
        if name in environ:
            text = environ[name]
            if not (text.isascii() and text.isdigit()):
                raise ConfigurationError(f"{name}={text!r}: give the index of this worker's device, 0 or more.")
            return int(text), name
    return 0, ""


# ---------------------------------------------------------------------- copies of a script


_MPI = {"mpirun": "OMPI_COMM_WORLD_SIZE", "mpiexec": "PMI_SIZE"}


def check_copies(environ: Mapping[str, str] = os.environ, command: Sequence[str] | None = None) -> None:
    """Raises ConfigurationError if an engine started several of these processes.

    ``command``: the script and its arguments, for the remedy.
    """
    script = shlex.join(sys.argv if command is None else command)
    if "TORCHELASTIC_RUN_ID" in environ and (count := _number(environ, "WORLD_SIZE")) > 1:
        local = _number(environ, "LOCAL_WORLD_SIZE") or count
        command = f"recycle-run --nproc-per-node={local} {script}"
        if local < count:
            command += ", on each machine with RECYCLE_COORDINATOR=HOST:PORT of a recycle-coordinator"
        _refuse("torchrun", count, command)
    # A batch script has SLURM_PROCID, too; only srun tells the number of tasks of a step.
    if "SLURM_PROCID" in environ and (count := _number(environ, "SLURM_STEP_NUM_TASKS")) > 1:
        _refuse("srun", count, f"srun recycle-run python {script}")
    for name, variable in _MPI.items():
        if (count := _number(environ, variable)) > 1:
            _refuse(name, count, f"recycle-run --nproc-per-node={count} {script}")


def _refuse(engine: str, count: int, command: str) -> None:
    raise ConfigurationError(
        f"{engine} started {count} processes of this script, and each would train by itself with all workers, because"
        f" RECYCLE_COORDINATOR does not say which run they belong to. Use instead: {command}"
    )


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    return int(text) if text.isascii() and text.isdigit() else 0
