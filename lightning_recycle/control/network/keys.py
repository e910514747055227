"""The secret that coordinator and workers of a run share.

Contract: every mistake is a :class:`~lightning_recycle.errors.ConfigurationError` with the remedy, without the key.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping

from lightning_recycle.errors import ConfigurationError

KEY_BYTES = 16
"""The least that a key may have."""


def check_key(key: bytes, name: str) -> bytes:
    """``key`` of at least 16 bytes; else ConfigurationError with the setting ``name``."""
    if len(key) < KEY_BYTES:
        raise ConfigurationError(
            f"{name} has {len(key)} bytes, which can be guessed: give one of at least {KEY_BYTES}, for example"
            f' {name}="$(head -c 32 /dev/urandom | base64)".'
        )
    return key


_MOST_BYTES = 4096  # of a file with a key
_KEY, _KEY_FILE = "RECYCLE_KEY", "RECYCLE_KEY_FILE"


def key_from_environment(environ: Mapping[str, str] = os.environ, needed_by: str = "") -> bytes:
    """The secret of a run, from ``RECYCLE_KEY`` or else from the key file.

    ``needed_by``: a variable that is set, for the error.

    Raises ConfigurationError if neither variable is set, the key is shorter than 16 bytes, or others may read the file.
    """
    key = environ.get(_KEY, "")
    if key:
        return check_key(key.encode(), _KEY)
    path = environ.get(_KEY_FILE, "")
    if path:
        return check_key(_read(path), f"{_KEY_FILE}={path}")
    raise ConfigurationError(
        (f"{needed_by} is set, and " if needed_by else "")
        + "RECYCLE_KEY is not set: give the coordinator and all workers the same secret, for example"
        ' RECYCLE_KEY="$(head -c 32 /dev/urandom | base64)", or RECYCLE_KEY_FILE, a file with it.'
    )


def _read(path: str) -> bytes:
    """The key in the file at ``path``, stripped."""
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
