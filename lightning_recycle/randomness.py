"""Randomness that depends on what is computed, never on which worker computes it.

Dropout of a layer for a micro-batch draws from (seed, step, global micro-batch index, layer index), a sample's
augmentation from (seed, epoch, sample index), a layer's initialisation from (seed, layer index). Hooks draw from the
global generators, which nothing else moves on.
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

from lightning_recycle.devices import default_generator

GENERATORS: tuple[tuple[type[Any], Callable[[Any], Any], Callable[[Any, Any], None]], ...] = (
    (torch.Generator, lambda g: g.get_state().numpy(), lambda g, state: g.set_state(torch.from_numpy(state))),
    (random.Random, random.Random.getstate, random.Random.setstate),
    (np.random.Generator, lambda g: g.bit_generator.state, lambda g, state: setattr(g.bit_generator, "state", state)),
    (np.random.RandomState, lambda g: g.get_state(legacy=False), np.random.RandomState.set_state),
)
"""Classes of generators of random numbers, with the functions that read and write their states."""

_FOUR = struct.Struct("<4q")  # (seed, step, micro-batch, layer), once for each layer and micro-batch
_seed_of: Callable[[int], int] | None = None
_draw_for: Callable[[int], None] | None = None


def derive_seed(*parts: int) -> int:
    """A 63-bit seed from integers; neighbouring integers give unrelated seeds."""
    packed = _FOUR.pack(*parts) if len(parts) == 4 else struct.pack(f"<{len(parts)}q", *parts)
    digest = hashlib.blake2b(packed, digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@contextmanager
def layer_randomness(device: torch.device) -> Iterator[torch.Generator]:
    """Lends torch's default generator of ``device``, and restores its state."""
    generator = default_generator(device)
    state = generator.get_state()
    try:
        yield generator
    finally:
        generator.set_state(state)


class microbatch_randomness:
    """Lends torch's default generator of a device to the layers of one micro-batch.

    Within the block it is a function that re-seeds the generator for the layer with the given index; layers that the
    user's code runs are announced by :func:`draw_for_layer`, which is global to the process: autograd runs layers again
    in threads of its own.
    """

    __slots__ = ("_address", "_generator", "_previous", "_state")

    def __init__(self, generator: torch.Generator, seed: int, step: int, microbatch: int) -> None:
        self._generator = generator
        self._address = (seed, step, microbatch)

    def __enter__(self) -> Callable[[int], None]:
        global _draw_for, _seed_of
        self._state = self._generator.get_state()
        self._previous = _draw_for, _seed_of
        _draw_for, _seed_of = self._draw_for, self._seed_of
        return self._draw_for

    def __exit__(self, *_: object) -> None:
        global _draw_for, _seed_of
        _draw_for, _seed_of = self._previous
        self._generator.set_state(self._state)

    def _seed_of(self, layer: int) -> int:
        return derive_seed(*self._address, layer)

    def _draw_for(self, layer: int) -> None:
        self._generator.manual_seed(derive_seed(*self._address, layer))


def draw_for_layer(layer: int) -> None:
    """From now on randomness is that of this layer for the current micro-batch."""
    if _draw_for is not None:
        _draw_for(layer)


@contextmanager
def step_randomness() -> Iterator[None]:
    """Seeds all generators for the user's whole step on the current micro-batch.

    Draws from Python's and NumPy's generators are the same wherever and however often it runs.
    """
    if _seed_of is None:
        yield
        return
    seed = _seed_of(0)
    with seeded_everything() as reseed:
        reseed(seed)
        draw_for_layer(0)
        yield


@contextmanager
def seeded_everything() -> Iterator[Callable[[int], None]]:
    """Lends the generators of Python, NumPy and torch (CPU) to be re-seeded."""
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
    """The states of the generators of Python, NumPy and torch (CPU)."""
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def set_generator_states(states: tuple[Any, ...]) -> None:
    """Restores the states of :func:`generator_states`."""
    python_state, numpy_state, torch_state = states
    random.setstate(python_state)
    np.random.set_state(numpy_state)
    torch.set_rng_state(torch_state)
