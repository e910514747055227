"""Comparison of replicas: counters, options, checksums of applied steps, inputs.

Parameters and optimizer states of a stage's workers are the same bits, since they step with the same reduced gradient;
checksums are compared now and then, after the same steps on all workers. Buffers are not compared. Copies of a
parameter on several stages are compared at the end of each epoch and evaluation: a hook that goes through
``self.parameters()`` finds those of one stage, and may pair them wrongly.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import pickle
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_recycle.control.protocol.messages import Checked
from lightning_recycle.runtime.stage_bundle import StageTies
from lightning_recycle.tensor_memory import checksum
from lightning_recycle.torch_internals import tree_flatten

FIRST_INTERVAL = 50
"""Steps between two checks as long as it is not known what they cost."""

_SHARE = 1e-3  # of the time of a step
_MOST_STEPS = 10_000


def stage_state(module: nn.Module, optimizers: Iterable[Optimizer]) -> dict[str, list[Any]]:
    """Parameters and optimizer states that a stage's workers share, by checksum name."""
    return {
        "parameters": [parameter.detach() for parameter in module.parameters()],
        "optimizer state": list(_leaves(optimizers)),
    }


def _leaves(optimizers: Iterable[Optimizer]) -> Iterator[Any]:
    """The tensors and numbers in the optimizers' states, by parameter."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter in optimizer.state:
                    yield from _nested_leaves(optimizer.state[parameter])


def _nested_leaves(owner: Any) -> Iterator[Any]:
    keys = sorted(owner, key=str) if isinstance(owner, Mapping) else range(len(owner))
    for key in keys:
        value = owner[key]
        if isinstance(value, (dict, list)):
            yield from _nested_leaves(value)
        elif isinstance(value, (Tensor, bool, int, float)):
            yield value


class StateChecks:
    """The checks of one worker.

    ``every``: steps between two checks; 0 for never, None for as few that they take a thousandth of the time.
    """

    def __init__(self, device: str, every: int | None, clock: Any = time.perf_counter) -> None:
        self._device, self._check_interval, self._clock = device, every, clock
        self._due: set[int] = set()
        self._last: tuple[int, float] | None = None  # the newest check: its step, and when it was over
        self._seconds = math.inf  # that one takes, at best

    def announce(self, step: int) -> None:
        self._due.add(step)

    def is_due(self, step: int) -> bool:
        return self._check_interval != 0 and step in self._due

    def check(self, step: int, module: nn.Module, optimizers: Iterable[Optimizer]) -> Checked:
        """The checksums of this worker after ``step``."""
        self._due = {due for due in self._due if due > step}
        began = self._clock()
        sums = self.sums(module, optimizers)
        ended = self._clock()
        interval = self._interval(step, began)
        self._seconds, self._last = min(self._seconds, ended - began), (step, ended)
        return Checked(sums, interval, self._device)

    def sums(self, module: nn.Module, optimizers: Iterable[Optimizer]) -> dict[str, bytes]:
        if self._check_interval == 0:
            return {}
        return {name: checksum(values) for name, values in stage_state(module, optimizers).items()}

    def _interval(self, step: int, now: float) -> int:
        """Steps until the check that it wants next."""
        if self._check_interval is not None:
            return self._check_interval
        if self._last is None or step <= self._last[0]:
            return FIRST_INTERVAL
        seconds = (now - self._last[1]) / (step - self._last[0])  # of a step
        if seconds <= 0:
            return FIRST_INTERVAL
        return min(_MOST_STEPS, max(1, math.ceil(self._seconds / (_SHARE * seconds))))


# ---------------------------------------------------------------------- copies on several stages


def sums_of_copies(ties: StageTies, parameters: Mapping[str, Tensor]) -> dict[str, bytes]:
    """Checksums of this stage's copies of other stages' parameters, by first name."""
    own_copies = [(tie.copies[0][1], name) for tie in ties.ties for stage, name in tie.copies if stage == ties.stage]
    return {first: checksum([parameters[name].detach()]) for first, name in own_copies if name in parameters}


def copies_differ(sums: Iterable[tuple[int, Mapping[str, bytes]]]) -> str:
    """Warns of copies that differ between stages, in words; empty if all are equal.

    Differences within a stage have another cause, and are left to :class:`StateChecks`.
    """
    found: dict[str, dict[int, set[bytes]]] = {}
    for stage, own in sums:
        for name, value in own.items():
            found.setdefault(name, {}).setdefault(stage, set()).add(value)
    names = [
        name
        for name, stages in found.items()
        if all(len(values) == 1 for values in stages.values()) and len(set.union(*stages.values())) > 1
    ]
    if not names:
        return ""
    which = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return (
        f"Several stages hold a copy of {which}, and these copies are no longer equal: a hook has changed one otherwise"
        " than another, so the result is not that of one device. Hooks find the parameters of their own stage in"
        " self.parameters(): do not pair them with others by their order or draw numbers for one after another. Use"
        " names, do it in __init__() or setup(), where the model is whole, or use pipeline_parallel_size=1."
    )


# ---------------------------------------------------------------------- options of optimizers

_MOST_OPTIONS = 64  # that are reported one by one


def optimizer_options(optimizers: Iterable[Optimizer]) -> dict[str, float]:
    """Numeric options of all groups, by name ("lr", "betas[1]", "lr of group 2")."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    numbers: dict[str, float] = {}
    for index, group in enumerate(groups):
        which = f" of group {index}" if index else ""
        options = [(str(key), value) for key, value in group.items() if key != "params"]
        for name, value in options:
            number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
            if isinstance(number, (int, float)):
                numbers[f"{name}{which}"] = number
            elif isinstance(value, (tuple, list)):
                options += [(f"{name}[{place}]", item) for place, item in enumerate(value)]
    if len(numbers) <= _MOST_OPTIONS:
        return numbers
    names = list(numbers)
    reported = {name: numbers[name] for name in names[:_MOST_OPTIONS]}
    reported["digest of the other options"] = hash(tuple(numbers[name] for name in names[_MOST_OPTIONS:]))
    return reported


# ---------------------------------------------------------------------- inputs of self(x)

# Share of a tensor's norm. Workers on unlike machines compute nearly the same; other samples are far from it.
_TOLERANCE = 1e-2

Fingerprint: TypeAlias = tuple[bytes, list[tuple[float, float]]]
"""A digest of all that is exact, and of each tensor of numbers its norm and a projection."""


def fingerprint(inputs: Sequence[Any]) -> Fingerprint:
    """A fingerprint of ``inputs`` in a few bytes: see :func:`alike`."""
    leaves, structure = tree_flatten(list(inputs))
    exact, near = hashlib.sha256(str(structure).encode()), []
    for leaf in leaves:
        exact.update(type(leaf).__qualname__.encode())
        if not isinstance(leaf, Tensor):
            with contextlib.suppress(Exception):  # what cannot be pickled stays in this process; its type must do
                exact.update(pickle.dumps(leaf))
            continue
        exact.update(f"{leaf.dtype}{tuple(leaf.shape)}".encode())
        flat = leaf.detach().cpu().flatten()
        if not (flat.is_floating_point() or flat.is_complex()):
            exact.update(flat.contiguous().numpy().tobytes())
            continue
        real = torch.view_as_real(flat).flatten() if flat.is_complex() else flat
        values = torch.nan_to_num(real.double(), nan=1.0, posinf=2.0, neginf=3.0)
        weights = torch.cos(torch.arange(values.numel(), dtype=torch.float64))
        near.append((float(values.norm()), float(values @ weights)))
    return exact.digest(), near


def alike(a: Fingerprint, b: Fingerprint) -> bool:
    """Whether inputs with these fingerprints are equal but for rounding."""
    return a[0] == b[0] and all(
        max(abs(norm - other_norm), abs(projection - other)) <= _TOLERANCE * max(norm, other_norm)
        for (norm, projection), (other_norm, other) in zip(a[1], b[1], strict=True)
    )
