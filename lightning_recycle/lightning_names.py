"""Lightning under both of its names: ``lightning.pytorch``, ``pytorch_lightning``.

Both packages are the same sources, but a class of one is not a class of the other. From the import of this package on,
whichever name a process imports first is loaded, and modules of the other name are the same modules. Both stay apart if
a process had loaded both before, or if their installed versions differ.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any

_OTHER_NAME = {"lightning.pytorch": "pytorch_lightning", "lightning.fabric": "lightning_fabric"}
_OTHER_NAME |= {other: name for name, other in _OTHER_NAME.items()}


def install() -> None:
    """From now on, modules of the name that is imported second are those of the first."""
    sys.meta_path.insert(0, _OneLightning())


def are_apart() -> bool:
    """Whether this process holds two different Lightnings."""
    return not _versions_agree() or (_is_loaded("lightning.pytorch") and _is_loaded("pytorch_lightning"))


def name_here(name: str) -> str:
    """The name of the same module or logger in the Lightning of this process."""
    for package, other in _OTHER_NAME.items():
        if name == package or name.startswith(f"{package}."):
            is_other = _is_loaded(other) and not _is_loaded(package) and _versions_agree()
            return other + name[len(package) :] if is_other else name
    return name


class _OneLightning(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        here = name_here(fullname)
        return None if here == fullname else importlib.machinery.ModuleSpec(fullname, _Loader(here))


class _Loader(importlib.abc.Loader):
    def __init__(self, here: str) -> None:
        self._here = here

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = importlib.import_module(self._here)  # the import takes what it finds here


def _is_loaded(name: str) -> bool:
    """Whether ``name`` is loaded by itself, not the other package under its name."""
    return getattr(sys.modules.get(name), "__name__", None) == name


@cache
def _versions_agree() -> bool:
    """Whether both packages are installed, in one version up to its bug fixes."""
    try:
        versions = {tuple(version(name).split(".")[:2]) for name in ("lightning", "pytorch-lightning")}
    except PackageNotFoundError:
        return False
    return len(versions) == 1
