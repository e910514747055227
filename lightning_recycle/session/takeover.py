"""The progress bar of a new leader.

Private Lightning API used here, and nowhere else: ``ProgressBar._trainer``.
"""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import RunningStage, TrainerFn

__all__ = ["show_progress_bar"]


_EVALUATIONS = {  # stage -> its name in hooks
    RunningStage.SANITY_CHECKING: "validation",
    RunningStage.VALIDATING: "validation",
    RunningStage.TESTING: "test",
    RunningStage.PREDICTING: "predict",
}


def show_progress_bar(trainer: pl.Trainer, dataloader_idx: int = 0) -> None:
    """Lets the progress bar of a new leader take over where the old leader's ended, whatever is under way.

    The bar of a worker that is not the leader is disabled: it has seen all hooks and shown nothing. Those that begin
    what is under way are called again.

    Args:
        trainer: of this worker.
        dataloader_idx: which loader an evaluation is at.
    """
    bar, module = trainer.progress_bar_callback, trainer.lightning_module
    if bar is None:
        return
    bar.enable()
    if bar._trainer is None or trainer.state.stage is None:
        return  # nothing has begun yet, or all is over
    fitting = trainer.state.fn == TrainerFn.FITTING
    if trainer.sanity_checking:
        bar.on_sanity_check_start(trainer, module)
    elif fitting and trainer.fit_loop.epoch_progress.current.ready:
        bar.on_train_start(trainer, module)
        bar.on_train_epoch_start(trainer, module)
    phase = _EVALUATIONS.get(trainer.state.stage)
    if phase is not None:
        bar.reset_dataloader_idx_tracker()
        getattr(bar, f"on_{phase}_start")(trainer, module)
        getattr(bar, f"on_{phase}_batch_start")(trainer, module, None, 0, dataloader_idx)
