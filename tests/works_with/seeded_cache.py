"""The dataset of MONAI that docs/works_with.md shows."""

from typing import Any

import torch
from monai.data import CacheDataset


class SeededCache(CacheDataset):
    def _transform(self, index: int) -> Any:
        self.transform.set_random_state(int(torch.randint(2**31, ())))
        return super()._transform(index)
