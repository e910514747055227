"""Losses and gradients that are not finite, which peers compute again.

A worker that gets a loss, or a stage a gradient, that is not finite reports it before the step can be committed
(:class:`~lightning_recycle.control.protocol.messages.NotFinite`). The step is run again and *inspected*: a worker that
makes such a value of finite ones keeps a record of the micro-batch, and all workers of its stage compute that. A peer
that gets finite values shows that it was the device; otherwise the step is run once more and the value is the model's
own.

Outside of inspected steps this costs nothing: losses, and norms where they are needed, are known anyway; sums over
gradients are for devices for which no worker has to wait.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_recycle.control.client import ControlClient
from lightning_recycle.control.protocol import messages
from lightning_recycle.control.protocol.corruption import FINITE, NOT_FINITE
from lightning_recycle.control.protocol.member import Interrupted
from lightning_recycle.devices import is_accelerator
from lightning_recycle.planning.program import Task
from lightning_recycle.runtime.checks.microbatch_records import MicrobatchRecorder, Recomputation, is_sound, tensors_of
from lightning_recycle.runtime.checks.verification import Verifier
from lightning_recycle.runtime.stage.stage import Stage

_VERDICT_TIMEOUT = 600.0  # seconds until a generation begins in which the step is inspected


class FiniteChecks:
    """One worker's part in the checks of losses and gradients.

    Args:
        possible: whether values that are not finite may show a broken device: not where some are expected, as those of
            a scaled loss are, nor without peers.
    """

    def __init__(
        self, client: ControlClient, stage: Stage, recompute: Recomputation, verifier: Verifier, possible: bool
    ) -> None:
        self._client, self._stage, self._recompute, self._verifier = client, stage, recompute, verifier
        self._possible = possible
        self._inspected = self._excused = -1
        self._inspects = False
        self._recorders: dict[int, MicrobatchRecorder] = {}
        self._was_finite = True  # the loss of the newest step

    def follow(self, inspected: int, excused: int) -> None:
        """Takes over the step to inspect, and up to which steps values are accepted."""
        self._inspected, self._excused = inspected, excused

    def begin(self, step: int) -> None:
        """An attempt at ``step`` begins."""
        self._inspects, self._recorders = self._possible and step == self._inspected, {}

    @property
    def inspects(self) -> bool:
        """Whether this attempt is inspected; gradients then hold nothing of other workers."""
        return self._inspects

    def applied(self, loss: float) -> None:
        """A step with this loss was applied."""
        self._was_finite = math.isfinite(loss)

    # ------------------------------------------------------------------ looking

    def losses(self, step: int, losses: Mapping[int, float]) -> None:
        """Checks the losses of this worker's micro-batches.

        Raises:
            Interrupted: if one of them is to be looked into, in a newer generation.
        """
        wrong = next((index for index, loss in losses.items() if not math.isfinite(loss)), None)
        if wrong is not None:
            self._ask(step, wrong)

    def gradient(self, step: int, squared_norm: float | None, buffers: Sequence[Tensor]) -> None:
        """Checks the reduced gradient; ``squared_norm``: its own if that is known.

        Raises:
            Interrupted: if it is to be looked into, in a newer generation.
        """
        if not self._asks(step):
            return
        if squared_norm is None:
            on_host = [buffer for buffer in buffers if not is_accelerator(buffer.device)]
            is_finite = all(map(_is_finite, on_host))
        else:
            is_finite = math.isfinite(squared_norm)
        if not is_finite:
            self._ask(step, -1)

    def _asks(self, step: int) -> bool:
        return self._possible and step > self._excused and self._was_finite

    def _ask(self, step: int, microbatch: int) -> None:
        if self._asks(step):
            self._client.send(messages.NotFinite(self._client.rank, self._client.generation, step, microbatch))
            self._client.await_announcement(_VERDICT_TIMEOUT)
            raise Interrupted

    # ------------------------------------------------------------------ in an inspected step

    def takes(self, step: int, task: Task, inputs: Any, target: Any) -> None:
        """The forward of ``task`` begins."""
        recorder = MicrobatchRecorder.of(step, task, inputs, target) if self._inspects else None
        if recorder is not None:
            self._recorders[task.index] = recorder

    def adds_gradients(self, task: Task) -> None:
        """Nothing: the gradients stay in those of the step, which is undone anyway."""

    def computed(self, task: Task, output: Any, loss: Tensor | float | None) -> None:
        """The forward of ``task`` gave ``output`` and on the last stage ``loss``.

        Raises:
            Interrupted: if it is not finite although the inputs are.
        """
        recorder = self._recorders.get(task.index)
        if recorder is None:
            return
        recorder.computed(output, loss)
        made = [*tensors_of(output), None if loss is None else float(loss)]
        if not is_sound(made) and is_sound(tensors_of(recorder.record.inputs)):
            self._call_vote(recorder)

    def differentiated(self, task: Task, grads: Any, input_grads: Any) -> None:
        """The backward of ``task``, given ``grads``, gave ``input_grads``.

        Raises:
            Interrupted: if they are not finite although ``grads`` is.
        """
        recorder = self._recorders.get(task.index)
        if recorder is None:
            return
        recorder.differentiated(grads, input_grads)
        if not is_sound(tensors_of(input_grads)) and is_sound(tensors_of(grads)):
            self._call_vote(recorder)

    def completed(self, task: Task) -> None:
        """The weight gradients of ``task`` are complete.

        Raises:
            Interrupted: if some are not finite although what they were made of is.
        """
        recorder = self._recorders.pop(task.index, None)
        if recorder is None or is_sound(self._recompute.gradients()):
            return
        if is_sound([*tensors_of(recorder.record.inputs), *tensors_of(recorder.record.grads)]):
            self._call_vote(recorder)
        self._inspects, self._recorders = False, {}  # all gradients have those numbers in them from now on

    def _call_vote(self, recorder: MicrobatchRecorder) -> None:
        record = replace(recorder.record, sums={**recorder.record.sums, FINITE: NOT_FINITE}, watches_numbers=True)
        self._verifier.dispute(record, self._client.rank, record.sums)


def _is_finite(values: Tensor) -> bool:
    """Whether the sum of all numbers is finite, which costs less than to test each."""
    # A sum of many finite numbers may be too large for a float16.
    total = values.sum(dtype=torch.float32 if values.dtype == torch.float16 else None)
    return bool(torch.isfinite(total))
