"""Costs and memory of GPT-style transformers from their dimensions, and of the GPUs that train them.

Concept: floating-point operations and bytes follow from layers, width, heads and sequence length. The fraction of the
peak that a GPU reaches is one number per model, calibrated in ``training_model``.

Contract: frozen values; per sample (one sequence), whole model, unless a name says otherwise.

Must not know: grids, schedules, failures.

Sources: operations from Narayanan et al., SC'21 (arXiv 2104.04473), section 5.1, split into F, B and W: a linear layer
costs the same in each, the attention products have no weights and cost twice as much in B as in F. Activation bytes
from Korthikanti et al. (arXiv 2205.05198), equation 2: s b h (34 + 5 a s / h) per layer without recomputation.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from lightning_recycle.arguments import at_least, whole
from lightning_recycle.errors import ConfigurationError

__all__ = ["GPUS", "Gpu", "Transformer", "get_gpu"]


STATE_BYTES_PER_PARAMETER = 16.0
"""Mixed precision with Adam: half-precision weight and gradient (2 + 2), single-precision weight and two moments
(4 + 4 + 4); Rajbhandari et al., ZeRO (arXiv 1910.02054), section 3.1."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A type of GPU: peak half-precision operations per second, memory in bytes, memory bandwidth in bytes/s."""

    name: str
    peak_flops: float
    memory_bytes: float
    memory_bandwidth: float


GPUS = {
    gpu.name: gpu
    for gpu in (  # manufacturer's data sheets, dense
        Gpu("V100-16GB", 125e12, 16e9, 0.9e12),
        Gpu("A100-40GB", 312e12, 40e9, 1.555e12),
        Gpu("A100-80GB", 312e12, 80e9, 2.0e12),
        Gpu("H100-80GB", 989e12, 80e9, 3.35e12),
        Gpu("H200-141GB", 989e12, 141e9, 4.8e12),
    )
}


def get_gpu(gpu: str | Gpu) -> Gpu:
    """The GPU of that name; a Gpu is returned unchanged.

    Raises:
        ConfigurationError: when the name is unknown.
    """
    if isinstance(gpu, Gpu):
        return gpu
    if gpu not in GPUS:
        raise ConfigurationError(f"unknown GPU {gpu!r}: choose one of {', '.join(GPUS)}, or give a Gpu(...).")
    return GPUS[gpu]


@dataclass(frozen=True, slots=True)
class Transformer:
    """A GPT-style decoder.

    Args:
        layers: transformer layers.
        width: hidden size h.
        heads: attention heads a.
        sequence: tokens per sample s.
        vocabulary: entries of the embedding, which is shared with the output layer.
    """

    layers: int
    width: int
    heads: int
    sequence: int = 2048
    vocabulary: int = 51200

    def __post_init__(self) -> None:
        for item in fields(self):
            whole("Transformer", item.name, getattr(self, item.name), 1)
        if self.width % self.heads:
            raise ConfigurationError(f"Transformer(width={self.width}, heads={self.heads}): heads must divide width.")

    @property
    def parameters(self) -> int:
        """12 l h^2 + 13 l h + (V + s) h."""
        h = self.width
        return self.layers * (12 * h * h + 13 * h) + (self.vocabulary + self.sequence) * h

    @property
    def linear_flops(self) -> float:
        """Operations of all linear layers and the output layer for one sample, the same in F, B and W."""
        return float(self.sequence) * (24 * self.layers * self.width**2 + 2 * self.width * self.vocabulary)

    @property
    def attention_flops(self) -> float:
        """Operations of the attention products in F for one sample; twice as many in B, none in W."""
        return 4.0 * self.layers * self.sequence**2 * self.width

    def flops(self, *, recompute: bool = False) -> tuple[float, float, float]:
        """Operations of (F, B, W) for one sample; with ``recompute`` B runs F again first."""
        forward = self.linear_flops + self.attention_flops
        backward = self.linear_flops + 2 * self.attention_flops + (forward if recompute else 0.0)
        return forward, backward, self.linear_flops

    def activation_bytes(self, *, recompute: bool = False) -> float:
        """Bytes that one sample holds from F to W, all layers; with ``recompute``, only each layer's input."""
        per_token = 2.0 if recompute else 34.0 + 5.0 * self.heads * self.sequence / self.width
        return self.layers * self.sequence * self.width * per_token

    def boundary_bytes(self) -> float:
        """Bytes between two stages for one sample, in half precision."""
        return 2.0 * self.sequence * self.width

    def state_bytes(self, per_parameter: float = STATE_BYTES_PER_PARAMETER) -> float:
        """Bytes of weights, gradients and optimizer state."""
        return self.parameters * at_least("Transformer", "per_parameter", per_parameter)
