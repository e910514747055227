"""The dataset that docs/works_with.md shows. Workers import this module."""

from typing import Any

import torch
from torch.utils.data import Dataset


class Seeded(Dataset[Any]):
    def __init__(self, dataset: Any, transform: Any) -> None:
        self.dataset, self.transform = dataset, transform

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        self.transform.set_random_state(int(torch.randint(2**31, ())))
        return self.transform(self.dataset[index])
