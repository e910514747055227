"""Models on CUDA devices that several workers share, and what those workers took of them.

Whoever imports this module gives the workers of a shared device different names, as NCCL's transport wants one for
each. NCCL 2.30 and newer allow that; older ones are told that each worker is another host.
"""

import json
import os
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.accelerators import CUDAAccelerator
from torch import Tensor, nn

from lightning_recycle import CommunicationOptions
from lightning_recycle.runtime.groups_and_transports import Transport
from lightning_recycle.runtime.nccl.nccl_transport import NcclTransport, transport_for
from lightning_recycle.session import stage_layers
from support.models import Regression

WIDTH = 5_000  # so that a micro-batch of two samples is larger than what Gloo carries with its header
ROWS = 512


def let_devices_be_shared(rank: int) -> None:
    """Called in each worker before NCCL is loaded."""
    if torch.cuda.nccl.version() >= (2, 30):
        os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    elif rank >= torch.cuda.device_count():
        os.environ["NCCL_HOSTID"] = f"worker{rank}"


def named(options: CommunicationOptions, rank: int, device: torch.device) -> Transport:
    """``transport_for``, for workers that share a device."""
    if device.type == "cuda":
        let_devices_be_shared(rank)
    found = transport_for(options, rank, device)
    if isinstance(found, NcclTransport):
        found._name = f"of worker {rank}"
    return found


stage_layers.transport_for = named


class SharedDevices(CUDAAccelerator):
    """Workers take turns at the devices that there are."""

    @staticmethod
    def parse_devices(devices: Any) -> list[int]:
        return list(range(int(devices)))

    @staticmethod
    def get_parallel_devices(devices: list[int]) -> list[torch.device]:
        return [torch.device("cuda", index % torch.cuda.device_count()) for index in devices]


class Wide(Regression):
    """Two wide stages, whose payloads are large."""

    def configure_pipeline(self) -> list[Any]:
        torch.manual_seed(0)
        return [nn.Linear(8, 16), nn.Linear(16, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)]


class Compiled(Wide):
    """Compiled as a user would, by torch's own compiler."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.mode = mode

    def configure_pipeline(self) -> list[Any]:
        return [torch.compile(layer, mode=self.mode) for layer in super().configure_pipeline()]


class Spread(nn.Module):
    """A vector (batch, 8) as a sequence (batch, ROWS, 8)."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, None].expand(-1, ROWS, -1) * torch.linspace(0, 1, ROWS, dtype=x.dtype, device=x.device)[:, None]


class Heavy(Regression):
    """Holds some megabytes for each micro-batch."""

    def configure_pipeline(self) -> list[Any]:
        torch.manual_seed(0)
        half = [(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh()) for _ in range(2)]
        return [Spread(), nn.Linear(8, 256), *half[0], *half[1]]

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return (output.mean((1, 2), keepdim=True)[:, 0] - target).square().mean()


class Taken(L.Callback):
    """Writes down the most bytes that this worker's tensors took, by the number of workers that were alive."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._most: dict[str, int] = {}

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        alive = str(len(trainer.strategy.live_workers))
        self._most[alive] = max(self._most.get(alive, 0), torch.cuda.max_memory_allocated())
        (self._folder / f"{trainer.strategy.grid_rank}.json").write_text(json.dumps(self._most))

    @staticmethod
    def read(folder: Path, alive: int) -> list[int]:
        found = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
        return [most[str(alive)] for most in found if str(alive) in most]
