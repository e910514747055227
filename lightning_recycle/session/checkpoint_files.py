"""How a checkpoint is written to the disk in one piece, what "whole" means for it, and what a failure to write one is.

Contract: a checkpoint under its name is whole (:func:`damage` finds nothing), whenever its writers die; one that cannot
be written leaves the one before unchanged.

A file is the zip archive that torch writes: the directory of the archive, which comes last, has the size and the CRC-32
of each of its records, so the file needs nothing beside it to be checked, copied or renamed. A folder has the same in
``manifest.json``, written last.

Must not know: who writes, and what the run does about a failure.
"""

from __future__ import annotations

import contextlib
import json
import os
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.fabric.utilities.load import _METADATA_FILENAME
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from typing_extensions import override

from lightning_recycle.files import delete, remove, remove_leftovers, replacing, write_json

__all__ = [
    "WholeCheckpointIO",
    "WriteFailure",
    "attempt",
    "checksum",
    "damage",
    "discard",
    "is_sharded",
    "local_path",
    "save_with_checksums",
    "write_manifest",
]

_T = TypeVar("_T")

_MANIFEST = "manifest.json"
_MANIFEST_VERSION = 1
_CHUNK = 1 << 22  # bytes
_ZIP = b"PK\x03\x04"
_PICKLE = b"\x80"  # torch's format before 1.6
Checksum = tuple[int, int]
"""Size in bytes and CRC-32 of a file."""


def local_path(path: str | os.PathLike[str]) -> Path | None:
    """``path`` as a path of this machine's file systems; None for URLs of others (``s3://``, ``memory://``)."""
    if "://" not in os.fspath(path):
        return Path(path)
    file_system, stripped = url_to_fs(os.fspath(path))
    return Path(stripped) if isinstance(file_system, LocalFileSystem) else None


def is_sharded(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` is a folder as this strategy writes it, or another strategy of Lightning."""
    return (Path(path) / _METADATA_FILENAME).is_file()


# ------------------------------------------------------------------ writing


class WholeCheckpointIO(TorchCheckpointIO):
    """Lightning's default, but a file under its name is whole: it is written beside its place and renamed.

    Files on other file systems than this machine's go Lightning's way.
    """

    @override
    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        path: str | Path,
        storage_options: Any | None = None,
        before_naming: Callable[[], None] | None = None,
    ) -> None:
        """Writes a checkpoint.

        Args:
            checkpoint: the checkpoint.
            path: the file's path or URL.
            storage_options: not supported, as in Lightning's class.
            before_naming: called right before a file of this machine gets its name.

        Raises:
            OSError: when the file system refuses; what was under ``path`` is then unchanged.
            TypeError: for ``storage_options``.
        """
        local = local_path(path)
        if local is None or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        remove_leftovers(local.parent)
        with replacing(local, before_naming) as file:
            save_with_checksums(checkpoint, file)

    @override
    def remove_checkpoint(self, path: str | Path) -> None:
        local = local_path(path)
        if local is None:
            super().remove_checkpoint(path)
        else:
            remove(local)


def save_with_checksums(value: Any, file: Any) -> None:
    """``torch.save`` with the checksums of its records, even where the user switched them off.

    Raises:
        OSError: when the file system refuses. (torch's writer raises an error of its own then.)
    """
    chosen = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(True)
    try:
        torch.save(value, file)
    except RuntimeError as error:
        if (reason := _system_error(error)) is not None:
            raise reason from None
        raise
    finally:
        torch.serialization.set_crc32_options(chosen)


@dataclass(frozen=True)
class WriteFailure:
    """Why a checkpoint was not written."""

    text: str


def attempt(action: Callable[[], _T], path: str | os.PathLike[str], content: Any) -> _T | WriteFailure:
    """What ``action`` returns, which writes ``content`` to ``path``; or why the file system refused.

    Raises:
        Exception: what ``action`` raises, if the file system is not the reason.
    """
    try:
        return action()
    except Exception as error:
        reason = _system_error(error)
        if reason is None:
            raise
        return WriteFailure(
            f"The checkpoint {os.fspath(path)} ({_megabytes(_tensor_bytes(content))} to write{_free_space(path)}) could"
            f" not be written: {reason}."
        )


def _system_error(error: BaseException) -> OSError | None:
    """The system's error that ``error`` is, or came from."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, OSError):
        found = found.__cause__ or found.__context__
    return found


def _tensor_bytes(content: Any) -> int:
    storages: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    apply_to_collection(content, Tensor, count)
    return sum(storages.values())


def _free_space(path: str | os.PathLike[str]) -> str:
    folder = None if (local := local_path(path)) is None else local.absolute().parent
    while folder is not None and not folder.is_dir():
        folder = None if folder == folder.parent else folder.parent
    if folder is None:
        return ""
    status = os.statvfs(folder)
    return f", {_megabytes(status.f_bavail * status.f_frsize)} free in {folder}"


def _megabytes(number: int) -> str:
    return f"{number / 1e6:.1f} MB"


# ------------------------------------------------------------------ checking


def checksum(path: Path) -> Checksum:
    """Size in bytes and CRC-32 of a file.

    Raises:
        OSError: if it cannot be read.
    """
    size = value = 0
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            size += len(chunk)
            value = zlib.crc32(chunk, value)
    return size, value


def write_manifest(folder: Path, checksums: Mapping[str, Checksum]) -> None:
    """Completes ``folder``, of which ``checksums`` has each file.

    Raises:
        OSError: when the file system refuses.
    """
    files = {name: {"bytes": size, "crc32": f"{crc:08x}"} for name, (size, crc) in sorted(checksums.items())}
    write_json(folder / _MANIFEST, {"version": _MANIFEST_VERSION, "files": files})


def damage(path: str | os.PathLike[str]) -> str | None:
    """What is wrong with the checkpoint at ``path`` on this machine's file systems; None if it is whole.

    Reads all of it. Files in torch's old format and folders of other strategies of Lightning have no checksums, and a
    program that writes files may have switched them off: there only completeness is checked.
    """
    path = Path(path)
    try:
        return _folder_damage(path) if path.is_dir() else _file_damage(path)
    except FileNotFoundError:
        return "it does not exist"
    except OSError as error:
        return f"it cannot be read: {error.strerror or error}"


def _file_damage(path: Path) -> str | None:
    with open(path, "rb") as file:
        head = file.read(len(_ZIP))
    if head[:1] == _PICKLE:
        return None
    if head != _ZIP:
        return "it is empty" if not head else "it is not a file that torch wrote"
    try:
        with zipfile.ZipFile(path) as archive:
            has_checksums = any(record.CRC for record in archive.infolist())
            bad = archive.testzip() if has_checksums else None
    except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError, ValueError, zlib.error) as error:
        # A damaged header can claim anything: an encrypted record, an unknown method, a date that does not exist.
        return f"it is incomplete or overwritten ({error or type(error).__name__})"
    return None if bad is None else f"the checksum of its record {bad} does not match"


def _folder_damage(path: Path) -> str | None:
    try:
        manifest = json.loads((path / _MANIFEST).read_bytes())
    except FileNotFoundError:
        missing = [name for name in (".metadata", _METADATA_FILENAME) if not (path / name).is_file()]
        return f"it has no {_MANIFEST} and no {' and no '.join(missing)}" if missing else None
    except ValueError:
        return f"its {_MANIFEST} is overwritten"
    try:
        wanted = {name: (entry["bytes"], int(entry["crc32"], 16)) for name, entry in manifest["files"].items()}
    except (AttributeError, KeyError, TypeError, ValueError):
        return f"its {_MANIFEST} is overwritten"
    for name, expected in wanted.items():
        if not (path / name).is_file():
            return f"its file {name} is missing"
        size, crc = checksum(path / name)
        if size != expected[0]:
            return f"its file {name} has {size} of {expected[0]} bytes"
        if crc != expected[1]:
            return f"the checksum of its file {name} does not match"
    return None


def discard(folder: Path) -> None:
    """Deletes a folder that did not become a checkpoint, as far as possible."""
    with contextlib.suppress(OSError):  # the disk is the reason that it did not; the next checkpoint tries again
        delete(folder)
