"""Norms of gradients that users' hooks ask for, on workers that hold one stage of the model.

``lightning.pytorch.utilities.grad_norm`` tells the norm of each gradient of a module and their total; a worker finds
those of its stage only. In a worker it asks the other stages and returns what one device would, the same on all
workers. All must call it, at the same place, as its norms travel through the coordinator.

``torch.nn.utils.clip_grad_norm_`` cannot know whether it is given all parameters that the user wants clipped together,
so a warning tells that they are those of one stage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any, TypeAlias

import torch
from lightning.pytorch.utilities import grad_norm, rank_zero_warn
from torch import Tensor, nn
from torch.nn.utils import clip_grad

__all__ = ["complete_norms", "norms_of_all_stages"]

_Gather: TypeAlias = Callable[[str, Callable[[], Any]], list[Any]]

_of_stage = FunctionType(grad_norm.__code__, grad_norm.__globals__, "grad_norm", grad_norm.__defaults__)
_total_norm = clip_grad._get_total_norm
_gather: _Gather | None = None
_names: Mapping[int, str] = {}


def complete_norms(gather: _Gather | None, names: Mapping[int, str] | None = None) -> None:
    """From now on norms are those of all stages; with None, of what this process holds.

    Args:
        gather: (name, function) -> what the function returns in each stage, in order, on all workers.
        names: the names of this stage's parameters, by ``id``; those that are tied have the same.
    """
    global _gather, _names
    _gather, _names = gather, names or {}
    # Users' modules hold the function itself (``from ... import grad_norm``): only what it runs can be replaced.
    grad_norm.__code__ = (_of_stage if gather is None else _grad_norm).__code__
    clip_grad._get_total_norm = _total_norm if gather is None else _warned_total_norm


def norms_of_all_stages(module: nn.Module, norm_type: Any, group_separator: str = "/") -> dict[str, Any]:
    """What ``grad_norm`` returns for ``module`` on one device."""
    assert _gather is not None
    norms = _of_stage(module, norm_type, group_separator)
    prefix = f"grad_{float(norm_type)}_norm"
    own = [
        (_names.get(id(parameter), name), entry, norms[entry].detach().cpu())
        for name, parameter in module.named_parameters()
        if (entry := f"{prefix}{group_separator}{name}") in norms
    ]
    whole: dict[str, Any] = {}
    counted: set[str] = set()
    for part in _gather("norms of gradients", lambda: own):
        for name, entry, norm in part:
            if name not in counted:  # otherwise a copy of a tied parameter, which one device has once
                whole[entry] = norm
                counted.add(name)
    if whole:
        whole[f"{prefix}_total"] = torch.tensor(list(whole.values())).norm(float(norm_type))
    return whole


def _grad_norm(module: nn.Module, norm_type: Any, group_separator: str = "/") -> dict[str, Any]:
    # This runs among the globals of Lightning's function.
    from lightning_recycle.session.gradient_norms import norms_of_all_stages

    return norms_of_all_stages(module, norm_type, group_separator)


_has_warned = False


def _warned_total_norm(*args: Any, **kwargs: Any) -> Tensor:
    global _has_warned
    if not _has_warned:
        _has_warned = True
        rank_zero_warn(
            "torch.nn.utils.clip_grad_norm_() sees the gradients of one stage of the model: each stage is clipped by a"
            " norm of its own. To clip by the norm of the whole model, use Trainer(gradient_clip_val=...), or"
            " self.clip_gradients(...) in configure_gradient_clipping()."
        )
    return _total_norm(*args, **kwargs)
