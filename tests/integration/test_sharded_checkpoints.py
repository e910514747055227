"""Checkpoints of positions of several processes, onto any other grid and onto one device."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import sharded as sh
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from support.scripts import consolidated
from support.training import TOLERANCE, on_one_device
from torch.utils.data import DataLoader

GLOBAL = 2 * sh.BATCH
ONE, FOUR = (1, 1, 1), (1, 1, 4)
MEMBERS = [(sh.TENSOR, FOUR), (ONE, sh.TENSOR), (FOUR, sh.TENSOR)]


def train(
    module: L.LightningModule, grid: tuple[int, ...], *callbacks: L.Callback, sharded: bool = False, **kwargs: Any
) -> L.Trainer:
    """Trains exactly, with the global batch of two pipelines, to step ``STEPS`` by default."""
    strategy = {"save_distributed_checkpoint": sharded, **kwargs.pop("strategy", {})}
    return sh.exact_fit(module, grid, *callbacks, batch=GLOBAL // sh.parts_of(grid), strategy=strategy, **kwargs)


def saving(folder: Path) -> ModelCheckpoint:
    return ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=2)


LONG = [
    (sh.Ordinary, sh.TENSOR, ONE, True),
    *((sh.Ordinary, *grids, sharded) for sharded in (False, True) for grids in MEMBERS),
    (sh.Ordinary, sh.FSDP, (4, 1, 1, 1), False),
    (sh.Ordinary, (1, 1, 2, 2), sh.FSDP, False),
    # With stages the names of parameters are others.
    (sh.Piped, (2, 2, 2), (1, 2, 1), True),
    (sh.Piped, (1, 2, 1), (2, 2, 2), True),
    (sh.Piped, (2, 2, 2), FOUR, True),
    (sh.Piped, sh.TENSOR, (1, 2, 2), True),
]
RUNS = [(sh.Ordinary, sh.TENSOR, ONE, False), *(pytest.param(*run, marks=pytest.mark.long) for run in LONG)]


@pytest.mark.parametrize(("module", "writer", "reader", "sharded"), RUNS, ids=sh.name)
def test_a_checkpoint_is_that_of_one_device_and_goes_on_with_any_number_of_stages_and_members(
    module, writer, reader, sharded, tmp_path
):
    kills = [sh.Kill(0, 2, 3)] if (writer, reader) == (sh.TENSOR, ONE) else []
    checks = {"enable_checkpointing": True, "validates": True, "val_check_interval": sh.STEPS}
    trainer = train(module(), writer, saving(tmp_path), *kills, sharded=sharded, **checks)
    layers, path = sh.plain_loop(2), tmp_path / f"step={sh.STEPS}.ckpt"
    if module is sh.Ordinary:
        loss = float((layers(sh.dataset()[:][0]) - sh.dataset()[:][1]).square().mean())
        assert abs(float(trainer.callback_metrics["val"]) - loss) < TOLERANCE
    if not sharded:
        stored = torch.load(path, weights_only=True)["state_dict"]
        pairs = [(stored[f"model.{key}"], p) for key, p in layers.named_parameters()]
        assert max(float((found - p).detach().abs().max()) for found, p in pairs) < TOLERANCE
    train(module(), reader, max_steps=2 * sh.STEPS, ckpt_path=path)


class ReadsShards(sh.Ordinary):
    """Of a folder each member reads its own part."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        (optimizer,) = checkpoint["optimizer_states"]
        key = "model.0.up.weight"
        for tensor in (checkpoint["state_dict"][key], *map(optimizer["state"][key].get, ("exp_avg", "exp_avg_sq"))):
            assert tensor.to_local().shape[0] == tensor.shape[0] // 4


@pytest.mark.long
def test_no_member_has_whole_tensors_of_a_folder(tmp_path):
    train(sh.Ordinary(), sh.TENSOR, saving(tmp_path), sharded=True, enable_checkpointing=True)
    train(ReadsShards(), FOUR, max_steps=2 * sh.STEPS, ckpt_path=tmp_path / f"step={sh.STEPS}.ckpt")


@pytest.mark.parametrize(
    "victim",
    [sh.AtHook(1, "on_save_checkpoint"), pytest.param(sh.AtPoint(0, "checkpoint", 2), marks=pytest.mark.long)],
    ids=sh.name,
)
def test_a_folder_is_complete_though_a_member_dies_that_writes_it(victim, tmp_path):
    train(sh.Ordinary(), sh.TENSOR, saving(tmp_path), victim, sharded=True, enable_checkpointing=True)
    files = sorted(path.name for path in (tmp_path / "step=2.ckpt").iterdir())
    assert files == [".metadata", "__0_0.distcp", "__1_0.distcp", "manifest.json", "meta.pt"]
    train(sh.Ordinary(), (1, 1, 2), max_steps=2 * sh.STEPS, ckpt_path=tmp_path / "step=2.ckpt")


@pytest.mark.long
def test_a_folder_of_members_is_consolidated_for_one_device(tmp_path):
    """From the end of an epoch, as one device begins the epoch again that it was in."""
    epoch = len(sh.dataset()) // GLOBAL
    train(sh.Ordinary(), (1, 1, 2), saving(tmp_path), sharded=True, max_steps=epoch, enable_checkpointing=True)
    one = consolidated(tmp_path / f"step={epoch}.ckpt", tmp_path / "one.ckpt")
    module = sh.Ordinary()
    on_one_device(max_steps=2 * epoch).fit(module, DataLoader(sh.dataset(), batch_size=GLOBAL), ckpt_path=one)
    assert sh.error(module, sh.plain_loop(2, steps=2 * epoch)) < TOLERANCE


@pytest.mark.parametrize(("module", "grid", "kill", "sharded"), [
    (sh.Ordinary, sh.FSDP, sh.KillTwo(0, 2, step=3, operation=2), False),
    pytest.param(sh.Piped, (2, 2, 2), sh.KillTwo(2, 6, step=3, operation=2), True, marks=pytest.mark.long),
    pytest.param(sh.Piped, (2, 2, 2), sh.KillTwo(2, 6, step=3, operation=2), False, marks=pytest.mark.long),
    pytest.param(sh.Ordinary, sh.FSDP, sh.KillTwo(0, 2, step=3, operation=2), True, marks=pytest.mark.long),
], ids=sh.name)  # fmt: skip
def test_a_run_starts_again_after_a_column_is_lost(module, grid, kill, sharded, tmp_path):
    strategy = {"on_stage_lost": "restart", "max_restarts": 2, "save_distributed_checkpoint": sharded}
    one = module()
    trainer: Any = sh.fit(one, grid, saving(tmp_path), kill, strategy=strategy, enable_checkpointing=True)
    assert any(event.kind == "stage_lost" for event in trainer.strategy.history), trainer.strategy.history
    assert sh.error(one, sh.plain_loop(sh.parts_of(grid))) < TOLERANCE
