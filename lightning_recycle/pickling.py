"""Pickles for worker processes: the user's ``__main__`` by name, else by value.

A script with a main guard is imported by every worker, so what it defines outside the guard is found there by name.
Everything else of ``__main__`` travels *by value* (cloudpickle): what stands under the guard, all of a script that has
none (to import it would run it again), of ``python -c``, of stdin, of a notebook; so do lambdas and local classes. It
is put into the worker's ``__main__`` under its name, so that later pickles mean the same on both sides. So are values
of global variables that the guard, or functions that it calls, may have set.

Standard pickles lose parts of some values: hooks of parameters, memory that tensors share, the dtype of a parameter
without a shape, the classes of modules with parametrizations. NumPy copies a memory-mapped file into the pickle; here
each process maps the file.
"""

from __future__ import annotations

import ast
import contextlib
import io
import mmap
import multiprocessing
import os
import pickle
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from multiprocessing import spawn
from pathlib import Path
from types import CellType, FunctionType, ModuleType
from typing import IO, Any
from unittest.mock import patch

import cloudpickle
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from lightning_recycle.tensor_memory import has_plain_memory, host_reduction, is_sharded


def reduction_of(value: Any) -> Any:
    """The reduction of ``value`` for ``reducer_override``, or NotImplemented."""
    if isinstance(value, Tensor):
        return host_reduction(value) if is_sharded(value) else _reduced_tensor(value)
    if type(value) is torch.UntypedStorage:  # as for tensors of a device: it comes to the host
        return _storage, (pickle.PickleBuffer(_bytes_of(value.cpu()).numpy()),)  # type: ignore[arg-type]
    if isinstance(value, np.ndarray):
        return reduced_array(value)
    if isinstance(value, nn.Module) and "parametrizations" in value._modules and _is_parametrized(type(value)):
        return object.__new__, (written_class(value),), vars(value), None, None, _set_attributes
    return NotImplemented


# ---------------------------------------------------------------------- tensors


def _reduced_tensor(tensor: Tensor) -> Any:
    if is_lazy(tensor):
        return type(tensor), (tensor.requires_grad, tensor.device, tensor.dtype)
    if type(tensor) not in (Tensor, nn.Parameter) or not tensor.is_leaf or not has_plain_memory(tensor):
        return host_reduction(tensor)
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
    """The reduction of an array in a memory-mapped file; NotImplemented for others.

    Others are also arrays of ``mode="c"``, whose changes are not in the file, and those whose file is gone.
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


# ---------------------------------------------------------------------- the user's script


_MAIN = "__main__"
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_lock = threading.Lock()


@dataclass(frozen=True)
class MainModule:
    """The script as workers see it: whether they import it, and names hidden then.

    ``settings``: variables that functions read, and that the guard or a function sets or changes; and attributes that
    they set, as dotted names.
    """

    imported: bool
    hidden: frozenset[str] = frozenset()
    settings: frozenset[str] = frozenset()

    def provides(self, value: Any) -> bool:
        """Whether workers find ``value`` of ``__main__`` by its name."""
        name: str = value.__qualname__
        return self.imported and name.split(".")[0] not in self.hidden and _found(name) is value


def main_module() -> MainModule:
    """The ``__main__`` of this process, as workers will see it."""
    main = sys.modules[_MAIN]
    spec, path = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if spec is not None and spec.name.split(".")[-1] == _MAIN:
        return MainModule(imported=False)  # `python -m package`: multiprocessing imports no module of that name
    try:
        return read_script(Path(path).read_bytes()) if path is not None else MainModule(imported=False)
    except (OSError, SyntaxError, ValueError):  # "<stdin>", a zip file, or whatever else is not a script in a file
        return MainModule(imported=False)


_PARSING = threading.Lock()
"""Python up to 3.12 counts the depth of all threads' parsers together: https://github.com/python/cpython/issues/106905."""


def read_script(source: str | bytes) -> MainModule:
    """A script with this source, as workers see it; SyntaxError if it is no Python."""
    with _PARSING:
        tree = ast.parse(source)
    statements = tree.body
    guards = [statement for statement in statements if isinstance(statement, ast.If) and _asks_for_main(statement.test)]
    if not guards:
        return MainModule(imported=False)
    imports = [node for guard in guards for node in ast.walk(guard) if isinstance(node, ast.Import | ast.ImportFrom)]
    imported = {alias.asname or alias.name.partition(".")[0] for node in imports for alias in node.names}
    guarded = {name for guard in guards for name in _names(guard.body)} | imported
    outside = set(_names([statement for statement in statements if statement not in guards]))
    functions = [node for node in ast.walk(tree) if isinstance(node, _FUNCTIONS)]
    inner = [node for function in functions for node in ast.walk(function)]
    read = {node.id for node in inner if isinstance(node, ast.Name)}
    declared = {name for node in inner if isinstance(node, ast.Global) for name in node.names}
    changed = {path for node in chain(inner, *map(ast.walk, guards)) if (path := _changed(node))}
    roots = {path.partition(".")[0] for path in changed}
    return MainModule(
        imported=True,
        hidden=frozenset(guarded - outside),
        settings=frozenset(
            {*(read & (guarded | declared | (outside & roots))), *(path for path in changed if "." in path)}
        ),
    )


def _changed(node: ast.AST | None) -> str | None:
    """Dotted name of what is set here, has an item set, or has a method called."""
    if isinstance(node, ast.Call):
        node = getattr(node.func, "value", None)
    elif not isinstance(getattr(node, "ctx", None), ast.Store | ast.Del):
        return None
    names: list[str] = []
    while isinstance(node, ast.Attribute | ast.Subscript):
        names = [node.attr, *names] if isinstance(node, ast.Attribute) else []
        node = node.value
    return ".".join([node.id, *names]) if isinstance(node, ast.Name) else None


def _asks_for_main(test: ast.expr) -> bool:
    parts = list(ast.walk(test))
    return any(isinstance(part, ast.Name) and part.id == "__name__" for part in parts) and any(
        isinstance(part, ast.Constant) and part.value == _MAIN for part in parts
    )


def _names(statements: Sequence[ast.AST]) -> Iterator[str]:
    """Names that these statements of a module bind."""
    for node in statements:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name  # what it has inside is local
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        else:
            yield from _names(list(ast.iter_child_nodes(node)))


def _found(qualified_name: str) -> Any:
    value: Any = sys.modules[_MAIN]
    for part in qualified_name.split("."):
        value = getattr(value, part, None)
    return value


# ---------------------------------------------------------------------- in the launching process


class MainPickler(cloudpickle.Pickler):
    """Pickles by name what workers find, and by value the rest of ``__main__``.

    ``definitions`` holds what was pickled by value and has a name there.
    """

    def __init__(self, file: IO[bytes], main: MainModule) -> None:
        super().__init__(file)
        self._main = main
        self.definitions: dict[str, Any] = {}
        # The globals of a function that travels are those of the worker's `__main__`, not a dict of their own.
        self.globals_ref[id(vars(sys.modules[_MAIN]))] = _Namespace(__name__=_MAIN)

    def reducer_override(self, value: Any) -> Any:
        if (known := reduction_of(value)) is not NotImplemented:
            return known
        if isinstance(value, type | FunctionType) and value.__module__ == _MAIN:
            if self._main.provides(value):
                return NotImplemented
            if _found(value.__qualname__) is value and "." not in value.__qualname__:
                self.definitions[value.__qualname__] = value
        if isinstance(value, CellType):
            return _empty_cell, ()  # each function that has it brings its content
        reduced = super().reducer_override(value)
        if isinstance(value, FunctionType) and value.__closure__ and isinstance(reduced, tuple):
            return _with_shared_cells(value, value.__closure__, reduced)
        if isinstance(value, type) and isinstance(reduced, tuple) and len(reduced) > 2:  # a class that is put together
            # The states of callbacks and data modules are found by this name, which cloudpickle leaves out.
            attributes, _ = reduced[2]
            attributes["__qualname__"] = value.__qualname__
        return reduced


def _with_shared_cells(function: FunctionType, cells: tuple[CellType, ...], reduced: tuple[Any, ...]) -> Any:
    """``reduced`` with shared closure variables, which cloudpickle would copy."""
    make, (*arguments, _), (attributes, members), *_, setter = reduced
    state = setter, (attributes, {**members, "__closure__": None}), [*map(content_of, cells)]
    return make, (*arguments, cells), state, None, None, _fill_cells


def content_of(cell: CellType) -> tuple[Any, ...]:
    """The value of a variable of functions; empty before the first."""
    try:
        return (cell.cell_contents,)
    except ValueError:
        return ()


def _empty_cell() -> CellType:
    return CellType()  # pickle finds no class of that name


def _fill_cells(function: Any, state: tuple[Any, Any, list[tuple[Any, ...]]]) -> None:
    setter, own, contents = state
    setter(function, own)
    for cell, content in zip(function.__closure__, contents, strict=True):
        if content:
            (cell.cell_contents,) = content


class _Namespace(dict[str, Any]):
    """Stands in a pickle for the namespace of ``__main__`` where it is loaded."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _namespace, ()


def dumps(value: Any, pickler: type[MainPickler] = MainPickler) -> bytes:
    """Pickles ``value`` in a worker for the launching process."""
    file = io.BytesIO()
    pickler(file, MainModule(imported=True)).dump(value)
    return file.getvalue()


def _namespace() -> dict[str, Any]:
    return vars(sys.modules[_MAIN])


@contextlib.contextmanager
def import_of_main(wanted: bool) -> Iterator[None]:
    """Within the block, this thread's processes import ``__main__`` if ``wanted``.

    Their default start method is that of this process, unless only this process knows it, as those of joblib do.
    """
    thread = threading.get_ident()
    with _lock:
        prepare = spawn.get_preparation_data

        def for_worker(name: str) -> dict[str, Any]:
            data: dict[str, Any] = prepare(name)
            if threading.get_ident() == thread:
                for key in () if wanted else ("init_main_from_name", "init_main_from_path"):
                    data.pop(key, None)
                if data["start_method"] not in multiprocessing.get_all_start_methods():
                    del data["start_method"]
            return data

        with patch.object(spawn, "get_preparation_data", for_worker):
            yield


# ---------------------------------------------------------------------- in a worker


def enter_main() -> None:
    """Gives a worker that has not imported the script an empty ``__main__``."""
    if "__mp_main__" not in sys.modules:  # the name under which multiprocessing imports one
        sys.modules[_MAIN] = sys.modules["__mp_main__"] = ModuleType(_MAIN)


def exit_if_importing() -> None:
    """Ends a worker whose import of the script has come to a call of ``fit``.

    Quietly: the launching process says why there are no workers.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        sys.stdout.flush()
        os._exit(1)
