"""Logs in the steps of its module: ``python logging_script.py basic|hydra FILE``. One worker is killed."""

import logging
import logging.config
import os
import signal
import sys
from typing import Any

import lightning as L
from lightning.pytorch.utilities import rank_zero_info
from support.models import Regression, dataset
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_recycle import ReCycleStrategy

log = logging.getLogger(__name__)
FORMAT = "[%(name)s][%(levelname)s][%(process)d] %(message)s"


class Logging(Regression):
    def on_train_start(self) -> None:
        rank_zero_info("from rank zero")
        logging.getLogger("library.part").debug("detail of %d", self.global_rank)
        log.debug("never written")

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        log.info("step %d of worker %d", self.global_step, self.global_rank)
        if self.global_rank == 1 and self.global_step == 2:
            log.error("last words", exc_info=ValueError("why"), extra={"model": self})
            os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(output, target)


def configure(kind: str, file: str) -> None:
    handlers: dict[str, Any] = {
        "console": {"class": "logging.StreamHandler", "formatter": "simple", "stream": "ext://sys.stdout"},
        "file": {"class": "logging.FileHandler", "formatter": "simple", "filename": file},
    }
    if kind == "basic":
        logging.basicConfig(level=logging.INFO, format=FORMAT, filename=file)
    else:  # as in Hydra's hydra/job_logging/default.yaml
        logging.config.dictConfig(
            {
                "version": 1,
                "formatters": {"simple": {"format": FORMAT}},
                "handlers": handlers,
                "root": {"level": "INFO", "handlers": list(handlers)},
                "disable_existing_loggers": False,
            }
        )
    logging.getLogger("library").setLevel(logging.DEBUG)
    package = logging.getLogger("lightning.pytorch")  # as if it had been imported after the handlers were configured
    package.handlers.clear()
    package.propagate = True


if __name__ == "__main__":
    configure(sys.argv[1], sys.argv[2])
    quiet: Any = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    strategy = ReCycleStrategy()
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy=strategy, max_steps=4, **quiet)
    trainer.fit(Logging().double(), DataLoader(dataset(), batch_size=24))
