"""Sharded checkpoints: a folder in torch's distributed checkpoint format, each stage's tensors in a file of its own.

torch.distributed.checkpoint coordinates its writers through the default process group; without one it takes each for
the only one. Here its steps (local plan, global plan, write, finish) are called one by one, and what they exchange goes
through the control plane; so a peer replaces a writer that dies, and the folder is written again. Each writer tells the
checksum of its file; the leader writes them to the manifest, and then the folder gets its name.

Layout, as Lightning writes and ``python -m lightning.pytorch.utilities.consolidate_checkpoint`` reads it: ``model`` and
``optimizer_0`` in the shards, everything else in ``meta.pt``; and the manifest.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.load import _METADATA_FILENAME
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from lightning_recycle.files import put_in_place, remove_leftovers, replacing, sync_folder, temporary_path
from lightning_recycle.session.checkpoint_files import (
    Checksum,
    WriteFailure,
    attempt,
    checksum,
    discard,
    save_with_checksums,
    write_manifest,
)
from lightning_recycle.session.collectives import Collectives

__all__ = ["load_sharded", "save_sharded"]

_TORCH_METADATA = ".metadata"


def save_sharded(
    path: str | os.PathLike[str],
    shard: dict[str, Any],
    rest: dict[str, Any],
    collectives: Collectives,
    before_naming: Callable[[], None],
) -> bool | WriteFailure:
    """Writes this worker's shard together with all others; every live worker takes part.

    Args:
        path: the folder's path, the same on all workers; replaced if it exists.
        shard: the state of this worker's stage, in nested dicts.
        rest: what does not belong to a stage.
        collectives: this worker's collectives.
        before_naming: called by the leader right before the folder gets its name.

    Returns:
        Whether this worker gave the folder its name; or why there is no checkpoint, the same on all workers.
    """
    path, gather = Path(path), collectives.gather
    folder: Path | None = None
    while True:
        if collectives.leads:
            if folder is not None:  # all live workers have left it, because a writer died
                discard(folder)
            remove_leftovers(path.parent)
        proposals = gather("checkpoint folder", temporary_path(path).name if collectives.leads else None)
        names = [name for _, name in sorted(proposals.items()) if name is not None]
        if not names:
            continue
        folder = path.with_name(names[0])
        outcome = _write_once(path, folder, shard, rest, collectives, before_naming)
        if outcome is None:
            continue
        if isinstance(outcome, WriteFailure) and collectives.leads:
            discard(folder)
        return outcome


def _write_once(
    path: Path,
    folder: Path,
    shard: dict[str, Any],
    rest: dict[str, Any],
    collectives: Collectives,
    before_naming: Callable[[], None],
) -> bool | WriteFailure | None:
    """Writes ``folder`` and names it ``path``; as :func:`save_sharded`, or None if a writer died meanwhile."""
    gather, num_stages = collectives.gather, collectives.grid.stages
    writer = FileSystemWriter(folder, sync_files=True)
    writer.set_up_storage_writer(is_coordinator=True)
    planner = DefaultSavePlanner()

    def plan() -> Any:
        # Each shard has its own keys, so each worker is the coordinator of the entries that are no tensors.
        planner.set_up_planner(shard, writer.storage_meta(), is_coordinator=True)
        return writer.prepare_local_plan(planner.create_local_plan())

    mine = attempt(plan, path, shard) if collectives.speaks else None
    plans = _parts(gather("checkpoint plan", mine))
    if isinstance(plans, WriteFailure):
        return plans
    if len(plans) < num_stages:
        return None
    ranks = sorted(plans)
    merged, metadata = DefaultSavePlanner().create_global_plan([plans[rank] for rank in ranks])
    merged = writer.prepare_global_plan(merged)

    def write() -> tuple[Any, dict[str, Checksum]]:
        index = _index_of(plans, ranks, mine)
        results = writer.write_data(planner.finish_plan(merged[index]), planner).wait()
        names = {result.storage_data.relative_path for result in results}
        return results, {name: checksum(folder / name) for name in names}

    written = _parts(gather("checkpoint data", attempt(write, path, shard) if mine is not None else None))
    if isinstance(written, WriteFailure):
        return written
    if len(written) < num_stages:
        return None

    def finish() -> bool:
        parts = [written[rank] for rank in sorted(written)]
        writer.finish(metadata, [results for results, _ in parts])
        with replacing(folder / _METADATA_FILENAME) as file:
            save_with_checksums(rest, file)
        checksums = {name: value for _, found in parts for name, value in found.items()}
        checksums |= {name: checksum(folder / name) for name in (_TORCH_METADATA, _METADATA_FILENAME)}
        write_manifest(folder, checksums)
        sync_folder(folder)
        before_naming()
        put_in_place(folder, path)
        return True

    named = attempt(finish, path, rest) if collectives.leads else None
    outcomes = _parts(gather("checkpoint", named))
    if isinstance(outcomes, WriteFailure):
        return outcomes
    return (named is not None) if outcomes else None


def _parts(gathered: Mapping[int, Any]) -> dict[int, Any] | WriteFailure:
    """What workers contributed, by rank; or the failure of one of them."""
    parts = {rank: part for rank, part in gathered.items() if part is not None}
    failures = [part for _, part in sorted(parts.items()) if isinstance(part, WriteFailure)]
    return failures[0] if failures else parts


def _index_of(plans: Mapping[int, Any], ranks: Sequence[int], mine: Any) -> int:
    """The index of this worker's plan: plans have no name, but their first item has."""
    keys = {item.index.fqn for item in mine.items}
    return next(i for i, rank in enumerate(ranks) if keys == {item.index.fqn for item in plans[rank].items})


def load_sharded(path: str | os.PathLike[str], wanted: Callable[[str], bool]) -> dict[str, Any]:
    """Reads a folder that :func:`save_sharded` wrote.

    Args:
        path: the folder's path.
        wanted: whether to read a key such as ``model.layers.0.weight`` or ``optimizer_0.state.3.exp_avg``.

    Returns:
        The checkpoint as one device would have written it, with the wanted parts of ``state_dict`` and
        ``optimizer_states``.
    """
    reader = FileSystemReader(path)
    keys = {key for key in reader.read_metadata().state_dict_metadata if wanted(key)}
    checkpoint: dict[str, Any] = {}
    _load_state_dict(checkpoint, reader, planner=_EmptyStateDictLoadPlanner(keys=keys), no_dist=True)
    rest = torch.load(Path(path) / _METADATA_FILENAME, map_location="cpu", weights_only=True)
    optimizers = sorted(key for key in checkpoint if key.startswith("optimizer_"))
    states = [checkpoint.pop(key) for key in optimizers]
    weights = checkpoint.pop("model", None) or checkpoint.pop("state_dict", {})
    return {**rest, **checkpoint, "state_dict": weights, "optimizer_states": states}
