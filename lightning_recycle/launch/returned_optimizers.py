"""The optimizers and schedulers of a run, in the launching process, where nothing trains.

The module's own ``configure_optimizers`` makes them for the whole model, as on one device, and they get the states that
the workers delivered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import lightning.pytorch as pl
from lightning.pytorch.core.optimizer import _init_optimizers_and_lr_schedulers
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch.optim import Optimizer

from lightning_recycle.errors import ConfigurationError
from lightning_recycle.session.optimizer_states import Copies, merge_optimizer_states, merged_names
from lightning_recycle.session.weight_callbacks import swap_schedules

__all__ = ["STAY_IN_THE_WORKERS", "StageOptimizers", "make_optimizers"]

StageOptimizers: TypeAlias = Sequence[tuple[dict[str, Any], list[list[str]]]]
"""Of each optimizer of a stage the state dict, and the names of the parameters by group."""

STAY_IN_THE_WORKERS = (
    "with save_distributed_checkpoint=True, where workers are started by hand, and where the weights stay in the"
    " workers, their states do, too"
)
"""Why the launching process may have no optimizers."""


def make_optimizers(
    module: pl.LightningModule,
    stages: Sequence[StageOptimizers],
    copies: Copies,
    schedulers: Sequence[dict[str, Any]],
) -> tuple[list[Optimizer], list[LRSchedulerConfig]]:
    """The optimizers and schedulers of the whole model.

    Args:
        module: the module, with all its parameters.
        stages: the optimizers of each stage, in order.
        copies: as in :func:`~lightning_recycle.session.optimizer_states.merge_optimizer_states`.
        schedulers: the states of the learning-rate schedulers.

    Raises:
        ConfigurationError: if the module cannot make them here.
    """
    try:
        optimizers, configs = _init_optimizers_and_lr_schedulers(module)
    except Exception as error:  # the user's: it may need what exists in the workers only
        raise ConfigurationError(
            f"{type(module).__name__}.configure_optimizers() fails in the launching process, without what setup() made"
            f" in the workers: {type(error).__name__}: {error}"
        ) from error
    of_stages = [list(zip(*of_one, strict=True)) for of_one in zip(*stages, strict=True)]  # (states, names) of each
    for optimizer, (_, names) in zip(optimizers, of_stages, strict=True):
        _group(optimizer, dict(module.named_parameters()), names, copies)
    swap_schedules(module.trainer, optimizers, configs)
    if len(configs) != len(schedulers):
        raise ConfigurationError(
            f"a callback has replaced the learning-rate schedulers: configure_optimizers() returns {len(configs)}, and"
            f" the workers have {len(schedulers)}"
        )
    for optimizer, (states, names) in zip(optimizers, of_stages, strict=True):
        optimizer.load_state_dict(merge_optimizer_states(states, names, copies))
    for config, state in zip(configs, schedulers, strict=True):
        config.scheduler.load_state_dict(state)
    return optimizers, configs


def _group(
    optimizer: Optimizer,
    parameters: Mapping[str, Any],
    names: Sequence[Sequence[Sequence[str]]],
    copies: Copies,
) -> None:
    """Makes the groups of parameters what they are in the workers, where callbacks may have frozen some and added
    groups; ``names`` by stage and group.
    """
    wanted = [[parameters[name] for name in members] for members in merged_names(names, copies)]
    del optimizer.param_groups[len(wanted) :]
    for group, members in zip(optimizer.param_groups, wanted, strict=False):
        group["params"] = members
    for members in wanted[len(optimizer.param_groups) :]:
        optimizer.add_param_group({"params": members})
