"""Randomness that depends on what is computed, never on which worker computes it.

Dropout of one layer for one micro-batch draws from (seed, step, global micro-batch index, layer index); a sample's
augmentation from (seed, epoch, sample index); a layer's initialisation from (seed, layer index). So neither the grid
nor a failure changes the result. Hooks draw from the global generators, which nothing else moves on, so each worker
draws the same.
"""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

__all__ = ["derive_seed", "generator_states", "layer_randomness", "seeded_everything", "set_generator_states"]


def derive_seed(*parts: int) -> int:
    """Returns a 63-bit seed determined by the integers ``parts``; neighbouring parts give unrelated seeds."""
    digest = hashlib.blake2b(struct.pack(f"<{len(parts)}q", *parts), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@contextmanager
def layer_randomness(device: torch.device) -> Iterator[torch.Generator]:
    """Lends torch's default generator of ``device`` to be re-seeded, and restores its state afterwards."""
    if device.type == "cuda":
        index = device.index if device.index is not None else torch.cuda.current_device()
        generator = torch.cuda.default_generators[index]
    else:
        generator = torch.default_generator
    state = generator.get_state()
    try:
        yield generator
    finally:
        generator.set_state(state)


@contextmanager
def seeded_everything() -> Iterator[Callable[[int], None]]:
    """Lends the generators of Python, NumPy and torch (CPU) to be re-seeded, and restores their state afterwards."""
    states = generator_states()

    def reseed(seed: int) -> None:
        random.seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)
        torch.default_generator.manual_seed(seed)

    try:
        yield reseed
    finally:
        set_generator_states(states)


def generator_states() -> tuple[Any, ...]:
    """The states of the generators of Python, NumPy and torch (CPU), from which hooks draw."""
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def set_generator_states(states: tuple[Any, ...]) -> None:
    """Restores what :func:`generator_states` returned."""
    python_state, numpy_state, torch_state = states
    random.setstate(python_state)
    np.random.set_state(numpy_state)
    torch.set_rng_state(torch_state)
