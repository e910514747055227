"""Files and folders that are complete under their name, even if their writer dies.

New content is written beside its final place, flushed to the disk, and renamed. No file system replaces a folder in a
single step: the old folder is renamed aside, the new one renamed in, the old one deleted. If the writer dies in
between, :func:`restored` gives the old one its name back.

What a killed writer leaves is hidden and names its process; :func:`remove_leftovers` deletes it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from functools import cache
from os import PathLike
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, BinaryIO, TypeVar

import msgspec

from lightning_recycle.errors import ConfigurationError, ReCycleError
from lightning_recycle.processes import has_ended, process_space

_Kind = TypeVar("_Kind")

_ABANDONED_SECONDS = 3600.0
"""Nobody writes for that long without a change: what is older is abandoned, even if its writer cannot be asked."""

_OF_WRITER = re.compile(r"\..*\.(?:writing|removing)\.(?P<machine>[0-9a-f]{8})-(?P<pid>[0-9]+)-[0-9a-f]{8}", re.DOTALL)
_ASIDE = ".replaced"
_PIECE = 1 << 20  # bytes that are written at once
_NAME_CHARACTERS = 40  # of the final name in a temporary one: file systems allow 255 bytes
_NO_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)  # some file systems cannot flush a folder


# ------------------------------------------------------------------ files


@contextlib.contextmanager
def replacing(
    path: str | PathLike[str], before_naming: Callable[[Path], None] | None = None, mode: int = 0o666
) -> Iterator[BinaryIO]:
    """Yields a new file that becomes ``path`` at the end of the block.

    ``before_naming`` is called with the temporary path when the content is on the disk.

    Raises:
        OSError: when the file system refuses; the old file is then unchanged.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_path(target)
    try:
        with open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if before_naming is not None:
            before_naming(temporary)
        put_in_place(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_atomically(path: str | PathLike[str], content: bytes | str) -> None:
    """Replaces the content of ``path``; text is written in UTF-8.

    A link stays a link, and what is not a file (``/dev/stdout``, a pipe) is written to as it is.

    Raises:
        OSError: when the file system refuses; the old file is then unchanged.
    """
    target = Path(os.path.realpath(path))
    data = content.encode() if isinstance(content, str) else content
    if target.exists() and not target.is_file():
        target.write_bytes(data)
        return
    with replacing(target) as file:
        file.write(data)


def write_json(path: str | PathLike[str], data: Any) -> None:
    """:func:`write_atomically` of ``data`` as one line of JSON."""
    write_atomically(path, json.dumps(data, allow_nan=False, separators=(",", ":")) + "\n")


def check_writable(setting: str, path: str | PathLike[str], is_folder: bool = False) -> None:
    """Raises ConfigurationError for the reason of :func:`why_not_writable`."""
    if why := why_not_writable(path, is_folder):
        raise ConfigurationError(f"{setting}={path}: {why}.")


def why_not_writable(path: str | PathLike[str], is_folder: bool = False) -> str:
    """Why no file, or folder, can be made at ``path``, with the remedy; else empty.

    ``is_folder``: one that exists must be a folder in which files can be made.
    """
    exists = os.path.exists(path)
    if exists and not is_folder:
        return ""
    folder = Path(path) if exists else Path(path).parent
    if not (nearest := next(each for each in (folder, *folder.parents) if os.path.exists(each))).is_dir():
        return f"{nearest} is a file, not a folder: give another path"
    if nearest != folder:
        return f"there is no folder {folder}: give another path, or make it with mkdir -p {folder}"
    try:
        TemporaryFile(dir=folder).close()
    except OSError as error:
        return f"nothing can be written in {folder} ({error.strerror}): give another path"
    return ""


def check_ending(setting: str, path: str | PathLike[str], ending: str, otherwise: str) -> None:
    """Raises ConfigurationError if ``path`` has another ending than ".json", say.

    What is not a file (``/dev/stdout``, a pipe) has any name. ``otherwise``: what else may be given, for the error.
    """
    path = Path(path)
    if path.suffix != ending and (path.is_file() or not path.exists()):
        raise ConfigurationError(f"{setting}={path}: give a name that ends with {ending}, or {otherwise}.")


@contextlib.contextmanager
def refusing(action: str, kind: type[ReCycleError] = ConfigurationError) -> Iterator[None]:
    """Turns OSError in the block into ``kind``: "cannot {action}: reason"."""
    try:
        yield
    except OSError as error:
        raise kind(f"cannot {action}: {error.strerror or error}.") from None


def read_json(path: str | PathLike[str], what: str, remedy: str, kind: type[ReCycleError] = ConfigurationError) -> Any:
    """The content of a JSON file.

    Errors call it ``what`` ("the plan") and give the ``remedy`` for a damaged file ("compute it again").

    Raises:
        ReCycleError: of that kind, when the file cannot be read or is not JSON.
    """
    with refusing(f"read {what} {path}", kind):
        content = Path(path).read_bytes()
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise kind(f"{what} {path} is damaged, it is not JSON ({error}): {remedy}.") from None


def typed_content(
    data: Any, kind: type[_Kind], schema: int, what: str, remedy: str, error: type[ReCycleError] = ConfigurationError
) -> _Kind:
    """``data`` of a JSON file with its ``schema`` as a dataclass; see read_json()."""
    found = data.get("schema") if isinstance(data, dict) else None
    if found != schema:
        raise error(f"{what} has schema {found!r}, this version reads {schema}: {remedy}, or update lightning-recycle.")
    try:
        return msgspec.convert(data, kind)
    except (ValueError, ReCycleError) as reason:
        raise error(f"{what} is damaged ({reason}): {remedy}.") from reason


def link(target: str | PathLike[str], path: str | PathLike[str]) -> None:
    """Makes ``path`` a relative symbolic link to ``target``, replacing what is there."""
    path = Path(path)
    temporary = temporary_path(path)
    os.symlink(os.path.relpath(target, path.parent), temporary)
    try:
        put_in_place(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


class Pace:
    """Limits the bytes per second that a thread writes; None is not a limit."""

    def __init__(self, bytes_per_second: float | None = None) -> None:
        self._rate, self._due = bytes_per_second, time.monotonic()

    def spend(self, size: int) -> None:
        """Waits until ``size`` bytes more may be written."""
        if self._rate is not None:
            now = time.monotonic()
            self._due = max(self._due, now) + size / self._rate
            time.sleep(self._due - now)

    def of(self, file: Any) -> Any:
        return file if self._rate is None else _PacedFile(file, self)


class _PacedFile:
    def __init__(self, file: Any, pace: Pace) -> None:
        self._file, self._pace = file, pace

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), _PIECE):
            piece = view[start : start + _PIECE]
            self._pace.spend(len(piece))
            self._file.write(piece)
        return len(view)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


# ------------------------------------------------------------------ names


def temporary_path(path: str | PathLike[str], purpose: str = "writing") -> Path:
    """A hidden, unique name beside ``path`` that names the writing process."""
    path = Path(path)
    owner = f"{_machine()}-{os.getpid()}-{secrets.token_hex(4)}"
    return path.with_name(f".{path.name[:_NAME_CHARACTERS]}.{purpose}.{owner}")


def put_in_place(new: Path, path: str | PathLike[str]) -> None:
    """Renames ``new`` over ``path``; after an OSError the old content has its name."""
    path = Path(path)
    aside = _aside(path)
    if not _is_folder(new) and not _is_folder(path):
        os.replace(new, path)
    else:
        if os.path.lexists(path):
            delete(aside)  # as long as there is something under the name, it is an older one
            os.rename(path, aside)
            sync_folder(path.parent)
        try:
            os.rename(new, path)
        except OSError:
            if os.path.lexists(aside):
                os.rename(aside, path)
            raise
    sync_folder(path.parent)
    delete(aside)


def put_in_place_if_left(temporary: str | PathLike[str], path: str | PathLike[str]) -> None:
    """:func:`put_in_place` for a writer that is gone, which may have done it."""
    if os.path.lexists(temporary):
        put_in_place(Path(temporary), path)


def restored(path: str | PathLike[str]) -> Path | None:
    """Where the content of ``path`` is: under that name, or nowhere.

    If a writer died between renaming the old folder aside and the new one in, the old one gets its name back. Where
    that is not allowed, it is where it is.
    """
    path, aside = Path(path), _aside(path)
    if os.path.lexists(path) or not os.path.lexists(aside):
        return path if os.path.lexists(path) else None
    try:
        os.rename(aside, path)
    except OSError:  # no permission to write there; or the writer lives, and has just put the new one in place
        return path if os.path.lexists(path) else aside
    return path


def waiting_aside(folder: str | PathLike[str]) -> list[Path]:
    """The paths in ``folder`` that :func:`restored` would give their content back."""
    names = [name for name in os.listdir(folder) if name.startswith(".") and name.endswith(_ASIDE)]
    paths = [Path(folder) / name[1 : -len(_ASIDE)] for name in names]
    return [path for path in paths if not os.path.lexists(path)]


def _aside(path: str | PathLike[str]) -> Path:
    path = Path(path)
    return path.with_name(f".{path.name}{_ASIDE}")


# ------------------------------------------------------------------ removal


def remove(path: str | PathLike[str]) -> None:
    """Deletes a file or folder, if it exists, in one step.

    A folder loses its name first, so that there is never half of it.
    """
    path = Path(path)
    for part in (_aside(path), path):  # in this order: without its name, the one aside would count again
        if _is_folder(part):
            doomed = temporary_path(path, "removing")
            os.rename(part, doomed)
            delete(doomed)
        else:
            delete(part)


def remove_leftovers(folder: str | PathLike[str]) -> None:
    """Deletes what killed writers left in ``folder``.

    What belongs to a living process of this machine stays; so does that of another machine for an hour after its last
    change.
    """
    try:
        names = os.listdir(folder)
    except OSError:
        return  # it is not there yet, or not for us to read: writing to it will tell
    for name in names:
        match = _OF_WRITER.fullmatch(name)
        # Somebody else may remove it as well, or may not let us: housekeeping does not fail what it precedes.
        with contextlib.suppress(OSError):
            if match is not None and _is_left(Path(folder) / name, match["machine"], int(match["pid"])):
                delete(Path(folder) / name)


def delete(path: Path) -> None:
    """Deletes a file, a link, or a folder with its content, if it exists."""
    if _is_folder(path):
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _is_left(path: Path, machine: str, pid: int) -> bool:
    if machine == _machine() and has_ended(pid, process_space()):
        return True
    changed = [path.lstat().st_mtime, *(file.lstat().st_mtime for file in path.rglob("*"))]
    return time.time() - max(changed) > _ABANDONED_SECONDS  # the process may be another one with the same number


@cache
def _machine() -> str:
    """A digest that is equal where process ids mean the same processes."""
    return hashlib.sha256(f"{socket.gethostname()} {process_space()}".encode()).hexdigest()[:8]


# ------------------------------------------------------------------ folders


def sync_folder(path: str | PathLike[str]) -> None:
    """Flushes the names in a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise
    finally:
        os.close(descriptor)


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()
