"""Activation checkpointing inside layers: what the backward computes again has the same masks, and is deferred too."""

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from support.stages import CPU, SEED, STEP, assert_same_bits, cut, generator_left_alone, gradients, train_step
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from lightning_recycle.runtime.stage import Stage

WIDTH = 8


class Inner(nn.Module):
    """Dropout before, between and after linear layers; counts its runs."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.4)
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        return x + self.dropout(self.down(self.dropout(F.gelu(self.up(self.dropout(x))))))


class Layer(nn.Module):
    """A layer with two inner parts.

    Args:
        mode: None for no checkpointing, one of MODES, or "redrawn", with masks of its own in the backward.
    """

    def __init__(self, mode: str | None) -> None:
        super().__init__()
        self.first, self.second = Inner(), Inner()
        self.mode = mode

    def forward(self, x: Tensor) -> Tensor:
        if self.mode is None:
            return self.second(self.first(x))
        if self.mode == "redrawn":
            return checkpoint(self.first, x, use_reentrant=False, preserve_rng_state=False)
        if self.mode == "nested":
            return checkpoint(self._nested, x, use_reentrant=False)
        if self.mode == "sequential":
            return checkpoint_sequential([self.first, self.second], 2, x, use_reentrant=False)
        reentrant = self.mode == "reentrant"
        return checkpoint(self.second, checkpoint(self.first, x, use_reentrant=reentrant), use_reentrant=reentrant)

    def _nested(self, x: Tensor) -> Tensor:
        return self.second(checkpoint(self.first, x, use_reentrant=False))


MODES = ["reentrant", "non-reentrant", "nested", "sequential"]


def model(mode: str | None) -> list[nn.Module]:
    torch.manual_seed(0)
    return [layer.double() for layer in (nn.Linear(WIDTH, WIDTH), Layer(mode), nn.Dropout(0.3), Layer(mode))]


def trained(layers: Sequence[nn.Module], cuts: Sequence[int], *, split_backward: bool) -> dict[str, Tensor]:
    """Losses and gradients of two micro-batches whose operations interleave: F0 F1 B1 B0 W1 W0."""
    generator = torch.Generator().manual_seed(1)
    data = [tuple(torch.randn(2, 2, 3, WIDTH, dtype=torch.float64, generator=generator)) for _ in range(2)]
    losses = train_step(cut(layers, cuts), data, split_backward=split_backward, backwards=[1, 0])
    return {**{f"loss {m}": loss for m, loss in enumerate(losses)}, **gradients(layers)}


@pytest.mark.parametrize("split_backward", [False, True], ids=["fused", "split"])
@pytest.mark.parametrize("cuts", [[], [1], [3], [1, 2, 3]], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_losses_and_gradients_have_the_bits_of_those_without_checkpointing(mode, cuts, split_backward):
    expected = trained(model(None), [], split_backward=False)
    assert len(expected) == 2 + len([p for layer in model(None) for p in layer.parameters()])
    assert_same_bits(trained(model(mode), cuts, split_backward=split_backward), expected)


@pytest.mark.parametrize("mode", MODES)
def test_the_inside_runs_again_in_b_and_its_weight_gradients_wait_for_w(mode):
    layer = Layer(mode).double()
    stage = Stage([layer], 1, SEED, CPU)
    x = torch.randn(2, 3, WIDTH, dtype=torch.float64, requires_grad=True)
    output = stage.forward(STEP, 0, x, split_backward=True)
    assert (layer.first.runs, layer.second.runs) == (1, 1)
    stage.backward_input(0, torch.ones_like(output))
    assert layer.first.runs >= 2
    assert layer.second.runs == (1 if mode == "sequential" else 2)  # torch does not checkpoint the last of a sequence
    assert all(p.grad is None for p in layer.parameters())
    runs = layer.first.runs
    stage.backward_weight(0)
    assert layer.first.runs == runs, "W computes nothing again"
    assert all(p.grad is not None for p in layer.parameters())


@pytest.mark.parametrize("mode", [*MODES, "redrawn"])
def test_the_backward_leaves_the_generator_of_the_process_alone(mode):
    stage = Stage([Layer(mode).double()], 1, SEED, CPU)
    x = torch.randn(2, WIDTH, dtype=torch.float64, requires_grad=True)
    output = stage.forward(STEP, 0, x, split_backward=True)
    with generator_left_alone():
        stage.backward_input(0, torch.ones_like(output))


@pytest.mark.parametrize("mode", ["reentrant", "non-reentrant"])
def test_autocast_is_the_same_in_the_recomputation(mode):
    def gradients(mode: str | None, *, split_backward: bool) -> list[Tensor]:
        torch.manual_seed(0)
        layer = Layer(mode)
        stage = Stage([layer], 1, SEED, CPU, forward_context=lambda: torch.autocast("cpu", dtype=torch.bfloat16))
        x = torch.randn(2, 3, WIDTH, requires_grad=True)
        output = stage.forward(STEP, 0, x, split_backward=split_backward)
        grad = torch.ones_like(output)
        if split_backward:
            found = stage.backward_input(0, grad)
            stage.backward_weight(0)
        else:
            found = stage.backward(0, grad)
        assert isinstance(found, tuple)
        return [found[0], *(p.grad for p in layer.parameters())]

    expected = gradients(None, split_backward=False)
    for split_backward in (False, True):
        for actual, value in zip(gradients(mode, split_backward=split_backward), expected, strict=True):
            assert torch.equal(actual, value)
