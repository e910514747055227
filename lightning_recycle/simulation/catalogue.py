"""The paper's models, by name.

Each is calibrated by one number. For the three models that the paper ran on 32 A100, it is the reported fault-free
throughput (arXiv 2405.14009); for the four of Megatron-LM (Narayanan et al., SC'21, arXiv 2104.04473, table 1) it
is the sustained operations per second of a GPU there, 135, 138, 140 and 148 teraFLOP/s, turned into samples/s.

Choices made here where the papers say nothing:

- *Micro-batch 1 without recomputation* for the models on 32 A100: with 2, the 6.7B model does not fit into 80 GB.
- *M = 4 S* micro-batches per pipeline, hence a global batch of 128. With many more, the 6.7B model (4 pipelines) would
  have no idle time to hide a failure in, and would lose more than the reported 9 % at a failure every 2 h.
- *Dimensions of the 3.35B model*: 28 layers of width 3072 (3.33 billion parameters); the paper gives none.
- *Grids of the large models*: up to 64 stages without tensor parallelism, 64 x 24 for the largest, as in the paper's
  planning experiments; Megatron's own layouts use tensor parallelism 8.
"""

from __future__ import annotations

from lightning_recycle.errors import ConfigurationError
from lightning_recycle.simulation.training_model import TrainingModel
from lightning_recycle.simulation.transformer import Transformer

__all__ = ["available_models", "get_model"]


def _small(name: str, layers: int, width: int, heads: int, pipelines: int, stages: int, throughput: float) -> None:
    shape = Transformer(layers, width, heads)
    _SETTINGS[name] = {
        "transformer": shape,
        "pipelines": pipelines,
        "stages": stages,
        "global_batch": 128,
        "throughput": throughput,
    }


def _megatron(
    name: str, layers: int, width: int, heads: int, pipelines: int, stages: int, batch: int, teraflops: float
) -> None:
    shape = Transformer(layers, width, heads)
    # Megatron counts the recomputed forward: 96 B s l h^2 (1 + s / 6h + V / 16 l h).
    per_sample = sum(shape.flops(recompute=True))
    _SETTINGS[name] = {
        "transformer": shape,
        "pipelines": pipelines,
        "stages": stages,
        "global_batch": batch,
        "throughput": pipelines * stages * teraflops * 1e12 / per_sample,
        "recompute": True,
        "network_bandwidth": 25e9,  # one 200 Gb/s adapter per GPU
    }


_SETTINGS: dict[str, dict] = {}
_small("gpt3_medium", 24, 1024, 16, 16, 2, 27.58)
_small("gpt3_3_35b", 28, 3072, 32, 8, 4, 14.87)
_small("gpt3_6_7b", 32, 4096, 32, 4, 8, 5.33)
_megatron("megatron_18_4b", 40, 6144, 48, 16, 16, 1024, 135)
_megatron("megatron_39_1b", 48, 8192, 64, 16, 32, 1536, 138)
_megatron("megatron_76_1b", 60, 10240, 80, 16, 64, 1792, 140)
_megatron("megatron_145_6b", 80, 12288, 96, 24, 64, 2304, 148)


def available_models() -> tuple[str, ...]:
    """The names that :func:`get_model` knows, by size."""
    return tuple(_SETTINGS)


def get_model(name: str, **changes: object) -> TrainingModel:
    """The model of that name, optionally with settings changed, e.g. ``get_model("gpt3_6_7b", global_batch=1024)``.

    Raises:
        ConfigurationError: when the name is unknown, or a changed setting is impossible.
    """
    if name not in _SETTINGS:
        raise ConfigurationError(f"unknown model {name!r}: choose one of {', '.join(_SETTINGS)}.")
    return TrainingModel(name=name, **{**_SETTINGS[name], **changes})
