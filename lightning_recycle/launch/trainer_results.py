"""Results of a run in the launching process: taken into its Trainer and module.

Where weights stay in the workers, a note is kept until weights are loaded into the module. The module's own
``configure_optimizers`` makes optimizers for the whole model, which get the workers' states. Loops show the user's
DataLoaders, with their states in the workers.
"""

from __future__ import annotations

import logging
import os
import tempfile
import weakref
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_recycle.control.payload import unpack
from lightning_recycle.errors import (
    ConfigurationError,
    ReCycleError,
    UnsupportedFeatureError,
)
from lightning_recycle.launch.run_preparation import ConfiguredStrategy, TrainerCall
from lightning_recycle.launch.worker_results import (
    LeaderResult,
    StageOptimizers,
    StageResult,
    StageResultFile,
    UserObjects,
)
from lightning_recycle.model.chain_parts import parts_of
from lightning_recycle.model.weights import set_tensors_beside, set_weights, weights_of
from lightning_recycle.session.lightning_internals import (
    init_optimizers,
    load_progress,
    restore_loaders,
    restore_settings,
    set_predictions,
)
from lightning_recycle.session.optimizer_states import (
    Copies,
    merge_optimizer_states,
    merged_names,
)
from lightning_recycle.session.weight_callbacks import load_parameter_groups, swap_schedules, take_pruned_form
from lightning_recycle.torch_internals import version_of

WEIGHTS_STAY = (
    "they stay in the workers (CheckpointOptions(gather_result=...)), and in the checkpoints that these have written"
)
"""Why a process has no trained weights."""


class MissingWeights:
    """Note that ``module`` lacks the trained weights, or is but ``one_stage``."""

    def __init__(self, module: pl.LightningModule, one_stage: bool) -> None:
        self._module = weakref.ref(module)
        self._one_stage = one_stage
        self._versions = _versions(module)

    def check(self, module: pl.LightningModule, ckpt_path: Any) -> None:
        """Refuses to run ``module`` as if it were trained.

        Raises:
            UnsupportedFeatureError: if ``module`` is to run as if it were trained.
        """
        if module is not self._module() or _versions(module) != self._versions:
            return
        if self._one_stage:
            raise UnsupportedFeatureError(
                f"After fit this {type(module).__name__} is one stage of the model, and the trained weights are not in"
                f" this process: {WEIGHTS_STAY}. Make a new one and give ckpt_path=..., or use"
                " CheckpointOptions(gather_result=True)."
            )
        if ckpt_path is None:
            raise UnsupportedFeatureError(
                f"The trained weights of this {type(module).__name__} are not in this process: {WEIGHTS_STAY}. Give"
                " ckpt_path='best', 'last' or a path, load weights into it, or use"
                " CheckpointOptions(gather_result=True)."
            )

    @staticmethod
    def refuse_to_save(path: Any) -> None:
        """Raises UnsupportedFeatureError for a checkpoint without trained weights."""
        raise UnsupportedFeatureError(
            f"trainer.save_checkpoint({os.fspath(path)!r}) was called after fit in a process without the trained"
            f" weights: {WEIGHTS_STAY}. Let a ModelCheckpoint callback write them in time (save_last=True; with"
            " save_distributed_checkpoint=True no process needs all of them), or use"
            " CheckpointOptions(gather_result=True)."
        )


def _versions(module: pl.LightningModule) -> int:
    """A number that changes when something is written to the parameters."""
    return sum(version_of(parameter) for parameter in module.parameters())


# ---------------------------------------------------------------------- optimizers


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
    """The optimizers and schedulers of the whole model, from those of all stages.

    Raises:
        ConfigurationError: if the module cannot make them here.
    """
    try:
        optimizers, configs = init_optimizers(module)
    except Exception as error:  # the user's: it may need what exists in the workers only
        raise ConfigurationError(
            f"{type(module).__name__}.configure_optimizers() fails in the launching process, without what setup() made"
            f" in the workers: {type(error).__name__}: {error}"
        ) from error
    of_stages = [list(zip(*of_one, strict=True)) for of_one in zip(*stages, strict=True)]  # (states, names) of each
    load_parameter_groups(module, optimizers, [merged_names(names, copies) for _, names in of_stages])
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


# ---------------------------------------------------------------------- the whole


log = logging.getLogger(__name__)


def take_results(call: TrainerCall, results: MutableMapping[int, Any]) -> Any:
    """Puts the workers' results, by rank, into the Trainer and its module.

    Empties ``results``: model and optimizers may be large. Returns the function's return value.
    """
    trainer = call.trainer
    state: dict[str, torch.Tensor] = {}
    parts: list[StageResult] = []
    extras: LeaderResult | None = None
    for rank in sorted(results):
        part, found = unpack(results.pop(rank))
        parts.append(part.read() if isinstance(part, StageResultFile) else part)
        extras = found or extras
    assert extras is not None
    parts.sort(key=lambda part: (part.stage, part.member))
    parts = [StageResult.merged(list(members)) for _, members in groupby(parts, key=lambda part: part.stage)]
    here = all(part.state is not None for part in parts)
    call.attach_data()
    user = UserObjects(call)
    if here:
        for part in parts:
            state.update(part.state or {})
        trained = {name: flag for part in parts for name, flag in part.objects.trained.items()}
        reshape = partial(user.take, extras.objects) if extras.objects.whole else partial(_add, trainer, trained)
        _take_weights(trainer, state, reshape)
    _restore_trainer(trainer, extras)
    trainer.precision_plugin.load_state_dict(extras.precision)
    for part in parts if here else []:
        user.take(part.objects, state)
        set_tensors_beside(trainer.lightning_module, part.beside)
    user.take(extras.objects, state)
    if trainer.state.fn == TrainerFn.FITTING:
        cast(ConfiguredStrategy, trainer.strategy).missing_weights = None if here else WEIGHTS_STAY
        _restore_optimizers(trainer, [part.optimizers for part in parts], extras)
    if trainer.state.fn == TrainerFn.PREDICTING and extras.returned is not None:
        several = trainer.predict_loop.num_dataloaders > 1  # what is returned of one is not in a list of loaders
        set_predictions(trainer, extras.returned if several else [extras.returned])
    return extras.returned


def _take_weights(
    trainer: pl.Trainer, state: Mapping[str, torch.Tensor], reshape: Callable[[Mapping[str, torch.Tensor]], None]
) -> None:
    """Makes the module of ``trainer`` the trained one.

    ``reshape`` makes it a module that has these weights.

    Raises:
        ReCycleError: if its weights do not fit into it; they are in a file then.
    """
    module = trainer.lightning_module
    try:
        parts_of(module).build()
        take_pruned_form(module, state)
        if is_overridden("configure_model", module) and weights_of(module).keys() != state.keys():
            module.configure_model()  # has run in the workers only
            take_pruned_form(module, state)
        if _forms(weights_of(module)) != _forms(state):  # made or changed by hooks
            reshape(state)
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if name in state and tensor.dtype != state[name].dtype:  # trained in another precision than it came in
                tensor.data = tensor.data.to(state[name].dtype)
        set_weights(module, state)
    except Exception as error:
        raise ReCycleError(
            f"The trained weights do not fit into the {type(module).__name__} of this process: {error} They are in"
            f" {_kept(trainer, state)}: load that with torch.load() and put them into a module that is built as in the"
            " workers. Make modules and buffers in __init__() or configure_model() instead of other hooks, to get them"
            " back in the module."
        ) from error


def _add(trainer: pl.Trainer, trained: Mapping[str, bool], state: Mapping[str, torch.Tensor]) -> None:
    """Adds weights that hooks have given to modules which this process has.

    ``trained``: whether each parameter requires a gradient, by name.
    """
    module = trainer.lightning_module
    modules, here = dict(module.named_modules()), _forms(weights_of(module))
    for name, tensor in state.items():
        owner, _, attribute = name.rpartition(".")
        if here.get(name) == tensor.shape or owner not in modules:
            continue
        if name in trained:
            modules[owner].register_parameter(attribute, torch.nn.Parameter(tensor.clone(), trained[name]))
        else:
            modules[owner].register_buffer(attribute, tensor.clone())


def _forms(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Size | None]:
    return {name: None if is_lazy(weight) else weight.shape for name, weight in weights.items()}


def _kept(trainer: pl.Trainer, state: Mapping[str, torch.Tensor]) -> str:
    for folder in (trainer.default_root_dir, tempfile.gettempdir()):
        try:
            descriptor, path = tempfile.mkstemp(prefix="trained_weights_", suffix=".pt", dir=folder)
            with os.fdopen(descriptor, "wb") as file:
                torch.save(dict(state), file)
            return path
        except (OSError, RuntimeError) as error:  # RuntimeError: what torch makes of a full disk
            log.warning("The trained weights could not be written in %s: %s", folder, error)
    return "no file, as none could be written"


def _restore_trainer(trainer: pl.Trainer, extras: LeaderResult) -> None:
    restore_settings(trainer, extras.trainer)
    for name, loop_state in extras.loops.items():
        load_progress(getattr(trainer, name), loop_state)
    restore_loaders(trainer, extras.loaders)


def _restore_optimizers(trainer: pl.Trainer, stages: Sequence[StageOptimizers | None], extras: LeaderResult) -> None:
    strategy = cast(ConfiguredStrategy, trainer.strategy)
    known = [stage for stage in stages if stage is not None]
    strategy.missing_optimizers = STAY_IN_THE_WORKERS if len(known) < len(stages) else None
    if strategy.missing_optimizers is None:
        try:
            strategy.optimizers, strategy.lr_scheduler_configs = make_optimizers(
                trainer.lightning_module, known, extras.copies, extras.schedulers
            )
        except ConfigurationError as error:  # most scripts do not need them here; who does is told
            strategy.missing_optimizers = str(error)
            log.info("The launching process has no optimizers: %s", error)
