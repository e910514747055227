"""One thing under way on a device: calls of NCCL with one tensor after the other.

Each is launched when the one before has ended: a kernel behind one that waits for others would hold up what CUDA puts
into the same queue of the hardware, which may be what those wait for.
"""

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
    end: Event | None = None  # behind the newest of them

    def proceed(self, library: NcclLibrary) -> bool:
        """Launches what can be launched; returns whether the device is done with all of it.

        Raises:
            NcclError: if the communicator has failed.
            RuntimeError: if the device is lost.
        """
        while not library.in_progress(self.comm):  # what is in progress is not on the stream yet
            if self.launched > 0:
                self.end = self.end or self.stream.record()
                if not self.end.query():
                    return False
            if self.launched == len(self.tensors):
                return True
            self.launch(self.tensors[self.launched])
            self.launched, self.end = self.launched + 1, None
        return False
