"""Facts about the whole gradient that a stage's step needs: norm and overflow.

A stage steps as soon as its own gradient is complete where a run needs neither, ties no weights across stages, does not
optimize by itself and is staggered. Otherwise all stages commit each step together, before it or, with speculative
clipping, after it: a stage steps as if nothing were clipped when that is likely. If the norm was too large, the
optimizer steps once more from where it was; learning rates that hooks changed since then stay. That is right only if no
code changes or sees gradients and parameters between them (:func:`may_speculate`).

``16-mixed``: the plugin scales and skips steps as on one device; each worker's scaler decides by overflow in *any*
stage, so all stay alike. A step that is redone has its old scale.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any, TypeAlias

import lightning.pytorch as pl
import torch
from lightning.pytorch import callbacks as pl_callbacks
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from lightning_recycle.errors import UnsupportedFeatureError
from lightning_recycle.model.parts import ModelParts
from lightning_recycle.runtime.commit_reports import CommitRules
from lightning_recycle.session.lightning_internals import replace_grad_norm, stage_grad_norm
from lightning_recycle.session.optimizer_states import OptimizerState
from lightning_recycle.tensor_memory import local_part, sharded_like
from lightning_recycle.torch_internals import (
    after_unscaling,
    foreach_mul,
    has_step_hooks,
    replace_total_norm,
    versions_of,
)


def commit_rules(
    trainer: pl.Trainer,
    module: pl.LightningModule,
    stages: int,
    staggered: bool = True,
    presumes: Callable[[float], bool] = bool,
) -> CommitRules:
    """The rules for the steps of ``module``, cut into ``stages``, under ``trainer``.

    ``presumes`` is one of them if facts about the gradients of all stages may come after the step.
    """
    clips = trainer.gradient_clip_val is not None and trainer.gradient_clip_algorithm != "value"
    norm, overflow = clips or is_overridden("configure_gradient_clipping", module), scaler_of(trainer) is not None
    may_come_afterwards = not overflow and stages > 1 and may_speculate(trainer, module)
    return CommitRules(norm, overflow, staggered, presumes if may_come_afterwards else None)


def steps_alone(trainer: pl.Trainer, parts: ModelParts, stages: Sequence[range]) -> bool:
    """Whether a stage can step before the others hold their gradients."""
    rules = commit_rules(trainer, parts.module, len(stages))
    is_joint = (rules.norm or rules.overflow) and rules.presumes is None
    return not (is_joint or parts.optimizes_itself or parts.ties(stages))


# ---------------------------------------------------------------------- speculative clipping

_GRADIENT_HOOKS = (
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_train_batch_start",
    "on_before_zero_grad",
)
_STEP_HOOKS = ("configure_gradient_clipping", "optimizer_step", "optimizer_zero_grad", "lr_scheduler_step")
# Lightning's callbacks that look at neither in these hooks; a subclass may.
_BLIND_CALLBACKS: tuple[type[pl.Callback], ...] = (
    pl_callbacks.DeviceStatsMonitor,
    pl_callbacks.EarlyStopping,
    pl_callbacks.LearningRateMonitor,
    pl_callbacks.ModelCheckpoint,  # it asks all workers for their parameters, which waits for the truth
    pl_callbacks.ModelSummary,
    pl_callbacks.RichModelSummary,
    pl_callbacks.RichProgressBar,
    pl_callbacks.ThroughputMonitor,
    pl_callbacks.Timer,
    pl_callbacks.TQDMProgressBar,
)


def may_speculate(trainer: pl.Trainer, module: pl.LightningModule) -> bool:
    """Whether a stage may step before it knows the norm for clipping."""
    accumulates = trainer.accumulate_grad_batches != 1 or any(
        isinstance(callback, pl_callbacks.GradientAccumulationScheduler)
        for callback in trainer.callbacks  # type: ignore[attr-defined]
    )
    if not trainer.gradient_clip_val or trainer.gradient_clip_algorithm == "value" or accumulates:
        return False
    return not _overrides(trainer, module, _GRADIENT_HOOKS, _STEP_HOOKS)


def _overrides(trainer: pl.Trainer, module: pl.LightningModule, hooks: Sequence[str], of_module: Sequence[str]) -> bool:
    """Whether the user overrides one of ``hooks``, or the module one of ``of_module``."""
    looking = [c for c in trainer.callbacks if type(c) not in _BLIND_CALLBACKS]  # type: ignore[attr-defined]
    callbacks = [c for c in looking if not type(c).__module__.startswith("lightning_recycle.")]
    return any(is_overridden(hook, module, pl.LightningModule) for hook in (*hooks, *of_module)) or any(
        is_overridden(hook, callback, pl.Callback) for hook in hooks for callback in callbacks
    )


def may_change_gradients(trainer: pl.Trainer, module: pl.LightningModule) -> bool:
    """Whether the user's code may change gradients between backward and optimizer.

    Not counted: clipping, which runs when all stages hold their gradients, or is idempotent.
    """
    hooks = ("on_after_backward", "on_before_optimizer_step", "on_before_zero_grad")
    return _overrides(trainer, module, hooks, _STEP_HOOKS[:3])


def sees_old_gradients(trainer: pl.Trainer, module: pl.LightningModule) -> bool:
    """Whether the user's code runs in a step while older gradients are there."""
    hooks = ("on_before_zero_grad", "on_train_batch_start")
    return _overrides(trainer, module, hooks, ("optimizer_zero_grad",))


def may_write_after_saves(trainer: pl.Trainer, module: pl.LightningModule) -> bool:
    """Whether the user's code may run after a callback has saved, in the same step."""
    ends = ("on_validation_epoch_end", "on_validation_end", "on_train_epoch_end")
    return _overrides(trainer, module, (*_GRADIENT_HOOKS, *ends), _STEP_HOOKS)


def norm_of_all(trainer: pl.Trainer, parameters: Iterable[Tensor]) -> float:
    """The norm of the gradients of ``parameters`` that all stages hold now."""
    if _gather is None:
        return float(nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))
    parameter_ids = set(map(id, parameters))
    own_norms = [
        (_parameter_names.get(id(p), name), float(p.grad.norm()))
        for name, p in trainer.lightning_module.named_parameters()
        if id(p) in parameter_ids and p.grad is not None
    ]
    norms = dict(chain.from_iterable(_gather("norms of gradients to clip", lambda: own_norms)))
    return math.hypot(*norms.values())


def norm_limit(trainer: pl.Trainer) -> float:
    """The norm beyond which the Trainer clips now; hooks may have changed it."""
    if trainer.gradient_clip_algorithm == "value":
        return math.inf
    return float(trainer.gradient_clip_val or math.inf)


def called_once(
    closure: Callable[[], Any], name: str, optimizer: Optimizer, otherwise: str = "", *, has_gradients: bool = False
) -> Callable[[], Any]:
    """``closure`` for an optimizer that may call it once, and first.

    Gradients are computed already. ``has_gradients``: whether parameters have them already, and must keep them too.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    # Changes through `parameter.data` have no version; torch's own optimizers make none.
    sums_up = not type(optimizer).__module__.startswith("torch.optim.")

    def values() -> list[Any]:
        gradients = [p.grad for p in parameters if p.grad is not None] if has_gradients else []
        versions: list[Any] = versions_of([*parameters, *gradients])
        return [*versions, float(nn.utils.get_total_norm([*map(local_part, parameters)]))] if sums_up else versions

    before, remaining = values(), [closure]

    def once() -> Any:
        what = None if remaining else "calls its closure several times"
        if remaining and values() != before:
            what = "changes the parameters or their gradients before it calls its closure"
        if what is not None:
            raise UnsupportedFeatureError(
                f"In {name}, the optimizer {what}: the gradients of all workers would have to be reduced in each call."
                f" Use an optimizer that calls it once, and first{otherwise and ', ' + otherwise}."
            )
        return remaining.pop()()

    return once


def clip_factor(clip_val: float, norm: float) -> float:
    """The factor of clipping, if below 1; the formula of torch's ``clip_grad_norm_``."""
    return clip_val / (norm + 1e-6)


class RepeatableStep:
    """State from before the newest optimizer step, by which it can be made again."""

    def __init__(self) -> None:
        self._states_before: list[OptimizerState] = []

    def tensors(self) -> Iterator[Tensor]:
        return (tensor for state in self._states_before for tensor in state.tensors())

    @staticmethod
    def is_watched(optimizers: list[Optimizer]) -> bool:
        """Whether hooks see each call of an optimizer's ``step``."""
        return any(map(has_step_hooks, optimizers))

    @torch.no_grad()
    def keep(self, optimizers: list[Optimizer]) -> None:
        """Copies their states; called right before they step."""
        old: list[OptimizerState | None] = [*self._states_before, *([None] * len(optimizers))]
        self._states_before = [OptimizerState(o, kept) for o, kept in zip(optimizers, old, strict=False)]

    def repeat(self, optimizers: list[Optimizer], factor: float, loss: Callable[[], Any]) -> None:
        """Steps again with gradients multiplied by ``factor``.

        Parameters are as they were; options such as learning rates are first the old, and then the present ones.
        """
        for optimizer, before in zip(optimizers, self._states_before, strict=True):
            now = OptimizerState(optimizer, None, options_only=True)
            with torch.no_grad():
                before.rewind()
                _multiply_gradients([p for group in optimizer.param_groups for p in group["params"]], factor)
            optimizer.step(closure=loss)
            now.rewind_options()


def _multiply_gradients(parameters: list[Tensor], factor: float) -> None:
    """Multiplies gradients into new memory, as a peer may need the old ones."""
    trained = [p for p in parameters if p.grad is not None]
    parts = foreach_mul([local_part(p.grad) for p in trained if p.grad is not None], factor)
    for parameter, part in zip(trained, parts, strict=True):
        parameter.grad = sharded_like(parameter, part)


# ---------------------------------------------------------------------- norms in hooks

_Gather: TypeAlias = Callable[[str, Callable[[], Any]], list[Any]]

_gather: _Gather | None = None
_parameter_names: Mapping[int, str] = {}


def complete_norms(gather: _Gather | None, names: Mapping[int, str] | None = None) -> None:
    """Completes ``grad_norm`` from all stages, and makes ``clip_grad_norm_`` warn.

    ``gather``: gathers values of all stages; None restores both functions. ``names``: of this stage's parameters, by
    ``id``; tied ones have the same.
    """
    global _gather, _parameter_names
    _gather, _parameter_names = gather, names or {}
    replace_grad_norm(None if gather is None else _grad_norm)
    replace_total_norm(None if gather is None else _warned_total_norm)


def norms_of_all_stages(module: nn.Module, norm_type: Any, group_separator: str = "/") -> dict[str, Any]:
    """The result of ``grad_norm`` for ``module`` on one device."""
    assert _gather is not None
    norms = stage_grad_norm(module, norm_type, group_separator)
    prefix = f"grad_{float(norm_type)}_norm"
    own_norms = [
        (_parameter_names.get(id(parameter), name), entry, norms[entry].detach().cpu())
        for name, parameter in module.named_parameters()
        if (entry := f"{prefix}{group_separator}{name}") in norms
    ]
    model_norms: dict[str, Any] = {}
    counted: set[str] = set()
    for stage_norms in _gather("norms of gradients", lambda: own_norms):
        for name, entry, norm in stage_norms:
            if name not in counted:  # otherwise a copy of a tied parameter, which one device has once
                model_norms[entry] = norm
                counted.add(name)
    if model_norms:
        model_norms[f"{prefix}_total"] = torch.tensor(list(model_norms.values())).norm(float(norm_type))
    return model_norms


def _grad_norm(module: nn.Module, norm_type: Any, group_separator: str = "/") -> dict[str, Any]:
    # This runs among the globals of Lightning's function.
    from lightning_recycle.session.gradient_clipping import norms_of_all_stages

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
    return nn.utils.get_total_norm(*args, **kwargs)


# ---------------------------------------------------------------------- loss scale


def scaler_of(trainer: pl.Trainer) -> GradScaler | None:
    """The scaler of the Trainer's precision, if there is one and it scales."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return scaler if scaler is not None and scaler.is_enabled() else None


def overflow_of_all(scaler: GradScaler | None, overflow: bool) -> AbstractContextManager[None]:
    """The scaler finds an overflow in the block if any stage's gradient has one."""
    if scaler is None:
        return nullcontext()

    def change(found_inf: Tensor, found: dict[Any, Tensor]) -> dict[Any, Tensor]:
        # Nothing is found where nothing is trained; a scaler wants to have looked at something.
        found = found or {found_inf.device: found_inf}
        for flag in found.values() if overflow else ():
            flag.fill_(1.0)
        return found

    return after_unscaling(scaler, change)


def restore_scale(trainer: pl.Trainer, state: dict[str, Any]) -> None:
    """Loads the precision plugin's state, also between unscaling and step."""
    scaler = scaler_of(trainer)
    if scaler is not None:
        scaler.scale(torch.zeros((), device=trainer.strategy.root_device))  # now it has a scale to be updated
        scaler.update(float(state["scale"]))  # and forgets what it has found so far
    trainer.precision_plugin.load_state_dict(state)
