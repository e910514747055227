"""Results of workers at the end of a run: each stage's part of the model, and the leader's common part."""

from __future__ import annotations

import contextlib
import logging
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_recycle.launch.run_preparation import TrainerCall
from lightning_recycle.model.layers import AbsentLayer
from lightning_recycle.model.weights import tensors_beside, weights_of
from lightning_recycle.runtime.executor.device_memory import tensor_bytes
from lightning_recycle.session.configuration import Gathering, ResultRoute
from lightning_recycle.session.lightning_internals import final_settings, loader_states, loop_states
from lightning_recycle.session.object_attributes import is_own
from lightning_recycle.session.object_graph import (
    CallbackList,
    LargeData,
    ObjectGraph,
    ObjectPack,
    process_anchors,
    streams_among,
    weights_by_name,
    weights_for,
)
from lightning_recycle.session.optimizer_states import complete_state, group_names
from lightning_recycle.session.session import Session
from lightning_recycle.tensor_memory import merge_shards, to_cpu
from lightning_recycle.torch_internals import tree_leaves

log = logging.getLogger(__name__)

StageOptimizers: TypeAlias = Sequence[tuple[dict[str, Any], list[list[str]]]]
"""Of each optimizer of a stage the state dict, and the names of the parameters by group."""


@dataclass(frozen=True)
class StageResult:
    """Result of a stage.

    Args:
        stage: which.
        state: its weights; None if they stay in the workers.
        optimizers: of each of its optimizers the state dict, and the names of the parameters by group; None if the
            stage does not train, or writes checkpoints of its own because the whole is too large for one place.
        objects: its layers, with what they keep outside of state dicts.
        beside: its parameters and buffers that state dicts do not hold.
        member: the number of the member of its position that it is of; it has that one's shards.
    """

    stage: int
    state: dict[str, Tensor] | None
    optimizers: StageOptimizers | None
    objects: CarriedObjects
    beside: dict[str, Tensor]
    member: int = 0

    @classmethod
    def merged(cls, members: Sequence[StageResult]) -> StageResult:
        """The result of a stage from those of the members of a position, in order."""
        first = members[0]
        states = [part.state for part in members if part.state is not None]
        optimizers = [part.optimizers for part in members if part.optimizers is not None]
        return replace(
            first,
            state=merge_shards(states) if len(states) == len(members) else None,
            optimizers=merge_shards(optimizers) if len(optimizers) == len(members) else None,
            beside=merge_shards([part.beside for part in members]),
        )


@dataclass(frozen=True)
class StageResultFile:
    """A :class:`StageResult` in a file of this machine."""

    path: Path

    def read(self) -> StageResult:
        """The part, mapped from the file, which may be deleted. Weights are copied into a module; states of optimizers
        stay mapped, so they take memory once they are used, and room on the disk as long as they live.
        """
        part = torch.load(self.path, map_location="cpu", weights_only=False, mmap=True)
        assert isinstance(part, StageResult)
        return part


@dataclass(frozen=True)
class CarriedObjects:
    """The user's objects, as they come home.

    Args:
        pack: the objects; weights are names.
        whole: whether the module is carried as a whole, with what parameters, buffers and submodules it has.
        trained: whether each parameter requires a gradient, by name.
        shared: whether what is no module is among them.
    """

    pack: ObjectPack
    whole: bool
    trained: dict[str, bool]
    shared: bool


class UserObjects:
    """The objects of the user that a worker and the launching process have, as the run finds them at its beginning.

    Args:
        call: the call of the Trainer's function.
        keeps_large: whether large data is noted, to tell later what has changed.
    """

    def __init__(self, call: TrainerCall, keeps_large: bool = False) -> None:
        self._trainer = call.trainer
        self._callbacks = list(self._trainer.callbacks)  # type: ignore[attr-defined]
        self._data = call.data
        modules = {"": call.arguments["model"]}
        self._large = LargeData(self._graph(modules, whole=True, shared=True).large if keeps_large else {})

    def _graph(
        self, modules: Mapping[str, nn.Module], whole: bool, shared: bool, skipped: Collection[str] = ()
    ) -> ObjectGraph:
        """Their graph: ``modules`` by name, or the module if it is carried as a ``whole``, and if they are ``shared``,
        callbacks, data and the profiler.
        """
        trainer, data = self._trainer, self._data
        callbacks = {f"callback {i}": callback for i, callback in enumerate(self._callbacks)}
        others = {**data, "profiler": getattr(trainer, "profiler", None)}
        roots: dict[str, Any] = {f"module {n}": m for n, m in modules.items() if not isinstance(m, AbsentLayer)}
        if shared:
            roots |= {name: value for name, value in callbacks.items() if not is_own(value)}
            roots |= {**others, "callbacks": CallbackList(trainer.callbacks)}  # type: ignore[attr-defined]
        loaders = {name: tree_leaves(value) for name, value in data.items() if name.endswith("loaders")}
        anchors = {
            **({} if whole else {f"module {n}": module for n, module in trainer.lightning_module.named_modules()}),
            **callbacks,
            **others,
            **process_anchors(trainer),
            **streams_among({f"{name} {i}": one for name, leaves in loaders.items() for i, one in enumerate(leaves)}),
        }
        return ObjectGraph(roots, anchors, whole, skipped, bound=(DeviceMesh,))

    def pack(self, wanted: Callable[[str], bool] | None, shared: bool, most_bytes: float = math.inf) -> CarriedObjects:
        """Packs the objects.

        Args:
            wanted: the submodules that are carried, by name; None: the whole module.
            shared: whether what is no module is carried.
            most_bytes: of large data that the data module did not have at the beginning.
        """
        module = self._trainer.lightning_module
        names = {id(tensor): name for name, tensor in weights_by_name(module).items()}
        modules = {"": module} if wanted is None else {n: m for n, m in module.named_modules() if wanted(n)}
        graph, skipped = self._graph(modules, wanted is None, shared), set[str]()
        unchanged = self._large.unchanged() if graph.large else {}  # arrays are read for it
        while new := {p: v for p, v in graph.large.items() if p.startswith("datamodule.") and id(v) not in unchanged}:
            if sum(value.nbytes for value in new.values()) <= most_bytes:
                break
            skipped.update(".".join(re.split(r"[.\[]", path)[:2]) for path in new)
            graph = self._graph(modules, wanted is None, shared, skipped)
        for path in sorted(skipped):
            log.info("%s stays in the workers, as it is large.", path)
        trained = {name: p.requires_grad for name, p in module.named_parameters(remove_duplicate=False)}
        return CarriedObjects(graph.pack({**unchanged, **names}).on_cpu(), wanted is None, trained, shared)

    def take(self, brought: CarriedObjects, weights: Mapping[str, Tensor]) -> None:
        """Makes the objects of this process those; ``weights`` are for what this module does not have yet."""
        module = self._trainer.lightning_module
        modules = {"": module} if brought.whole else dict(module.named_modules())
        graph = self._graph(modules, brought.whole, brought.shared)
        given = {n: nn.Parameter(w, brought.trained[n]) if n in brought.trained else w for n, w in weights.items()}
        graph.update(brought.pack, torch.device("cpu"), {**graph.large, **weights_for(module, given)})


@dataclass(frozen=True)
class LeaderResult:
    """Common part of a result, which the leader delivers.

    Args:
        returned: the return value of the function.
        trainer: attributes of the Trainer and of its parts, by path.
        loops: the state dict of each loop, by name.
        loaders: the states of the DataLoaders of each loop that has read them, by path.
        objects: what the user's objects keep outside of state dicts, those of stages apart.
        schedulers: the states of the learning-rate schedulers.
        copies: the parameters, by stage and name, that are a copy of another stage's, and of which one.
        precision: the state of the precision plugin.
    """

    returned: Any
    trainer: dict[str, dict[str, Any]]
    loops: dict[str, dict[str, Any]]
    loaders: dict[str, list[dict[str, Any]]]
    objects: CarriedObjects
    schedulers: list[dict[str, Any]]
    copies: dict[tuple[int, str], str]
    precision: dict[str, Any]


def way_home(session: Session, gathering: Gathering) -> ResultRoute:
    """How the result of the run comes home: all workers ask, and are answered alike."""
    if not gathering.depends_on_size:
        return gathering.way(0)
    return gathering.way(sum(session.checkpoints.collectives.gather_stages("bytes", lambda: _size(session))))


def _size(session: Session) -> int:
    """The bytes of the weights of this worker's stage, and of its optimizers, if they would come home."""
    optimizers = session.trainer.optimizers if _brings_optimizers(session) else []
    states = [list(optimizer.state.values()) for optimizer in optimizers]
    return tensor_bytes([*weights_of(session.module).values(), states])


def _brings_optimizers(session: Session) -> bool:
    return session.trainer.state.fn == TrainerFn.FITTING and not session.checkpoints.sharded


def stage_result(
    session: Session, user: UserObjects, way: ResultRoute, folder: str | None = None
) -> StageResult | StageResultFile:
    """The part of this worker's stage, as it comes home: in a message, or in a new file of ``folder``."""
    if way is ResultRoute.STAYS:
        layers = user.pack(_carried_layers(session), shared=False)
        return StageResult(session.worker.stage, None, None, layers, {}, _member(session))
    if way is ResultRoute.FILES and folder is not None:
        path = Path(folder, f"{session.place.rank}-{session.place.incarnation}")
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            torch.save(_part(session, user, copies=False), path)
            return StageResultFile(path)
        except (OSError, RuntimeError) as error:  # RuntimeError: what torch makes of a full disk
            log.warning("The result comes home in a message instead of a file: %s", error)
            with contextlib.suppress(OSError):  # there may be nothing to delete
                path.unlink()
    return _part(session, user, copies=True)


def _part(session: Session, user: UserObjects, copies: bool) -> StageResult:
    """The part of this worker's stage; ``copies``: with tensors of its own."""
    module, optimizers = session.module, None
    if _brings_optimizers(session):
        optimizers = [(to_cpu(complete_state(o), copies), group_names(module, o)) for o in session.trainer.optimizers]
    layers = user.pack(_carried_layers(session), shared=False)
    state, beside = (to_cpu(tensors, copies) for tensors in (weights_of(module), tensors_beside(module)))
    return StageResult(session.worker.stage, state, optimizers, layers, beside, _member(session))


def _carried_layers(session: Session) -> Callable[[str], bool]:
    """The submodules that come home as objects; not those that are parallel over the mesh of this position."""
    return session.parts.is_of_layer if session.mesh is None else lambda name: False


def _member(session: Session) -> int:
    """The number of this worker in its position."""
    return session.run.positions.member(session.place.rank)


def leader_result(
    session: Session, user: UserObjects, way: ResultRoute, most_bytes: float, returned: Any
) -> LeaderResult:
    """The common part, from this worker, the leader; ``most_bytes``: as in :meth:`UserObjects.pack`."""
    trainer, is_of_layer = session.trainer, session.parts.is_of_layer
    whole = session.grid.stages == 1 and way is not ResultRoute.STAYS and session.mesh is None
    # What makes layers parallel stays: it belongs to the mesh of this position.
    is_carried = (lambda name: not is_of_layer(name)) if session.mesh is None else (lambda name: not name)
    objects = user.pack(None if whole else is_carried, True, most_bytes)
    return LeaderResult(
        returned=to_cpu(returned),
        trainer={
            path: {name: to_cpu(value) for name, value in settings.items()}
            for path, settings in final_settings(trainer).items()
        },
        loops=loop_states(trainer),
        loaders=loader_states(trainer),
        objects=objects,
        schedulers=[config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        copies=dict(session.checkpoints.copies),
        precision=trainer.precision_plugin.state_dict(),
    )
