"""Documented modules that have moved: in this release the old path still works, with a warning."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import warnings
from types import ModuleType
from typing import Any

__all__ = ["MOVED", "install"]

MOVED = {
    "lightning_recycle.adapters": "lightning_recycle.model",
    "lightning_recycle.adapters.huggingface": "lightning_recycle.model.huggingface",
    "lightning_recycle.adapters.sequential": "lightning_recycle.model.module",
    "lightning_recycle.module": "lightning_recycle.model.module",
    "lightning_recycle.partition": "lightning_recycle.model.partition",
    "lightning_recycle.resilience": "lightning_recycle.control",
    "lightning_recycle.resilience.messages": "lightning_recycle.control.history",
}
"""Old path -> new path."""


class _Redirect(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(fullname, self) if fullname in MOVED else None

    def exec_module(self, module: ModuleType) -> None:
        old = module.__name__
        warnings.warn(f"{old} has moved to {MOVED[old]}; import it from there.", FutureWarning, stacklevel=2)
        sys.modules[old] = importlib.import_module(MOVED[old])  # the import takes what it finds here


def install() -> None:
    """Makes the old paths importable."""
    sys.meta_path.insert(0, _Redirect())
