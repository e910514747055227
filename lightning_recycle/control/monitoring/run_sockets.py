"""Unix sockets of the runs of this user on this machine.

They lie in a folder of mode 0700: no port, no key, access by the file system. A name begins with the process id. The
next reader removes the socket that a killed process left. A folder that is not this user's alone is neither used nor
read.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

_BACKLOG = 16
_CONNECT_SECONDS = 2.0


def _folders() -> Iterator[Path]:
    """Folders of runs, best first; environments of jobs and shells may differ."""
    user = os.geteuid()
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        yield Path(runtime) / "lightning_recycle"
    yield Path(f"/run/user/{user}/lightning_recycle")
    yield Path(f"/tmp/lightning_recycle-{user}")  # not TMPDIR, which a job may have for itself


def _is_mine(folder: Path) -> bool:
    try:
        found = folder.lstat()
    except OSError:  # there is none, or it cannot be reached
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077


def _made(folder: Path) -> bool:
    with contextlib.suppress(OSError):  # it exists, or cannot be made: the next line looks
        folder.mkdir(mode=0o700)
    return _is_mine(folder)


@contextlib.contextmanager
def listen_here() -> Iterator[socket.socket]:
    """A socket that listens where this user's runs are found.

    Raises OSError if no such place can be used.
    """
    sockets()  # removes what killed processes left
    problem: OSError | None = None
    for folder in 2 * list(dict.fromkeys(_folders())):  # twice: a run that ends just now may remove its folder
        if not _made(folder):
            continue
        path = folder / f"{os.getpid()}-{secrets.token_hex(4)}.sock"
        listener = socket.socket(socket.AF_UNIX)
        try:
            # Under its name it always answers: who finds a socket that does not takes it for a dead one.
            hidden = path.with_suffix(".new")
            listener.bind(str(hidden))
            listener.listen(_BACKLOG)
            hidden.rename(path)
        except OSError as error:  # too long a path, for example
            listener.close()
            problem = error
            continue
        try:
            yield listener
        finally:
            listener.close()
            path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # others are in it
                folder.rmdir()
        return
    raise problem or OSError(f"none of {', '.join(map(str, _folders()))} is a folder of this user alone")


def sockets() -> list[Path]:
    """Sockets of this user's runs, oldest first; removes those of dead processes."""
    live_sockets: dict[Path, float] = {}
    for folder in dict.fromkeys(_folders()):
        for path in folder.glob("*.sock") if _is_mine(folder) else ():
            try:
                began = path.stat().st_mtime
                connect_to(path).close()
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)
            except OSError:  # it has just gone, or is too busy to be asked
                continue
            else:
                live_sockets[path] = began
    return sorted(live_sockets, key=lambda path: live_sockets[path])


def connect_to(path: Path) -> socket.socket:
    """A connection to the run at ``path``; raises OSError if it is gone."""
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(_CONNECT_SECONDS)
    try:
        connection.connect(str(path))
    except OSError:
        connection.close()
        raise
    return connection
