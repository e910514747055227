"""Checkpoint files and folders: written in one piece, checked by their checksums.

Contract: a checkpoint under its name is whole (:func:`damage` finds nothing), whenever its writers die; a failed write
leaves the previous checkpoint unchanged. A file is torch's zip archive, whose directory has size and CRC-32 of each
record. A folder is in torch's distributed format, with the names of Lightning's strategies: ``state_dict``, and by
reference to the same bytes ``model``; ``optimizer_0`` has states by names of parameters; all but tensors is in
``meta.pt``; sizes and checksums are in ``manifest.json``, written last. Steps of torch.distributed.checkpoint are
called one by one, as it has no process group here: messages go through the control plane.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

import torch
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from lightning.fabric.plugins.io import CheckpointIO, TorchCheckpointIO
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.storage import WriteResult
from typing_extensions import override

from lightning_recycle.control.protocol.messages import SaveFailure
from lightning_recycle.devices import storage_bytes
from lightning_recycle.errors import CheckpointError
from lightning_recycle.files import (
    Pace,
    delete,
    put_in_place,
    remove,
    remove_leftovers,
    replacing,
    restored,
    sync_folder,
    temporary_path,
    waiting_aside,
    write_json,
)
from lightning_recycle.session.lightning_internals import (
    METADATA_FILENAME,
    load_distributed_checkpoint,
    unflatten_state_dict,
)
from lightning_recycle.session.worker_context import StageGroup
from lightning_recycle.tensor_memory import empty_like
from lightning_recycle.torch_internals import tree_leaves

_T = TypeVar("_T")

_MANIFEST = "manifest.json"
_MANIFEST_VERSION = 1
_TORCH_METADATA = ".metadata"
_OF_ANY_STRATEGY = (_TORCH_METADATA, METADATA_FILENAME)  # files of a folder
_VERSION = "pytorch-lightning_version"
_CHUNK = 1 << 22  # bytes
_ZIP = b"PK\x03\x04"
_PICKLE = b"\x80"  # torch's format before 1.6
JOB_CHECKPOINT = re.compile(r"hpc_ckpt_(\d+)\.ckpt")
"""Names of the checkpoints of a job of SLURM that is requeued."""

Checksum = tuple[int, int]
"""Size in bytes and CRC-32 of a file."""


def local_path(path: str | os.PathLike[str]) -> Path | None:
    """``path`` as a path of this machine's file systems."""
    if "://" not in os.fspath(path):
        return Path(path)
    file_system, stripped = url_to_fs(os.fspath(path))
    return Path(stripped) if isinstance(file_system, LocalFileSystem) else None


def is_sharded(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` is a folder of this or another strategy of Lightning."""
    return (local := local_path(path)) is not None and (local / METADATA_FILENAME).is_file()


# ------------------------------------------------------------------ writing


class WholeCheckpointIO(TorchCheckpointIO):
    """Lightning's CheckpointIO with atomic writes: a file is renamed when complete."""

    @override
    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        path: str | Path,
        storage_options: Any | None = None,
        before_naming: Callable[[Path], None] | None = None,
        pace: Pace | None = None,
    ) -> None:
        """Writes a checkpoint.

        ``before_naming``: called with its temporary path right before a local file gets its name. ``pace``: limits the
        writing of a local file.

        Raises:
            OSError: when the file system refuses; the file under ``path`` is then unchanged.
            TypeError: for ``storage_options``.
        """
        local = local_path(path)
        if local is None or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        remove_leftovers(local.parent)
        with replacing(local, before_naming) as file:
            save_with_checksums(checkpoint, file if pace is None else pace.of(file))

    @override
    def remove_checkpoint(self, path: str | Path) -> None:
        local = local_path(path)
        if local is None:
            super().remove_checkpoint(path)
        else:
            remove(local)


def save_with_checksums(value: Any, file: Any) -> None:
    """``torch.save`` with checksums of its records, even where they are switched off.

    Raises OSError, not the error of torch's writer, when the file system refuses.
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


def attempt(action: Callable[[], _T], path: str | os.PathLike[str], content: Any) -> _T | SaveFailure:
    """The result of ``action``, which writes ``content`` to ``path``.

    Raises its exception if the file system is not the reason.
    """
    try:
        return action()
    except Exception as error:
        reason = _system_error(error)
        if reason is None:
            raise
        size = megabytes(storage_bytes(tree_leaves(content)))
        return SaveFailure(
            f"The checkpoint {os.fspath(path)} ({size} to write{_free_space(path)}) could not be written: {reason}.",
            is_refusal=True,
            remedy=_REMEDIES.get(reason.errno or 0, ""),
        )


_SPACE = "Free some space, or keep fewer checkpoints (save_top_k)."
_PERMISSION = "Make the folder writable for this user, or set another one (ModelCheckpoint(dirpath))."
_FOLDER = "Its folder is gone: make it again, or mount it."
_REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), _SPACE),
    **dict.fromkeys((errno.EROFS, errno.EACCES, errno.EPERM), _PERMISSION),
    errno.ENOENT: _FOLDER,
    errno.ENOTDIR: "A file has the name of its folder: set another folder (ModelCheckpoint(dirpath)).",
}


def _system_error(error: BaseException) -> OSError | None:
    """The OSError that ``error`` is or was caused by."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, OSError):
        found = found.__cause__ or found.__context__
    return found


def _free_space(path: str | os.PathLike[str]) -> str:
    folder = None if (local := local_path(path)) is None else local.absolute().parent
    while folder is not None and not folder.is_dir():
        folder = None if folder == folder.parent else folder.parent
    if folder is None:
        return ""
    status = os.statvfs(folder)
    return f", {megabytes(status.f_bavail * status.f_frsize)} free in {folder}"


def megabytes(number: float) -> str:
    """``number`` bytes in words."""
    return f"{number / 1e6:.1f} MB"


# ------------------------------------------------------------------ checking


def checksum(path: Path) -> Checksum:
    """Size in bytes and CRC-32 of a file; raises OSError if it cannot be read."""
    size = value = 0
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            size += len(chunk)
            value = zlib.crc32(chunk, value)
    return size, value


def write_manifest(folder: Path, checksums: Mapping[str, Checksum]) -> None:
    """Completes ``folder``, whose files have ``checksums``.

    Raises OSError when the file system refuses.
    """
    files = {name: {"bytes": size, "crc32": f"{crc:08x}"} for name, (size, crc) in sorted(checksums.items())}
    write_json(folder / _MANIFEST, {"version": _MANIFEST_VERSION, "files": files})


def check_exists(path: Any, checkpoint_io: CheckpointIO) -> None:
    """Raises CheckpointError if ``ckpt_path=path`` is not a file or checkpoint folder.

    The error names the newest whole checkpoint there, and the one with the nearest name.

    The files of a user's own ``checkpoint_io`` are not looked for.
    """
    if not isinstance(checkpoint_io, TorchCheckpointIO):
        return
    local = local_path(path)
    files = (_MANIFEST, *_OF_ANY_STRATEGY)
    if local is not None and local.is_dir() and not any((local / name).exists() for name in files):
        reason = f"it is not a checkpoint folder, with neither {' nor '.join(files)}"
        local /= f"any{ModelCheckpoint.FILE_EXTENSION}"
    elif get_filesystem(path).exists(path):
        return
    elif local is not None and not local.parent.is_dir():
        reason = f"there is no folder {local.parent.absolute()}"
    else:
        reason = "there is no such file or folder"
    newest = meant = ""
    if local is not None and local.parent.is_dir():
        others = newest_first(checkpoints_beside(local))
        whole = next((other for other in others if restored(other) is not None and damage(other) is None), None)
        none = f"; {local.parent.absolute()} holds no whole checkpoint"
        newest = none if whole is None else f"; the newest whole checkpoint there: {whole}"
        names = {other.stem: other.name for other in others}
        meant = "".join(f" Did you mean {names[stem]!r}?" for stem in get_close_matches(local.stem, names, n=1))
    raise CheckpointError(f"ckpt_path={os.fspath(path)!r}: {reason}{newest}.{meant}")


def check_content(path: Any, content: Any) -> None:
    """Raises CheckpointError if no Trainer wrote the ``content`` of ``path``."""
    if not isinstance(content, Mapping) or _VERSION not in content:
        raise CheckpointError(
            f"ckpt_path={os.fspath(path)!r} is not a checkpoint of Lightning: it has no {_VERSION!r}. To load weights"
            " alone, call model.load_state_dict(torch.load(...)) before the Trainer."
        )


def checkpoints_beside(path: Path) -> list[Path]:
    """The checkpoints in the folder of ``path``: either SLURM's, or all others."""
    names = {*os.listdir(path.parent), *(other.name for other in waiting_aside(path.parent))}
    of_job, own = JOB_CHECKPOINT.fullmatch(path.name) is not None, ModelCheckpoint.FILE_EXTENSION
    return [
        path.with_name(name)
        for name in names
        if (name.endswith((path.suffix or own, own)) or is_sharded(path.with_name(name)))
        and not name.startswith(".")
        and (JOB_CHECKPOINT.fullmatch(name) is not None) == of_job
    ]


def newest_first(paths: Iterable[Path]) -> list[Path]:
    """The paths by the time of their content; links to nothing come first."""

    def written(path: Path) -> float:
        try:
            return path.stat().st_mtime
        except FileNotFoundError:
            return math.inf

    return sorted(paths, key=written, reverse=True)


def damage(path: str | os.PathLike[str]) -> str | None:
    """The damage of the checkpoint at ``path``, a local file or folder; reads it all.

    Without checksums (torch's old format, other strategies' folders, checksums switched off) only completeness is
    checked.
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
        missing = [name for name in _OF_ANY_STRATEGY if not (path / name).is_file()]
        return f"it has no {_MANIFEST} and no {' and no '.join(missing)}" if missing else None
    except ValueError:
        return f"its {_MANIFEST} is overwritten"
    try:
        files = {name: (entry["bytes"], int(entry["crc32"], 16)) for name, entry in manifest["files"].items()}
    except (AttributeError, KeyError, TypeError, ValueError):
        return f"its {_MANIFEST} is overwritten"
    for name, expected in files.items():
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


# ---------------------------------------------------------------------- sharded checkpoints

_WEIGHTS, _FSDP_WEIGHTS = "state_dict", "model"


def save_sharded(
    path: Path,
    shard: dict[str, Any],
    common: dict[str, Any],
    group: StageGroup,
    before_naming: Callable[[Path], None],
    pace: Pace | None = None,
) -> SaveFailure | None:
    """Writes this worker's shard together with all others of ``group``.

    ``shard``: the state of this stage, in nested dicts; each member writes its own part of sharded tensors. ``common``:
    belongs to no stage. ``before_naming``: called by the leader right before the folder gets its name, with its
    temporary path. Returns why there is no checkpoint, as far as this worker knows; the leader does. Raises the
    exception of ``group`` where a worker is lost.
    """
    with _temporary_folder(path, group) as folder:
        gather = group.gather_all
        writer = FileSystemWriter(folder, sync_files=True)
        writer.fs = _PacedFileSystem(pace or Pace())
        writer.set_up_storage_writer(is_coordinator=True)
        planner = DefaultSavePlanner()

        def plan() -> Any:
            # Each stage has its own keys, so each writer is the coordinator of the entries that are no tensors. Of what
            # the members of a position have in common one copy is written.
            planner.set_up_planner(shard, writer.storage_meta(), is_coordinator=True)
            return writer.prepare_local_plan(planner.create_local_plan())

        plans = gather("checkpoint plan", attempt(plan, path, shard))
        if (failure := _failure_in(plans)) is not None:
            return failure
        ranks = sorted(plans)
        rank_plans, metadata = DefaultSavePlanner().create_global_plan([plans[rank] for rank in ranks])
        rank_plans = writer.prepare_global_plan(rank_plans)

        def write() -> tuple[Any, dict[str, Checksum]]:
            plan = planner.finish_plan(rank_plans[ranks.index(group.rank)])
            results = writer.write_data(plan, planner).wait()
            names = {result.storage_data.relative_path for result in results}
            return results, {name: checksum(folder / name) for name in names}

        written = gather("checkpoint data", attempt(write, path, shard))
        if (failure := _failure_in(written)) is not None:
            return failure

        def finish() -> None:
            outcomes = [written[rank] for rank in ranks]
            writer.finish(metadata, _with_other_names(metadata, [results for results, _ in outcomes]))
            with replacing(folder / METADATA_FILENAME) as file:
                save_with_checksums(common, file)
            checksums = {name: value for _, sums in outcomes for name, value in sums.items()}
            checksums |= {name: checksum(folder / name) for name in (_TORCH_METADATA, METADATA_FILENAME)}
            write_manifest(folder, checksums)
            sync_folder(folder)
            before_naming(folder)
            put_in_place(folder, path)

        return attempt(finish, path, common) if group.is_leader else None


@contextlib.contextmanager
def _temporary_folder(path: Path, group: StageGroup) -> Iterator[Path]:
    """A folder beside ``path``, the same for all of ``group``.

    It is deleted at the end of the block unless it has got another name.
    """
    if group.is_leader:
        remove_leftovers(path.parent)
    proposals = group.gather_all("checkpoint folder", temporary_path(path).name if group.is_leader else None)
    folder = path.with_name(next(name for name in proposals.values() if name is not None))
    try:
        yield folder
    finally:
        if group.is_leader:
            discard(folder)


class _PacedFileSystem(FileSystem):
    def __init__(self, pace: Pace) -> None:
        self._pace = pace

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as stream:
            yield self._pace.of(stream)


def _with_other_names(metadata: Metadata, results: Sequence[Sequence[WriteResult]]) -> list[list[WriteResult]]:
    """Adds the weights under FSDPStrategy's name, in ``metadata`` and ``results``."""
    stored, paths = metadata.state_dict_metadata, metadata.planner_data
    others = {key: _FSDP_WEIGHTS + key.removeprefix(_WEIGHTS) for key in stored if paths[key][0] == _WEIGHTS}
    for key, other in others.items():
        stored[other], paths[other] = stored[key], (_FSDP_WEIGHTS, *paths[key][1:])
    added = []
    for of_writer in results:
        weights = (result for result in of_writer if result.index.fqn in others)
        renamed = (replace(w, index=replace(w.index, fqn=others[w.index.fqn])) for w in weights)
        added.append([*of_writer, *renamed])
    return added


def _failure_in(gathered: Mapping[int, Any]) -> SaveFailure | None:
    return next((part for _, part in sorted(gathered.items()) if isinstance(part, SaveFailure)), None)


def load_sharded(path: str | os.PathLike[str], selected: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Reads a folder that :func:`save_sharded` or another strategy of Lightning wrote.

    ``selected``: by keys such as ``state_dict.layers.0.weight``, or their beginning such as
    ``optimizer_0.state.layers.0.weight``; a DTensor as the value makes tensors of its shape DTensors with its
    placements, read in shards. Everything by default. Returns the checkpoint as one device would have written it, with
    the selected parts of ``state_dict`` and ``optimizer_states``.
    """
    reader = FileSystemReader(path)
    metadata = reader.read_metadata()
    paths = metadata.planner_data
    weights = _WEIGHTS if any(key_path[0] == _WEIGHTS for key_path in paths.values()) else _FSDP_WEIGHTS
    entries: dict[str, Any] = {}
    for key, stored in metadata.state_dict_metadata.items():
        top, *inner = paths[key]
        if top == _FSDP_WEIGHTS and weights == _WEIGHTS:
            continue  # the same bytes
        names = accumulate((_WEIGHTS if top == weights else top, *inner), lambda name, part: f"{name}.{part}")
        name = next((name for name in names if selected is None or name in selected), None)
        if name is not None:
            entries[key] = None
            if isinstance(stored, TensorStorageMetadata):
                template = None if selected is None else selected[name]
                entries[key] = empty_like(stored.size, stored.properties.dtype, template)
    load_distributed_checkpoint(entries, reader, planner=DefaultLoadPlanner(False, False), no_dist=True)
    checkpoint: dict[str, Any] = unflatten_state_dict(entries, paths)
    common = torch.load(Path(path) / METADATA_FILENAME, map_location="cpu", weights_only=True)
    optimizers = sorted((key for key in checkpoint if key.startswith("optimizer_")), key=_number_of)
    states = [checkpoint.pop(key) for key in optimizers]
    for state in states:
        state["state"] = {**state.get("state", {}), **state.pop("others", {})}
    return {**common, "state_dict": checkpoint.pop(weights, {}), **checkpoint, "optimizer_states": states}


def _number_of(key: str) -> int:
    return int(key.rpartition("_")[2])
