"""Questions of the executor to the process that it runs in, and results of a step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from torch import Tensor, nn

from lightning_recycle.control.protocol import messages
from lightning_recycle.control.protocol.messages import AfterStep

RecordOutput: TypeAlias = Callable[[Any, Any, int], bytes]
"""(output, target, number of samples) of a micro-batch -> bytes for all workers."""


@dataclass(frozen=True)
class StepResult:
    """Results of a step, the same on every worker.

    Args:
        gradient_norm: the norm of all gradients, if needed, else NaN; of a scaled loss, if scaled; 0 on a guess that it
            is small enough.
        outputs: hooks' results for the outputs, by global micro-batch, if there are such hooks.
        check_next: whether all check their state after the next step.
        add_gradients: adds the gradients of the step to those of the parameters, as a backward does.
    """

    loss: float
    gradient_norm: float
    outputs: Mapping[int, bytes] = field(default_factory=dict)
    after_step: AfterStep = AfterStep.GO_ON
    overflow: bool = False
    check_next: bool = False
    add_gradients: Callable[[], None] = lambda: None


class MicrobatchValues(Protocol):
    """Changes of one micro-batch's forward in the user's module, when it is over."""

    record: bytes

    def note(self, earlier: bytes) -> bytes:
        """The changes for the next stage, with earlier stages' ones; may be empty."""

    def output(self, earlier: bytes) -> bytes:
        """On the last stage, the record and all changes, for all workers; may be empty."""


class ExecutorCallbacks(Protocol):
    """Questions of the executor to the process that it runs in."""

    def split(self, data: Any, index: int) -> tuple[Any, Any]:
        """A collated micro-batch of step ``index`` of an epoch -> (input, target)."""

    def microbatch(self, index: int, statistics: Sequence[Tensor]) -> AbstractContextManager[MicrobatchValues]:
        """The context of a micro-batch's forward, by its index in the global batch.

        It gives the module that micro-batch's values, and adds to ``statistics`` instead of running statistics.
        """

    def computing_again(self, index: int) -> AbstractContextManager[None]:
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
        """Called within a regroup, before ``step``; ``is_applied``: some have applied it."""

    def as_in_step(self, step: int) -> AbstractContextManager[None]:
        """The context in which the user's code sees the progress of ``step``."""

    def describe_step(self, step: int) -> messages.Facts:
        """Called when ``step`` was applied; returns facts that must be equal on its peers."""

    def not_optimized(self) -> Collection[nn.Parameter]:
        """Parameters of no optimizer: their gradients are not clipped or counted."""

    def must_know(self, step: int) -> bool:
        """Whether ``step`` may not be made on a guess."""

    def keep_optimizer(self) -> None:
        """The optimizer is about to step on a guess."""

    def step_again(self, norm: float) -> None:
        """Repeats the newest step, made on a wrong guess, with gradients of norm ``norm``.

        The parameters and ``parameter.grad`` are restored before.
        """

    def take_snapshot(self) -> Any:
        """State for a worker that joins this stage, at a step boundary."""

    def restore_snapshot(self, snapshot: Any) -> None:
        """Takes over a peer's :meth:`take_snapshot`."""
