"""Private parts of torch that several rooms use, under public names.

torch 2.6 has no public way to them. ``tests/test_import.py`` fails when one disappears.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from operator import attrgetter
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.modules import batchnorm
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_map_only as tree_map_only
from torch.utils.data import get_worker_info

NormBase = batchnorm._NormBase
foreach_add_ = torch._foreach_add_
foreach_copy_ = torch._foreach_copy_
foreach_mul = torch._foreach_mul
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm
make_subclass = Tensor._make_subclass
_version = attrgetter("_version")


def modules_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """The table of the direct children of ``module``, past its ``__setattr__``."""
    return module._modules


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The table of the parameters of ``module`` itself, past its ``__setattr__``."""
    return module._parameters


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """The table of the buffers of ``module`` itself, past its ``__setattr__``."""
    return module._buffers


def is_compiled(module: nn.Module) -> bool:
    """Whether ``module.compile()`` was called."""
    return getattr(module, "_compiled_call_impl", None) is not None


def reduce_without_compilation(module: nn.Module) -> tuple[Any, ...]:
    """The reduction of a compiled module, without what ``compile()`` made."""
    reduced: Any = module.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    make, arguments, state = reduced[:3]
    return make, arguments, {name: value for name, value in state.items() if name != "_compiled_call_impl"}


def version_of(tensor: Tensor) -> int:
    """Number of writes to the memory of ``tensor`` that autograd has counted."""
    return tensor._version


def versions_of(tensors: Iterable[Tensor]) -> list[int]:
    """:func:`version_of` of each."""
    return list(map(_version, tensors))


def show_dataset(dataset: Any) -> None:
    """Lets ``get_worker_info()`` show ``dataset``, by which users divide it."""
    object.__setattr__(get_worker_info(), "dataset", dataset)  # write-protected


def replace_tensors(module: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
    """Replaces each parameter and buffer of ``module``; FSDP2 notices that."""
    module._apply(function)


def is_registered_from_outside(device: torch.device) -> bool:
    """Whether the kind of ``device`` is not one of torch's own."""
    return device.type == torch._C._get_privateuse1_backend_name()


@contextmanager
def moved_by_swaps() -> Iterator[None]:
    """Within the block FSDP2 moves its shards by swapping tensors.

    Not all kinds of devices let torch replace their memory alone.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_init  # slow to import

    def move(parameters: Iterable[nn.Parameter], buffers: Iterable[Tensor], device: torch.device) -> None:
        for tensor in (*parameters, *buffers):
            if tensor.device != device and tensor.device.type != "meta":
                moved = tensor.detach().to(device)
                is_parameter = isinstance(tensor, nn.Parameter)
                torch.utils.swap_tensors(tensor, nn.Parameter(moved, tensor.requires_grad) if is_parameter else moved)

    with patch.object(_fsdp_init, "_move_states_to_device", move):
        yield


def is_fsdp_root(module: Any) -> bool:
    """Whether ``module``, sharded by FSDP2, runs without one around it."""
    return bool(module._get_fsdp_state()._is_root)


def fsdp_parameters(module: Any) -> list[nn.Parameter]:
    """The parameters that ``module``, sharded by FSDP2, gathers itself."""
    return [p.sharded_param for group in module._get_fsdp_state()._fsdp_param_groups for p in group.fsdp_params]


def fsdp_places(module: Any) -> Iterator[tuple[nn.Module, str]]:
    """Modules and names by which FSDP2 has :func:`fsdp_parameters` in tables."""
    for group in module._get_fsdp_state()._fsdp_param_groups:
        for parameter in group.fsdp_params:
            info = parameter._module_info
            yield info.module, info.param_name
            yield from zip(info.shared_modules, info.shared_param_names, strict=True)


def drop_unsharded_gradients(module: Any) -> None:
    """Drops gradients that FSDP2 has not summed over the processes yet."""
    for group in module._get_fsdp_state()._fsdp_param_groups:
        for parameter in group.fsdp_params:
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None
            parameter.unsharded_accumulated_grad = None


def offset_of(tensor: Any) -> tuple[int, ...]:
    """Where this process's part of a DTensor begins, in each dimension."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # slow to import

    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(offset)


def hooks_after_accumulation(parameters: Iterable[nn.Parameter]) -> Iterator[tuple[nn.Parameter, dict[Any, Any]]]:
    """The parameters with hooks for after an accumulation, and those hooks."""
    for parameter in parameters:
        if hooks := getattr(parameter, "_post_accumulate_grad_hooks", None):
            yield parameter, hooks


def take_hooks_after_accumulation(parameters: Iterable[nn.Parameter]) -> dict[nn.Parameter, dict[Any, Any]]:
    """Removes those hooks, and returns them."""
    taken = dict(hooks_after_accumulation(parameters))
    for parameter in taken:
        set_hooks_after_accumulation(parameter, OrderedDict())
    return taken


def set_hooks_after_accumulation(parameter: nn.Parameter, hooks: dict[Any, Any]) -> None:
    """Replaces those hooks; torch keeps the old ones if it is given None."""
    parameter._post_accumulate_grad_hooks = hooks


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Whether hooks see each call of the optimizer's ``step``."""
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def replace_total_norm(function: Callable[..., Tensor] | None) -> None:
    """Replaces the norm of ``clip_grad_norm_``; with None it is torch's again."""
    clip_grad._get_total_norm = nn.utils.get_total_norm if function is None else function


@contextmanager
def after_unscaling(
    scaler: GradScaler, change: Callable[[Tensor, dict[Any, Tensor]], dict[Any, Tensor]]
) -> Iterator[None]:
    """Changes the overflows that ``scaler`` finds in the block, by device.

    Torch's own scaler for sharded gradients overrides the same method.
    """
    unscale = scaler._unscale_grads_

    def unscale_and_change(optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool) -> dict[Any, Tensor]:
        return change(found_inf, unscale(optimizer, inv_scale, found_inf, allow_fp16))

    with patch.object(scaler, "_unscale_grads_", unscale_and_change):
        yield


is_zero_tensor = Tensor._is_zerotensor  # one without memory
is_transforming: Callable[[], bool] = torch._C._are_functorch_transforms_active
"""Whether the code runs within a transform of ``torch.func``."""


@contextmanager
def hooks_outside_of_transforms(hooks: AbstractContextManager[None]) -> Iterator[None]:
    """Hooks for saved tensors in the block, outside of transforms of ``torch.func``.

    Those refuse them all.
    """
    refuse, depth = torch.autograd.graph.disable_saved_tensors_hooks, 0

    @contextmanager
    def refuse_others(message: str) -> Iterator[None]:
        nonlocal depth
        depth += 1
        if depth == 1:
            hooks.__exit__(None, None, None)
        try:
            with refuse(message):
                yield
        finally:
            depth -= 1
            if depth == 0:
                hooks.__enter__()

    with patch.object(torch.autograd.graph, "disable_saved_tensors_hooks", refuse_others), hooks:
        yield
