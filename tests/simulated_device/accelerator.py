"""Lightning's accelerator for simulated devices, and such devices where a test asks for the processor."""

import functools
import os
from typing import Any

import lightning as L
import torch
from lightning.pytorch.accelerators import Accelerator

from simulated_device import KIND, is_here


class SimulatedAccelerator(Accelerator):
    """One worker per device."""

    def setup_device(self, device: torch.device) -> None:
        torch.accelerator.set_device_index(device.index)

    def teardown(self) -> None:
        pass

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        return {"allocated": torch.accelerator.memory_allocated(device)}

    @staticmethod
    def parse_devices(devices: Any) -> list[int]:
        return list(devices) if isinstance(devices, list) else list(range(int(devices)))

    @staticmethod
    def get_parallel_devices(devices: list[int]) -> list[torch.device]:
        return [torch.device(KIND, index) for index in devices]

    @staticmethod
    def auto_device_count() -> int:
        return torch.accelerator.device_count()

    @staticmethod
    def is_available() -> bool:
        return is_here()

    @staticmethod
    def name() -> str:
        return KIND


def in_place_of_the_cpu() -> None:
    """From now on a Trainer of this process that is to use this package's strategy on the processor uses devices."""
    init = L.Trainer.__init__

    @functools.wraps(init)
    def on_devices(self: L.Trainer, *args: Any, **kwargs: Any) -> None:
        strategy = kwargs.get("strategy")
        ours = strategy == "recycle" or type(strategy).__name__ == "ReCycleStrategy"
        if ours and kwargs.get("accelerator") == "cpu":
            kwargs["accelerator"] = SimulatedAccelerator()
        init(self, *args, **kwargs)

    if is_here() and "SIMULATED_DEVICES_IN_TESTS" in os.environ:
        L.Trainer.__init__ = on_devices
