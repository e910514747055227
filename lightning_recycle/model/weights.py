"""All weights of a module: processes exchange them, whatever the module's own ``state_dict`` leaves out or renames.

A module may override ``state_dict`` for its checkpoints, to leave out a backbone that is not trained for example. What
a worker that joins and the launching process get must be complete.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

__all__ = ["set_weights", "weights_of"]


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    """The parameters and persistent buffers of ``module`` by name, not copied."""
    state: dict[str, Tensor] = nn.Module.state_dict(module)
    return state


def set_weights(module: nn.Module, weights: Mapping[str, Any]) -> None:
    """Copies what :func:`weights_of` found in a module of the same form into ``module``."""
    nn.Module.load_state_dict(module, weights)
