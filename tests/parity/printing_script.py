"""Runs scripts in a process of its own, whose output a test reads: ``python printing_script.py folder``."""

import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelSummary, TQDMProgressBar
from same_script import Classifier, Session, on_a_grid, on_one_device
from support.training import QUIET

from lightning_recycle import LayerSpec

SEPARATOR = "=====next====="


class WithRecipe(Classifier):
    """One layer is a recipe, which a worker of another stage never builds."""

    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = torch.zeros(2, 8, dtype=torch.float64)

    def configure_pipeline(self) -> list[Any]:
        layers = super().configure_pipeline()
        return [*layers[:2], LayerSpec(torch.nn.Linear, 16, 16, dtype=torch.float64), *layers[3:]]


def with_defaults(session: Session) -> None:
    """Everything that a Trainer enables by itself: Rich's summary and bar, checkpoints, a logger."""
    session.fit(Classifier(), validates=True, max_epochs=1, log_every_n_steps=1, **dict.fromkeys(QUIET, True))


def with_plain_text(session: Session) -> None:
    shown: dict[str, Any] = {"enable_progress_bar": True, "enable_model_summary": True}
    callbacks = [TQDMProgressBar(), ModelSummary(max_depth=2)]
    trainer = session.fit(WithRecipe(), validates=True, max_epochs=1, callbacks=callbacks, **shown)
    trainer.validate(session.run.module, session.data.validation())  # prints a table


if __name__ == "__main__":
    torch.set_num_threads(1)
    for where, run in (("one", on_one_device), ("grid", on_a_grid)):
        for name, script in (("defaults", with_defaults), ("plain", with_plain_text)):
            print(SEPARATOR, flush=True)
            folder = Path(sys.argv[1]) / where / name
            folder.mkdir(parents=True)
            run(script, folder)
