"""Any ``nn.Sequential`` as a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from typing_extensions import override

from lightning_recycle.errors import ConfigurationError
from lightning_recycle.model.module import PipelineModule
from lightning_recycle.model.optimizers import OptimizerFactory, check_factory, make_optimizers

__all__ = ["SequentialPipeline"]


class SequentialPipeline(PipelineModule):
    """The children of an ``nn.Sequential`` as layers, with a loss and an optimizer.

    What :meth:`PipelineModule.from_sequential` makes; its arguments are described there. Names in the state dict are
    those of the model behind ``layers.``. A 1-tuple reaches the next layer as its item.

    To load from a checkpoint, pass the same arguments:
    ``SequentialPipeline.load_from_checkpoint(path, model=..., loss=..., optimizer=...)``.

    Raises:
        ConfigurationError: if an argument is of the wrong kind.
    """

    def __init__(self, model: nn.Sequential, loss: Callable[[Any, Any], Tensor], optimizer: OptimizerFactory) -> None:
        super().__init__()
        if not isinstance(model, nn.Sequential):
            raise ConfigurationError(
                f"from_sequential() got a {type(model).__name__} as model; it takes an nn.Sequential. For other models"
                " derive a class from PipelineModule and return the layers from configure_pipeline()."
            )
        if isinstance(loss, type) or not callable(loss):
            raise ConfigurationError(
                f"from_sequential() got loss={loss!r}; pass a function of (output, target), such as"
                " torch.nn.functional.cross_entropy, or a module, such as nn.CrossEntropyLoss()."
            )
        if isinstance(loss, nn.Module) and any(True for _ in loss.parameters()):
            raise ConfigurationError(
                f"The loss {type(loss).__name__} has parameters; only layers can have some. Make it the last layer,"
                " with a loss function behind it."
            )
        check_factory(optimizer)
        self.criterion = loss
        self._optimizer = optimizer
        self._children = list(model)
        for layer in self._children:
            layer.register_forward_pre_hook(_pack)
        self._build_layers()
        self._children = []  # the layers of other stages are to be freed

    @override
    def configure_pipeline(self) -> list[nn.Module]:
        return self._children

    @override
    def loss(self, output: Any, target: Any) -> Tensor:
        return self.criterion(output, target)

    @override
    def configure_optimizers(self) -> Any:
        return make_optimizers(self._optimizer, self.parameters())


def _pack(layer: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """A forward pre-hook: several arguments are what the layer before returned as a tuple."""
    return arguments if len(arguments) == 1 else (arguments,)
