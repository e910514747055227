"""Runs whose leader dies, in a process of its own whose output a test reads: ``takeover_script.py folder case...``."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import callbacks as pl_callbacks
from lightning.pytorch.callbacks import DeviceStatsMonitor, RichProgressBar, ThroughputMonitor, Timer, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from same_script import LEADER, STAGES, Classifier, Session, on_a_grid

from lightning_recycle.callbacks import Fault, FaultInjectionCallback

SEPARATOR = "=====next====="
BARS = {"TQDM": TQDMProgressBar, "Rich": RichProgressBar}


class DiesInEvaluation(pl_callbacks.Callback):
    """Kills the first leader when the second batch of an evaluation begins."""

    def _on_batch(self, trainer: Any, module: Any, batch: Any, batch_idx: int, *_: Any) -> None:
        if trainer.strategy.grid_rank == LEADER and batch_idx == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    on_validation_batch_start = on_test_batch_start = on_predict_batch_start = _on_batch


def kill_leader(entry: str, at: str, step: int) -> pl_callbacks.Callback:
    if entry != "fit":
        return DiesInEvaluation()
    return FaultInjectionCallback([Fault("kill", LEADER // STAGES, LEADER % STAGES, step, at=at)])


def killed(bar: str, entry: str, at: str, step: int) -> Any:
    def script(session: Session) -> None:
        trainer = session.trainer(
            max_epochs=2,
            enable_progress_bar=True,
            log_every_n_steps=1,
            logger=CSVLogger(session.root, name="logs", version=0),
            callbacks=[
                BARS[bar](),
                ThroughputMonitor(batch_size_fn=lambda batch: len(batch[0]), window_size=2),
                DeviceStatsMonitor(cpu_stats=True),
                Timer(duration="00:00:10:00"),
                kill_leader(entry, at, step),
            ],
        )
        if entry == "fit":
            trainer.fit(Classifier(), session.data.training(), session.data.validation())
        else:
            getattr(trainer, entry)(Classifier(), [session.data.validation(), session.data.loader(30, seed=3)])
        failures = [event.worker for event in trainer.strategy.history if event.kind == "failure"]
        print(f"\nlost workers: {failures}", flush=True)

    return script


CASES: dict[str, Any] = {
    f"{bar}-{entry}-{at}-{step}": killed(bar, entry, at, step)
    for bar in BARS
    for entry, at, step in (
        ("fit", "forward", 2),
        ("fit", "validation", 0),  # the sanity check
        ("fit", "validation", 4),
        ("validate", "batch", 1),
        ("test", "batch", 1),
        ("predict", "batch", 1),
    )
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    for case in sys.argv[2:]:
        print(SEPARATOR, flush=True)
        on_a_grid(CASES[case], Path(sys.argv[1]) / case)
