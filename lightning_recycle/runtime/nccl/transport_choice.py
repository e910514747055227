"""Which transport carries a worker's payloads.

"nccl" is NCCL, and an error where that cannot be. "auto" is NCCL between CUDA devices where it works, which is tried in
each generation before anything depends on it (:mod:`~lightning_recycle.runtime.nccl.nccl_transport`), and Gloo
elsewhere. Each pair and each group of workers finds by itself what it can do.
"""

from __future__ import annotations

from datetime import timedelta

import torch

from lightning_recycle.errors import ConfigurationError
from lightning_recycle.runtime.comm.transports import GlooTransport, HostMemory, Transport
from lightning_recycle.runtime.nccl.device_streams import CudaStreams
from lightning_recycle.runtime.nccl.nccl_library import Libnccl, device_name
from lightning_recycle.runtime.nccl.nccl_transport import NcclTransport

__all__ = ["TIMEOUT_SECONDS", "check_transport", "transport_for"]

TIMEOUT_SECONDS = 1800.0  # of any single message


def check_transport(option: str, device: torch.device) -> None:
    """Whether ``ReCycleStrategy(transport=option)`` is possible with a device.

    Raises:
        ConfigurationError: if it is not.
    """
    if option == "nccl" and device.type != "cuda":
        raise ConfigurationError(
            f"ReCycleStrategy(transport='nccl') carries tensors of CUDA devices, and this run is on {device.type!r}:"
            " use transport='auto', which is Gloo here, or Trainer(accelerator='gpu')."
        )


def transport_for(option: str, rank: int, device: torch.device, standby: bool = True) -> Transport:
    """The transport of worker ``rank``, whose tensors are on ``device``, for
    ``ReCycleStrategy(transport=option, standby_connections=standby)``.

    Raises:
        ConfigurationError: if it must be NCCL, and cannot be.
    """
    check_transport(option, device)
    gloo = GlooTransport(timedelta(seconds=TIMEOUT_SECONDS), HostMemory(device))
    if option == "gloo" or device.type != "cuda":
        return gloo
    required = option == "nccl"
    library: Libnccl | str
    try:
        library = Libnccl()
    except ConfigurationError as error:
        if required:
            raise
        library, name = str(error), ""
    else:
        name = device_name(device)
    return NcclTransport(rank, device, library, CudaStreams(device), name, gloo, required, standby)
