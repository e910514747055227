"""The profiler: the costs of a stage's operations on the running model, in seconds and bytes.

Times come from the executor, which measures every operation anyway. This module measures the rest: the memory that a
micro-batch holds between F and W, the size of its messages, and the time of a message to the next stage.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from lightning_recycle.planning.profile import StageProfile
from lightning_recycle.runtime.memory_meter import message_bytes, saved_tensors, storage_bytes

__all__ = ["StageProfiler"]

_SMALL, _LARGE = 1, 1 << 20  # bytes
_ROUNDS = 5


class StageProfiler:
    """Collects the measurements of one worker's first steps.

    Args:
        parameters: parameters of the stage; autograd saves them too, but they cost a micro-batch nothing.
        first_step: first measured step; those before are warm-up.
        last_step: last measured step, after which :meth:`profile` is complete.

    Attributes:
        waiting_bytes: what one micro-batch holds from B to W, once the memory meter knows it.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], first_step: int = 3, last_step: int = 8) -> None:
        self.first_step, self.last_step = first_step, last_step
        self.latency = self.bandwidth = 0.0
        self.waiting_bytes: int | None = None
        self._own = {p.untyped_storage().data_ptr() for p in parameters}
        self._activation_bytes = 0
        self._output_bytes = 0

    @contextmanager
    def forward(self, step: int) -> Iterator[None]:
        """Wraps the F of one micro-batch and counts what autograd saves, each storage once."""
        if step != self.first_step:
            yield
            return
        with saved_tensors() as saved:
            yield
        self._activation_bytes = max(self._activation_bytes, storage_bytes(saved, self._own))

    def measure_links(self, stage: int, is_last: bool, exchange: Callable[[int, int, bool], None]) -> None:
        """Measures the link to the next stage of the pipeline: even stages begin, then odd ones.

        Args:
            stage: of this worker.
            is_last: whether no stage follows.
            exchange: called with a number of stages further, a number of bytes, and whether to send first.
        """
        for parity in (0, 1):
            if stage % 2 == parity and not is_last:
                self.latency, self.bandwidth = _link(lambda size: exchange(1, size, True))
            elif stage % 2 != parity and stage > 0:
                _link(lambda size: exchange(-1, size, False))

    def sent(self, value: Any) -> None:
        """Counts the bytes of what one micro-batch sends to the next stage."""
        self._output_bytes = max(self._output_bytes, message_bytes(value))

    def profile(self, seconds: Mapping[str, float]) -> StageProfile:
        """The stage's profile; ``seconds`` by name of the operation (a fused backward counts as half B, half W)."""
        fused = seconds.get("BW", 0.0) / 2
        return StageProfile(
            forward=seconds.get("F", 0.0),
            backward_input=seconds.get("B", fused),
            backward_weight=seconds.get("W", fused),
            reduce=seconds.get("REDUCE", 0.0),
            optimizer=seconds.get("STEP", 0.0),
            activation_bytes=self._activation_bytes,
            output_bytes=self._output_bytes,
            waiting_bytes=self.waiting_bytes,
        )


def _link(exchange: Callable[[int], None]) -> tuple[float, float]:
    """Latency in seconds and bandwidth in bytes per second of a link.

    Args:
        exchange: sends a message of the given number of bytes and waits until as many have come back.
    """

    def one_way(size: int) -> float:
        exchange(size)  # the first one pays for buffers
        best = float("inf")
        for _ in range(_ROUNDS):
            started = time.perf_counter()
            exchange(size)
            best = min(best, (time.perf_counter() - started) / 2)
        return best

    latency, large = one_way(_SMALL), one_way(_LARGE)
    return latency, _LARGE / max(large - latency, 1e-9)
