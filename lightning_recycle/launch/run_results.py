"""Results of a run: packed in its workers, taken into the Trainer and its module.

One worker of each column delivers its part of the model, and the leader the common part. Where weights stay in the
workers, a note is kept until weights are loaded into the module. The module's own ``configure_optimizers`` makes
optimizers for the whole model, which get the workers' states.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import tempfile
import weakref
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import Logger
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_recycle.control.client import unpack
from lightning_recycle.devices import tensor_bytes
from lightning_recycle.errors import ConfigurationError, ReCycleError, UnsupportedFeatureError
from lightning_recycle.launch.run_preparation import ConfiguredStrategy, TrainerCall
from lightning_recycle.model.chain_parts import parts_of
from lightning_recycle.model.layers import (
    AbsentLayer,
    non_state_tensors,
    set_non_state_tensors,
    set_weights,
    take_pruned_form,
    weights_of,
)
from lightning_recycle.session import lightning_internals as internals
from lightning_recycle.session.configuration import Gathering, ResultRoute
from lightning_recycle.session.object_attributes import is_own
from lightning_recycle.session.object_graph import (
    CallbackList,
    LargeData,
    ObjectGraph,
    ObjectPack,
    Originals,
    process_anchors,
    streams_among,
    weights_by_name,
    weights_for,
)
from lightning_recycle.session.optimizer_states import (
    complete_state,
    group_names,
    load_parameter_groups,
    merge_optimizer_states,
    merged_names,
)
from lightning_recycle.session.session import Session
from lightning_recycle.tensor_memory import merge_shards, to_cpu
from lightning_recycle.torch_internals import tree_leaves, version_of

log = logging.getLogger(__name__)

StageOptimizers: TypeAlias = Sequence[tuple[dict[str, Any], list[list[str]]]]
"""By optimizer of a stage, the state dict and the parameters' names by group."""


@dataclass(frozen=True)
class StageResult:
    """Result of a stage, or of one member of its position.

    Args:
        state: its weights; None if they stay in the workers.
        optimizers: None if the stage does not train, its weights stay in the workers, or it writes its own checkpoints
            because the whole is too large for one place.
        objects: its layers, with their state outside of state dicts.
        non_state_tensors: its parameters and buffers that are in no state dict.
        member: the number of the member of its position, whose shards it has.
    """

    stage: int
    state: dict[str, Tensor] | None
    optimizers: StageOptimizers | None
    objects: CarriedObjects
    non_state_tensors: dict[str, Tensor]
    member: int = 0

    @classmethod
    def merged(cls, members: Sequence[StageResult]) -> StageResult:
        """The result of a stage from those of the members of a position, in order."""
        first = members[0]
        states = [member.state for member in members if member.state is not None]
        optimizers = [member.optimizers for member in members if member.optimizers is not None]
        return replace(
            first,
            state=merge_shards(states) if len(states) == len(members) else None,
            optimizers=merge_shards(optimizers) if len(optimizers) == len(members) else None,
            non_state_tensors=merge_shards([member.non_state_tensors for member in members]),
        )


@dataclass(frozen=True)
class StageResultFile:
    """A :class:`StageResult` in a file of this machine."""

    path: Path

    def read(self) -> StageResult:
        """The part, mapped from the file, which may be deleted.

        Weights are copied into a module; optimizer states stay mapped, and take room on the disk while they live.
        """
        part = torch.load(self.path, map_location="cpu", weights_only=False, mmap=True)
        assert isinstance(part, StageResult)
        return part


@dataclass(frozen=True)
class CarriedObjects:
    """The user's objects on their way to the launching process.

    Attributes:
        pack: the objects; in it each weight is replaced by its name.
        whole: whether the whole module is in it, with its parameters, buffers and submodules.
        requires_grad: whether each parameter requires a gradient, by name.
        shared: whether callbacks, data and the profiler are in it.
    """

    pack: ObjectPack
    whole: bool
    requires_grad: dict[str, bool]
    shared: bool


class UserObjects:
    """Packs the user's objects in a worker; unpacks them in the launching process.

    With the ``session`` of a worker that begins, it is noted what they hold, to find later changes.
    """

    def __init__(self, call: TrainerCall, session: Session | None = None) -> None:
        self._trainer = call.trainer
        self._callbacks = list(self._trainer.callbacks)  # type: ignore[attr-defined]
        self._data = call.data
        self._originals: Originals | None = None
        self._large = LargeData({})
        if session is not None:
            graph = self._graph({"": call.arguments["model"]}, whole=True, shared=True)
            self._large = LargeData(graph.large)
            session.originals = self._originals = Originals(graph.values.values())

    def _graph(
        self, modules: Mapping[str, nn.Module], whole: bool, shared: bool, skipped: Collection[str] = ()
    ) -> ObjectGraph:
        """The graph of the objects in ``modules``, by name.

        ``whole``: they are the whole module; ``shared``: with callbacks, data and the profiler.
        """
        trainer, data = self._trainer, self._data
        callbacks = {f"callback {i}": callback for i, callback in enumerate(self._callbacks)}
        others = {**data, "profiler": getattr(trainer, "profiler", None)}
        others |= {f"logger {i}": each for i, each in enumerate(trainer.loggers) if _is_of_user(each)}
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
            **streams_among({f"{name} {i}": leaf for name, leaves in loaders.items() for i, leaf in enumerate(leaves)}),
        }
        return ObjectGraph(roots, anchors, whole, skipped, bound=(DeviceMesh,), originals=self._originals)

    def pack(self, admits: Callable[[str], bool] | None, shared: bool, most_bytes: float = math.inf) -> CarriedObjects:
        """Packs the submodules whose names it ``admits``; None: the whole module.

        ``shared``: with callbacks, data and the profiler; ``most_bytes``: of large data that is new in the data module.
        """
        module = self._trainer.lightning_module
        names = {id(tensor): name for name, tensor in weights_by_name(module).items()}
        modules = {"": module} if admits is None else {n: m for n, m in module.named_modules() if admits(n)}
        graph, skipped = self._graph(modules, admits is None, shared), set[str]()
        unchanged = self._large.unchanged() if graph.large else {}  # arrays are read for it
        while new := {p: v for p, v in graph.large.items() if p.startswith("datamodule.") and id(v) not in unchanged}:
            if sum(value.nbytes for value in new.values()) <= most_bytes:
                break
            skipped.update(".".join(re.split(r"[.\[]", path)[:2]) for path in new)
            graph = self._graph(modules, admits is None, shared, skipped)
        for path in sorted(skipped):
            log.info("%s stays in the workers, as it is large.", path)
        requires_grad = {name: p.requires_grad for name, p in module.named_parameters(remove_duplicate=False)}
        return CarriedObjects(graph.pack({**unchanged, **names}).on_cpu(), admits is None, requires_grad, shared)

    def unpack(self, carried: CarriedObjects, weights: Mapping[str, Tensor]) -> None:
        """Updates this process's objects; ``weights``: for those missing in its module."""
        module, flags = self._trainer.lightning_module, carried.requires_grad
        modules = {"": module} if carried.whole else dict(module.named_modules())
        graph = self._graph(modules, carried.whole, carried.shared)
        new_weights = {name: nn.Parameter(w, flags[name]) if name in flags else w for name, w in weights.items()}
        graph.update(carried.pack, torch.device("cpu"), {**graph.large, **weights_for(module, new_weights)})

    def _training(self, training: SimpleNamespace) -> ObjectGraph:
        """The graph of optimizers and schedulers, without what depends on the stage."""
        trainer = self._trainer
        anchors = {
            **{f"module {name}": module for name, module in trainer.lightning_module.named_modules()},
            **{f"callback {i}": callback for i, callback in enumerate(self._callbacks)},
            **self._data,
            **process_anchors(trainer, optimizers=False),
        }
        graph = partial(ObjectGraph, {"training": training}, anchors, bound=(DeviceMesh,), optimizers=True)
        return graph(skipped=[f"{path}.{name}" for path in graph().nodes_of(Optimizer) for name in _BY_STAGE])

    def pack_training(self) -> ObjectPack:
        """Packs the Trainer's optimizers and schedulers; hooks may have replaced them."""
        strategy, weights = self._trainer.strategy, weights_by_name(self._trainer.lightning_module)
        training = SimpleNamespace(optimizers=strategy.optimizers, schedulers=strategy.lr_scheduler_configs)
        return self._training(training).pack({id(tensor): name for name, tensor in weights.items()}).on_cpu()

    def unpack_training(self, packed: ObjectPack, training: SimpleNamespace) -> None:
        """Makes ``training`` the workers', with its own objects of the same class."""
        weights = weights_for(self._trainer.lightning_module, {})
        self._training(training).update(packed, torch.device("cpu"), weights)


_BY_STAGE = ("state", "param_groups")  # of an optimizer


def _is_of_user(logger: Logger) -> bool:
    """Whether none of Lightning's classes writes what ``logger`` gets."""
    homes = {base.__module__ for base in type(logger).__mro__} - {Logger.__module__}
    return not any(home.startswith("lightning.pytorch.loggers.") for home in homes)


@dataclass(frozen=True)
class LeaderResult:
    """The leader's part of a result: all that is not a stage's own.

    ``trainer``: attributes of the Trainer and its parts, by path; ``loaders``: states of the DataLoaders of each loop;
    ``objects``: the user's, outside of stages; ``training``: optimizers and schedulers, if they are delivered;
    ``copies``: parameters that copy another stage's, by stage and name.
    """

    returned: Any
    trainer: dict[str, dict[str, Any]]
    loops: dict[str, dict[str, Any]]
    loaders: dict[str, list[dict[str, Any]]]
    objects: CarriedObjects
    training: ObjectPack | None
    copies: dict[tuple[int, str], str]
    precision: dict[str, Any]


def result_route(session: Session, gathering: Gathering) -> ResultRoute:
    """Route of the run's result; all workers call it, and get the same."""
    if not gathering.depends_on_size:
        return gathering.route(0)
    return gathering.route(sum(session.checkpoints.collectives.gather_stages("bytes", lambda: _result_bytes(session))))


def _result_bytes(session: Session) -> int:
    """The bytes of this worker's weights and optimizer states."""
    optimizers = session.trainer.optimizers if _delivers_optimizers(session) else []
    states = [list(optimizer.state.values()) for optimizer in optimizers]
    return tensor_bytes([*weights_of(session.module).values(), states])


def _delivers_optimizers(session: Session) -> bool:
    """Whether optimizer states belong to the result."""
    return session.trainer.state.fn == TrainerFn.FITTING and not session.checkpoints.sharded


def stage_result(
    session: Session, user: UserObjects, route: ResultRoute, folder: str | None = None
) -> StageResult | StageResultFile:
    """This stage's part, for a message or in a new file of ``folder``."""
    if route is ResultRoute.FILES and folder is not None:
        path = Path(folder, f"{session.place.rank}-{session.place.incarnation}")
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            torch.save(_collect_stage(session, user, route, as_copies=False), path)
            return StageResultFile(path)
        except (OSError, RuntimeError) as error:  # RuntimeError: what torch makes of a full disk
            log.warning("The result comes home in a message instead of a file: %s", error)
            with contextlib.suppress(OSError):  # there may be nothing to delete
                path.unlink()
    return _collect_stage(session, user, route, as_copies=True)


def _collect_stage(session: Session, user: UserObjects, route: ResultRoute, as_copies: bool) -> StageResult:
    """This worker's part of the result; without tensors if they stay in the workers."""
    state, optimizers, others = None, None, {}
    if route is not ResultRoute.STAYS:
        module = session.module
        state, others = (to_cpu(tensors, as_copies) for tensors in (weights_of(module), non_state_tensors(module)))
        if _delivers_optimizers(session):
            states = [(complete_state(each), group_names(module, each)) for each in session.trainer.optimizers]
            optimizers = [(to_cpu(state, as_copies), names) for state, names in states]
    layers, member = user.pack(_carried_layers(session), shared=False), session.run.positions.member(session.place.rank)
    return StageResult(session.worker.stage, state, optimizers, layers, others, member)


def _carried_layers(session: Session) -> Callable[[str], bool]:
    """The submodules that are delivered as objects; none that a mesh divides."""
    return session.parts.is_of_layer if session.mesh is None else lambda name: False


def leader_result(
    session: Session, user: UserObjects, route: ResultRoute, most_bytes: float, returned: Any
) -> LeaderResult:
    """The common part, from this worker, the leader."""
    trainer, is_of_layer = session.trainer, session.parts.is_of_layer
    is_whole = session.grid.stages == 1 and route is not ResultRoute.STAYS and session.mesh is None
    # What makes layers parallel stays: it belongs to the mesh of this position.
    is_carried = (lambda name: not is_of_layer(name)) if session.mesh is None else (lambda name: not name)
    objects = user.pack(None if is_whole else is_carried, True, most_bytes)
    return LeaderResult(
        returned=to_cpu(returned),
        trainer={
            path: {name: to_cpu(value) for name, value in settings.items()}
            for path, settings in internals.final_settings(trainer).items()
        },
        loops=internals.loop_states(trainer),
        loaders=internals.loader_states(trainer),
        objects=objects,
        training=user.pack_training() if _delivers_optimizers(session) and route is not ResultRoute.STAYS else None,
        copies=dict(session.checkpoints.copies),
        precision=trainer.precision_plugin.state_dict(),
    )


WHY_NO_WEIGHTS = (
    "they stay in the workers (CheckpointOptions(gather_result=...)), and in the checkpoints that these have written"
)
"""Why a process has no trained weights."""


class MissingWeightsGuard:
    """Remembers that ``module`` lacks the trained weights, until they are written.

    ``is_one_stage``: the module is one stage of the model.
    """

    def __init__(self, module: pl.LightningModule, is_one_stage: bool) -> None:
        self._module = weakref.ref(module)
        self._is_one_stage = is_one_stage
        self._writes = _count_writes(module)

    def check(self, module: pl.LightningModule, ckpt_path: Any) -> None:
        """UnsupportedFeatureError if ``module`` would run without its trained weights."""
        if module is not self._module() or _count_writes(module) != self._writes:
            return
        if self._is_one_stage:
            raise UnsupportedFeatureError(
                f"After fit this {type(module).__name__} is one stage of the model, and the trained weights are not in"
                f" this process: {WHY_NO_WEIGHTS}. Make a new one and give ckpt_path=..., or use"
                " CheckpointOptions(gather_result=True)."
            )
        if ckpt_path is None:
            raise UnsupportedFeatureError(
                f"The trained weights of this {type(module).__name__} are not in this process: {WHY_NO_WEIGHTS}. Give"
                " ckpt_path='best', 'last' or a path, load weights into it, or use"
                " CheckpointOptions(gather_result=True)."
            )


def _count_writes(module: pl.LightningModule) -> int:
    """A number that changes with each write to the parameters that autograd counts."""
    return sum(version_of(parameter) for parameter in module.parameters())


# ---------------------------------------------------------------------- optimizers


WHY_NO_OPTIMIZERS = (
    "their states stay in the workers with save_distributed_checkpoint=True, where the weights stay there, and where"
    " workers are started by hand"
)
"""Why the launching process may have no optimizers."""


def make_optimizers(
    user: UserObjects, module: pl.LightningModule, stages: Sequence[StageOptimizers], leader: LeaderResult
) -> tuple[list[Optimizer], list[LRSchedulerConfig]]:
    """The optimizers and schedulers of the whole model, from those of all stages.

    Raises ConfigurationError if they cannot be made here.
    """
    why = f"{type(module).__name__}.configure_optimizers() fails in the launching process, without what setup() made in"
    why += " the workers"
    by_optimizer = [list(zip(*each, strict=True)) for each in zip(*stages, strict=True)]  # (states, names) of each
    training = SimpleNamespace()
    assert leader.training is not None, "it comes with the states"
    try:
        training.optimizers, training.schedulers = internals.init_optimizers(module)
        why = "the workers' optimizers do not fit into the launching process"
        user.unpack_training(leader.training, training)
        groups = [merged_names(names, leader.copies) for _, names in by_optimizer]
        load_parameter_groups(module, training.optimizers, groups)
        for optimizer, (states, names) in zip(training.optimizers, by_optimizer, strict=True):
            optimizer.load_state_dict(merge_optimizer_states(states, names, leader.copies))
    except ConfigurationError:
        raise
    except Exception as error:  # the user's: it may need what exists in the workers only
        raise ConfigurationError(f"{why}: {type(error).__name__}: {error}") from error
    return training.optimizers, training.schedulers


# ---------------------------------------------------------------------- the whole


def take_results(call: TrainerCall, results: MutableMapping[int, Any]) -> Any:
    """Puts the workers' results, by rank, into the Trainer and its module.

    Empties ``results``: model and optimizers may be large. Returns the function's return value.
    """
    trainer = call.trainer
    state: dict[str, torch.Tensor] = {}
    stages: list[StageResult] = []
    leader: LeaderResult | None = None
    for rank in sorted(results):
        result, from_leader = unpack(results.pop(rank))
        stages.append(result.read() if isinstance(result, StageResultFile) else result)
        leader = from_leader or leader
    assert leader is not None
    stages.sort(key=lambda result: (result.stage, result.member))
    stages = [StageResult.merged(list(members)) for _, members in groupby(stages, key=lambda result: result.stage)]
    has_weights = all(result.state is not None for result in stages)
    flags = {name: flag for result in stages for name, flag in result.objects.requires_grad.items()}
    call.attach_data()
    user = UserObjects(call)
    if has_weights:
        for result in stages:
            state.update(result.state or {})
        adapt: Callable[[Mapping[str, torch.Tensor]], None] = partial(_add_weights_made_by_hooks, trainer, flags)
        _take_weights(trainer, state, partial(user.unpack, leader.objects) if leader.objects.whole else adapt)
    _restore_trainer(trainer, leader)
    trainer.precision_plugin.load_state_dict(leader.precision)
    for result in stages if has_weights else []:
        user.unpack(result.objects, state)
        set_non_state_tensors(trainer.lightning_module, result.non_state_tensors)
    user.unpack(leader.objects, state)
    for name, parameter in trainer.lightning_module.named_parameters():
        parameter.requires_grad_(flags.get(name, parameter.requires_grad))  # hooks may have changed it
    if trainer.state.fn == TrainerFn.FITTING:
        cast(ConfiguredStrategy, trainer.strategy).missing_weights = None if has_weights else WHY_NO_WEIGHTS
        _restore_optimizers(trainer, user, [result.optimizers for result in stages], leader)
        user.unpack(leader.objects, state)  # as configure_optimizers(), which has run here, may have changed them
    if trainer.state.fn == TrainerFn.PREDICTING and leader.returned is not None:
        several = trainer.predict_loop.num_dataloaders > 1  # what is returned of one is not in a list of loaders
        internals.set_predictions(trainer, leader.returned if several else [leader.returned])
    return leader.returned


def _take_weights(
    trainer: pl.Trainer, state: Mapping[str, torch.Tensor], adapt_module: Callable[[Mapping[str, torch.Tensor]], None]
) -> None:
    """Makes the module of ``trainer`` the trained one.

    ``adapt_module`` fits it to these weights. Raises ReCycleError if they do not fit; they are in a file then.
    """
    module = trainer.lightning_module
    try:
        parts_of(module).build()
        take_pruned_form(module, state)
        if is_overridden("configure_model", module) and weights_of(module).keys() != state.keys():
            module.configure_model()  # has run in the workers only
            take_pruned_form(module, state)
        if _shapes(weights_of(module)) != _shapes(state):  # made or changed by hooks
            adapt_module(state)
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if name in state and tensor.dtype != state[name].dtype:  # trained in another precision than it came in
                tensor.data = tensor.data.to(state[name].dtype)
        set_weights(module, state)
    except Exception as error:
        raise ReCycleError(
            f"The trained weights do not fit into the {type(module).__name__} of this process: {error} They are in"
            f" {_save_unfitting_weights(trainer, state)}: load that with torch.load() and put them into a module that"
            " is built as in the workers. Make modules and buffers in __init__() or configure_model() instead of other"
            " hooks, to get them back in the module."
        ) from error


def _add_weights_made_by_hooks(
    trainer: pl.Trainer, requires_grad: Mapping[str, bool], state: Mapping[str, torch.Tensor]
) -> None:
    """Adds to the module's submodules the weights that hooks have made in the workers."""
    module = trainer.lightning_module
    modules, shapes = dict(module.named_modules()), _shapes(weights_of(module))
    for name, tensor in state.items():
        owner, _, attribute = name.rpartition(".")
        if shapes.get(name) == tensor.shape or owner not in modules:
            continue
        if name in requires_grad:
            modules[owner].register_parameter(attribute, torch.nn.Parameter(tensor.clone(), requires_grad[name]))
        else:
            modules[owner].register_buffer(attribute, tensor.clone())


def _shapes(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Size | None]:
    """The shape of each weight; None for a lazy one."""
    return {name: None if is_lazy(weight) else weight.shape for name, weight in weights.items()}


def _save_unfitting_weights(trainer: pl.Trainer, state: Mapping[str, torch.Tensor]) -> str:
    """Saves weights that fit no module here; returns the file's path, in words."""
    for folder in (trainer.default_root_dir, tempfile.gettempdir()):
        try:
            descriptor, path = tempfile.mkstemp(prefix="trained_weights_", suffix=".pt", dir=folder)
            with os.fdopen(descriptor, "wb") as file:
                torch.save(dict(state), file)
            return path
        except (OSError, RuntimeError) as error:  # RuntimeError: what torch makes of a full disk
            log.warning("The trained weights could not be written in %s: %s", folder, error)
    return "no file, as none could be written"


def _restore_trainer(trainer: pl.Trainer, leader: LeaderResult) -> None:
    internals.restore_settings(trainer, leader.trainer)
    for name, loop_state in leader.loops.items():
        internals.load_progress(getattr(trainer, name), loop_state)
    internals.restore_loaders(trainer, leader.loaders)


def _restore_optimizers(
    trainer: pl.Trainer, user: UserObjects, stages: Sequence[StageOptimizers | None], leader: LeaderResult
) -> None:
    strategy = cast(ConfiguredStrategy, trainer.strategy)
    states = [stage for stage in stages if stage is not None]
    strategy.missing_optimizers = WHY_NO_OPTIMIZERS if len(states) < len(stages) else None
    if strategy.missing_optimizers is None:
        try:
            strategy.optimizers, strategy.lr_scheduler_configs = make_optimizers(
                user, trainer.lightning_module, states, leader
            )
        except ConfigurationError as error:  # most scripts do not need them here; who does is told
            strategy.missing_optimizers = str(error)
            log.info("The launching process has no optimizers: %s", error)
