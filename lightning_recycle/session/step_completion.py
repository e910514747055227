"""Completion of a checkpoint: the rest of the step that asked for it.

Concept: Lightning saves in the middle of the end of a step. Its checkpoint lacks hooks that come later, schedulers that
follow a metric, sums of means over the epoch, and the callbacks' own records of this save. So a checkpoint is asked for
there, as Lightning makes it, and *completed* at the next :class:`Boundary`: under one key of its own it gets the rest
of the state, as plain data. Lightning's keys stay what one device would have written. A run that reads the checkpoint
substitutes the newer values, and goes on behind the boundary.

The part that is common to all workers does not depend on the grid. Of its layers each stage adds gradients of an
unfinished window of accumulation, weights and optimizer states that hooks have changed since the checkpoint was asked
for, by name, and the users' objects, for a restart of the same run.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from enum import Enum
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_recycle.randomness import generator_states, set_generator_states
from lightning_recycle.session.object_graph import ObjectPack
from lightning_recycle.session.optimizer_states import group_names
from lightning_recycle.tensor_memory import local_part, memory_address
from lightning_recycle.torch_internals import version_of

COMPLETION = "lightning_recycle"
"""The key of a checkpoint under which the completion is."""

_BY_NAME = ("weights", "gradients")


class Boundary(Enum):
    """The places of a training at which a step is over."""

    BATCH = "batch"
    """All hooks of the batch have run, and Lightning has logged it."""
    VALIDATION = "validation"
    """So is a validation that was due after the batch, and schedulers that follow a metric of the step."""
    EPOCH = "epoch"
    """So is the epoch, if the batch was its last."""


class StateMarks:
    """Addresses and versions of a stage's weights and optimizer states."""

    def __init__(self, module: pl.LightningModule, optimizers: Sequence[Optimizer]) -> None:
        self._module, self._optimizers = module, optimizers
        self._weights = {name: mark_of(value) for name, value in module.state_dict().items()}
        self._states = [_marks_of(state) for state in self._by_name()]

    def changes(self) -> dict[str, Any]:
        """Weights and optimizer states, by name, that have changed since the marks."""
        weights = self._module.state_dict()
        return {
            "weights": {name: value for name, value in weights.items() if mark_of(value) != self._weights.get(name)},
            "optimizers": [
                {name: values for name, values in state.items() if _marks_of(values) != before.get(name)}
                for state, before in zip(self._by_name(), self._states, strict=True)
            ],
        }

    def _by_name(self) -> list[dict[str, dict[str, Any]]]:
        found = []
        for optimizer in self._optimizers:
            names = [name for group in group_names(self._module, optimizer) for name in group]
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            pairs = zip(names, parameters, strict=True)
            found.append({name: dict(optimizer.state.get(parameter, {})) for name, parameter in pairs})
        return found


def mark_of(value: Any) -> Any:
    """Where ``value`` lies, and how often it was written: differs once it has changed."""
    if not isinstance(value, Tensor):
        return repr(value)
    part = local_part(value)
    return memory_address(part), part.storage_offset(), None if part.is_inference() else version_of(part)


def _marks_of(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _marks_of(value) if isinstance(value, Mapping) else mark_of(value) for name, value in values.items()}


def frozen(checkpoint: Mapping[str, Any]) -> Callable[[], dict[str, Any]]:
    """A function that returns ``checkpoint`` as read from a file written now."""
    file = io.BytesIO()
    torch.save(dict(checkpoint), file)

    def load() -> dict[str, Any]:
        file.seek(0)
        content: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=False)
        return content

    return load


def as_tensors(pack: ObjectPack) -> list[Tensor]:
    """The tensors of ``pack``, behind its pickle: safe to load."""
    return [torch.frombuffer(bytearray(pack.data), dtype=torch.uint8), *pack.tensors]


def add_parts(checkpoint: Mapping[str, Any], parts: Sequence[Mapping[str, Any] | None]) -> None:
    """Adds the parts of all stages to the completion in ``checkpoint``."""
    found = [part for part in parts if part is not None]
    if not found:
        return
    merged: dict[str, Any] = {kind: {n: v for part in found for n, v in part[kind].items()} for kind in _BY_NAME}
    of_stages = zip(*(part["optimizers"] for part in found), strict=True)
    merged["optimizers"] = [{n: v for one in each for n, v in one.items()} for each in of_stages]
    if "objects" in found[0]:
        merged["objects"] = [part["objects"] for part in found]
    checkpoint[COMPLETION].update(merged)


def boundary_of(completion: Mapping[str, Any]) -> Boundary | None:
    """Where a checkpoint was completed; None if it was in the middle of a step."""
    return completion["boundary"] and Boundary(completion["boundary"])


def complete(checkpoint: MutableMapping[str, Any], completion: Mapping[str, Any], further: Iterable[str]) -> None:
    """Puts what is newer in ``completion`` in the place of Lightning's values.

    Args:
        further: the entries in which the weights are if ``state_dict`` has others.
    """
    checkpoint["loops"]["fit_loop"] = completion["trainer"]["loops"]
    checkpoint["lr_schedulers"], checkpoint["callbacks"] = completion["lr_schedulers"], completion["callbacks"]
    for state, groups in zip(checkpoint["optimizer_states"], completion["param_groups"], strict=True):
        for group, options in zip(state["param_groups"], groups, strict=True):
            group.update(options)
    weights = next((checkpoint[kind] for kind in further if kind in checkpoint), checkpoint["state_dict"])
    weights.update({name: value for name, value in completion["weights"].items() if name in weights})


def generators_as_data() -> tuple[Any, ...]:
    """The states of the generators from which hooks draw, as plain data."""
    python_state, (kind, words, *rest), torch_state = generator_states()
    return python_state, (kind, torch.from_numpy(words.astype(np.int64)), *rest), torch_state


def set_generators(states: tuple[Any, ...]) -> None:
    """Restores what :func:`generators_as_data` returned."""
    python_state, (kind, words, *rest), torch_state = states
    set_generator_states((python_state, (kind, words.numpy().astype(np.uint32), *rest), torch_state))
