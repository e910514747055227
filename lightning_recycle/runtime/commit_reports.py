"""Results of a step, reports between stages, and the executor's questions.

A REDUCED worker reports its stage's part of the whole gradient. If only the norm matters, and only one above the clip
value, it may step as if the norm were below. That step is *speculative* until all have reported, which confirms it. All
workers of a generation find the same speculation right or wrong; if wrong, they enter the generation begun for that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from torch import Tensor, nn

from lightning_recycle.control.client import ControlClient, unpack_all
from lightning_recycle.control.protocol import messages
from lightning_recycle.control.protocol.messages import AfterStep

RecordOutput: TypeAlias = Callable[[Any, Any, int], bytes]
"""(output, target, number of samples) of a micro-batch -> bytes for all workers."""


@dataclass(frozen=True)
class StepResult:
    """Results of a step, the same on every worker.

    Args:
        gradient_norm: the norm of all gradients, if needed, else NaN; of a scaled loss, if scaled; 0 in a speculative
            step.
        outputs: hooks' results for the outputs, by global micro-batch, if there are such hooks.
        check_next: whether all check their state after the next step.
        add_gradients: adds the gradients of the step to those of the parameters, as a backward does; False if there
            are none.
    """

    loss: float
    gradient_norm: float
    outputs: Mapping[int, bytes] = field(default_factory=dict)
    after_step: AfterStep = AfterStep.GO_ON
    overflow: bool = False
    check_next: bool = False
    add_gradients: Callable[[], bool] = lambda: False


class MicrobatchValues(Protocol):
    """Changes of one micro-batch's forward in the user's module, when it is over."""

    record: bytes

    def note(self, earlier: bytes) -> bytes:
        """The changes for the next stage, with earlier stages' ones; may be empty."""

    def output(self, earlier: bytes) -> bytes:
        """On the last stage, the record and all changes, for all workers; may be empty."""


class ExecutorCallbacks(Protocol):
    """Interface of the executor to the Trainer in its process."""

    def split(self, data: Any, index: int) -> tuple[Any, Any]:
        """A collated micro-batch of step ``index`` of an epoch -> (input, target)."""

    def microbatch(self, index: int, statistics: Sequence[Tensor]) -> AbstractContextManager[MicrobatchValues]:
        """The context of a micro-batch's forward, by its index in the global batch.

        It gives the module that micro-batch's values, and adds to ``statistics`` instead of running statistics.
        """

    def recomputing(self, index: int) -> AbstractContextManager[None]:
        """As :meth:`microbatch`, for a repeated forward without lasting effects."""

    @property
    def records_outputs(self) -> bool:
        """Whether :meth:`record_output` is wanted in training."""

    def record_output(self, output: Any, target: Any, samples: int) -> bytes:
        """Bytes for all workers, from a micro-batch's output on the last stage."""

    def is_suspect(self, error: Exception) -> bool:
        """Whether a fault of the machine may explain ``error``."""

    def on_generation(self) -> None:
        """The workers of a generation are connected."""

    def on_recovery(self, step: int, is_applied: bool) -> None:
        """Called within a regroup, before ``step`` runs again.

        ``is_applied``: a column is done with the step: it has applied it, or is REDUCED in it.
        """

    def as_in_step(self, step: int) -> AbstractContextManager[None]:
        """The context in which the user's code sees the progress of ``step``."""

    def describe_step(self, step: int) -> messages.Facts:
        """Called when ``step`` was applied; returns facts that must be equal on its peers."""

    def unoptimized_parameters(self) -> Collection[nn.Parameter]:
        """Parameters of no optimizer: their gradients are not clipped or counted."""

    def forbids_speculation(self, step: int) -> bool:
        """Whether ``step`` may not be speculative."""

    def keep_optimizer_state(self) -> None:
        """Called before a speculative step of the optimizer, for :meth:`step_again`."""

    def step_again(self, norm: float) -> None:
        """Repeats the newest step, a wrong speculation, with gradients of norm ``norm``.

        The parameters and ``parameter.grad`` are restored before.
        """

    def take_snapshot(self) -> Any:
        """State for a worker that joins this stage, at a step boundary."""

    def restore_snapshot(self, snapshot: Any) -> None:
        """Takes over a peer's :meth:`take_snapshot`."""


_GROWTH = 1.1  # of the norm since the step before, which a speculation allows for
_ANNOUNCEMENT_TIMEOUT = 60.0  # seconds from the proof of a wrong speculation to the new generation


@dataclass(frozen=True)
class CommitRules:
    """Requirements of a step on other stages: their norms, overflows, or a lockstep.

    Args:
        staggered: whether a stage may step before the others hold their gradients.
        presumes: norm of all gradients -> whether the step is the same without knowing the norm. With it a stage
            speculates on it, unless reports say otherwise; without it all stages know the norm first.
    """

    norm: bool = False
    overflow: bool = False
    staggered: bool = True
    presumes: Callable[[float], bool] | None = None


@dataclass(frozen=True)
class CommitPayload:
    """A stage's report before they step; ``squared_norm``: NaN if it is not needed."""

    squared_norm: float = math.nan
    overflow: bool = False


def norm_of(payloads: Mapping[int, CommitPayload]) -> float:
    """Norm of all gradients from the stages' reports; NaN if none has one."""
    return sum(payload.squared_norm for _, payload in sorted(payloads.items())) ** 0.5 if payloads else math.nan


class SpeculativeCommits:
    """Speculative steps of a worker, and the reports it knows.

    ``presumes``: norm -> whether the step is the same without knowing it. ``is_unconfirmed``: the newest step is not
    confirmed. ``reports``: by column, for the newest step that all have reported.
    """

    def __init__(self, client: ControlClient, column: int, columns: int, presumes: Callable[[float], bool]) -> None:
        self.is_unconfirmed = False
        self.reports: Mapping[int, CommitPayload] = {}
        self._client, self._column, self._columns, self._presumes = client, column, columns, presumes
        self._reported_in = (-1, -1)  # the generation and the step of the newest report

    def is_likely(self, own_payload: CommitPayload) -> bool:
        """Whether a speculation will hold, by earlier reports; one answer in a column."""
        others = {column: payload for column, payload in self.reports.items() if column != self._column}
        enough = len(others) == self._columns - 1
        return enough and self._presumes(_GROWTH * norm_of({**others, self._column: own_payload}))

    def was_right(self, reports: Mapping[int, CommitPayload]) -> bool:
        return self._presumes(norm_of(reports))

    def report(self, step: int, payload: CommitPayload | None, speculative: bool) -> None:
        """Reports ``step`` once in a generation; ``speculative``: without waiting."""
        if self._reported_in != (self._client.generation, step):
            self._reported_in = (self._client.generation, step)
            self._client.send_commit(step, payload, speculative)

    def is_reported(self, step: int) -> bool:
        return self._client.commit_answer(step) is not None

    def await_reports(self, step: int) -> Mapping[int, CommitPayload]:
        """Waits until all have reported ``step``; Interrupted by a new generation."""
        answer = self._client.await_committed(step)
        self.reports = unpack_all(answer.payloads)
        if answer.speculative and not self.was_right(self.reports):
            self._client.undo(step, _ANNOUNCEMENT_TIMEOUT)
        return self.reports
