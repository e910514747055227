"""The profiler: the costs of a stage's operations on the running model, in seconds and bytes.

Times come from the executor, which measures every operation anyway. This module measures the rest: the memory that a
micro-batch holds between F and W, the size of its messages, and the time of a message to the next stage.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_recycle.planning.profile import StageProfile

__all__ = ["StageProfiler", "measure_link"]

_SMALL, _LARGE = 1, 1 << 20  # bytes
_ROUNDS = 5


class StageProfiler:
    """Collects the measurements of one worker's first steps.

    Args:
        parameters: parameters of the stage; autograd saves them too, but they cost a micro-batch nothing.
        first_step: first measured step; those before are warm-up.
        last_step: last measured step, after which :meth:`profile` is complete.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], first_step: int = 3, last_step: int = 8) -> None:
        self.first_step, self.last_step = first_step, last_step
        self.latency = self.bandwidth = 0.0
        self._own = {p.untyped_storage().data_ptr() for p in parameters}
        self._activation_bytes = 0
        self._output_bytes = 0

    @contextmanager
    def forward(self, step: int) -> Iterator[None]:
        """Wraps the F of one micro-batch and counts what autograd saves, each storage once."""
        if step != self.first_step:
            yield
            return
        storages: dict[int, int] = {}

        def saved(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._own:
                storages[storage.data_ptr()] = storage.nbytes()
            return tensor.detach()  # itself would be a cycle where it is the node's own output

        with torch.autograd.graph.saved_tensors_hooks(saved, lambda tensor: tensor):
            yield
        self._activation_bytes = max(self._activation_bytes, sum(storages.values()))

    def sent(self, value: Any) -> None:
        """Counts the bytes of what one micro-batch sends to the next stage."""
        tensors = value if isinstance(value, tuple) else (value,)
        self._output_bytes = max(self._output_bytes, sum(t.nbytes for t in tensors if isinstance(t, Tensor)))

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
        )


def measure_link(exchange: Callable[[int], None]) -> tuple[float, float]:
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
