"""Refuses a script that was started several times, as one process per worker, without a run to take part in.

Concept: a script that is started by itself launches its own workers. Started N times by ``torchrun``, ``srun`` or
``mpirun``, it would train N times, each with all workers, into the same folders. Those engines number the processes
that they start, in variables which they set; a worker that is told of a coordinator is none of these cases.

Contract: :func:`check_copies` is pure, and silent where a script is alone: with one process, in a SLURM batch script,
in an interactive step of one task.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence

from lightning_recycle.errors import ConfigurationError

__all__ = ["check_copies"]

_MPI = {"mpirun": "OMPI_COMM_WORLD_SIZE", "mpiexec": "PMI_SIZE"}


def check_copies(environ: Mapping[str, str] = os.environ, command: Sequence[str] | None = None) -> None:
    """Raises ConfigurationError if this process is one of several that an engine started without a coordinator.

    Args:
        environ: the environment of this process.
        command: the script and its arguments, for the remedy; by default this program's.
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
