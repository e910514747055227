"""A sweep's script: trains, undisturbed or with a worker killed and replaced, and keeps the weights."""

from pathlib import Path
from typing import Any

import hydra
import small_training as small
import torch
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from torch.utils.data import DataLoader

ConfigStore.instance().store("job", {"killed": False})


def loader(size: int) -> DataLoader[Any]:
    return DataLoader([small.as_tensors(row) for row in small.as_rows()], batch_size=size)


@hydra.main(version_base=None, config_name="job")
def main(config: Any) -> None:
    weights, _ = small.on_workers(loader, killed=config.killed)
    torch.save(weights, Path(HydraConfig.get().runtime.output_dir) / "weights.pt")


if __name__ == "__main__":
    main()
