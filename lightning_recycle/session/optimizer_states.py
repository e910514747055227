"""State dicts of stages and of the whole model: joined for checkpoints, split for the stages that read them.

A checkpoint is that of a single device: names ``layers.<index>...``, one optimizer over all parameters. The optimizer's
state names parameters by number, counted through the groups and, within a group, in the order of the layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_recycle.errors import ConfigurationError

__all__ = [
    "GroupNames",
    "group_names",
    "merge_optimizer_states",
    "parameter_numbers",
    "split_optimizer_state",
    "stage_optimizer_state",
    "to_cpu",
]

GroupNames: TypeAlias = Sequence[Sequence[str]]
"""Names of an optimizer's parameters, by group and position."""


def group_names(module: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """The names of the optimizer's parameters, by group."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]


def to_cpu(value: Any) -> Any:
    """A copy of ``value`` with its tensors on the CPU in storages of their own, fit for pickling."""
    if isinstance(value, Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, Mapping):
        return {key: to_cpu(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(to_cpu(item) for item in value)
    return value


def merge_optimizer_states(
    parts: Sequence[dict[str, Any]], names: Sequence[GroupNames], copies: Mapping[str, str]
) -> dict[str, Any]:
    """Joins the state dicts of the stages' optimizers into that of one optimizer over all layers in order.

    Args:
        parts: one state dict per stage, with the same number of parameter groups.
        names: the parameters' names, by stage, group and position.
        copies: maps the name of each parameter that is a copy of another stage's to the name of that one. Copies are
            left out, as one device has the parameter once.

    Raises:
        ConfigurationError: if the stages have different numbers of groups.
    """
    num_groups = {len(part["param_groups"]) for part in parts}
    if len(num_groups) > 1:
        raise ConfigurationError(
            f"The stages' optimizers have different numbers of parameter groups {sorted(num_groups)}: create the same"
            " groups on every stage in configure_optimizers(), empty ones included."
        )
    state: dict[int, Any] = {}
    groups: list[dict[str, Any]] = []
    next_index = 0
    for group in range(num_groups.pop()):
        indices: list[int] = []
        for part, part_names in zip(parts, names, strict=True):
            for old, name in zip(part["param_groups"][group]["params"], part_names[group], strict=True):
                if name in copies:
                    continue
                if old in part["state"]:
                    state[next_index] = part["state"][old]
                indices.append(next_index)
                next_index += 1
        groups.append({**parts[0]["param_groups"][group], "params": indices})
    return {"state": state, "param_groups": groups}


def parameter_numbers(names: Sequence[GroupNames], copies: Mapping[str, str], stage: int) -> list[int]:
    """The numbers of ``stage``'s parameters in the state of one optimizer over all layers; arguments as in
    :func:`merge_optimizer_states`.
    """
    numbers = _numbers(names, copies)
    return [numbers[copies.get(name, name)] for group in names[stage] for name in group]


def _numbers(names: Sequence[GroupNames], copies: Mapping[str, str]) -> dict[str, int]:
    ordered = [n for group in range(len(names[0])) for part in names for n in part[group] if n not in copies]
    return {name: number for number, name in enumerate(ordered)}


def stage_optimizer_state(
    part: dict[str, Any], names: Sequence[GroupNames], copies: Mapping[str, str], stage: int
) -> dict[str, Any]:
    """The state dict of ``stage``'s optimizer, with the numbers of one optimizer over all layers, as text; arguments as
    in :func:`merge_optimizer_states`. The groups are those of the whole model.

    They are text because torch's distributed checkpoints turn every key into text; ``Optimizer.load_state_dict`` takes
    any names that the groups use too.
    """
    numbers = _numbers(names, copies)
    mine = [name for group in names[stage] for name in group]
    old = [index for group in part["param_groups"] for index in group["params"]]
    state = {
        str(numbers[name]): part["state"][index]
        for name, index in zip(mine, old, strict=True)
        if name not in copies and index in part["state"]
    }
    groups = []
    for index, group in enumerate(part["param_groups"]):
        whole = [str(numbers[name]) for stage_names in names for name in stage_names[index] if name not in copies]
        groups.append({**group, "params": whole})
    return {"state": state, "param_groups": groups}


def split_optimizer_state(
    whole: dict[str, Any], names: Sequence[GroupNames], copies: Mapping[str, str], stage: int
) -> dict[str, Any]:
    """The part of ``whole`` that belongs to ``stage``; the inverse of :func:`merge_optimizer_states`, same arguments.

    Raises:
        ConfigurationError: if a group does not have as many parameters as the stages together.
    """
    if len(whole["param_groups"]) != len(names[stage]):
        raise ConfigurationError(
            f"The checkpoint's optimizer has {len(whole['param_groups'])} parameter groups, this one"
            f" {len(names[stage])}: create the same groups as when the checkpoint was written."
        )
    saved: dict[str, int] = {}
    for index, group in enumerate(whole["param_groups"]):
        known = [name for part in names for name in part[index] if name not in copies]
        if len(group["params"]) != len(known):
            raise ConfigurationError(
                f"Parameter group {index} of the checkpoint's optimizer has {len(group['params'])} parameters, that of"
                f" this model {len(known)}: the model or configure_optimizers() differs from the one that was saved."
            )
        saved.update(zip(known, group["params"], strict=True))
    state: dict[int, Any] = {}
    groups: list[dict[str, Any]] = []
    next_index = 0
    for group, mine in zip(whole["param_groups"], names[stage], strict=True):
        indices = []
        for name in mine:
            old = saved[copies.get(name, name)]
            if old in whole["state"]:
                state[next_index] = whole["state"][old]
            indices.append(next_index)
            next_index += 1
        groups.append({**group, "params": indices})
    return {"state": state, "param_groups": groups}
