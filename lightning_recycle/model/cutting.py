"""How a user's module is cut into stages: which kind of parts it has."""

from __future__ import annotations

import lightning.pytorch as pl

from lightning_recycle.errors import ConfigurationError
from lightning_recycle.model.chain_parts import ChainParts
from lightning_recycle.model.chains import LayerPaths
from lightning_recycle.model.module import PipelineModule
from lightning_recycle.model.parts import LayerParts, ModelParts, StepParts

__all__ = ["is_meant_to_be_cut", "parts_of"]


def is_meant_to_be_cut(module: pl.LightningModule, pipeline: LayerPaths = None) -> bool:
    """Whether ``module`` has several stages where the user does not say how many; ``pipeline``: the layers that the
    user names. Others have one, with which any module works.
    """
    return isinstance(module, PipelineModule) or pipeline is not None


def parts_of(module: pl.LightningModule, num_stages: int = 1, pipeline: LayerPaths = None) -> ModelParts:
    """How ``module`` is cut into ``num_stages``; ``pipeline``: the layers that the user names.

    Raises:
        ConfigurationError: if it cannot be cut.
    """
    if isinstance(module, PipelineModule):
        if pipeline is not None:
            raise ConfigurationError(
                f"ReCycleStrategy(layers={pipeline!r}) names the layers of an ordinary LightningModule, and"
                f" {type(module).__name__} is a PipelineModule: it returns its layers from configure_pipeline(). Leave"
                " the option out."
            )
        return LayerParts(module)
    return StepParts(module) if num_stages == 1 else ChainParts(module, num_stages, pipeline)
