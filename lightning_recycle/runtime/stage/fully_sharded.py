"""Layers that FSDP2 has sharded, and their state between attempts.

Such a layer gathers its parameters before its forward and its backward, and sums their gradients over the members of
the position at the end of each backward. An attempt that is aborted leaves parameters gathered, which later changes of
the shards do not reach, and gradients that the next backward would add to its own. ``reset_iter_state`` is there from
torch 2.13 on.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from lightning_recycle.torch_internals import drop_unsharded_gradients, is_fsdp_root


def fully_sharded_modules(modules: Iterable[nn.Module]) -> Iterator[Any]:
    """Those of ``modules`` and their submodules that ``fully_shard`` was called for."""
    kind = _fsdp_module()
    if kind is not None:
        found = dict.fromkeys(part for module in modules for part in module.modules())
        yield from (module for module in found if isinstance(module, kind))


def unsharded_class(kind: type[Any]) -> type[Any]:
    """The class of an object of ``kind`` before ``fully_shard`` changed it."""
    bases = kind.__bases__
    return bases[1] if len(bases) == 2 and bases[0] is _fsdp_module() else kind


def _fsdp_module() -> type[Any] | None:
    """FSDP's class of sharded modules, if it was imported; importing it takes long."""
    return getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)


def can_be_reset() -> bool:
    """Whether this torch can begin a step again after an aborted one."""
    from torch.distributed.fsdp import FSDPModule

    return hasattr(FSDPModule, "reset_iter_state")


class FullyShardedLayers:
    """The modules in ``layers`` that are sharded by FSDP2; true if there are any."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        self._modules = list(fully_sharded_modules(layers))

    def __bool__(self) -> bool:
        return bool(self._modules)

    def reset(self) -> None:
        """Drops gathered parameters, and the rest of a forward or backward."""
        for module in self._modules:
            if is_fsdp_root(module):  # known from the first forward on
                module.reset_iter_state()
            drop_unsharded_gradients(module)
