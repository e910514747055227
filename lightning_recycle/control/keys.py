"""The secret of a run, from the environment of who takes part: ``RECYCLE_KEY``, or a file that only its owner reads.

Contract: a key that cannot be used is a :class:`~lightning_recycle.errors.ConfigurationError` with the remedy; the key
itself is in no message.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping

from lightning_recycle.control.handshake import check_key
from lightning_recycle.errors import ConfigurationError

__all__ = ["key_from_environment"]

_MOST_BYTES = 4096  # of a file with a key
_KEY, _KEY_FILE = "RECYCLE_KEY", "RECYCLE_KEY_FILE"


def key_from_environment(environ: Mapping[str, str] = os.environ) -> bytes:
    """The secret that the coordinator and the workers of a run share. ``RECYCLE_KEY`` counts if both are set.

    Raises:
        ConfigurationError: if neither variable is set, the key is shorter than 16 bytes, or others may read the file.
    """
    key = environ.get(_KEY, "")
    if key:
        return check_key(key.encode(), _KEY)
    path = environ.get(_KEY_FILE, "")
    if path:
        return check_key(_read(path), f"{_KEY_FILE}={path}")
    raise ConfigurationError(
        "RECYCLE_KEY is not set: give the coordinator and all workers the same secret, for example"
        ' RECYCLE_KEY="$(head -c 32 /dev/urandom | base64)", or RECYCLE_KEY_FILE, a file with it.'
    )


def _read(path: str) -> bytes:
    """The key in the file at ``path``, without the white space around it."""
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_mode & 0o077:
                raise ConfigurationError(
                    f"{_KEY_FILE}={path}: others may read or write it (mode {stat.S_IMODE(status.st_mode):04o}), and"
                    f" who knows the key can run code in the workers: chmod 600 {path}; for a secret that Kubernetes"
                    " mounts, defaultMode: 0400."
                )
            return file.read(_MOST_BYTES).strip()
    except OSError as error:
        raise ConfigurationError(f"{_KEY_FILE}={path} cannot be read: {error.strerror or error}.") from error
