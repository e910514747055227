"""A script whose workers are actors of a Ray cluster: some minutes on four cores.

    pip install '.[ray,examples]'
    python examples/ray_driver.py
    ray job submit --working-dir examples -- python ray_driver.py

All that differs from a script for this machine is ``engine="ray"``. Afterwards the model here is the trained one.
"""

import argparse
import sys
from collections.abc import Sequence

import lightning as L

from lightning_recycle import RecoveryOptions, ReCycleStrategy

from convnet import ConvNet
from digits import Digits


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description="A small convolutional network, with workers on Ray.")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--engine", choices=("ray", "local"), default="ray")
    options = parser.parse_args(arguments)
    L.seed_everything(0)
    model, data = ConvNet(), Digits(batch_size=16)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=4,
        strategy=ReCycleStrategy(
            pipeline_parallel_size=2,
            num_microbatches=4,
            engine=options.engine,
            recovery=RecoveryOptions(max_restarts=10),
        ),
        max_epochs=options.epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, datamodule=data)
    print({name: round(float(value), 4) for name, value in trainer.callback_metrics.items()})
    return 0


if __name__ == "__main__":
    sys.exit(main())
