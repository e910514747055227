"""One thing under way on a device: calls of NCCL, one after the other on one stream, and the event behind them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from lightning_recycle.runtime.device_streams import Event, Stream
from lightning_recycle.runtime.nccl import NcclComm, NcclLibrary

__all__ = ["Launched"]


@dataclass(eq=False)
class Launched:
    """``tensors`` that are launched one after the other. They live as long as this does.

    Args:
        comm: the communicator. Each call may leave it in progress, and then nothing may be called.
        tensors: what the calls are for, contiguous.
        launch: the call, with one of them.
        stream: where it enqueues them.
    """

    comm: NcclComm
    tensors: Sequence[Tensor]
    launch: Callable[[Tensor], None]
    stream: Stream
    launched: int = 0
    end: Event | None = None

    def proceed(self, library: NcclLibrary) -> bool:
        """Launches what can be launched; returns whether the device is done with all of it.

        Raises:
            NcclError: if the communicator has failed.
            RuntimeError: if the device is lost.
        """
        if library.in_progress(self.comm):
            return False
        while self.launched < len(self.tensors):
            self.launch(self.tensors[self.launched])
            self.launched += 1
            if library.in_progress(self.comm):
                return False
        if self.end is None:
            self.end = self.stream.record()  # not before: what is in progress is not on the stream yet
        return self.end.query()
