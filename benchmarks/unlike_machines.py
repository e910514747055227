"""What a tolerance could tell between machines that round in another way.

    .venv/bin/python benchmarks/unlike_machines.py     # half a minute

One machine adds up the products of a matrix product as torch does, the other one in two halves, as a kernel with other
blocks would. Both compute the same micro-batches with the same weights, in each step of a training in float32. Printed
is how far their weight gradients are apart, relative to the largest gradient so far; in how many later steps they are
farther apart than 10 times the farthest in the first 100, which a tolerance learned from those would take for an error;
and which share of flipped bits of a matrix product a tolerance above all that rounding did would have missed.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from harness import console, describe_machine
from rich.table import Table
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_recycle.callbacks.fault_effects import WrongArithmetic

__all__ = ["main"]

WIDTH, BATCH, TOKENS = 32, 8, 6
BITS = {"lowest": 0, "middle": 12, "highest of the mantissa": 22, "lowest of the exponent": 23}
_LEARNS, _LEARNED = 100, 10.0  # steps; a tolerance in the farthest of those
_MM, _ADDMM, _BMM = torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default


class InHalves(TorchDispatchMode):
    """Within the block matrix products add up the halves of their inner dimension apart."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (_MM, _BMM):
            return _product(*args)
        if func is _ADDMM and not kwargs:
            return args[0] + _product(*args[1:])
        return func(*args, **(kwargs or {}))


def _product(a: Tensor, b: Tensor) -> Tensor:
    half = a.shape[-1] // 2
    return a[..., :half] @ b[..., :half, :] + a[..., half:] @ b[..., half:, :]


class Experts(nn.Module):
    """Each token goes to the expert of its highest score."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        share, chosen = self.scores(x).softmax(-1).max(-1)
        each = torch.stack([expert(x) for expert in self.experts], -2)
        return x + share[..., None] * each[torch.arange(x.shape[0])[:, None], torch.arange(x.shape[1]), chosen]


def _perceptron(activation: type[nn.Module]) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 64), activation(), nn.Linear(64, 64), activation(), nn.Linear(64, WIDTH))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "tanh": lambda: _perceptron(nn.Tanh),
    "ReLU": lambda: _perceptron(nn.ReLU),
    "attention, GELU": lambda: nn.TransformerEncoderLayer(
        WIDTH, 4, 64, dropout=0.0, activation="gelu", batch_first=True
    ),
    "experts": Experts,
}


def _gradient(model: nn.Module, batch: tuple[Tensor, Tensor], machine: AbstractContextManager[Any]) -> Tensor:
    model.zero_grad(set_to_none=True)
    with machine:
        (model(batch[0]) - batch[1]).square().mean().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).double()


def _apart(name: str, steps: int) -> tuple[list[float], dict[str, list[float]]]:
    """The relative differences by rounding, and by a flipped bit."""
    torch.manual_seed(0)
    model, target = MODELS[name](), torch.randn(WIDTH, WIDTH) / WIDTH**0.5
    optimizer, draw = torch.optim.AdamW(model.parameters(), lr=1e-3), random.Random(0)
    rounded: list[float] = []
    flipped: dict[str, list[float]] = {bit: [] for bit in BITS}
    largest = 0.0
    for _ in range(steps):
        x = torch.randn(BATCH, TOKENS, WIDTH)
        batch = (x, x @ target)
        other = _gradient(model, batch, InHalves())
        for bit, place in BITS.items():
            wrong = WrongArithmetic(draw.randint(1, 6), place, draw)  # one of the first six products, or several
            flipped[bit].append(float((_gradient(model, batch, wrong) - other).norm()))
        right = _gradient(model, batch, nullcontext())
        largest = max(largest, float(right.norm()))
        rounded.append(float((right - other).norm()) / largest)
        for bit in BITS:
            flipped[bit][-1] /= largest
        optimizer.step()
    return rounded, flipped


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    console.print(describe_machine())
    started = time.perf_counter()
    table = Table("model", "rounding: median", "largest", "taken for errors", *(f"missed: {bit}" for bit in BITS))
    for name in MODELS:
        rounded, flipped = _apart(name, options.steps)
        most = max(rounded)
        accused = sum(value > _LEARNED * max(rounded[:_LEARNS]) for value in rounded[_LEARNS:])
        missed = (sum(value <= most for value in values) / len(values) for values in flipped.values())
        median = sorted(rounded)[len(rounded) // 2]
        table.add_row(name, f"{median:.1e}", f"{most:.1e}", str(accused), *(f"{m:.1%}" for m in missed))
    console.print(table)
    console.print(f"{time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
