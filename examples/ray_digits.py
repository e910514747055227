"""Train on a Ray cluster, lose a worker, and bring model, metrics and checkpoint home.

    python examples/ray_digits.py                                # on this machine, about a minute
    python examples/ray_digits.py --kill                         # and one of the workers dies
    ray job submit --working-dir examples -- python ray_digits.py --storage s3://bucket/runs

Four actors form 2 pipelines of 2 stages. The function ``train`` runs in each of them, and makes its Trainer there.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_recycle import RayReCycle, ReCycleStrategy, ray_worker
from lightning_recycle.callbacks import Fault, FaultInjectionCallback

from convnet import ConvNet
from digits import Digits

__all__ = ["main", "train"]


def train(config: dict[str, Any]) -> int:
    """What every worker runs; returns the number of steps."""
    run = ray_worker()
    faults = [Fault("kill", pipeline=0, stage=1, step=20)] if config["kill"] else []
    trainer = L.Trainer(
        accelerator=config["accelerator"],
        strategy=ReCycleStrategy(**run.strategy_arguments),
        max_epochs=config["epochs"],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint(monitor="val_loss", mode="min"), FaultInjectionCallback(faults)],
        **run.trainer_arguments,
    )
    L.seed_everything(0)
    trainer.fit(ConvNet(), datamodule=Digits(batch_size=16))
    return trainer.global_step


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description="A small convolutional network on a Ray cluster.")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--kill", action="store_true", help="one worker dies at step 20")
    parser.add_argument("--gpu", action="store_true", help="a GPU for each worker")
    parser.add_argument("--storage", default=None, help="a folder that all nodes reach, or a URL of one")
    options = parser.parse_args(arguments)
    storage = options.storage or tempfile.mkdtemp(prefix="ray_digits_")
    recycle = RayReCycle(
        num_pipelines=2, pipeline_parallel_size=2, num_microbatches=4, use_gpu=options.gpu, storage_path=storage
    )
    accelerator = "gpu" if options.gpu else "cpu"
    result = recycle.fit(train, {"epochs": options.epochs, "kill": options.kill, "accelerator": accelerator})
    model = ConvNet()
    model.load_state_dict(dict(result.state_dict))
    lost = [event for event in result.history if event.kind == "failure"]
    print(f"{result.returned} steps, {len(lost)} failures, best checkpoint {result.checkpoint}")
    print({name: round(float(value), 4) for name, value in result.metrics.items()})
    return 0


if __name__ == "__main__":
    sys.exit(main())
