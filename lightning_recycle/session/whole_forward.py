"""``self(x)`` outside of steps: all workers run the whole model together.

Concept: hooks run on every worker alike, so each calls ``self(x)`` at the same place with the same ``x``. They first
meet there, and compare what they were given; then one worker of each stage runs its layers, and the output of the last
stage reaches all. If a worker dies meanwhile, the others do it again, so no hook notices.

Contract: there are no gradients. Layers are in the modes that the module is in. What they draw depends on (seed, step,
number of the call since that step, layer). What the user's ``forward`` keeps in attributes stays on its worker.
Where only some workers call it, the coordinator ends the run.

Must not know: how a value travels between stages, what a failure asks of a worker.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from torch import Tensor

from lightning_recycle.errors import ConfigurationError, UnsupportedFeatureError
from lightning_recycle.model.full_forward import CallResult
from lightning_recycle.model.parts import ModelParts
from lightning_recycle.model.recording import RecordedModule
from lightning_recycle.runtime.executor.executor import Executor
from lightning_recycle.session.collectives import ALONE, WorkerCollectives
from lightning_recycle.session.outputs import OutputRecorder
from lightning_recycle.torch_internals import tree_flatten

_TOLERANCE = 1e-2
"""Share of a tensor's norm. Workers on unlike machines compute nearly the same; other samples are far from it."""

Fingerprint: TypeAlias = tuple[Any, ...]


class WholeForward:
    """One worker's part."""

    def __init__(
        self,
        parts: ModelParts,
        recorder: OutputRecorder,
        module: RecordedModule,
        collectives: WorkerCollectives,
        executor: Executor,
    ) -> None:
        self._parts, self._recorder = parts, recorder
        self._module, self._collectives, self._executor = module, collectives, executor
        self._version = -1
        self._calls = 0  # since that version

    def __call__(self, inputs: Sequence[Any]) -> Any:
        """The output of the whole model, on every worker.

        Args:
            inputs: what the first of the parts that run takes, and is the target for the last one.

        Raises:
            UnsupportedFeatureError: in code that sees one micro-batch, and while this worker is about to join.
            ConfigurationError: if workers were given different inputs.
        """
        self._refuse_here()
        number = self._meet(inputs)
        value = inputs[0] if len(inputs) == 1 else tuple(inputs)
        side_effects = self._recorder.side_effects
        keeps_shares = side_effects.keeps_shares
        with torch.no_grad():
            done = self._executor.forward_whole(value, -1 - number, partial(self._parts.record_forward, self._recorder))
        side_effects.keeps_shares = keeps_shares  # what forward() keeps for itself is no part of a sum
        (output,) = self._recorder.replay({0: done}, on_step=False).values
        return move_data_to_device(output.value if isinstance(output, CallResult) else output, self._module.device)

    def _refuse_here(self) -> None:
        name = type(self._module).__name__
        if self._module.sees_one_microbatch:
            raise UnsupportedFeatureError(
                f"{name} was called, as in self(x), by code that sees one micro-batch: loss(), split_batch(), a layer,"
                " or a hook that sees outputs. This worker holds one stage of the model, and the others do not run that"
                " code. Use the output that the hook gets; call self(x) in a hook that all workers run, such as"
                " on_train_batch_end or on_validation_epoch_end."
            )
        if self._collectives.client.joining:
            raise UnsupportedFeatureError(ALONE.format(what=f"{name} was called, as in self(x)"))

    def _meet(self, inputs: Sequence[Any]) -> int:
        """Waits for all workers; returns the number of this call."""
        if self._version != self._executor.version:
            self._version, self._calls = self._executor.version, 0
        mine = fingerprint(inputs)
        numbers, given = zip(*self._collectives.gather("self(x)", (self._calls, mine)).values(), strict=True)
        if not all(alike(theirs, mine) for theirs in given):
            raise ConfigurationError(
                f"{type(self._module).__name__} was called, as in self(x), with inputs that differ between the workers,"
                " which evaluate it together. Make them the same on all: from what every worker has (batch,"
                " self.trainer.datamodule, what hooks collected), or drawn by a torch.Generator with a seed of its own;"
                " not from what one worker has, such as its rank, its clock, or what it read alone."
            )
        number: int = max(numbers)  # one that has joined since the step has counted fewer
        self._calls = number + 1
        return number


def fingerprint(inputs: Sequence[Any]) -> tuple[Fingerprint, ...]:
    """A fingerprint of ``inputs`` in a few bytes: see :func:`alike`."""
    leaves, structure = tree_flatten(list(inputs))
    return (("structure", str(structure)), *(_of_leaf(leaf) for leaf in leaves))


def alike(a: Sequence[Fingerprint], b: Sequence[Fingerprint]) -> bool:
    """Whether inputs with these fingerprints are equal but for rounding."""
    return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))


def _of_leaf(leaf: Any) -> Fingerprint:
    if not isinstance(leaf, Tensor):
        try:
            data = pickle.dumps(leaf)
        except Exception:  # it stays in this process; its type must do
            data = b""
        return type(leaf).__qualname__, hashlib.sha256(data).digest()
    kind = (str(leaf.dtype), tuple(leaf.shape))
    flat = leaf.detach().cpu().flatten()
    if not (flat.is_floating_point() or flat.is_complex()):
        return *kind, hashlib.sha256(flat.contiguous().numpy().tobytes()).digest()
    real = torch.view_as_real(flat).flatten() if flat.is_complex() else flat
    values = torch.nan_to_num(real.double(), nan=1.0, posinf=2.0, neginf=3.0)
    weights = torch.cos(torch.arange(values.numel(), dtype=torch.float64))
    return *kind, float(values.norm()), float(values @ weights)


def _same(a: Fingerprint, b: Fingerprint) -> bool:
    if not isinstance(a[-1], float) or not isinstance(b[-1], float):
        return a == b
    *kind, norm, projection = a
    *other, other_norm, other_projection = b
    limit = _TOLERANCE * max(norm, other_norm)
    return kind == other and abs(norm - other_norm) <= limit and abs(projection - other_projection) <= limit
