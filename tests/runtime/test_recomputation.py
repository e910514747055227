"""A forward that is computed again for its backward: the same bits, and between both runs only the input is kept."""

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from support.stages import CPU, SEED, STEP, assert_same_bits, cut, generator_left_alone, gradients, train_step
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from lightning_recycle.runtime.stage import Stage
from lightning_recycle.session.microbatch_changes import MicrobatchChanges

WIDTH = 8
CUTS = [4, 8]


class Block(nn.Module):
    """Dropout, running statistics, and a layer whose forward changes a buffer that it uses."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dropout = nn.BatchNorm1d(WIDTH), nn.Dropout(0.4)
        self.linear = spectral_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(F.gelu(self.linear(self.norm(x))))


class Two(nn.Module):
    """Passes several tensors on, one of which needs no gradient."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        return x * 2, None, torch.arange(len(x))


class OfTwo(nn.Module):
    """Uses a transform of torch.func, which refuses hooks for saved tensors."""

    def forward(self, x: Tensor, nothing: None, index: Tensor) -> Tensor:
        slopes = torch.func.vmap(torch.func.grad(lambda row: row.sin().sum()))(x)
        return x + slopes + index.to(x.dtype)[:, None]


class Named(nn.Module):
    """Takes what it gets out of its input, and writes into it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.linear(batch.pop("x").add_(1.0))


def model() -> list[nn.Module]:
    torch.manual_seed(0)
    first = [Named(), nn.ReLU(inplace=True), Block(), Two()]
    return [*first, OfTwo(), nn.ReLU(inplace=True), Block(), Block(), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2)]


def trained(recomputed: Sequence[int], *, split_backward: bool, autocast: bool = False) -> dict[str, Tensor]:
    """Losses, gradients and buffers of two steps of three micro-batches: F0 F1 F2, R and B of 1, 0 and 2, then W."""
    layers = model()
    module = L.LightningModule()
    module.layers = nn.ModuleList(layers)
    effects = MicrobatchChanges(module, microbatches=3)
    dtype = torch.float32 if autocast else torch.float64
    context = {"forward_context": lambda: torch.autocast("cpu", dtype=torch.bfloat16)} if autocast else {}
    stages = cut([layer.to(dtype) for layer in layers], CUTS, **context)
    generator = torch.Generator().manual_seed(1)
    found: dict[str, Tensor] = {}
    for step in range(2):
        drawn = torch.randn(3, 2, 4, WIDTH, dtype=dtype, generator=generator)
        data = [({"x": x.clone()}, y.to(torch.bfloat16 if autocast else dtype)) for x, y in drawn]
        options: Any = {"step": step, "backwards": [1, 0, 2], "recomputed": recomputed, "kept": effects.again}
        effects.begin_step(step)
        for m, loss in enumerate(train_step(stages, data, split_backward=split_backward, **options)):
            found[f"loss {step}.{m}"] = loss
        found |= {f"{step} {name}": grad.clone() for name, grad in gradients(layers).items()}
        buffers = [(f"{i}.{name}", b) for i, layer in enumerate(layers) for name, b in layer.named_buffers()]
        found |= {f"{step} {name}": buffer.clone() for name, buffer in buffers}
    assert len(found) == 2 * (3 + len([p for layer in layers for p in layer.parameters()]) + len(buffers))
    return found


@pytest.mark.parametrize("autocast", [False, True], ids=["float64", "autocast"])
@pytest.mark.parametrize("split_backward", [False, True], ids=["fused", "split"])
@pytest.mark.parametrize("recomputed", [(0,), (1,), (0, 1)], ids=str)
def test_losses_gradients_and_buffers_have_the_bits_of_those_without(recomputed, split_backward, autocast):
    """With dropout, running statistics, spectral norm, layers that write into their input, and several tensors."""
    expected = trained((), split_backward=False, autocast=autocast)
    assert {"0 6.norm.running_mean", "0 6.linear.parametrizations.weight.0._u"} <= expected.keys()
    assert_same_bits(trained(recomputed, split_backward=split_backward, autocast=autocast), expected)


class Save(torch.autograd.Function):
    """Saves a tensor that is counted while it lives."""

    alive = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        held = torch.ones(3)
        ctx.save_for_backward(held)
        Save.alive += 1
        weakref.finalize(held, Save.gone)
        return x.clone()

    @staticmethod
    def gone() -> None:
        Save.alive -= 1

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        assert ctx.saved_tensors
        return grads[0]


class Saving(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return Save.apply(self.linear(x))


def test_nothing_that_autograd_saves_lives_between_f_and_r():
    gc.collect()
    before = Save.alive
    stage = Stage([Saving(), Saving()], 0, SEED, CPU)
    values = [stage.forward(STEP, m, torch.randn(2, WIDTH), split_backward=True, recomputed=m > 0) for m in range(3)]
    assert all(isinstance(value, Tensor) and value.requires_grad for value in values), "its gradient is wanted back"
    assert Save.alive - before == 2, "of micro-batch 0 alone"
    stage.recompute(2, split_backward=True)
    assert Save.alive - before == 4
    for m in (2, 0):
        stage.backward_input(m, torch.ones(2, WIDTH))
        stage.backward_weight(m)
    assert Save.alive == before
    stage.clear()


def test_a_stage_that_trains_nothing_passes_its_input_on_twice():
    stage = Stage([nn.Dropout(0.5)], 0, SEED, CPU)
    first = stage.forward(STEP, 0, torch.ones(50), split_backward=False, recomputed=True)
    assert isinstance(first, Tensor)
    assert not first.requires_grad
    stage.recompute(0, split_backward=False)
    assert stage.backward(0, (None,)) is None


def test_the_generator_of_the_process_is_left_alone():
    stage = Stage([nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)], 0, SEED, CPU)
    stage.forward(STEP, 0, torch.ones(2, WIDTH), split_backward=False, recomputed=True)
    with generator_left_alone():
        stage.recompute(0, split_backward=False)
