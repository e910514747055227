"""What is refused of a module: layers replayed from one CUDA graph in a pipeline, ties that sharding separates."""

from types import CodeType
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

from lightning_recycle.errors import ConfigurationError, UnsupportedFeatureError
from lightning_recycle.session.configuration import check_graphs, plans_checked


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


def make_graphed_callables(module: nn.Module) -> None:
    """What torch's does to a module, without a device."""

    def make_graphed_forward() -> Any:
        def new_fwd(*args: Any) -> None: ...

        return new_fwd

    module.forward = make_graphed_forward()


def test_a_graphed_layer_of_a_pipeline_is_an_error_that_names_it():
    module = Module()
    check_graphs(module, 2)
    make_graphed_callables(module.layers[1])
    with pytest.raises(UnsupportedFeatureError, match=r"Module\.layers\.1 .*reduce-overhead"):
        check_graphs(module, 2)
    check_graphs(module, 1)


def test_torch_still_replaces_the_forward_of_what_it_is_given():
    """The name is how such a layer is known."""
    code: Any = torch.cuda.make_graphed_callables.__code__

    def functions(code: CodeType) -> set[str]:
        inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        return {code.co_name}.union(*(functions(found) for found in inner))

    assert {"make_graphed_callables", "make_graphed_forward", "new_fwd"} <= functions(code)


def replace_weights(*layers: nn.Module) -> None:
    """Gives each parameters of its own, as ``parallelize_module`` does."""
    for layer in layers:
        layer.weight = nn.Parameter(layer.weight.detach().clone())


def test_weights_that_sharding_separates_are_an_error_that_says_how_to_tie_them():
    module = Module()
    module.layers[1].weight = module.layers[0].weight
    remedy = r"layers\.0\.weight and layers\.1\.weight: .*self\.layers\.1\.weight = self\.layers\.0\.weight"
    with pytest.raises(ConfigurationError, match=remedy), plans_checked(module):
        replace_weights(*module.layers)


def test_weights_that_are_tied_again_or_never_were_are_left_alone():
    module = Module()
    with plans_checked(module):
        replace_weights(module.layers[0])
    module.layers[1].weight = module.layers[0].weight
    with plans_checked(module):
        replace_weights(module.layers[0])
        module.layers[1].weight = module.layers[0].weight
