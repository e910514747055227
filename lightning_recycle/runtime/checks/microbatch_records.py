"""Records of micro-batches, from which a peer can compute the same.

A record has the stage's inputs for one micro-batch, and checksums of the results. :class:`Recomputation` computes it on
another worker without lasting changes: gradients go into separate memory, values of the module are restored, and logged
or collected data of the user's code is dropped.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_recycle.control.protocol.messages import FINITE, IS_FINITE, NOT_FINITE
from lightning_recycle.planning.program import Task
from lightning_recycle.runtime.checks.checksums import checksum
from lightning_recycle.runtime.stage.stage import Stage
from lightning_recycle.tensor_memory import local_part, put_together, take_apart
from lightning_recycle.torch_internals import foreach_add_, version_of

log = logging.getLogger(__name__)

_OUTPUT, _INPUT_GRADIENT, WEIGHT_GRADIENT = "output", "input gradient", "weight gradient"


@dataclass(frozen=True)
class MicrobatchRecord:
    """Inputs and results of a stage for one micro-batch.

    ``wanted``: which input tensors need a gradient; ``machine``: properties that must be equal for equal bits;
    ``watches_numbers``: finite results matter, not their bits.
    """

    step: int
    microbatch: int
    inputs: Any
    target: Any
    wanted: tuple[bool, ...]
    split_backward: bool
    grads: Any = None
    sums: Mapping[str, bytes] = field(default_factory=dict)
    machine: str = ""
    watches_numbers: bool = False


def is_sound(values: Sequence[Tensor | float | None]) -> bool:
    """Whether no number is NaN or infinite, except negative infinity in a mask."""
    for value in values:
        if isinstance(value, Tensor):
            if value.is_floating_point() and bool((torch.isnan(value) | torch.isposinf(value)).any()):
                return False
            if value.is_complex() and not bool(torch.isfinite(value).all()):
                return False
        elif value is not None and not math.isfinite(value):
            return False
    return True


class MicrobatchRecorder:
    """Records one micro-batch, from its forward on."""

    def __init__(self, step: int, task: Task, inputs: Any, target: Any) -> None:
        given, told = mapped((inputs, target), _copy)
        wanted = tuple(tensor.requires_grad for tensor in tensors_of(inputs))
        self.record = MicrobatchRecord(step, task.index, given, told, wanted, task.split_backward)

    @classmethod
    def of(cls, step: int, task: Task, inputs: Any, target: Any) -> MicrobatchRecorder | None:
        """A recorder, or None if the stage's inputs cannot be sent to others."""
        try:
            return cls(step, task, inputs, target)
        except Exception as error:  # whatever an object of the user's raises that cannot be pickled
            log.debug("Micro-batch %d cannot be recorded: %s", task.index, error)
            return None

    def computed(self, output: Any, loss: Tensor | float | None) -> None:
        """Records the forward's ``output``, and on the last stage its ``loss``."""
        sums = {_OUTPUT: checksum([*tensors_of(output), None if loss is None else float(loss)])}
        self.record = replace(self.record, sums=sums)

    def differentiated(self, grads: Any, input_grads: Any) -> None:
        """Records the backward from ``grads`` to ``input_grads``."""
        sums = {**self.record.sums, _INPUT_GRADIENT: checksum(tensors_of(input_grads))}
        self.record = replace(self.record, grads=mapped(grads, _copy), sums=sums)

    def completed(self, gradients: Sequence[Tensor]) -> None:
        """Records the complete weight gradients, alone in ``gradients``."""
        self.record = replace(self.record, sums={**self.record.sums, WEIGHT_GRADIENT: checksum(gradients)})


class GradientsApart:
    """Separate memory for gradients, for a while, of parameters that have some."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._usual: list[tuple[nn.Parameter, Tensor]] = []
        self._apart: list[Tensor] = []
        self._clean: list[int] = []  # their versions when nothing was written

    def begin(self) -> None:
        """Replaces each ``parameter.grad`` by an empty separate gradient."""
        self._usual = [(p, p.grad) for p in self._parameters if p.grad is not None]
        if not self._apart:
            self._apart = [torch.zeros_like(grad) for _, grad in self._usual]
            self._clean = [*map(_writes, self._apart)]
        for (parameter, _), apart in zip(self._usual, self._apart, strict=True):
            parameter.grad = apart

    def end(self) -> None:
        """Restores ``parameter.grad``, unless the user's code has replaced it."""
        for (parameter, usual), apart in zip(self._usual, self._apart, strict=True):
            if parameter.grad is apart:
                parameter.grad = usual

    def add(self) -> None:
        """Adds the separate gradients to the earlier ones."""
        pairs = zip(self._usual, self._apart, self._clean, strict=True)
        written = [(usual, apart) for (_, usual), apart, clean in pairs if _writes(apart) > clean]
        if written:
            foreach_add_(*map(list, zip(*written, strict=True)))
        self._usual, self._apart, self._clean = [], [], []


def _writes(grad: Tensor) -> int:
    return version_of(grad) + version_of(local_part(grad))


class Recomputation:
    """Computes records once more; ``divisor``: micro-batches in the global batch."""

    def __init__(
        self,
        stage: Stage,
        parameters: Sequence[nn.Parameter],
        divisor: int,
        computing_again: Callable[[int], AbstractContextManager[None]] = lambda index: nullcontext(),
    ) -> None:
        self._stage, self.parameters, self._divisor = stage, parameters, divisor
        self._computing_again = computing_again

    def gradients(self) -> list[Tensor]:
        return [p.grad for p in self.parameters if p.requires_grad and p.grad is not None]

    def __call__(self, record: MicrobatchRecord) -> dict[str, bytes]:
        """This worker's checksums of all results that ``record`` has checksums of."""
        stage, index = self._stage, record.microbatch
        inputs, target, grads = mapped((record.inputs, record.target, record.grads), _copy)
        for tensor, wanted in zip(tensors_of(inputs), record.wanted, strict=True):
            tensor.requires_grad_(wanted)
        with self._computing_again(index), self._gradients_apart():
            output = stage.forward(record.step, index, inputs, target, split_backward=record.split_backward)
            results: list[Any] = [*tensors_of(output), None]
            if stage.has_loss:
                results[-1] = float(stage.loss(record.step, index, output, target, self._divisor))
            sums = {_OUTPUT: checksum(results)}
            if _INPUT_GRADIENT not in record.sums:
                stage.forget(index)
                return _with_numbers(record, sums, results)
            if record.split_backward:
                input_grads = stage.backward_input(index, grads)
                stage.backward_weight(index)
            else:
                input_grads = stage.backward(index, grads)
            sums[_INPUT_GRADIENT] = checksum(tensors_of(input_grads))
            results += [*tensors_of(input_grads), *self.gradients()]
            if WEIGHT_GRADIENT in record.sums:
                sums[WEIGHT_GRADIENT] = checksum(self.gradients())
            return _with_numbers(record, sums, results)

    @contextmanager
    def _gradients_apart(self) -> Iterator[None]:
        apart = GradientsApart(self.parameters)
        apart.begin()
        try:
            yield
        finally:
            apart.end()


def _with_numbers(record: MicrobatchRecord, sums: dict[str, bytes], results: list[Any]) -> dict[str, bytes]:
    if record.watches_numbers:
        sums[FINITE] = IS_FINITE if is_sound(results) else NOT_FINITE
    return sums


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors in ``value``, of any objects."""
    return take_apart(value)[1]


def mapped(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """``value``, of any objects, with other tensors."""
    rest, tensors = take_apart(value)
    return put_together(rest, [function(tensor) for tensor in tensors])


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()
