"""What workers deliver at the end of a run: each stage its part of the model, the leader what all have in common."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn

from lightning_recycle.launch.returned_optimizers import StageOptimizers
from lightning_recycle.model.weights import weights_of
from lightning_recycle.session.attributes import AttributeCarrier, CallbackParts, Pickles
from lightning_recycle.session.gathering import Gathering, Way, bytes_of
from lightning_recycle.session.object_graph import ObjectPack, module_graph
from lightning_recycle.session.optimizer_states import group_names, to_cpu
from lightning_recycle.session.session import Session

__all__ = ["LOOPS", "Extras", "FiledPart", "StagePart", "extras_of", "part_of", "way_home"]

log = logging.getLogger(__name__)

LOOPS = ("fit_loop", "fit_loop.epoch_loop.val_loop", "validate_loop", "test_loop", "predict_loop")
"""The loops of a Trainer that have DataLoaders, by path."""

_ATTRIBUTES = {  # of the Trainer's parts, by path: what a run changes, and is in no state dict
    "": ("state", "should_stop", "val_check_batch", "accumulate_grad_batches"),
    "_checkpoint_connector": ("_ckpt_path",),
    "_logger_connector": ("_progress_bar_metrics", "_logged_metrics", "_callback_metrics"),
    "fit_loop": ("min_epochs", "max_epochs", "max_batches", "_last_train_dl_reload_epoch"),
    "fit_loop.epoch_loop": ("_skip_next_val",),
    "fit_loop.epoch_loop.val_loop": ("_max_batches", "_has_run", "_last_val_dl_reload_epoch"),
    "validate_loop": ("_max_batches", "_has_run", "verbose"),
    "test_loop": ("_max_batches", "_has_run", "verbose"),
    "predict_loop": ("max_batches", "_return_predictions", "current_batch_indices", "epoch_batch_indices"),
}


@dataclass(frozen=True)
class StagePart:
    """What a stage delivers.

    Args:
        stage: which.
        state: its weights; None if they stay in the workers.
        optimizers: of each of its optimizers the state dict, and the names of the parameters by group; None if the
            stage does not train, or writes checkpoints of its own because the whole is too large for one place.
        attributes: what its layers keep outside of state dicts.
    """

    stage: int
    state: dict[str, Tensor] | None
    optimizers: StageOptimizers | None
    attributes: dict[str, Pickles]


@dataclass(frozen=True)
class FiledPart:
    """A :class:`StagePart` in a file of this machine."""

    path: Path

    def read(self) -> StagePart:
        """The part. Its weights are mapped from the file, to be copied into a module; that may be deleted."""
        part = torch.load(self.path, map_location="cpu", weights_only=False, mmap=True)
        assert isinstance(part, StagePart)
        return replace(part, optimizers=to_cpu(part.optimizers))  # these are loaded without a copy


@dataclass(frozen=True)
class ModuleStructure:
    """A module without its weights; ``trained``: whether each of its parameters requires a gradient, by name."""

    objects: ObjectPack
    trained: dict[str, bool]

    @classmethod
    def of(cls, trainer: pl.Trainer) -> ModuleStructure:
        module = trainer.lightning_module
        parameters = dict(module.named_parameters(remove_duplicate=False))
        names = {id(tensor): name for name, tensor in [*parameters.items(), *module.named_buffers()]}
        weights = weights_of(module)
        packed = module_graph(trainer).pack({key: name for key, name in names.items() if name in weights})
        objects = ObjectPack(packed.data, [to_cpu(tensor) for tensor in packed.tensors])
        return cls(objects, {name: parameter.requires_grad for name, parameter in parameters.items()})

    def give(self, trainer: pl.Trainer, weights: Mapping[str, Tensor]) -> None:
        """Makes the module of ``trainer`` one of this structure, with ``weights``."""
        tensors = {
            name: nn.Parameter(weight, self.trained[name]) if name in self.trained else weight
            for name, weight in weights.items()
        }
        module_graph(trainer).update(self.objects, torch.device("cpu"), tensors)


@dataclass(frozen=True)
class Extras:
    """What the leader delivers besides.

    Args:
        returned: what the function of the Trainer returned.
        trainer: attributes of the Trainer and of its parts, by path.
        loops: the state dict of each loop, by name.
        loaders: the states of the DataLoaders of each loop that has read them, by path.
        callbacks: the states of the callbacks.
        callback_parts: the callbacks, with what they keep outside of their states.
        modules: what the module and its submodules keep outside of their state dict.
        profiler: what the profiler keeps.
        schedulers: the states of the learning-rate schedulers.
        copies: the parameters, by stage and name, that are a copy of another stage's, and of which one.
        precision: the state of the precision plugin.
        data: the state of the data module.
        structure: the module with all that it holds, its weights apart, if it has one stage.
    """

    returned: Any
    trainer: dict[str, dict[str, Any]]
    loops: dict[str, dict[str, Any]]
    loaders: dict[str, list[dict[str, Any]]]
    callbacks: dict[str, Any]
    callback_parts: CallbackParts
    modules: dict[str, Pickles]
    profiler: Pickles
    schedulers: list[dict[str, Any]]
    copies: dict[tuple[int, str], str]
    precision: dict[str, Any]
    data: dict[str, Any]
    structure: ModuleStructure | None


def way_home(session: Session, gathering: Gathering) -> Way:
    """How the result of the run comes home: all workers ask, and are answered alike."""
    if not gathering.depends_on_size:
        return gathering.way(0)
    return gathering.way(sum(session.checkpoints.collectives.gather_stages("bytes", lambda: _size(session))))


def _size(session: Session) -> int:
    """The bytes of the weights of this worker's stage, and of its optimizers, if they would come home."""
    size = bytes_of(weights_of(session.module).values())
    if _brings_optimizers(session):
        for optimizer in session.trainer.optimizers:
            size += sum(bytes_of(state.values()) for state in optimizer.state.values())
    return size


def _brings_optimizers(session: Session) -> bool:
    return session.trainer.state.fn == TrainerFn.FITTING and not session.checkpoints.sharded


def part_of(session: Session, carrier: AttributeCarrier, way: Way, folder: str | None = None) -> StagePart | FiledPart:
    """The part of this worker's stage, as it comes home: in a message, or in a new file of ``folder``."""
    if way is Way.STAYS:
        return StagePart(session.worker.stage, None, None, carrier.pack_modules(session.parts.is_of_layer))
    if way is Way.FILES and folder is not None:
        path = Path(folder, f"{session.place.rank}-{session.place.incarnation}")
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            torch.save(_part(session, carrier, copies=False), path)
            return FiledPart(path)
        except (OSError, RuntimeError) as error:  # RuntimeError: what torch makes of a full disk
            log.warning("The result comes home in a message instead of a file: %s", error)
            with contextlib.suppress(OSError):  # there may be nothing to delete
                path.unlink()
    return _part(session, carrier, copies=True)


def _part(session: Session, carrier: AttributeCarrier, copies: bool) -> StagePart:
    """The part of this worker's stage; ``copies``: with tensors of its own."""
    module, optimizers = session.module, None
    if _brings_optimizers(session):
        optimizers = [(to_cpu(o.state_dict(), copies), group_names(module, o)) for o in session.trainer.optimizers]
    layers = carrier.pack_modules(session.parts.is_of_layer)
    return StagePart(session.worker.stage, to_cpu(weights_of(module), copies), optimizers, layers)


def extras_of(session: Session, carrier: AttributeCarrier, returned: Any) -> Extras:
    """What this worker, the leader, adds."""
    trainer = session.trainer
    loaders = {path: attrgetter(path)(trainer)._combined_loader for path in LOOPS}
    return Extras(
        returned=to_cpu(returned),
        trainer={
            path: {name: to_cpu(vars(owner)[name]) for name in names if name in vars(owner)}
            for path, names in _ATTRIBUTES.items()
            for owner in [attrgetter(path)(trainer) if path else trainer]
        },
        loops={name: getattr(trainer, name).state_dict() for name in LOOPS if "." not in name},
        loaders={path: loader._state_dicts() for path, loader in loaders.items() if loader is not None},
        callbacks=call._call_callbacks_state_dict(trainer),
        callback_parts=carrier.pack_callbacks(),
        modules=carrier.pack_modules(lambda name: not session.parts.is_of_layer(name)),
        profiler=carrier.pack(trainer.profiler),  # type: ignore[attr-defined]
        schedulers=[config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        copies=dict(session.checkpoints.copies),
        precision=trainer.precision_plugin.state_dict(),
        data=_state_of_data(trainer),
        structure=ModuleStructure.of(trainer) if session.grid.stages == 1 else None,
    )


def _state_of_data(trainer: pl.Trainer) -> dict[str, Any]:
    datamodule = getattr(trainer, "datamodule", None)
    try:
        return datamodule.state_dict() if datamodule is not None else {}
    except Exception as error:  # its teardown() was called before, and the run is worth more than this state
        log.warning(
            "The state of %s does not come home: %s: %s", type(datamodule).__name__, type(error).__name__, error
        )
        return {}
