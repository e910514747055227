"""Models in float64 and their data, of which every grid makes the same global micro-batches."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import Dataset, TensorDataset

from lightning_recycle import LayerSpec, PipelineModule

GLOBAL_MICROBATCHES = 12
GLOBAL_BATCH = 24
STEPS = 10


class Regression(PipelineModule):
    """Six layers in float64; with ``dropout`` two more that draw."""

    def __init__(self, dropout: float = 0.0, specs: bool = False, clip_scale: float = 1.0) -> None:
        super().__init__()
        self.dropout, self.specs, self.clip_scale = dropout, specs, clip_scale

    def configure_pipeline(self) -> list[Any]:
        torch.manual_seed(0)
        linear = LayerSpec if self.specs else lambda cls, *args: cls(*args)
        layers: list[Any] = [linear(nn.Linear, 8, 16), nn.Tanh(), linear(nn.Linear, 16, 16)]
        if self.dropout:
            layers += [nn.Dropout(self.dropout), nn.Linear(16, 16), nn.Dropout(self.dropout)]
        layers += [nn.ReLU(inplace=True), nn.Linear(16, 4), nn.Linear(4, 1)]
        return layers

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return self.clip_scale * (output - target).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Divided(Regression):
    """The members of a position share the last two linear layers."""

    def configure_model(self) -> None:
        super().configure_model()
        *_, up, down = (layer for layer in self.layers if isinstance(layer, nn.Linear))
        parallelize_module(up, self.device_mesh["tensor_parallel"], ColwiseParallel())
        parallelize_module(down, self.device_mesh["tensor_parallel"], RowwiseParallel())


class Scheduled(Regression):
    """With a learning rate that falls every step."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Samples with random augmentation."""

    def __len__(self) -> int:
        return GLOBAL_BATCH * STEPS

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = torch.full((8,), index / len(self), dtype=torch.float64) + torch.randn(8, dtype=torch.float64)
        return x, x.sum(0, keepdim=True)


def dataset(num_samples: int = GLOBAL_BATCH * STEPS) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(num_samples, 8, generator=generator, dtype=torch.float64)
    y = torch.randn(num_samples, 1, generator=generator, dtype=torch.float64)
    return TensorDataset(x, y)


class Encode(nn.Module):
    """A product with a weight (outputs, inputs) that a :class:`Decode` may share."""

    def __init__(self, outputs: int, inputs: int, divisor: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / divisor)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight)


class Decode(nn.Module):
    """The transpose of an :class:`Encode`, with its weight."""

    def __init__(self, encode: Encode) -> None:
        super().__init__()
        self.weight = encode.weight

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.t()).mean(-1, keepdim=True)


class AutoEncoder(PipelineModule):
    """Its first layer and its last share a weight."""

    def configure_pipeline(self) -> list[nn.Module]:
        torch.manual_seed(0)
        encode = Encode(6, 8, 3)
        return [encode, nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 6), nn.Tanh(), Decode(encode)]

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)
