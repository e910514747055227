"""Journal of a coordinator: a small append-only file for its restart.

Concept: each line is all that must be known at that moment
(:class:`~lightning_recycle.control.protocol.coordinator_restart.Kept`, and which process holds which position), with a
checksum. The last whole line counts; a torn one, after a crash in the middle of writing, is cut off. A line is written
when the roster changes, when the run ends, and for a few other events that are as rare; it is on the disk before
anybody is told.

Contract: a file that was written under another key is not believed: it begins anew. Whoever opens the file
takes it over: it writes its *epoch*, one higher than the last, and from then on :meth:`Journal.write` and
:meth:`Journal.check` of the one before raise :class:`SupersededError`. So of two coordinators only the newer one
can change anything, also when the older one was merely stopped and wakes up. If the file cannot be written, it is
emptied, and the run goes on without it: what is outdated must not be believed.

The key of the run is not in the file, only a digest by which the same key is recognized.
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import logging
import os
import socket
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from lightning_recycle.control.protocol.coordinator_restart import Kept
from lightning_recycle.errors import ConfigurationError, ControlPlaneError

__all__ = ["Journal", "Process", "SupersededError", "default_path"]

log = logging.getLogger(__name__)

_CHECKSUM_BYTES = 8  # in hexadecimal


class SupersededError(ControlPlaneError):
    """Another coordinator of the same run was started after this one."""


@dataclass(frozen=True, slots=True)
class Process:
    """The process at a position; see :class:`~lightning_recycle.control.protocol.messages.Hello`."""

    token: str
    pid: int
    node: str
    space: str = ""
    incarnation: int = 0


@dataclass(frozen=True, slots=True)
class _Line:
    """A line of the journal: all that is known at a moment.

    ``statuses``: those of the runs before this one.
    """

    proof: str
    run: str
    epoch: int
    statuses: tuple[int, ...] = ()
    kept: Kept | None = None
    processes: Mapping[int, Process] = field(default_factory=dict)


def default_path(address: tuple[str, int]) -> Path:
    """Where the coordinator that listens at ``address`` writes by default: in a folder of this user's own.

    The name has this machine's in it, as machines may share the user's home.

    Raises:
        ConfigurationError: if that folder is not the user's own, or cannot be made.
    """
    folder = _state_folder()
    try:
        found = folder.lstat()
    except OSError as error:
        raise ConfigurationError(f"{folder}: {error.strerror}. Give --state another file, or --state none.") from error
    if found.st_uid != os.getuid() or folder.is_symlink():
        raise ConfigurationError(f"{folder} belongs to somebody else: give --state another file, or --state none.")
    machine = f"{socket.gethostname()}-{address[0]}"
    name = "".join(letter if letter.isalnum() or letter in ".-" else "_" for letter in machine)
    return folder / f"coordinator-{name}-{address[1]}.log"


def _state_folder() -> Path:
    """The user's folder for state, which is not cleaned; one of temporary files where it cannot be written."""
    home = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    folder = Path(home) / "lightning_recycle"
    with contextlib.suppress(OSError):  # a read-only home, or none
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    folder = Path(tempfile.gettempdir()) / f"lightning-recycle-{os.getuid()}"
    with contextlib.suppress(OSError):  # the caller looks at it and says why
        folder.mkdir(mode=0o700, exist_ok=True)
    return folder


class Journal:
    """The file of one coordinator.

    Args:
        path: the file; it is made if it does not exist.
        key: the key of the run.

    Attributes:
        run: a random name of the run.
        epoch: how many coordinators it has had before.
        statuses: how the runs before it have ended.
        kept: what was written down of the run; None at its beginning.
        processes: who held which position then.
        is_continued: whether another coordinator has begun the run.

    Raises:
        ConfigurationError: if the file cannot be opened.
    """

    def __init__(self, path: Path, key: bytes) -> None:
        self.path = path
        self._proof = hmac.digest(key, b"recycle journal", "sha256").hex()[:32]
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigurationError(f"--state {path}: {error.strerror}.") from error
        self._is_broken = False
        self.is_continued = False
        with self._locked():
            data = _read_all(self._fd)
            line, size = _last_line(data)
            if line is not None and line.proof != self._proof:
                log.warning("%s was written by a coordinator of another run: it begins anew.", path)
                line, size = None, 0
            if size < len(data):
                os.ftruncate(self._fd, size)
            self._size = size
            if line is None:
                line = _Line(self._proof, os.urandom(8).hex(), -1)
            self.is_continued = line.epoch >= 0
            self._line = replace(line, epoch=line.epoch + 1)
            self._append()

    @property
    def run(self) -> str:
        return self._line.run

    @property
    def epoch(self) -> int:
        return self._line.epoch

    @property
    def statuses(self) -> tuple[int, ...]:
        return self._line.statuses

    @property
    def kept(self) -> Kept | None:
        return self._line.kept

    @property
    def processes(self) -> Mapping[int, Process]:
        return self._line.processes

    def write(self, kept: Kept, processes: Mapping[int, Process]) -> None:
        """Writes down ``kept`` and who holds the positions of its roster, if that is news.

        Raises:
            SupersededError: if another coordinator has taken over.
        """
        if kept == self._line.kept:
            return
        holders = {rank: processes[rank] for rank in kept.live if rank in processes}
        with self._locked():
            self._check()
            self._line = replace(self._line, kept=kept, processes=holders)
            self._append()

    def adopt(self, run: str, epoch: int, kept: Kept | None, processes: Mapping[int, Process]) -> None:
        """Goes on with ``run``, of which this file does not know, after a coordinator of ``epoch``.

        Raises:
            SupersededError: if another coordinator has taken over.
        """
        with self._locked():
            self._check()
            self._line = replace(self._line, run=run, epoch=epoch + 1, kept=kept, processes=dict(processes))
            self.is_continued = True
            self._append()

    def begin(self, statuses: tuple[int, ...]) -> None:
        """Another run begins.

        Args:
            statuses: those of the runs before.

        Raises:
            SupersededError: if another coordinator has taken over.
        """
        with self._locked():
            self._check()
            os.ftruncate(self._fd, 0)
            self._size, self._is_broken, self.is_continued = 0, False, False
            self._line = _Line(self._proof, os.urandom(8).hex(), self.epoch, statuses)
            self._append()

    def check(self) -> None:
        """Raises:
        SupersededError: if another coordinator has taken over.
        """
        with self._locked():
            self._check()

    def close(self) -> None:
        os.close(self._fd)

    def _check(self) -> None:
        if self._is_broken:
            return
        if os.fstat(self._fd).st_size == self._size:
            try:
                if os.path.samestat(os.fstat(self._fd), self.path.stat()):
                    return
            except FileNotFoundError:  # removed, as cleaners of temporary files do: nobody has taken over
                return self._write_anew()
        raise SupersededError(f"another coordinator of this run was started meanwhile; it writes to {self.path}")

    def _write_anew(self) -> None:
        """Puts a whole file at the path, unless another coordinator has made its own there meanwhile."""
        draft = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            fd = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
            os.close(self._fd)
            self._fd, self._size = fd, 0
            self._append()
            os.link(draft, self.path)
        except FileExistsError:
            raise SupersededError(f"another coordinator of this run was started; it writes to {self.path}") from None
        except OSError as error:
            self._is_broken = True
            log.warning("%s is gone and cannot be written anew (%s).", self.path, error)
            return
        finally:
            with contextlib.suppress(OSError):  # not made, then
                draft.unlink()
        log.warning("%s was removed while the run goes on: it is written anew.", self.path)

    def _append(self) -> None:
        if self._is_broken:
            return
        body = msgspec.json.encode(self._line)
        data = f"{zlib.crc32(body):0{_CHECKSUM_BYTES}x} ".encode() + body + b"\n"
        try:
            if os.write(self._fd, data) < len(data):
                raise OSError("the disk is full")
            os.fsync(self._fd)
        except OSError as error:
            self._is_broken = True
            log.warning("%s cannot be written (%s): this run does not survive its coordinator.", self.path, error)
            with contextlib.suppress(OSError):  # emptying a file needs no room; there is nothing else left to try
                os.ftruncate(self._fd, 0)
            return
        self._size += len(data)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """For the milliseconds of a look or a line: a coordinator that was stopped in between cannot be waited for."""
        with contextlib.suppress(OSError):  # held by one that was stopped, or a file system without locks
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                fcntl.flock(self._fd, fcntl.LOCK_UN)


def _read_all(fd: int) -> bytes:
    os.lseek(fd, 0, os.SEEK_SET)
    pieces = []
    while piece := os.read(fd, 1 << 20):
        pieces.append(piece)
    return b"".join(pieces)


def _last_line(data: bytes) -> tuple[_Line | None, int]:
    """The last whole line before the first that is none, and the bytes until its end."""
    last, size = None, 0
    for text in data.splitlines(keepends=True):
        try:
            checksum, body = int(text[:_CHECKSUM_BYTES], 16), text[_CHECKSUM_BYTES + 1 :].rstrip(b"\n")
            if not text.endswith(b"\n") or zlib.crc32(body) != checksum:
                break
            last = msgspec.json.decode(body, type=_Line)
        except (ValueError, msgspec.MsgspecError):
            break
        size += len(text)
    return last, size
