"""Which transport carries a worker's payloads.

"auto" is Gloo, also between CUDA devices: no part of the other has run on devices yet, and who trains for a week should
not be the first. With "nccl" each pair of workers must have devices of their own; what a pair can do is found when it
connects (:mod:`~lightning_recycle.runtime.nccl_transport`).
"""

from __future__ import annotations

from datetime import timedelta

import torch

from lightning_recycle.errors import ConfigurationError
from lightning_recycle.runtime.device_streams import CudaStreams
from lightning_recycle.runtime.nccl import Libnccl, device_name
from lightning_recycle.runtime.nccl_transport import NcclTransport
from lightning_recycle.runtime.transports import GlooTransport, Transport

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


def transport_for(option: str, rank: int, device: torch.device) -> Transport:
    """The transport of worker ``rank``, whose tensors are on ``device``, for ``ReCycleStrategy(transport=option)``.

    Raises:
        ConfigurationError: if it must be NCCL, and cannot be.
    """
    check_transport(option, device)
    gloo = GlooTransport(timedelta(seconds=TIMEOUT_SECONDS))
    if option != "nccl":
        return gloo
    return NcclTransport(rank, device, Libnccl(), CudaStreams(device), device_name(device), gloo, required=True)
