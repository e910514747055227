"""Checkpoints of positions of several processes, onto any other grid and onto one device."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from sharded import (
    BATCH,
    STEPS,
    Alone,
    AtHook,
    AtPoint,
    KillTwo,
    Ordinary,
    Piped,
    dataset,
    error,
    fit,
    kinds,
    plain_loop,
)
from support.scripts import consolidated
from support.training import TOLERANCE, on_one_device
from torch.utils.data import DataLoader
from typing_extensions import override

GLOBAL = 2 * BATCH


def train(
    module: L.LightningModule, grid: tuple[int, int, int], *callbacks: L.Callback, sharded: bool = False, **kwargs: Any
) -> L.Trainer:
    """Trains with the global batch of two pipelines, to step ``STEPS`` by default."""
    strategy = {"save_distributed_checkpoint": sharded, **kwargs.pop("strategy", {})}
    return fit(module, grid, *callbacks, batch=GLOBAL // grid[0], strategy=strategy, **kwargs)


def saving(folder: Path, every: int = 2) -> ModelCheckpoint:
    return ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=every)


def module_for(grid: tuple[int, int, int]) -> L.LightningModule:
    if grid[1] > 1:
        return Piped()
    return Ordinary() if grid[2] > 1 else Alone()


def check_resumed(path: Path, grid: tuple[int, int, int]) -> None:
    """What goes on from ``path`` on ``grid`` ends as an uninterrupted training."""
    module = module_for(grid)
    train(module, grid, max_steps=2 * STEPS, ckpt_path=path)
    assert error(module, plain_loop(2, steps=2 * STEPS)) < TOLERANCE


WRITERS = [((2, 1, 2), (1, 1, 1)), ((2, 1, 2), (1, 1, 4)), ((1, 1, 1), (2, 1, 2)), ((1, 1, 4), (2, 1, 2))]
"""Of an ordinary module; with stages the names of parameters are others."""

WITH_STAGES = [((2, 2, 2), (1, 2, 1)), ((1, 2, 1), (2, 2, 2)), ((2, 2, 2), (1, 1, 4)), ((2, 1, 2), (1, 2, 2))]


@pytest.mark.parametrize("sharded", [False, True], ids=["file", "folder"])
@pytest.mark.parametrize(
    ("writer", "reader"), [WRITERS[0], *(pytest.param(*case, marks=pytest.mark.long) for case in WRITERS[1:])], ids=str
)
def test_a_checkpoint_goes_on_with_any_number_of_members(
    writer: tuple[int, int, int], reader: tuple[int, int, int], sharded: bool, tmp_path: Path
) -> None:
    train(module_for(writer), writer, saving(tmp_path), sharded=sharded, enable_checkpointing=True)
    check_resumed(tmp_path / f"step={STEPS}.ckpt", reader)


@pytest.mark.long
@pytest.mark.parametrize(("writer", "reader"), WITH_STAGES, ids=str)
def test_a_folder_goes_on_with_any_stages_and_members(
    writer: tuple[int, int, int], reader: tuple[int, int, int], tmp_path: Path
) -> None:
    module, alone = Piped, PipedAlone
    train((module if writer[2] > 1 else alone)(), writer, saving(tmp_path), sharded=True, enable_checkpointing=True)
    resumed = (module if reader[2] > 1 else alone)()
    train(resumed, reader, max_steps=2 * STEPS, ckpt_path=tmp_path / f"step={STEPS}.ckpt")
    assert error(resumed, plain_loop(2, steps=2 * STEPS)) < TOLERANCE


class ReadsShards(Ordinary):
    """Of a folder each member reads its own part."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        (optimizer,) = checkpoint["optimizer_states"]
        name = "model.0.up.weight"
        for tensor in (checkpoint["state_dict"][name], *map(optimizer["state"][name].get, ("exp_avg", "exp_avg_sq"))):
            assert tensor.to_local().shape[0] == tensor.shape[0] // 4


@pytest.mark.long
def test_no_member_has_whole_tensors_of_a_folder(tmp_path: Path) -> None:
    train(Ordinary(), (2, 1, 2), saving(tmp_path), sharded=True, enable_checkpointing=True)
    module = ReadsShards()
    train(module, (1, 1, 4), max_steps=2 * STEPS, ckpt_path=tmp_path / f"step={STEPS}.ckpt")
    assert error(module, plain_loop(2, steps=2 * STEPS)) < TOLERANCE


class PipedAlone(Piped):
    @override
    def configure_model(self) -> None:
        super(Piped, self).configure_model()


@pytest.mark.parametrize(
    "victim", [AtHook(1, "on_save_checkpoint"), pytest.param(AtPoint(0, "checkpoint", 2), marks=pytest.mark.long)]
)
def test_a_folder_is_complete_though_a_member_dies_that_writes_it(victim: L.Callback, tmp_path: Path) -> None:
    module = Ordinary()
    train(module, (2, 1, 2), saving(tmp_path), victim, sharded=True, enable_checkpointing=True)
    assert error(module, plain_loop(2)) < TOLERANCE
    files = sorted(path.name for path in (tmp_path / "step=2.ckpt").iterdir())
    assert files == [".metadata", "__0_0.distcp", "__1_0.distcp", "manifest.json", "meta.pt"]
    check_resumed(tmp_path / "step=2.ckpt", (1, 1, 2))


@pytest.mark.long
def test_a_folder_of_members_is_consolidated_for_one_device(tmp_path: Path) -> None:
    """From the end of an epoch, as one device begins the epoch again that it was in."""
    epoch = len(dataset()) // GLOBAL
    train(Ordinary(), (1, 1, 2), saving(tmp_path), sharded=True, max_steps=epoch, enable_checkpointing=True)
    one = consolidated(tmp_path / f"step={epoch}.ckpt", tmp_path / "one.ckpt")
    module = Alone()
    on_one_device(max_steps=2 * epoch).fit(module, DataLoader(dataset(), batch_size=GLOBAL), ckpt_path=one)
    assert error(module, plain_loop(2, steps=2 * epoch)) < TOLERANCE


@pytest.mark.parametrize("sharded", [False, pytest.param(True, marks=pytest.mark.long)], ids=["file", "folder"])
def test_a_run_starts_again_after_a_column_is_lost(sharded: bool, tmp_path: Path) -> None:
    module = Piped()
    options = {"on_stage_lost": "restart", "max_restarts": 2}
    trainer = train(
        module, (2, 2, 2), saving(tmp_path), KillTwo(2, 6, step=3, operation=2),
        sharded=sharded, strategy=options, enable_checkpointing=True,
    )  # fmt: skip
    assert "stage_lost" in kinds(trainer), kinds(trainer)
    assert error(module, plain_loop(2)) < TOLERANCE
