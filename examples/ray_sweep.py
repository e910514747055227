"""Search for a learning rate with Ray Tune, four actors for each trial: some minutes on ten cores.

    pip install '.[ray,examples]' 'ray[tune]'
    python examples/ray_sweep.py --cpus 10

A trial is the launching process of its run: it needs one CPU itself, and the actors come on top of that. So
``--concurrent`` says how many trials there is room for: each needs 1 + 4 CPUs.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import lightning as L
import ray
from ray import tune

from lightning_recycle import ReCycleStrategy

from convnet import ConvNet
from digits import Digits

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def attempt(config: dict[str, Any]) -> dict[str, float]:
    """A trial: trains, and tells Tune what came of it."""
    strategy = ReCycleStrategy(pipeline_parallel_size=2, num_microbatches=4, engine="ray")
    trainer = L.Trainer(strategy=strategy, devices=4, max_epochs=config["epochs"], **QUIET)
    L.seed_everything(0)
    trainer.fit(ConvNet(learning_rate=config["lr"]), datamodule=Digits(batch_size=16))
    return {"val_loss": float(trainer.callback_metrics["val_loss"])}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description="A sweep with Ray Tune.")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--concurrent", type=int, default=1, help="trials at the same time")
    parser.add_argument("--cpus", type=int, default=None, help="CPUs of a cluster on this machine; by default all")
    options = parser.parse_args(arguments)
    if options.cpus is not None:
        ray.init(num_cpus=options.cpus)
    tuner = tune.Tuner(
        tune.with_resources(attempt, {"CPU": 1}),
        param_space={"lr": tune.grid_search([1e-3, 1e-2]), "epochs": options.epochs},
        tune_config=tune.TuneConfig(metric="val_loss", mode="min", max_concurrent_trials=options.concurrent),
    )
    results = tuner.fit()
    if results.num_errors:
        return 1
    print(f"Best: {results.get_best_result().config}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
