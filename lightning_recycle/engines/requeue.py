"""Asks SLURM to run this job again: ``scontrol requeue``, with a bound, once what it resumes from is complete.

Contract: returns after ``timeout`` seconds at the latest, and never raises for what SLURM does or does not do: the
checkpoint is there, and a log line says how to requeue by hand.
"""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Mapping

__all__ = ["job_name", "requeue"]

log = logging.getLogger(__name__)


def job_name(environ: Mapping[str, str] = os.environ) -> str:
    """What SLURM calls this job, or this task of an array: ``123`` or ``120_3``.

    The number of an array's last task is also that of the whole array: ``scontrol requeue 120`` would requeue all.
    """
    array = environ.get("SLURM_ARRAY_JOB_ID")
    return environ["SLURM_JOB_ID"] if array is None else f"{array}_{environ['SLURM_ARRAY_TASK_ID']}"


def requeue(timeout: float) -> bool:
    """Requeues this job; whether that is known to have succeeded within ``timeout`` seconds.

    If it succeeds, SLURM ends this process soon, maybe before it returns.
    """
    try:
        command = ["scontrol", "requeue", job_name()]
    except KeyError as error:
        log.warning("The job is not requeued: %s is not set, so this is no job of SLURM.", error)
        return False
    log.info("Requeueing job %s.", command[-1])
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired:
        why = f"it has not answered within {timeout:g} s"
    except OSError as error:  # there is no scontrol on this node, or no memory to start it
        why = f"it could not be started ({error})"
    else:
        if done.returncode == 0:
            return True
        why = f"it ended with status {done.returncode} ({(done.stderr or done.stdout).strip()})"
    log.warning(
        "The job is saved but perhaps not requeued: %s: %s. Run that command to have it go on.", " ".join(command), why
    )
    return False
