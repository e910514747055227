"""Used by train_vision.py and others: a small convolutional network as a list of layers.

Its accuracy is exact on every grid. Norms are GroupNorm: unlike BatchNorm's, its result does not depend on how a batch
is cut into micro-batches. Shapes are (batch, channels, height, width).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

from lightning_recycle import LayerSpec, PipelineModule

_CHANNELS_PER_GROUP = 4


class Downsample(nn.Module):
    """Convolution with ``stride``, norm, ReLU: (batch, inputs, h, w) to (batch, outputs, h / stride, w / stride)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.norm = nn.GroupNorm(outputs // _CHANNELS_PER_GROUP, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.convolution(x)))


class ResidualBlock(nn.Module):
    """Two convolutions added to their input; shapes stay."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = Downsample(channels, channels, stride=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.GroupNorm(channels // _CHANNELS_PER_GROUP, channels)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.norm(self.second(self.first(x))))


class Classifier(nn.Module):
    """Everything in a row, then logits: (batch, channels, size, size) to (batch, classes)."""

    def __init__(self, channels: int, size: int, classes: int) -> None:
        super().__init__()
        self.logits = nn.Linear(channels * size * size, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.logits(x.flatten(1))
        return logits


class ConvNet(PipelineModule):
    """Classifies one-channel images (batch, 1, size, size).

    Args:
        size: Pixels per side, an even number.
        width: Channels of the first half, a multiple of 4; the second half has twice as many.
        blocks: Residual blocks of each half; there are ``2 * blocks + 3`` layers.
        classes: Number of classes.
        learning_rate: Learning rate of AdamW.
    """

    def __init__(
        self, size: int = 8, width: int = 16, blocks: int = 2, classes: int = 10, learning_rate: float = 3e-3
    ) -> None:
        super().__init__()
        if size < 2 or size % 2:
            raise ValueError(f"size={size}: choose an even number of pixels")
        if width < 1 or width % _CHANNELS_PER_GROUP:
            raise ValueError(f"width={width}: choose a multiple of {_CHANNELS_PER_GROUP}")
        self.save_hyperparameters()
        self.size = size
        self.width = width
        self.blocks = blocks
        self.classes = classes
        self.learning_rate = learning_rate
        self.accuracy = MulticlassAccuracy(classes, average="micro")

    def configure_pipeline(self) -> list[nn.Module | LayerSpec]:
        """The layers in order; the strategy cuts this list into stages."""
        return [
            LayerSpec(Downsample, 1, self.width, stride=1),
            *(LayerSpec(ResidualBlock, self.width) for _ in range(self.blocks)),
            LayerSpec(Downsample, self.width, 2 * self.width, stride=2),
            *(LayerSpec(ResidualBlock, 2 * self.width) for _ in range(self.blocks)),
            LayerSpec(Classifier, 2 * self.width, self.size // 2, self.classes),
        ]

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Mean cross-entropy in nats of logits (batch, classes) and classes (batch,)."""
        return F.cross_entropy(output, target)

    def on_validation_output(self, output: Tensor, target: Tensor) -> None:
        """Log the loss as ``val_loss`` and the fraction of images classified correctly as ``val_accuracy``."""
        super().on_validation_output(output, target)
        self.accuracy.update(output, target)
        self.log("val_accuracy", self.accuracy, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW over the parameters of this worker's stage."""
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)
