"""Manual optimization: the training step of several micro-batches as one.

A worker runs the user's ``training_step`` for each of its micro-batches, in turns
(:mod:`~lightning_recycle.runtime.executor.whole_steps`), each in a state of its own. They meet at each backward pass,
whose gradients are averaged over all micro-batches of all workers, as under DDP, and at each step of an optimizer or
scheduler, which is done once.

Contract: ``loss.backward()`` is the same as ``self.manual_backward(loss)``; ``torch.autograd.grad`` is local. Closures
of optimizers are called once, by each micro-batch. Optimizers that ``configure_optimizers`` did not return are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, update_wrapper
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_recycle.devices import enter_device
from lightning_recycle.errors import UnsupportedFeatureError
from lightning_recycle.model.parts import ModelParts
from lightning_recycle.randomness import derive_seed, layer_randomness, seeded_everything
from lightning_recycle.runtime.executor.whole_steps import Lockstep, StepPath, WholeStepMicrobatch, WholeStepRunner
from lightning_recycle.session.collectives import WorkerContext
from lightning_recycle.session.commit_requirements import called_once
from lightning_recycle.session.lightning_internals import lightning_optimizers
from lightning_recycle.session.microbatch_state import ManualStepState, MicrobatchState
from lightning_recycle.session.outputs import OutputRecorder


class ManualSteps:
    """Runs the steps of one worker."""

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
        self._exchange: WholeStepRunner
        self._way: StepPath
        self._counted: list[bool] = []
        self._is_together = False  # in something that is done together: what it calls is not met again
        self._in_backward = False

    # ------------------------------------------------------------------ a step

    def run(
        self, step: int, microbatches: Sequence[WholeStepMicrobatch], exchange: WholeStepRunner, way: StepPath
    ) -> list[tuple[float, bytes]]:
        """Runs the step for the micro-batches of this worker.

        Returns the loss of each (NaN if it has none), and its effects for all workers.
        """
        self._exchange, self._way = exchange, way
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
            done = self._turns.run([partial(self._one, step, microbatch) for microbatch in microbatches])
        if self._states:
            self._states[0].remain()
        self._turns, self._states = Lockstep(), []
        return done

    def _one(self, step: int, microbatch: WholeStepMicrobatch) -> tuple[float, bytes]:
        """The step on one micro-batch; state of its thread is entered here."""
        device = self._context.device
        enter_device(device)
        with self._context.forward_context(), seeded_everything() as reseed, layer_randomness(device) as generator:
            seed = derive_seed(self._context.seed, step, microbatch.index, 0)
            reseed(seed)
            generator.manual_seed(seed)
            self._recorder.slot_changes.slot = microbatch.index
            output = self._step(*microbatch.inputs)
        with self._context.forward_context():
            return _loss_in(output), self._parts.record_training(self._recorder, output, None, microbatch.samples)

    # ------------------------------------------------------------------ what is done together

    @contextmanager
    def _shared_operations(self) -> Iterator[None]:
        """Makes backward passes and steps in the block meeting points of micro-batches."""
        with ExitStack() as stack:
            replace = partial(_replaced, stack)
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

    def _meet(self, what: str, part: Any, together: Callable[[list[Any]], Any]) -> Any:
        def once(parts: list[Any]) -> Any:
            self._way.add(what)
            self._is_together = True
            try:
                return together(parts)
            finally:
                self._is_together = False

        return self._turns.meet(what, part, once)

    @contextmanager
    def hooks_once(self) -> Iterator[None]:
        """Callbacks are called in the block for the first micro-batch only."""
        callbacks, trainer = self._trainer.callbacks, self._trainer  # type: ignore[attr-defined]
        if self._turns.number:
            trainer.callbacks = []  # type: ignore[attr-defined]
        try:
            yield
        finally:
            trainer.callbacks = callbacks  # type: ignore[attr-defined]

    # ------------------------------------------------------------------ backward passes

    def _backward(self, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """``torch.autograd.backward`` with gradients averaged over the step."""
        if self._in_backward:  # of a part that is computed once more (torch.utils.checkpoint with use_reentrant=True)
            original(*args, **kwargs)
            return
        trained = [p for p in self._trainer.lightning_module.parameters() if p.requires_grad]
        before = [parameter.grad for parameter in trained]
        for parameter in trained:
            parameter.grad = None
        self._in_backward = True
        try:
            original(*args, **kwargs)
            mine = [parameter.grad for parameter in trained]
        finally:
            self._in_backward = False
            for parameter, grad in zip(trained, before, strict=True):
                parameter.grad = grad
        what = f"a backward pass of {len(trained)} parameters with {sum(p.numel() for p in trained):,} numbers"
        total = self._meet(what, mine, partial(self._average, trained))
        for parameter, new in zip(trained, total, strict=True):
            if new is None:
                continue
            if parameter.grad is None:
                parameter.grad = new if self._turns.number == 0 else new.clone()
            else:
                parameter.grad.add_(new)

    @torch.no_grad()
    def _average(
        self, trained: Sequence[nn.Parameter], parts: Sequence[Sequence[Tensor | None]]
    ) -> list[Tensor | None]:
        """The mean gradients over all micro-batches."""
        self._exchange.check(self._way)
        found: dict[int, Tensor | None] = {}
        for dtype in dict.fromkeys(parameter.dtype for parameter in trained):
            numbers = [number for number, parameter in enumerate(trained) if parameter.dtype == dtype]
            sizes = [trained[number].numel() for number in numbers]
            size = sum(sizes)
            flat = torch.zeros(size + len(numbers), dtype=dtype, device=self._context.device)  # then: who has one
            views = flat[:size].split(sizes)
            for part in (part for part, counts in zip(parts, self._counted, strict=True) if counts):
                for place, (number, view) in enumerate(zip(numbers, views, strict=True)):
                    grad = part[number]
                    if grad is not None:
                        view.add_(_dense(grad).reshape(-1))
                        flat[size + place] = 1
            self._exchange.all_reduce(flat)
            has = (flat[size:].abs() > 0).tolist()
            flat[:size].div_(self._context.grid.global_microbatches)
            for number, view, is_there in zip(numbers, views, has, strict=True):
                found[number] = view.view(trained[number].shape) if is_there else None
        return [found[number] for number in range(len(trained))]

    # ------------------------------------------------------------------ optimizers and schedulers

    def _step_optimizer(
        self, what: str, optimizer: Optimizer, original: Callable[..., Any], closure: Any = None, **kwargs: Any
    ) -> Any:
        if self._is_together:  # Lightning's optimizer steps torch's
            return original(closure, **kwargs) if closure is not None else original(**kwargs)
        result = None
        if callable(closure):
            with torch.enable_grad():
                result = closure()
            closure = called_once(lambda: result, what)

        def together(_: list[Any]) -> Any:
            returned = original(closure, **kwargs) if closure is not None else original(**kwargs)
            self._follow(p for group in optimizer.param_groups for p in group["params"])
            return returned

        returned = self._meet(what, None, together)
        return result if callable(closure) else returned

    def _step_scheduler(self, what: str, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        if self._is_together:  # a scheduler of schedulers
            original(*args, **kwargs)
            return

        def together(_: list[Any]) -> None:
            original(*args, **kwargs)
            self._follow(())

        self._meet(what, None, together)

    def _follow(self, parameters: Any) -> None:
        wanted = list(parameters)
        for world in self._states[1:]:
            world.follow(wanted)

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


def _replaced(stack: ExitStack, owner: Any, name: str, value: partial[Any]) -> None:
    """Replaces an attribute of ``owner`` itself until the end of ``stack``."""
    own = vars(owner)
    if name in own:
        stack.callback(setattr, owner, name, own[name])
    else:
        stack.callback(own.pop, name, None)
    # A scheduler leaves a mark on its optimizer's step, and warns if it is gone.
    setattr(owner, name, update_wrapper(value, getattr(owner, name)))


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
