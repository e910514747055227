"""Which transport carries a worker's payloads.

"gloo", the default, is Gloo on every device. "nccl" is experimental: NCCL between CUDA devices, tried in each
generation before anything depends on it (:mod:`~lightning_recycle.runtime.nccl.nccl_transport`). Pairs and groups of
workers where it does not work use Gloo, and the log says why. Nothing else of this room is used from outside.
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
            " use transport='gloo', the default, or Trainer(accelerator='gpu')."
        )


def transport_for(option: str, rank: int, device: torch.device, standby: bool = True) -> Transport:
    """The transport of worker ``rank``, whose tensors are on ``device``, for
    ``ReCycleStrategy(transport=option, standby_connections=standby)``.

    Raises:
        ConfigurationError: if it is "nccl", and there is no CUDA device or no library.
    """
    check_transport(option, device)
    gloo = GlooTransport(timedelta(seconds=TIMEOUT_SECONDS), HostMemory(device))
    if option == "gloo":
        return gloo
    library = Libnccl()
    return NcclTransport(
        rank, device, library, CudaStreams(device), device_name(device), gloo, required=False, reserves=standby
    )
