"""Pickles of values of which the standard ones lose a part, for processes that do the same work.

- torch leaves out the hooks of a parameter, and that two tensors share memory.
- It refuses modules with parametrizations, whose class it has made itself.
- NumPy writes a memory-mapped file into the pickle; here each process maps the file.
"""

from __future__ import annotations

import mmap
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from lightning_recycle.tensor_memory import has_plain_memory

__all__ = ["parametrize_class", "reduced_array", "reduction_of", "written_class"]


def reduction_of(value: Any) -> Any:
    """The reduction of ``value`` for a pickler's ``reducer_override``; NotImplemented for the standard one."""
    if isinstance(value, Tensor):
        return _reduced_tensor(value)
    if type(value) is torch.UntypedStorage and value.device.type == "cpu":
        return _storage, (pickle.PickleBuffer(_bytes_of(value).numpy()),)  # type: ignore[arg-type]
    if isinstance(value, np.ndarray):
        return reduced_array(value)
    if isinstance(value, nn.Module) and "parametrizations" in value._modules and _is_parametrized(type(value)):
        return object.__new__, (written_class(value),), vars(value), None, None, _set_attributes
    return NotImplemented


# ---------------------------------------------------------------------- tensors


def _reduced_tensor(tensor: Tensor) -> Any:
    if type(tensor) not in (Tensor, nn.Parameter) or not tensor.is_leaf or not has_plain_memory(tensor):
        return NotImplemented
    memory = tensor.untyped_storage()  # the same object for all tensors that share it, so it is pickled once
    form = (tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride())
    hooks = (tensor._backward_hooks, getattr(tensor, "_post_accumulate_grad_hooks", None))
    state = (vars(tensor), *hooks)
    # The state is set once the tensor is memoized: hooks may refer to it.
    arguments = (memory, *form, type(tensor) is nn.Parameter, tensor.requires_grad)
    return (_tensor, arguments, state, None, None, _set_state) if any(state) else (_tensor, arguments)


def _storage(data: bytearray) -> torch.UntypedStorage:
    storage = torch.UntypedStorage(len(data))
    if data:
        _bytes_of(storage).copy_(torch.frombuffer(data, dtype=torch.uint8))
    return storage


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def _tensor(
    memory: torch.UntypedStorage,
    dtype: torch.dtype,
    offset: int,
    shape: torch.Size,
    stride: tuple[int, ...],
    is_parameter: bool,
    requires_grad: bool,
) -> Tensor:
    tensor = torch.empty(0, dtype=dtype).set_(memory, offset, shape, stride)
    return nn.Parameter(tensor, requires_grad) if is_parameter else tensor.requires_grad_(requires_grad)


def _set_state(tensor: Tensor, state: tuple[dict[str, Any], Any, Any]) -> None:
    attributes, tensor._backward_hooks, post_accumulate = state
    vars(tensor).update(attributes)
    if post_accumulate is not None:
        tensor._post_accumulate_grad_hooks = post_accumulate


# ---------------------------------------------------------------------- modules with parametrizations


def _is_parametrized(kind: type[Any]) -> bool:
    """Whether torch has made this class for one module with parametrizations."""
    return getattr(vars(kind).get("__getstate__"), "__module__", None) == parametrize.__name__


def written_class(module: Any) -> type[Any]:
    """The class of ``module`` without what parametrizations have made of it."""
    kind = type(module)
    return kind.__bases__[0] if _is_parametrized(kind) else kind


def parametrize_class(module: nn.Module) -> None:
    """Makes the class of ``module`` fit the parametrizations that it has."""
    kind, parametrizations = type(module), module._modules.get("parametrizations")
    wanted = list(parametrizations) if isinstance(parametrizations, nn.ModuleDict) else []
    here = [name for name, value in vars(kind).items() if isinstance(value, property)] if _is_parametrized(kind) else []
    if {*wanted} == {*here}:
        return
    module.__class__ = written_class(module)
    if wanted:
        parametrize._inject_new_class(module)
        for name in wanted:
            parametrize._inject_property(module, name)


def _set_attributes(module: nn.Module, attributes: dict[str, Any]) -> None:
    vars(module).update(attributes)
    parametrize_class(module)


# ---------------------------------------------------------------------- arrays


def reduced_array(array: np.ndarray[Any, Any]) -> Any:
    """The reduction of an array that lies in a memory-mapped file; NotImplemented for others.

    Arrays of ``mode="c"``, whose changes are not in the file, and of files that are gone are others.
    """
    root = array
    while isinstance(root.base, np.ndarray):
        root = root.base
    if not isinstance(root, np.memmap) or not isinstance(root.base, mmap.mmap) or root.mode == "c":
        return NotImplemented
    if type(array) not in (np.ndarray, np.memmap) or not isinstance(root.filename, (str, Path)):
        return NotImplemented
    if not os.path.isfile(root.filename):
        return NotImplemented
    if array is not root:
        begin = array.__array_interface__["data"][0] - root.__array_interface__["data"][0]
        return _view, (root, array.shape, array.dtype, begin, array.strides)
    mode = "r+" if root.mode == "w+" else root.mode
    order = "C" if root.flags.c_contiguous else "F"
    return np.memmap, (root.filename, root.dtype, mode, root.offset, root.shape, order)


def _view(root: np.ndarray[Any, Any], shape: Any, dtype: Any, begin: int, strides: Any) -> np.ndarray[Any, Any]:
    return np.ndarray(shape, dtype, root.ravel("K"), begin, strides)
