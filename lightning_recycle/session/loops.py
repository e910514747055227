"""Lightning's training loop with a schedule instead of step and backward.

Everything around a step (progress, hooks, schedulers, loggers, checkpoints) stays Lightning's, in its order. All hooks
concern the whole global batch: ``on_before_backward`` and ``on_after_backward`` come with its mean loss when its
gradient is complete. A joining worker goes through the same loops, and waits before its first epoch until it may enter.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.loops.fetchers import _DataFetcher
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.loops.optimization.automatic import _AutomaticOptimization
from lightning.pytorch.loops.optimization.manual import _ManualOptimization
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.trainer import call
from torch.optim import Optimizer
from typing_extensions import override

from lightning_recycle.control.protocol.control_collectives import StopPlace
from lightning_recycle.data.iterable_style import StreamLoader
from lightning_recycle.data.step_sources import StepHandle, StepLoader
from lightning_recycle.runtime.commit_reports import StepResult
from lightning_recycle.runtime.gradients import AccumulationPart
from lightning_recycle.session.gradient_clipping import called_once
from lightning_recycle.session.lightning_internals import (
    ends_step,
    epochs_so_far,
    lightning_optimizers,
    resume_at_counters,
    rewind_to_batch,
)
from lightning_recycle.session.step_loaders import addressed_loaders
from lightning_recycle.session.training_steps import TrainingSteps
from lightning_recycle.session.worker_snapshot import StepBoundary

log = logging.getLogger(__name__)

_SAMPLER = "the state of a sampler"  # marks it among the states of loaders


def share_of_batch(trainer: pl.Trainer, batch_idx: int) -> AccumulationPart:
    """The share of the batch that Lightning has just begun in a step of the optimizer."""
    batches = trainer.accumulate_grad_batches
    return AccumulationPart(batches, begins=batch_idx % batches == 0, ends=ends_step(trainer))


class PipelineOptimization(_AutomaticOptimization):
    """Runs one step of the schedule and lets Lightning's ``optimizer_step`` apply it."""

    @override
    def run(self, optimizer: Optimizer, batch_idx: int, kwargs: OrderedDict[str, Any]) -> dict[str, Any]:
        trainer, runner = self.trainer, _runner(self.trainer)
        strategy, module = trainer.strategy, trainer.lightning_module
        share = share_of_batch(trainer, batch_idx)

        is_empty = False

        def apply(result: StepResult) -> None:
            loss = runner.as_loss(result.loss) / share.batches

            def backward_is_done() -> torch.Tensor:
                nonlocal is_empty
                if share.begins:
                    self._on_before_zero_grad(optimizer)
                    self._optimizer_zero_grad(batch_idx, optimizer)
                is_empty = not (result.add_gradients() or result.loss)  # all parts of the step returned None
                if not is_empty:
                    strategy.precision_plugin.pre_backward(loss, module)
                    strategy.precision_plugin.post_backward(loss, module)
                return loss

            if not share.ends:
                backward_is_done()
                return
            self.optim_progress.optimizer.step.increment_ready()
            name = f"a step of {type(optimizer).__name__}"
            closure = called_once(backward_is_done, name, optimizer, _EVALUATES_AGAIN)
            arguments = (trainer.current_epoch, batch_idx, lightning_optimizers(trainer)[0], closure)
            call._call_lightning_module_hook(trainer, "optimizer_step", *arguments)
            self.optim_progress.optimizer.step.increment_completed()

        loss, returned = _run_step(trainer, kwargs["batch"], apply, share)
        return {} if is_empty else {"loss": loss / share.batches, **(returned or {})}


_EVALUATES_AGAIN = (
    "or one like SAM with automatic_optimization = False and self.manual_backward() for each evaluation of the loss"
)


class PipelineManualOptimization(_ManualOptimization):
    """Runs one step of a module that optimizes by itself."""

    @override
    def advance(self, kwargs: OrderedDict[str, Any]) -> None:
        _, returned = _run_step(
            self.trainer, kwargs["batch"], lambda _: None, AccumulationPart()
        )  # its optimizers have stepped
        self._output = returned or {}


def _runner(trainer: pl.Trainer) -> TrainingSteps:
    loop = trainer.fit_loop
    assert isinstance(loop, PipelineFitLoop)
    return loop.runner


def _run_step(
    trainer: pl.Trainer, handle: StepHandle, apply: Callable[[StepResult], None], share: AccumulationPart
) -> tuple[torch.Tensor, Any]:
    """Runs a step, and logs in place of ``training_step``, where Lightning allows it."""
    runner, profiler = _runner(trainer), trainer.profiler  # type: ignore[attr-defined]
    with profiler.profile(f"[Strategy]{type(trainer.strategy).__name__}.training_step"):
        result = runner.run_step(handle, apply, share)
    results, module, loss = trainer._results, trainer.lightning_module, runner.as_loss(result.loss)
    if results is not None:
        results.batch_size = handle.num_samples
    previous, module._current_fx_name = module._current_fx_name, "training_step"
    try:
        return loss, runner.log_step(handle, loss, result.outputs)
    finally:
        module._current_fx_name = previous


class PipelineEpochLoop(_TrainingEpochLoop):
    """The epoch loop; its parent's attribute names are keys in checkpoints."""

    def __init__(self, trainer: pl.Trainer, min_steps: int | None, max_steps: int) -> None:
        super().__init__(trainer, min_steps, max_steps)
        self.automatic_optimization = PipelineOptimization(trainer)
        self.manual_optimization = PipelineManualOptimization(trainer)
        # Whether this worker begins at the current batch: its counters are already right.
        self._enters_mid_epoch = False
        # Called once it has the data of the epoch in whose middle it begins.
        self._on_entered: Callable[[], None] | None = None
        # Whether it begins with what follows the batch that the counters have completed, such as a validation.
        self._ends_batch = False
        self._has_advanced = False

    @property
    @override
    def done(self) -> bool:
        _runner(self.trainer).agree_to_stop(StopPlace.EPOCH if self._has_advanced else StopPlace.EPOCH_START)
        return super().done

    @override
    def reset(self) -> None:
        if self._enters_mid_epoch:
            self._enters_mid_epoch = False
            return
        epoch_is_over = self.restarted_on_train_batch_end and self.batch_progress.is_last_batch
        super().reset()
        if epoch_is_over:  # the parent sees that only if it knows the length
            self.batch_progress.reset_on_run()
            self.scheduler_progress.reset_on_run()
            self.automatic_optimization.optim_progress.reset_on_run()
            self.val_loop.batch_progress.total.reset()

    @override
    def on_run_start(self, data_fetcher: _DataFetcher) -> None:
        """Begins with the batch that the counters name, also in the middle of an epoch."""
        first = self.batch_progress.current.ready
        fit_loop = self.trainer.fit_loop
        assert fit_loop._combined_loader is not None
        loaders = fit_loop._combined_loader.flattened
        is_alone = len(loaders) == 1
        for loader in loaders:
            assert isinstance(loader, StepLoader)
            if self.trainer.current_epoch > 0 and not fit_loop.is_resuming and not self.restarting:
                loader.iterate_again()  # as the parent does
            loader.enter_epoch(first if is_alone else 0, fit_loop.max_batches)
        _runner(self.trainer).loaders.compare(loaders)
        super().on_run_start(data_fetcher)
        self._has_advanced = False
        # Lightning asks data without a length for a batch before it knows where training begins.
        if first or any(loader.only_forward for loader in loaders):
            iter(data_fetcher)
            if is_alone:
                data_fetcher.fetched += first
            else:  # where each of them is depends on how they are combined; addresses cost nothing
                for _ in range(first):
                    next(data_fetcher)
        for loader in loaders:
            loader.entered()
        if (on_entered := self._on_entered) is not None:
            self._on_entered = None
            on_entered()
        if self._ends_batch:
            self._ends_batch, self._has_advanced = False, True
            self.on_advance_end(data_fetcher)

    @override
    def _build_kwargs(self, kwargs: OrderedDict[str, Any], batch: Any, batch_idx: int) -> OrderedDict[str, Any]:
        """Only the batch is needed here."""
        kwargs["batch"] = batch
        return kwargs

    @override
    def advance(self, data_fetcher: _DataFetcher) -> None:
        self._has_advanced = not self.restarting  # then the parent asks first whether a validation was interrupted
        super().advance(data_fetcher)
        self._has_advanced = True
        _runner(self.trainer).at_boundary(StepBoundary.BATCH)

    @override
    def on_advance_end(self, data_fetcher: _DataFetcher) -> None:
        super().on_advance_end(data_fetcher)
        _runner(self.trainer).at_boundary(StepBoundary.VALIDATION)

    @override
    def _should_check_val_fx(self, data_fetcher: _DataFetcher) -> bool:
        if self._has_advanced:
            _runner(self.trainer).agree_to_stop(StopPlace.STEP_END)
        decided = super()._should_check_val_fx(data_fetcher)
        if self.trainer._val_check_time_interval is not None and self._should_check_val_epoch():
            decided = bool(self.trainer.strategy.broadcast(decided))  # each worker has its own clock
        if decided:
            _runner(self.trainer).confirm_step()
        return decided

    @override
    def _broadcast_sigterm_tensor(self) -> None:
        """The parent broadcasts from rank 0 through torch's default group."""


class PipelineFitLoop(_FitLoop):
    """The fit loop; its parent's attribute names are keys in checkpoints."""

    runner: TrainingSteps
    _has_started = False
    # Whether it begins in an epoch that is not over, however many steps or epochs it is to train.
    _goes_on = False
    _batch_size_to_load: int | None

    @classmethod
    def install(cls, trainer: pl.Trainer, runner: TrainingSteps) -> None:
        """Replaces ``trainer``'s fit and epoch loops, continuing their counters."""
        lightning_loop = trainer.fit_loop
        if isinstance(lightning_loop, cls):  # of an earlier run in this process
            lightning_loop.runner = runner
            return
        old_epoch = lightning_loop.epoch_loop
        epoch = PipelineEpochLoop(trainer, old_epoch.min_steps, old_epoch.max_steps)
        optimization = epoch.automatic_optimization
        optimization.optim_progress = old_epoch.automatic_optimization.optim_progress
        manual = epoch.manual_optimization
        manual.optim_step_progress = old_epoch.manual_optimization.optim_step_progress
        loops = {"automatic_optimization": optimization, "manual_optimization": manual}
        epoch.__dict__.update({**vars(old_epoch), **loops})
        pipeline_loop = cls(trainer)
        overridden = {"epoch_loop": epoch, "runner": runner, "_batch_size_to_load": None}
        pipeline_loop.__dict__.update({**vars(lightning_loop), **overridden})
        trainer.fit_loop = pipeline_loop

    @property
    @override
    def skip(self) -> bool:
        steps, epochs = self.epoch_loop.global_step, epochs_so_far(self.trainer)
        is_past = -1 < self.max_steps < steps or -1 < (self.max_epochs or -1) <= epochs
        self._has_started, self._goes_on = False, self.runner.checkpoints.resumes_mid_epoch and not is_past
        return super().skip

    @property
    @override
    def done(self) -> bool:
        self.runner.agree_to_stop(StopPlace.FIT if self._has_started else StopPlace.START)
        return not self._goes_on and super().done

    @override
    def reset(self) -> None:
        super().reset()
        if self.restarted_on_epoch_end:
            # With ``max_steps`` the parent would repeat the finished epoch, without a batch, and number later epochs
            # one too high.
            self.epoch_progress.increment_completed()
            self.reset_restart_stage()
            _Loop.restarting.fset(self, False)  # type: ignore[attr-defined]

    @override
    def setup_data(self) -> None:
        super().setup_data()
        if self._combined_loader is not None:
            self.runner.loaders.keep_for_training(self._combined_loader.flattened)
            self._load_combined_loader_states()  # configure_optimizers() may have read the loaders before
            for loader in self._combined_loader.flattened:
                loader.entered()
        self.runner.loaders.set_epoch(epochs_so_far(self.trainer))  # as the parent does next, of the samplers

    @override
    def on_advance_start(self) -> None:
        resumes = self.restarted_mid_epoch
        super().on_advance_start()
        if resumes:  # the parent does not call this hook again, and the factor is in no checkpoint
            for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
                if isinstance(callback, GradientAccumulationScheduler):
                    callback.on_train_epoch_start(self.trainer, self.trainer.lightning_module)

    @override
    def on_advance_end(self) -> None:
        self._goes_on = False
        self.runner.confirm_step()  # hooks at the end of an epoch may look at parameters
        super().on_advance_end()
        self.runner.at_boundary(StepBoundary.EPOCH)

    @override
    def on_save_checkpoint(self) -> dict[str, Any]:
        """Adds seed, batch size and samplers to the loop's state."""
        state: dict[str, Any] = super().on_save_checkpoint()
        state["seed"] = self.runner.seed
        state["global_batch_size"] = self.runner.loaders.global_batch_size
        orders = [loader.order_state() for loader in addressed_loaders(self)]
        if any(orders):
            reload = {"reload": self.trainer.reload_dataloaders_every_n_epochs}  # type: ignore[attr-defined]
            state["sampler_states"] = [order and {**order, **reload} for order in orders]
        return state

    @override
    def on_load_checkpoint(self, state_dict: dict[str, Any]) -> None:
        super().on_load_checkpoint(state_dict)
        states = [{_SAMPLER: order} for order in state_dict.get("sampler_states", [])]
        if (seed := state_dict.get("seed")) is not None:
            self.runner.resume_seed(seed)
        before = state_dict.get("global_batch_size")
        self._batch_size_to_load = None if before == self.runner.loaders.global_batch_size else before
        self._combined_loader_states_to_load = [*self._combined_loader_states_to_load, *states]

    @override
    def _load_combined_loader_states(self) -> None:
        """Also rewinds a stream for a checkpoint from the end of an epoch."""
        if self.is_resuming:
            self.restore_stream_places()

    def restore_stream_places(self) -> None:
        """Rewinds streams of data to their places in the state that this loop loaded.

        Of data with addresses it is the state of the sampler; that of a single device's loader in a checkpoint stays
        unused.
        """
        states, self._combined_loader_states_to_load = self._combined_loader_states_to_load, []
        assert self._combined_loader is not None
        self._compare_batch_sizes()
        orders = [state[_SAMPLER] for state in states if _SAMPLER in state]
        for source, order in zip(addressed_loaders(self), orders, strict=False):
            source.load_order_state(order)
        states = states[: len(states) - len(orders)]
        for loader, state in zip(self._combined_loader.flattened, states, strict=False):
            if isinstance(loader, StreamLoader):
                loader.load_state_dict(state)

    def _compare_batch_sizes(self) -> None:
        """Warns if the training of a checkpoint goes on with batches of another size."""
        before, self._batch_size_to_load = self._batch_size_to_load, None
        now, progress = self.runner.loaders.global_batch_size, self.epoch_loop.batch_progress
        if not before or not now or before == now or not self.trainer.is_global_zero:
            return
        done = 0 if progress.is_last_batch else progress.current.ready
        mid = f", after {done} of the epoch's batches, so it repeats or leaves out samples" if done else ""
        log.warning(
            "The checkpoint was written with global batches of %d samples, and those of this run have %d: the training"
            " goes on with these%s. To keep the batch choose a batch_size whose product with the number of pipelines is"
            " %d.",
            *(before, now, mid, before),
        )

    def enter_mid_epoch(self, state: dict[str, Any]) -> None:
        """Begins the epoch of ``state`` at the batch that the donor had begun."""
        self.on_load_checkpoint(state)
        self.restore_stream_places()
        epoch = self.epoch_loop
        assert isinstance(epoch, PipelineEpochLoop)
        rewind_to_batch(self.trainer)
        epoch._enters_mid_epoch = True

    def resume_after(self, boundary: StepBoundary, on_entered: Callable[[], None]) -> None:
        """Continues the training behind ``boundary``, to which the counters belong."""
        resume_at_counters(self.trainer, mid_epoch=boundary is not StepBoundary.EPOCH)
        self._combined_loader_states_to_load, self._batch_size_to_load = [], None  # both were seen to in setup_data()
        epoch = self.epoch_loop
        assert isinstance(epoch, PipelineEpochLoop)
        if boundary is StepBoundary.EPOCH:
            on_entered()
            return
        epoch._enters_mid_epoch, epoch._on_entered = True, on_entered
        epoch._ends_batch = boundary is StepBoundary.BATCH

    @override
    def on_run_start(self) -> None:
        super().on_run_start()
        self._has_started = True
        self.runner.enter_training()

    @override
    def on_run_end(self) -> None:
        with self.runner.checkpoints.saving_at_end():  # hooks at the end may look for checkpoints
            super().on_run_end()


def patch_logger_connector(trainer: pl.Trainer, hook: Callable[[], None]) -> None:
    """Patches Lightning's connector of loggers for batches that are addresses.

    Lightning cannot see a batch size in them, which means over an epoch need. ``hook`` is called on all workers before
    hooks at the end of an epoch. Replaces the patch of an earlier run.
    """
    connector = trainer._logger_connector
    start, reached = type(connector).on_batch_start, type(connector).epoch_end_reached

    def on_batch_start(batch: Any, dataloader_idx: int | None = None) -> None:
        start(connector, batch, dataloader_idx)
        if isinstance(batch, StepHandle):
            assert trainer._results is not None
            trainer._results.batch_size = batch.num_samples

    def epoch_end_reached() -> None:
        hook()
        reached(connector)

    connector.on_batch_start = on_batch_start  # type: ignore[method-assign]
    connector.epoch_end_reached = epoch_end_reached  # type: ignore[method-assign]
