"""Journal of a coordinator: a small file from which another process goes on with its run.

Concept: the file holds all that must be known
(:class:`~lightning_recycle.control.protocol.coordinator_restart.JournaledState`, and which process holds which
position). It is replaced as a whole when the roster changes, when the run ends, and for a few other events that are as
rare; it is on the disk before anything is announced.

Contract: one process at a time has the file: it holds a lock as long as it lives, also while it is stopped, and whoever
finds the lock taken is refused. So there are never two coordinators of one run. A file that was written under another
key is not believed: it begins anew. If it cannot be written it is removed, and the run goes on without it: what is
outdated must not be believed.

The key of the run is not in the file, only a digest by which the same key is recognized.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hmac
import logging
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from lightning_recycle.control.protocol.coordinator_restart import JournaledState
from lightning_recycle.errors import ConfigurationError
from lightning_recycle.files import replacing

log = logging.getLogger(__name__)

_LOCK_SECONDS = 5.0  # for a process that was killed a moment ago to let go


@dataclass(frozen=True, slots=True)
class Process:
    """The process at a position; see :class:`~lightning_recycle.control.protocol.messages.Hello`."""

    token: str
    pid: int
    node: str
    space: str = ""
    incarnation: int = 0


@dataclass(frozen=True, slots=True)
class _Content:
    """Content of the file. ``proof``: a digest of the key; ``statuses``: those of the runs before this one."""

    proof: str
    run: str
    statuses: tuple[int, ...] = ()
    kept: JournaledState | None = None
    processes: Mapping[int, Process] = field(default_factory=dict)


def default_path(address: tuple[str, int]) -> Path:
    """Where the coordinator that listens at ``address`` writes by default: in the user's folder for state.

    The name has this machine's in it, as machines may share the user's home.

    Raises:
        ConfigurationError: if that folder cannot be made.
    """
    folder = Path(os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")) / "lightning_recycle"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"{folder}: {error.strerror}. Give --state another file, or --state none.") from error
    machine = f"{socket.gethostname()}-{address[0]}"
    name = "".join(letter if letter.isalnum() or letter in ".-" else "_" for letter in machine)
    return folder / f"coordinator-{name}-{address[1]}.json"


class Journal:
    """The file of one coordinator.

    Args:
        path: the file; it is made if it does not exist. Beside it lies the lock.
        key: the key of the run.

    Attributes:
        run: a random name of the run.
        statuses: how the runs before it have ended.
        kept: what was written down of the run; None at its beginning.
        processes: who held which position then.
        is_continued: whether another coordinator has begun the run.

    Raises:
        ConfigurationError: if the file cannot be written, or belongs to a coordinator that lives.
    """

    def __init__(self, path: Path, key: bytes) -> None:
        self.path = path
        self._proof = hmac.digest(key, b"recycle journal", "sha256").hex()[:32]
        self._lock_path = path.with_name(f"{path.name}.lock")
        try:
            self._lock = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigurationError(f"--state {path}: {error.strerror}.") from error
        self._is_broken = False
        try:
            self._take_lock()
            found = self._read()
            self.is_continued = found is not None
            self._content = _Content(self._proof, os.urandom(8).hex()) if found is None else found
            self._replace()
        except BaseException:
            os.close(self._lock)
            raise

    @property
    def run(self) -> str:
        return self._content.run

    @property
    def statuses(self) -> tuple[int, ...]:
        return self._content.statuses

    @property
    def kept(self) -> JournaledState | None:
        return self._content.kept

    @property
    def processes(self) -> Mapping[int, Process]:
        return self._content.processes

    def write(self, kept: JournaledState, processes: Mapping[int, Process]) -> None:
        """Writes down ``kept`` and who holds the positions of its roster, if that is news."""
        if kept != self._content.kept:
            holders = {rank: processes[rank] for rank in (*kept.roster.ranks, *kept.roster.parked) if rank in processes}
            self._content = replace(self._content, kept=kept, processes=holders)
            self._replace()

    def adopt(self, run: str, kept: JournaledState | None, processes: Mapping[int, Process]) -> None:
        """Goes on with ``run``, of which this file does not know."""
        self.is_continued = True
        self._content = replace(self._content, run=run, kept=kept, processes=processes)
        self._replace()

    def begin(self, statuses: tuple[int, ...]) -> None:
        """Another run begins; ``statuses``: those of the runs before."""
        self._is_broken = self.is_continued = False
        self._content = _Content(self._proof, os.urandom(8).hex(), statuses)
        self._replace()

    def remove(self) -> None:
        """Nothing is left to be continued."""
        for path in (self.path, self._lock_path):
            path.unlink(missing_ok=True)

    def close(self) -> None:
        os.close(self._lock)

    def _take_lock(self) -> None:
        """Of this process alone: the kernel releases it whatever ends it, and processes forked from it have none."""
        deadline = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError as error:
                if error.errno not in (errno.EACCES, errno.EAGAIN):
                    return  # a file system without locks
            if time.monotonic() > deadline:
                raise ConfigurationError(
                    f"--state {self.path}: another coordinator has this file, and lives, or is stopped. Kill it first,"
                    " or give another file."
                )
            time.sleep(0.05)

    def _read(self) -> _Content | None:
        """Journal of an earlier coordinator with the same key."""
        try:
            found = msgspec.json.decode(self.path.read_bytes(), type=_Content)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ConfigurationError(f"--state {self.path}: {error.strerror}.") from error
        except (ValueError, msgspec.MsgspecError):
            log.warning("%s is no file of a coordinator: it begins anew.", self.path)
            return None
        if found.proof != self._proof:
            log.warning("%s was written by a coordinator of another run: it begins anew.", self.path)
            return None
        return found

    def _replace(self) -> None:
        if self._is_broken:
            return
        try:
            with replacing(self.path) as file:
                os.fchmod(file.fileno(), 0o600)
                file.write(msgspec.json.encode(self._content))
        except OSError as error:
            self._is_broken = True
            log.warning("%s cannot be written (%s): this run does not survive its coordinator.", self.path, error)
            with contextlib.suppress(OSError):  # there is nothing else left to try
                self.path.unlink(missing_ok=True)
