"""A module for batches of graphs of ``torch_geometric``."""

from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch_geometric.nn import GCNConv, global_mean_pool


class Graphs(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.head = GCNConv(4, 8).double(), torch.nn.Linear(8, 1).double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = self.conv(batch.x, batch.edge_index).tanh()
        return (self.head(global_mean_pool(hidden, batch.batch)).flatten() - batch.y).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-2)
