"""Sharded state goes to a replacement: the optimizer's, and that of checkpoints."""

import itertools
import json
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from sharded import BATCH, BOTH, FSDP, TENSOR, Kill, KillTwo, Ordinary, Waits, dataset, error, fit, lost, parts_of
from support.blocks import blocks
from support.sampling import sampled
from support.training import TOLERANCE
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

SAVED, LAST = 2, 20
"""The step of the checkpoint, and of the end of the run; a replacement has to join between them."""
BEGINS = ("fresh", "resumed", "restarted")
LOSSES = ("a join", "the loss of the donor")
NAMES = {TENSOR: "TP", FSDP: "FSDP", BOTH: "both"}
CASES = [*itertools.product((TENSOR, FSDP, BOTH), BEGINS, LOSSES)]


class Averaged(Ordinary):
    """Keeps its mesh, and an average of its weights, sharded like them, which it reports whole at the end."""

    def __init__(self, report: Path) -> None:
        super().__init__()
        self.report = report

    def configure_model(self) -> None:
        super().configure_model()
        self.mesh = self.device_mesh
        self.average = [p.detach().clone() for p in self.parameters()]

    def on_train_batch_start(self, *_: Any) -> None:
        assert self.mesh.size() > 1
        for average, parameter in zip(self.average, self.parameters(), strict=True):
            average.mul_(0.5).add_(parameter.detach(), alpha=0.5)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["average"] = [_whole(average) for average in self.average]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.saved = checkpoint["average"]

    def on_train_start(self) -> None:
        for average, saved in zip(self.average, getattr(self, "saved", ()), strict=False):
            average.copy_(_like(saved, average))

    def on_train_end(self) -> None:
        found = [_whole(average).tolist() for average in self.average]
        if self.trainer.is_global_zero:
            self.report.write_text(json.dumps(found))


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _like(whole: Tensor, tensor: Tensor) -> Tensor:
    """``whole``, divided as ``tensor`` is."""
    if not isinstance(tensor, DTensor):
        return whole
    return distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None)


def plain_loop_with_average(parts: int) -> tuple[nn.Sequential, list[Tensor]]:
    layers, data = blocks(), dataset()
    average = [p.detach().clone() for p in layers.parameters()]
    optimizer = torch.optim.AdamW(layers.parameters(), lr=0.01)
    for step in range(LAST):
        begin = step * parts * BATCH % len(data)
        x, y = data[begin : begin + parts * BATCH]
        for mean, parameter in zip(average, layers.parameters(), strict=True):
            mean.mul_(0.5).add_(parameter.detach(), alpha=0.5)
        optimizer.zero_grad()
        (layers(x) - y).square().mean().backward()
        optimizer.step()
    return layers, average


@pytest.mark.parametrize(("grid", "begins", "losses"), sampled(CASES, 1, seed=31), ids=NAMES.get)
def test_a_replacement_gets_its_own_shards(grid, begins, losses, tmp_path):
    members, report, path = parts_of(grid) // 2 * grid[-1], tmp_path / "average.json", None
    limits: dict[str, Any] = {"max_epochs": 9, "strategy": {"max_restarts": 9}, "enable_checkpointing": True}
    limits["default_root_dir"] = tmp_path
    checkpoint = ModelCheckpoint(tmp_path, "first", every_n_train_steps=SAVED, save_top_k=1)
    callbacks: list[L.Callback] = [checkpoint]
    attempt = 0
    if begins == "resumed":
        fit(Averaged(report), grid, checkpoint, max_steps=SAVED, **limits)
        path = tmp_path / "first.ckpt"
    elif begins == "restarted":
        attempt = 1
        limits["strategy"] |= {"on_stage_lost": "restart"}
        callbacks.append(KillTwo(members - 1, 2 * members - 1, step=SAVED + 1, operation=1))
    callbacks += [Kill(members - 1, SAVED + 2, 1, attempt), Waits(SAVED + 2, of=2 * members)]
    if losses == "the loss of the donor":
        callbacks.append(Kill(2 * members - 1, LAST - 2, 1, attempt))
    module = Averaged(report)
    trainer = fit(module, grid, *callbacks, max_steps=LAST, ckpt_path=path, **limits)
    kinds = [event.kind for event in trainer.strategy.history]
    assert "rejoined" in kinds, kinds
    assert kinds.count("stage_lost") == attempt, kinds
    assert lost(trainer) >= 1 + (losses != "a join"), kinds
    layers, average = plain_loop_with_average(parts_of(grid))
    assert error(module, layers) < TOLERANCE
    assert not hasattr(module, "mesh"), "it stays in the workers"
    reported = [torch.tensor(each, dtype=torch.double) for each in json.loads(report.read_text())]
    assert max(float((a - b).abs().max()) for a, b in zip(reported, average, strict=True)) < TOLERANCE
