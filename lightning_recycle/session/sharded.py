"""Sharded checkpoints: a folder in torch's distributed checkpoint format, each stage's tensors in a file of its own.

torch.distributed.checkpoint coordinates its writers through the default process group; without one it takes each for
the only one. Here its steps (local plan, global plan, write, finish) are called one by one, and what they exchange goes
through the control plane; so a peer replaces a writer that dies, and the folder is written again. It gets its name when
it is complete.

Layout, as Lightning writes and ``python -m lightning.pytorch.utilities.consolidate_checkpoint`` reads it: ``model`` and
``optimizer_0`` in the shards, everything else in ``meta.pt``.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.load import _METADATA_FILENAME
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from lightning_recycle.session.collectives import Collectives

__all__ = ["is_sharded", "load_sharded", "save_sharded"]


def is_sharded(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` is a folder written by :func:`save_sharded`, or by another strategy of Lightning."""
    return (Path(path) / _METADATA_FILENAME).is_file()


def save_sharded(
    path: str | os.PathLike[str],
    shard: dict[str, Any],
    rest: dict[str, Any],
    collectives: Collectives,
    before_naming: Callable[[], None],
) -> bool:
    """Writes this worker's shard together with all others; every live worker takes part.

    Args:
        path: the folder's path, the same on all workers; replaced if it exists.
        shard: the state of this worker's stage, in nested dicts.
        rest: what does not belong to a stage.
        collectives: this worker's collectives.
        before_naming: called by the leader right before the folder gets its name.

    Returns:
        Whether this worker gave the folder its name.
    """
    path, gather, num_stages = Path(path), collectives.gather, collectives.grid.stages
    attempt = 0
    while True:
        folder = path.with_name(f".{path.name}.writing.{attempt}")
        attempt += 1
        writer = FileSystemWriter(folder, sync_files=True)
        writer.set_up_storage_writer(is_coordinator=True)
        planner = DefaultSavePlanner()
        mine = None
        if collectives.speaks:
            # Each shard has its own keys, so each worker is the coordinator of the entries that are no tensors.
            planner.set_up_planner(shard, writer.storage_meta(), is_coordinator=True)
            mine = writer.prepare_local_plan(planner.create_local_plan())
        plans = {rank: plan for rank, plan in gather("checkpoint plan", mine).items() if plan is not None}
        if len(plans) < num_stages:
            continue
        ranks = sorted(plans)
        merger = DefaultSavePlanner()
        merged, metadata = merger.create_global_plan([plans[rank] for rank in ranks])
        merged = writer.prepare_global_plan(merged)
        written = None
        if mine is not None:
            index = _index_of(plans, ranks, mine)
            written = writer.write_data(planner.finish_plan(merged[index]), planner).wait()
        results = [part for _, part in sorted(gather("checkpoint data", written).items()) if part is not None]
        if len(results) < num_stages:
            continue
        named = False
        if collectives.leads:
            writer.finish(metadata, results)
            torch.save(rest, folder / _METADATA_FILENAME)
            before_naming()
            _replace(folder, path)
            named = True
        if any(gather("checkpoint", named).values()):
            return named


def _index_of(plans: Mapping[int, Any], ranks: Sequence[int], mine: Any) -> int:
    """The index of this worker's plan: plans have no name, but their first item has."""
    keys = {item.index.fqn for item in mine.items}
    return next(i for i, rank in enumerate(ranks) if keys == {item.index.fqn for item in plans[rank].items})


def _replace(folder: Path, path: Path) -> None:
    """Renames ``folder`` to ``path``, replacing whatever has that name."""
    if path.is_dir():
        shutil.rmtree(path)
    elif path.exists():
        path.unlink()
    folder.rename(path)
    for leftover in path.parent.glob(f".{path.name}.writing.*"):
        shutil.rmtree(leftover)


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
    return {
        **rest,
        "state_dict": checkpoint.get("model", checkpoint.get("state_dict", {})),
        "optimizer_states": [checkpoint[key] for key in optimizers],
    }
