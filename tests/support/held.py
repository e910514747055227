"""A model that holds large tensors for each micro-batch, and what its workers counted of them."""

import json
import os
import weakref
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from lightning_recycle.planning import Op, OpKind
from support.models import Regression

MEGABYTE = 1 << 20
EACH = 2 * MEGABYTE
"""What a micro-batch holds in each :class:`Hold`, but for some hundred bytes."""


class _Hold(torch.autograd.Function):
    """Keeps a large tensor from F until autograd needs it no more, and counts those that there are."""

    alive = peak = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        held = torch.ones(EACH, dtype=torch.uint8)
        ctx.save_for_backward(held)
        _Hold.alive += 1
        _Hold.peak = max(_Hold.peak, _Hold.alive)
        weakref.finalize(held, _Hold.gone)
        return x.clone()

    @staticmethod
    def gone() -> None:
        _Hold.alive -= 1

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class Hold(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return _Hold.apply(x) if self.training and x.requires_grad else x


class Heavy(Regression):
    """A regression whose first and last stage hold :data:`EACH` for a micro-batch; both if they are one."""

    def configure_pipeline(self) -> list[Any]:
        first, *rest, last = super().configure_pipeline()
        return [first, Hold(), *rest, Hold(), last]


class Peaks(L.Callback):
    """Writes down the most that this worker held at once, by the number of workers that were alive."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.peaks: dict[str, int] = {}
        self.live = 0

    def on_train_start(self, trainer: L.Trainer, *_: Any) -> None:
        executor = trainer.strategy.session.executor
        executor.after_operation.append(self._after)
        self.client = executor.client

    def _after(self, step: int, op: Op) -> None:
        if op.kind is OpKind.REDUCE:
            live = len(self.client.member.roster)
            if live == self.live:  # else a part of this step was run under the plan of before
                name = f"{live} {'measured' if step > 2 else 'before'}"
                self.peaks[name] = max(self.peaks.get(name, 0), _Hold.peak)
            self.live, _Hold.peak = live, _Hold.alive
            (self.folder / f"{os.getpid()}-{op.stage}.json").write_text(json.dumps(self.peaks))


def peaks(folder: Path) -> dict[str, int]:
    """The most of the large tensors that any worker held."""
    found: dict[str, int] = {}
    for path in folder.glob("*.json"):
        for name, peak in json.loads(path.read_text()).items():
            found[name] = max(found.get(name, 0), peak)
    return found
