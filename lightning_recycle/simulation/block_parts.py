"""What part of a block its attention is, and its MLP: for models whose blocks are cut in two.

Concept: a block is attention and then an MLP, each with its normalization and its residual sum, so what is sent between
them has the size of what is sent between two blocks. Each part is a fraction of the block, of F, B, W, parameters and
activations.

Contract: pure; the fractions of a block add up to 1. The output layer is spread evenly over all halves, and so are
embeddings.

Must not know: GPUs, grids.

Sources: operations as in :mod:`~lightning_recycle.simulation.transformer`; linear layers of attention have 4 h^2 of the
block's 12 h^2 weights (query, key, value and projection), those of the MLP 8 h^2. Activation bytes from Korthikanti et
al. (arXiv 2205.05198), section 4.1: s b h (11 + 5 a s / h) for attention, 19 s b h for the MLP, 2 s b h for each
normalization.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from lightning_recycle.simulation.transformer import Transformer

__all__ = ["LayerPart", "block_parts"]


@dataclass(frozen=True, slots=True)
class LayerPart:
    """Fractions of a block's F, B, W, parameters and activations."""

    forward: float
    backward: float
    weight: float
    parameters: float
    activations: float


@lru_cache(maxsize=64)
def block_parts(shape: Transformer, *, recompute: bool = False) -> tuple[LayerPart, LayerPart]:
    """(attention, MLP) of a block of ``shape``; with ``recompute`` B runs F again first, and only inputs are held."""
    h, s = float(shape.width), float(shape.sequence)
    output = shape.sequence * shape.width * shape.vocabulary / shape.layers  # half of the output layer's 2 s h V
    linear = 8 * s * h * h + output, 16 * s * h * h + output
    products = 4 * s * s * h, 0.0
    forward = tuple(map(sum, zip(linear, products, strict=True)))
    again = forward if recompute else (0.0, 0.0)
    backward = tuple(own + 2 * extra + twice for own, extra, twice in zip(linear, products, again, strict=True))
    embedding = (shape.vocabulary + shape.sequence) * h / shape.layers / 2
    parameters = 4 * h * h + 6 * h + embedding, 8 * h * h + 7 * h + embedding
    activations = (1.0, 1.0) if recompute else (13 + 5 * shape.heads * s / h, 21.0)
    halves = [_fractions(values) for values in (forward, backward, linear, parameters, activations)]
    attention, mlp = (LayerPart(*values) for values in zip(*halves, strict=True))
    return attention, mlp


def _fractions(values: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(value / sum(values) for value in values)
