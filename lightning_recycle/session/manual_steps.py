"""Manual optimization: the training step of several micro-batches as one.

A worker runs the user's ``training_step`` for each of its micro-batches, in turns
(:mod:`~lightning_recycle.runtime.manual_step_runner`), each in a state of its own. They meet at each backward pass,
whose gradients are averaged over all micro-batches of all workers, as under DDP, and at each step of an optimizer or
scheduler, which is done once.

A step that steps optimizers itself cannot be redone from its parameters, nor computed back: :class:`ManualStepState`
copies all before each step, into the same memory. A :class:`MicrobatchState` has what would be a process's own under
DDP; an optimizer's step is done in the first one and copied to the others. So each may clip its gradients, toggle an
optimizer or average weights, at the price of a copy of parameters, buffers and gradients for each further micro-batch.

Contract: ``loss.backward()`` is the same as ``self.manual_backward(loss)``; ``torch.autograd.grad`` is local. Closures
of optimizers are called once, by each micro-batch. Optimizers that ``configure_optimizers`` did not return are refused.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from copy import copy, deepcopy
from dataclasses import dataclass
from functools import partial, update_wrapper
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torchmetrics import Metric

from lightning_recycle.devices import default_generator, enter_device
from lightning_recycle.errors import UnsupportedFeatureError
from lightning_recycle.model.parts import ModelParts
from lightning_recycle.randomness import (
    derive_seed,
    generator_states,
    layer_randomness,
    seeded_everything,
    set_generator_states,
)
from lightning_recycle.runtime.manual_step_runner import Lockstep, ManualStepMicrobatch, ManualStepRunner, StepPath
from lightning_recycle.session.change_tracker import ValueTree
from lightning_recycle.session.gradient_clipping import called_once, restore_scale
from lightning_recycle.session.lightning_internals import count_manual_steps, lightning_optimizers
from lightning_recycle.session.object_attributes import INTERNAL_ATTRIBUTES, MODULE_TABLES
from lightning_recycle.session.object_graph import ObjectGraph, ObjectPack, callback_graph
from lightning_recycle.session.optimizer_states import OptimizerState, copied
from lightning_recycle.session.output_recorder import OutputRecorder, metric_states, set_metric_states
from lightning_recycle.session.worker_context import WorkerContext
from lightning_recycle.torch_internals import (
    set_hooks_after_accumulation,
    take_hooks_after_accumulation,
    tree_map_only,
)

_COPIED_BYTES = 256 * 1024  # of a tensor that is not a weight: larger ones, such as masks, are seldom written in place


@dataclass(frozen=True)
class _ProcessState:
    """How to get, set and copy one part of the state of the process.

    ``put``: makes a value the current one. ``copy``: for another micro-batch. ``stays``: whether the first
    micro-batch's value is there after the step.
    """

    get: Callable[[], Any]
    put: Callable[[Any], None]
    copy: Callable[[Any], Any]
    stays: bool = True


def _fields(owners: Sequence[Any], *names: str) -> _ProcessState:
    """State of the attributes of tensors or modules."""

    def put(values: list[list[Any]]) -> None:
        for owner, items in zip(owners, values, strict=True):
            for name, value in zip(names, items, strict=True):
                setattr(owner, name, value)

    def copy(values: list[list[Any]]) -> list[list[Any]]:
        return [[value.clone() if isinstance(value, Tensor) else value for value in items] for items in values]

    return _ProcessState(lambda: [[getattr(owner, name) for name in names] for owner in owners], put, copy)


def _options(groups: Sequence[dict[str, Any]]) -> _ProcessState:
    def put(values: list[dict[str, Any]]) -> None:
        for group, options in zip(groups, values, strict=True):
            group.update(options)

    def get() -> list[dict[str, Any]]:
        return [{key: value for key, value in group.items() if key != "params"} for group in groups]

    return _ProcessState(get, put, _cloned)


def _metrics(metrics: Callable[[], list[Metric]]) -> _ProcessState:
    """The accumulated states of the metrics that are recorded; trackers add some."""

    def get() -> list[tuple[Metric, dict[str, Any]]]:
        return [(metric, metric_states(metric)) for metric in metrics()]

    def put(values: list[tuple[Metric, dict[str, Any]]]) -> None:
        for metric, states in values:
            set_metric_states(metric, states)

    return _ProcessState(get, put, _cloned, stays=False)


def _generators(device: torch.device) -> _ProcessState:
    """The states of Python's, NumPy's and torch's generators."""
    generator = default_generator(device)

    def get() -> Any:
        return generator_states(), generator.get_state()

    def put(value: Any) -> None:
        set_generator_states(value[0])
        generator.set_state(value[1])

    return _ProcessState(get, put, lambda value: value, stays=False)


def _values(tree: ValueTree) -> _ProcessState:
    """Mutable values in the module's tree; of tensors their identity, not content."""
    return _ProcessState(tree.contents, tree.restore, lambda value: value)


def _internals(module: pl.LightningModule) -> _ProcessState:
    """Attributes of the module that are not the user's, such as recorded values."""

    def put(value: dict[str, Any]) -> None:
        for name in _INTERNALS - value.keys():
            vars(module).pop(name, None)
        vars(module).update(value)

    def own(value: dict[str, Any]) -> dict[str, Any]:
        return {name: copy(item) if isinstance(item, dict) else item for name, item in value.items()}

    return _ProcessState(lambda: {n: v for n, v in vars(module).items() if n in _INTERNALS}, put, own)


_INTERNALS = INTERNAL_ATTRIBUTES - {*MODULE_TABLES, "_trainer", "training"}


class MicrobatchState:
    """A context in which the process is as one micro-batch has left it.

    ``tree``: the values of ``module``. ``metrics``: returns the recorded metrics. ``first``: whether it takes the state
    over unchanged.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        tree: ValueTree,
        optimizers: Iterable[Optimizer],
        device: torch.device,
        metrics: Callable[[], list[Metric]],
        first: bool,
    ) -> None:
        weights = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
        others = {id(tensor): tensor for tensor in tree.tensors() if tensor.nbytes <= _COPIED_BYTES}
        self._tensors = [*{**weights, **others}.values()]
        self._components = {
            "tensors": _fields(self._tensors, "data"),  # neither a copy nor a write, which autograd would count
            "gradients": _fields(list(module.parameters()), "requires_grad", "grad"),
            "options": _options([group for optimizer in optimizers for group in optimizer.param_groups]),
            "modes": _fields(list(module.modules()), "training"),
            "metrics": _metrics(metrics),
            "generators": _generators(device),
            "internals": _internals(module),
            "values": _values(tree),
        }
        values = {name: component.get() for name, component in self._components.items()}
        self._values = {
            name: values[name] if first and component.stays else component.copy(values[name])
            for name, component in self._components.items()
        }
        self._outside_states: dict[str, Any] = {}

    def __enter__(self) -> None:
        self._outside_states = {name: part.get() for name, part in self._components.items()}
        for name, part in self._components.items():
            part.put(self._values[name])

    def __exit__(self, *_: object) -> None:
        self._values = {name: part.get() for name, part in self._components.items()}
        for name, part in self._components.items():
            part.put(self._outside_states[name])
        self._outside_states = {}

    @torch.no_grad()
    def follow(self, parameters: Iterable[Tensor]) -> None:
        """Takes ``parameters`` and optimizer options from the state that is entered."""
        parameter_ids = set(map(id, parameters))
        for tensor, (data,) in zip(self._tensors, self._values["tensors"], strict=True):
            if id(tensor) in parameter_ids:
                data.copy_(tensor)
        options = self._components["options"]
        self._values["options"] = options.copy(options.get())

    def remain(self) -> None:
        """Makes the process as this micro-batch has left it, except for recorded parts."""
        for name, part in self._components.items():
            if part.stays:
                part.put(self._values[name])


def _cloned(value: Any) -> Any:
    return tree_map_only(Tensor, Tensor.clone, value)


# ---------------------------------------------------------------------- the whole step

_HOOKS_OF_STEPS = ("on_before_backward", "on_after_backward", "on_before_optimizer_step")


class ManualStepState:
    """The state of ``trainer`` and its module, with values ``tree``, before a step."""

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer
        self._tensors: dict[Tensor, Tensor] = {}
        self._gradients: dict[nn.Parameter, tuple[bool, Tensor | None]] = {}
        self.forget_values()
        self._optimizers: list[OptimizerState] = []
        self._schedulers: list[dict[str, Any]] = []
        self._other_states: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
        self._callbacks: tuple[ObjectGraph, ObjectPack] | None = None

    def forget_values(self) -> None:
        """Keeps no values of the module, nor weak references to weights, until a step."""
        self.tree = ValueTree(self._trainer.lightning_module)
        self._values: list[tuple[Any, Any]] = []

    @property
    def _progress(self) -> Any:
        return count_manual_steps(self._trainer)

    @torch.no_grad()
    def keep(self) -> None:
        trainer = self._trainer
        module = trainer.lightning_module
        self._tensors = {t: copied(t, self._tensors.get(t)) for t in (*module.parameters(), *module.buffers())}
        before = self._gradients
        self._gradients = {
            p: (p.requires_grad, None if p.grad is None else copied(p.grad, before.get(p, (False, None))[1]))
            for p in module.parameters()
        }
        self._values = self.tree.contents()
        old = self._optimizers[: len(trainer.optimizers)]
        self._optimizers = [OptimizerState(*pair) for pair in itertools.zip_longest(trainer.optimizers, old)]
        self._schedulers = [deepcopy(config.scheduler.state_dict()) for config in trainer.lr_scheduler_configs]
        self._other_states = deepcopy((self._progress.state_dict(), trainer.precision_plugin.state_dict()))
        watching = [c for c in trainer.callbacks if _sees_steps(c)]  # type: ignore[attr-defined]
        self._callbacks = None
        if watching:
            graph = callback_graph(trainer, watching)
            packed = graph.pack()
            self._callbacks = graph, ObjectPack(packed.data, [tensor.clone() for tensor in packed.tensors])

    @torch.no_grad()
    def rewind(self) -> None:
        trainer = self._trainer
        for tensor, saved in self._tensors.items():
            if tensor.shape == saved.shape:
                tensor.data.copy_(saved)
            else:
                tensor.data = saved.clone()
        for parameter, (requires_grad, grad) in self._gradients.items():
            parameter.requires_grad = requires_grad
            parameter.grad = None if grad is None else grad.clone()
        self.tree.restore(self._values)
        for state in self._optimizers:
            state.rewind()
        for config, scheduler in zip(trainer.lr_scheduler_configs, self._schedulers, strict=True):
            config.scheduler.load_state_dict(deepcopy(scheduler))
        progress, precision = deepcopy(self._other_states)
        self._progress.load_state_dict(progress)
        restore_scale(trainer, precision)
        if self._callbacks is not None:
            graph, packed = self._callbacks
            graph.update(packed, trainer.strategy.root_device)


def _sees_steps(callback: Callback) -> bool:
    return any(is_overridden(hook, callback, Callback) for hook in _HOOKS_OF_STEPS)


class ManualSteps:
    """Runs a worker's training steps under manual optimization."""

    def __init__(
        self,
        context: WorkerContext,
        step: nn.Module,
        parts: ModelParts,
        recorder: OutputRecorder,
        state: ManualStepState,
    ) -> None:
        self._context, self._trainer = context, context.trainer
        self._step, self._parts, self._recorder = step, parts, recorder
        self._turns = Lockstep()
        self._states: list[MicrobatchState] = []
        self.state = state
        self._exchange: ManualStepRunner
        self._step_path: StepPath
        self._counted: list[bool] = []
        self._is_together = False  # in something that is done together: what it calls is not met again
        self._in_backward = False

    # ------------------------------------------------------------------ a step

    def run(
        self, step: int, microbatches: Sequence[ManualStepMicrobatch], exchange: ManualStepRunner, step_path: StepPath
    ) -> list[tuple[float, bytes]]:
        """Runs the step for the micro-batches: of each the loss (NaN: none) and effects."""
        self._exchange, self._step_path = exchange, step_path
        self._counted = [microbatch.counts for microbatch in microbatches]
        self._is_together = self._in_backward = False
        trainer = self._trainer
        module = trainer.lightning_module
        self._states = [
            MicrobatchState(
                module,
                self.state.tree,
                trainer.optimizers,
                self._context.device,
                lambda: self._recorder.metrics,
                first=number == 0,
            )
            for number in range(len(microbatches) if len(microbatches) > 1 else 0)
        ]
        self._turns = Lockstep(self._states)
        with self._shared_operations(), self._context.forward_context():
            done = self._turns.run([partial(self._run_microbatch, step, microbatch) for microbatch in microbatches])
        if self._states:
            self._states[0].remain()
        self._turns, self._states = Lockstep(), []
        return done

    def _run_microbatch(self, step: int, microbatch: ManualStepMicrobatch) -> tuple[float, bytes]:
        """The step on one micro-batch; state of its thread is entered here."""
        device = self._context.device
        enter_device(device)
        with self._context.forward_context(), seeded_everything() as reseed, layer_randomness(device) as generator:
            seed = derive_seed(self._context.seed, step, microbatch.index, 0)
            reseed(seed)
            generator.manual_seed(seed)
            self._recorder.microbatch_changes.next_microbatch = microbatch.index
            output = self._step(*microbatch.inputs)
        with self._context.forward_context():
            return _loss_in(output), self._parts.record_training(self._recorder, output, None, microbatch.samples)

    # ------------------------------------------------------------------ what is done together

    @contextmanager
    def _shared_operations(self) -> Iterator[None]:
        """Makes backward passes and steps in the block meeting points of micro-batches."""
        with ExitStack() as stack:

            def replace(owner: Any, name: str, value: partial[Any]) -> None:
                # A scheduler leaves a mark on its optimizer's step, and warns if it is gone.
                stack.enter_context(patch.object(owner, name, update_wrapper(value, getattr(owner, name))))

            replace(torch.autograd, "backward", partial(self._backward, torch.autograd.backward))
            for number, (wrapper, optimizer) in enumerate(
                zip(lightning_optimizers(self._trainer), self._trainer.optimizers, strict=True)
            ):
                what = f"a step of optimizer {number} ({type(optimizer).__name__})"
                replace(wrapper, "step", partial(self._step_optimizer, what, optimizer, wrapper.step))
                replace(optimizer, "step", partial(self._step_optimizer, what, optimizer, optimizer.step))
            for number, config in enumerate(self._trainer.lr_scheduler_configs):
                scheduler = config.scheduler
                what = f"a step of scheduler {number} ({type(scheduler).__name__})"
                replace(scheduler, "step", partial(self._step_scheduler, what, scheduler.step))
            stack.callback(register_optimizer_step_pre_hook(self._check_optimizer).remove)
            yield

    def _meet(self, name: str, contribution: Any, combine: Callable[[list[Any]], Any]) -> Any:
        def once(contributions: list[Any]) -> Any:
            self._step_path.add(name)
            with patch.object(self, "_is_together", True):
                return combine(contributions)

        return self._turns.meet(name, contribution, once)

    def hooks_once(self) -> AbstractContextManager[Any]:
        """Callbacks are called in the block for the first micro-batch only."""
        callbacks = self._trainer.callbacks  # type: ignore[attr-defined]
        return patch.object(self._trainer, "callbacks", [] if self._turns.number else callbacks)

    # ------------------------------------------------------------------ backward passes

    def _backward(self, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """``torch.autograd.backward`` with gradients averaged over the step."""
        if self._in_backward:  # of a part that is computed once more (torch.utils.checkpoint with use_reentrant=True)
            original(*args, **kwargs)
            return
        trained = [p for p in self._trainer.lightning_module.parameters() if p.requires_grad]
        before = [parameter.grad for parameter in trained]
        hooks = take_hooks_after_accumulation(trained)
        for parameter in trained:
            parameter.grad = None
        self._in_backward = True
        try:
            original(*args, **kwargs)
            gradients = [parameter.grad for parameter in trained]
        finally:
            self._in_backward = False
            for parameter, grad in zip(trained, before, strict=True):
                parameter.grad = grad
            for parameter, of_one in hooks.items():
                set_hooks_after_accumulation(parameter, of_one)
        what = f"a backward pass of {len(trained)} parameters with {sum(p.numel() for p in trained):,} numbers"
        total = self._meet(what, gradients, partial(self._average, trained))
        for parameter, mean in zip(trained, total, strict=True):
            if mean is None:
                continue
            with torch.no_grad():
                if parameter.grad is None:
                    parameter.grad = mean if self._turns.number == 0 else mean.clone()
                else:
                    parameter.grad.add_(mean)
                for hook in list(hooks.get(parameter, {}).values()):
                    hook(parameter)

    @torch.no_grad()
    def _average(
        self, trained: Sequence[nn.Parameter], contributions: Sequence[Sequence[Tensor | None]]
    ) -> list[Tensor | None]:
        """The mean gradients over all micro-batches."""
        self._exchange.check(self._step_path)
        means: dict[int, Tensor | None] = {}
        for dtype in dict.fromkeys(parameter.dtype for parameter in trained):
            numbers = [number for number, parameter in enumerate(trained) if parameter.dtype == dtype]
            sizes = [trained[number].numel() for number in numbers]
            size = sum(sizes)
            flat = torch.zeros(size + len(numbers), dtype=dtype, device=self._context.device)  # then: who has one
            views = flat[:size].split(sizes)
            for grads in (grads for grads, counts in zip(contributions, self._counted, strict=True) if counts):
                for position, (number, view) in enumerate(zip(numbers, views, strict=True)):
                    grad = grads[number]
                    if grad is not None:
                        view.add_(_dense(grad).reshape(-1))
                        flat[size + position] = 1
            self._exchange.all_reduce(flat)
            has_gradient = (flat[size:].abs() > 0).tolist()
            flat[:size].div_(self._context.grid.global_microbatches)
            for number, view, is_there in zip(numbers, views, has_gradient, strict=True):
                means[number] = view.view(trained[number].shape) if is_there else None
        return [means[number] for number in range(len(trained))]

    # ------------------------------------------------------------------ optimizers and schedulers

    def _step_optimizer(
        self, name: str, optimizer: Optimizer, original: Callable[..., Any], closure: Any = None, **kwargs: Any
    ) -> Any:
        if self._is_together:  # Lightning's optimizer steps torch's
            return original(closure, **kwargs) if closure is not None else original(**kwargs)
        result = None
        if callable(closure):
            with torch.enable_grad():
                result = closure()

        def together(_: list[Any]) -> Any:
            once = called_once(lambda: result, name, optimizer, has_gradients=True) if callable(closure) else closure
            returned = original(once, **kwargs) if closure is not None else original(**kwargs)
            self._follow(p for group in optimizer.param_groups for p in group["params"])
            return returned

        returned = self._meet(name, None, together)
        return result if callable(closure) else returned

    def _step_scheduler(self, name: str, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        if self._is_together:  # a scheduler of schedulers
            original(*args, **kwargs)
            return

        def together(_: list[Any]) -> None:
            original(*args, **kwargs)
            self._follow(())

        self._meet(name, None, together)

    def _follow(self, parameters: Any) -> None:
        parameter_list = list(parameters)
        for world in self._states[1:]:
            world.follow(parameter_list)

    def _check_optimizer(self, optimizer: Optimizer, *_: Any) -> None:
        if not self._is_together:
            name = type(optimizer).__name__
            why = (
                "in a backward pass, whose gradients are those of one micro-batch"
                if self._in_backward
                else "that configure_optimizers() did not return, so it would step once for each micro-batch"
            )
            raise UnsupportedFeatureError(
                f"training_step() stepped an optimizer ({name}) {why}. Return all optimizers from"
                " configure_optimizers(), and step what self.optimizers() gives."
            )


def _dense(grad: Tensor) -> Tensor:
    if grad.layout is not torch.strided:
        raise UnsupportedFeatureError(
            f"A gradient is a {grad.layout} tensor of shape {tuple(grad.shape)}; the strategy needs dense gradients."
            " Use sparse=False in embeddings."
        )
    return grad


def _loss_in(output: Any) -> float:
    """The loss that a step returned; NaN if it returned none, as it may."""
    loss = output.get("loss") if isinstance(output, dict) else output
    return float(loss.detach()) if isinstance(loss, Tensor) and loss.numel() == 1 else float("nan")
