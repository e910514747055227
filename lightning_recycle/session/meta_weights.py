"""Memory and first values for parameters that ``configure_model`` has made on torch's meta device.

Concept: as in Lightning's strategies, what is on the meta device gets memory, and the ``reset_parameters()`` of the
module that has it gives it values. Of a tensor that is sharded over a position a worker gets its own part. The values
are drawn for whole tensors, one module after the other, and each worker keeps its part: so they do not depend on the
grid, and no worker ever holds more of the weights than its own part and one module.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from lightning_recycle.randomness import derive_seed, seeded_everything
from lightning_recycle.tensor_memory import local_part, part_like
from lightning_recycle.torch_internals import buffers_of, parameters_of, replace_tensors

__all__ = ["materialize"]


def materialize(module: nn.Module, device: torch.device, seed: int, is_elsewhere: Callable[[str], bool]) -> None:
    """Gives the parameters and buffers of ``module`` that are on the meta device memory on ``device``, and values.

    Args:
        module: the user's module.
        device: the device of this worker.
        seed: the seed of the run.
        is_elsewhere: whether a parameter or buffer, by its name, belongs to another stage.
    """
    named = [*module.named_parameters(), *module.named_buffers()]
    wanted = {id(tensor) for name, tensor in named if tensor.is_meta and not is_elsewhere(name)}
    owners = {
        name: part
        for name, part in module.named_modules()
        if any(id(t) in wanted for t in (*parameters_of(part).values(), *buffers_of(part).values()))
    }
    if not owners:
        return
    replace_tensors(module, lambda t: torch.zeros_like(t, device=device) if id(t) in wanted else t)
    without = []
    with seeded_everything() as reseed:
        for name, owner in owners.items():
            reseed(derive_seed(seed, zlib.crc32(name.encode())))
            if not _reset(owner, device):
                without.append(f"{name} ({type(owner).__name__})")
    if without:
        rank_zero_warn(
            f"These modules were made on the meta device and have no reset_parameters(), so their values are 0:"
            f" {', '.join(without[:5])}. Define it, or give them values in on_fit_start()."
        )


@torch.no_grad()
def _reset(owner: nn.Module, device: torch.device) -> bool:
    """Lets ``owner`` draw its own tensors, whole, and keeps this worker's part; whether it can."""
    reset = getattr(owner, "reset_parameters", None)
    if not callable(reset):
        return False
    tables: list[dict[str, Any]] = [parameters_of(owner), buffers_of(owner)]
    kept = [{name: t for name, t in table.items() if t is not None} for table in tables]
    for table, tensors in zip(tables, kept, strict=True):
        table.update({name: _whole_like(t, device) for name, t in tensors.items()})
    try:
        reset()
        for table, tensors in zip(tables, kept, strict=True):
            for name, tensor in tensors.items():
                local_part(tensor).copy_(local_part(part_like(table[name].detach(), tensor)))
    finally:
        for table, tensors in zip(tables, kept, strict=True):
            table.update(tensors)
    return True


def _whole_like(tensor: Tensor, device: torch.device) -> Tensor:
    values = torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)
    return nn.Parameter(values, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else values
