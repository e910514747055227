"""Lightning's Tuner, LearningRateFinder and BatchSizeFinder.

Concept: a trial is a run of its own, before the run that it is for. Lightning rewinds a training in which it tries
something; here the launching process keeps its module and its Trainer, workers try, and what they hold ends with them.
So there is nothing to rewind, a worker may die in a trial, and one without memory ends a trial and nothing else.

The learning rates, the losses, the search for a batch size and what follows from them are Lightning's own code. It is
given what it asks of a Trainer.

Contract: :func:`finders_of` tells which callbacks want trials, :func:`tune` makes them, and :func:`set_aside` keeps
these callbacks from the workers of the run itself.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, TypeAlias, cast

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import BatchSizeFinder, Callback, LearningRateFinder
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.tuner.batch_size_scaling import _adjust_batch_size, _run_binsearch_scaling, _run_power_scaling
from lightning.pytorch.tuner.lr_finder import _determine_lr_attr_name, _LRCallback, _LRFinder
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.parsing import lightning_getattr, lightning_hasattr, lightning_setattr
from typing_extensions import override

from lightning_recycle.callbacks import HeartbeatCallback
from lightning_recycle.errors import UnsupportedFeatureError
from lightning_recycle.launch.delivery import Call, Extras
from lightning_recycle.launch.results import attach_data
from lightning_recycle.model.cutting import is_meant_to_be_cut

__all__ = ["finders_of", "set_aside", "tune"]

log = logging.getLogger(__name__)

Finder: TypeAlias = BatchSizeFinder | LearningRateFinder
Trial: TypeAlias = Callable[[Call], Extras]
"""Runs a function of the Trainer in workers of its own; returns what their leader delivers."""

_HOOKS = {  # function of the Trainer -> the hook in which the finders begin
    TrainerFn.FITTING: "on_fit_start",
    TrainerFn.VALIDATING: "on_validation_start",
    TrainerFn.TESTING: "on_test_start",
    TrainerFn.PREDICTING: "on_predict_start",
}
_LIMITS = {
    TrainerFn.VALIDATING: "limit_val_batches",
    TrainerFn.TESTING: "limit_test_batches",
    TrainerFn.PREDICTING: "limit_predict_batches",
}


def finders_of(trainer: pl.Trainer, is_outside: bool) -> list[Finder]:
    """The callbacks of ``trainer`` that want trials; ``is_outside``: in a worker that somebody else started.

    Raises:
        UnsupportedFeatureError: for those that would make them in the middle of a run, and where workers are started
            by somebody else.
    """
    finders = [c for c in trainer.callbacks if isinstance(c, BatchSizeFinder | LearningRateFinder)]  # type: ignore[attr-defined]
    for finder in finders:
        base = LearningRateFinder if isinstance(finder, LearningRateFinder) else BatchSizeFinder
        names = [name for name in dir(Callback) if name.startswith("on_") and name not in _HOOKS.values()]
        names += ["lr_find", "scale_batch_size"]
        for name in names:
            if getattr(type(finder), name, None) is not getattr(base, name, None):
                raise UnsupportedFeatureError(
                    f"strategy='recycle' does not support {type(finder).__name__}.{name}(): trials run in workers of"
                    f" their own, before the run begins. Use {base.__name__}, or Tuner between two runs."
                )
        for variable, is_set in (
            ("RECYCLE_COORDINATOR", is_outside),
            ("RECYCLE_LISTEN", "RECYCLE_LISTEN" in os.environ),
        ):
            if is_set:
                raise UnsupportedFeatureError(
                    f"strategy='recycle' does not support {type(finder).__name__} with {variable}: each trial needs"
                    " workers of its own. Find the value with workers of one machine, and give it to this run."
                )
    return finders


def tune(finder: Finder, call: Call, trial: Trial) -> bool:
    """Lets ``finder`` find its value for a run of ``call``; returns whether that is all that is wanted (Tuner)."""
    trainer = call[0]
    module = trainer.lightning_module
    assert trainer.state.fn is not None
    attach_data(call)

    def find(*_: Any) -> None:
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            rank_zero_warn(f"{type(finder).__name__} does nothing with fast_dev_run.")
        elif isinstance(finder, LearningRateFinder):
            finder.optimal_lr = _find_learning_rate(finder, call, trial)
        else:
            finder.optimal_batch_size = _find_batch_size(finder, call, trial)

    name = "lr_find" if isinstance(finder, LearningRateFinder) else "scale_batch_size"
    setattr(finder, name, find)  # its own hook decides whether it wants trials of this function
    try:
        getattr(finder, _HOOKS[trainer.state.fn])(trainer, module)
    finally:
        delattr(finder, name)
    if finder._early_exit:
        trainer.state.status, trainer.state.stage = TrainerStatus.FINISHED, None
    return finder._early_exit


@contextmanager
def set_aside(trainer: pl.Trainer, finders: Sequence[Finder]) -> Iterator[None]:
    """Takes ``finders`` out of the callbacks while the block runs."""
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    places = [callbacks.index(finder) for finder in finders]
    callbacks[:] = [callback for callback in callbacks if callback not in finders]
    try:
        yield
    finally:
        for place, finder in zip(places, finders, strict=True):
            trainer.callbacks.insert(place, finder)  # type: ignore[attr-defined]


@contextmanager
def _set_for_trials(
    trainer: pl.Trainer, callback: Callback, *settings: tuple[Any, str, Any], **options: Any
) -> Iterator[None]:
    """Gives the Trainer that workers get ``callback`` alone, ``settings`` (owner, name, value) and ``options`` of the
    strategy; undone at the end of the block.
    """
    strategy: Any = trainer.strategy
    heartbeats = [c for c in trainer.callbacks if isinstance(c, HeartbeatCallback)]  # type: ignore[attr-defined]
    settings = (
        (trainer, "callbacks", [*heartbeats, callback]),
        (trainer, "loggers", [DummyLogger()] if trainer.loggers else []),
        (trainer, "num_sanity_val_steps", 0),
        (strategy, "options", replace(strategy.options, profile=None, **options)),
        *settings,
    )
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in settings]
    try:
        for owner, name, value in settings:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def _keep_only(trainer: pl.Trainer, callback: Callback) -> None:
    """Drops the callbacks that the module brings: in a trial Lightning runs nobody's."""
    own = "lightning_recycle."
    trainer.callbacks = [  # type: ignore[attr-defined]
        c
        for c in trainer.callbacks  # type: ignore[attr-defined]
        if c is callback or type(c).__module__.startswith(own)
    ]


# ---------------------------------------------------------------------- learning rates


class _RatesTried(_LRCallback):
    """Lightning's own, in a worker: its state comes home, and goes to a worker that joins."""

    def __init__(self, search: _LRFinder, threshold: float | None) -> None:
        super().__init__(search.num_training, threshold)
        self._search = search

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        _keep_only(trainer, self)

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._search._exchange_scheduler(trainer)
        self.progress_bar_refresh_rate = int(trainer.is_global_zero)

    @override
    def state_dict(self) -> dict[str, Any]:
        names = ("lrs", "losses", "avg_loss", "best_loss")
        return {name: getattr(self, name) for name in names}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        vars(self).update(state_dict)


def _find_learning_rate(finder: LearningRateFinder, call: Call, trial: Trial) -> _LRFinder:
    trainer, function, args, kwargs = call
    module = trainer.lightning_module
    name = _determine_lr_attr_name(module, finder._attr_name) if finder._update_attr else ""
    if inspect.signature(function).bind(*args, **kwargs).arguments.get("ckpt_path") is not None:
        raise UnsupportedFeatureError(
            f"strategy='recycle' does not support {type(finder).__name__} with ckpt_path: the checkpoint's optimizer"
            " has a learning rate of its own. Load the weights into the module, and call fit without ckpt_path."
        )
    search = _LRFinder(finder._mode, finder._min_lr, finder._max_lr, finder._num_training_steps)
    tried = _RatesTried(search, finder._early_stop_threshold)
    steps = search.num_training
    with _set_for_trials(
        trainer,
        tried,
        (trainer.fit_loop.epoch_loop, "max_steps", steps + trainer.global_step),
        (trainer, "limit_val_batches", steps),
        (trainer, "should_stop", False),
    ):
        state = trial(call).callbacks[tried.state_key]
    search.results.update(lr=state["lrs"], loss=state["losses"])
    search._total_batch_idx = len(state["lrs"]) * trainer.accumulate_grad_batches - 1
    if len(state["losses"]) < steps:
        log.info("LR finder stopped early after %d steps.", len(state["losses"]))
    if finder._update_attr and (rate := search.suggestion()) is not None:
        lightning_setattr(module, name, rate)
        log.info("Learning rate set to %s", rate)
    return search


# ---------------------------------------------------------------------- batch sizes


class _SizeTried(Callback):
    """In a worker: tells how much data there is."""

    def __init__(self) -> None:
        self.samples: int | None = None
        self.loaders = 0

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        _keep_only(trainer, self)

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        loop = trainer._active_loop
        assert loop is not None
        data = loop._combined_loader
        assert data is not None
        self.loaders = len(data.flattened)
        try:
            self.samples = data._dataset_length()
        except NotImplementedError:  # a stream: nobody knows
            self.samples = None

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"samples": self.samples, "loaders": self.loaders}


class _Sizes:
    """A batch size being looked for: what Lightning's search asks of a Trainer and its loop.

    The search may ask for any size. A pipeline trains with a multiple of its micro-batches, and with no more than its
    share of the data: the last, incomplete step of an epoch is left out.

    Args:
        finder: the callback.
        call: the function that is tried.
        trial: runs it.
    """

    def __init__(self, finder: BatchSizeFinder, call: Call, trial: Trial) -> None:
        trainer = call[0]
        self.lightning_module = trainer.lightning_module
        self.restarting = False
        nothing = SimpleNamespace(reset=lambda: None)  # a trial leaves no progress here
        automatic, manual = SimpleNamespace(optim_progress=nothing), SimpleNamespace(optim_step_progress=nothing)
        loop = SimpleNamespace(automatic_optimization=automatic, manual_optimization=manual)
        self.fit_loop = SimpleNamespace(epoch_progress=nothing, epoch_loop=loop)
        self._active_loop = self._combined_loader = self
        self._finder, self._call, self._trial = finder, call, trial
        self._fits = trainer.state.fn == TrainerFn.FITTING
        self._quantum, self._pipelines = 1, trainer.world_size
        if self._fits:
            strategy: Any = trainer.strategy
            is_cut = is_meant_to_be_cut(trainer.lightning_module, strategy.options.pipeline)
            grid = strategy.options.choose_grid(strategy.num_devices, can_be_cut=is_cut)
            self._quantum = grid.microbatches
        self._samples: int | None = None

    def settle(self) -> int:
        """Sets the size that training can have; returns it."""
        name = self._finder._batch_arg_name
        size = cast(int, lightning_getattr(self.lightning_module, name))
        if self._fits:
            if self._samples is not None:
                size = min(size, self._samples // self._pipelines)
            size = max(self._quantum, size // self._quantum * self._quantum)
            lightning_setattr(self.lightning_module, name, size)
        return size

    # ------------------------------------------------------------------ what Lightning's search calls

    def run(self) -> None:
        trainer = self._call[0]
        asked = lightning_getattr(self.lightning_module, self._finder._batch_arg_name)
        tried = _SizeTried()
        steps = self._finder._steps_per_trial
        loop = trainer._active_loop
        assert loop is not None
        if self._fits:
            settings = [
                (trainer, "limit_train_batches", 1.0),
                (trainer, "limit_val_batches", steps),
                (trainer.fit_loop.epoch_loop, "max_steps", steps + trainer.global_step),
            ]
        else:
            assert trainer.state.fn is not None
            settings = [(trainer, _LIMITS[trainer.state.fn], steps)]
            if hasattr(loop, "verbose"):
                settings.append((loop, "verbose", False))
        self.settle()
        try:
            with _set_for_trials(trainer, tried, *settings, machine_error_retries=0):  # the trial asks for this error
                state = self._trial(self._call).callbacks[tried.state_key]
        finally:
            lightning_setattr(self.lightning_module, self._finder._batch_arg_name, asked)
        if not self._fits and state["loaders"] > 1:
            raise MisconfigurationException("The Batch size finder cannot be used with multiple dataloaders.")
        self._samples = state["samples"]

    def setup_data(self) -> None: ...

    def load_state_dict(self, state: Any) -> None: ...

    def _dataset_length(self) -> int:
        if self._samples is None:
            raise NotImplementedError
        return self._samples // self._pipelines

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "_combined_loader" or value is not None:  # the search drops the loaders of the size before
            super().__setattr__(name, value)


def _find_batch_size(finder: BatchSizeFinder, call: Call, trial: Trial) -> int:
    trainer = call[0]
    module, name = trainer.lightning_module, finder._batch_arg_name
    loop = trainer._active_loop
    assert loop is not None
    if not loop._data_source.is_module():
        raise MisconfigurationException(
            "The batch size finder cannot be used with DataLoaders that are given to the Trainer: it sets"
            f" {name!r}, which a train_dataloader() (or its like) of the module or the data module must read."
        )
    if not lightning_hasattr(module, name):
        raise MisconfigurationException(
            f"Field {name} not found in `model`, `datamodule`, nor their `hparams` attributes."
        )
    sizes: Any = _Sizes(finder, call, trial)
    size, _ = _adjust_batch_size(sizes, name, value=finder._init_val)
    rewound: dict[str, Any] = {"loop_state_dict": {}}
    if finder._mode == "power":
        _run_power_scaling(sizes, size, name, finder._max_trials, rewound, finder._max_val)
    else:
        _run_binsearch_scaling(sizes, size, name, finder._max_trials, rewound, 0.0, finder._max_val)
        largest = sizes.settle()  # the margin is below what was tried, which the search may not have asked for
        lightning_setattr(module, name, max(1, int(largest * (1 - finder._margin))))
    found = cast(int, sizes.settle())
    log.info("Finished batch size finder, will continue with full run using batch size %d", found)
    return found
