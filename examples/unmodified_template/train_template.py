"""A project laid out like lightning-hydra-template, without a change for failures: half a minute on two cores.

    python examples/unmodified_template/train_template.py                                             # one device
    python examples/unmodified_template/train_template.py trainer.strategy=recycle trainer.devices=4  # four workers
    python examples/unmodified_template/train_template.py -m trainer.strategy=recycle trainer.devices=4 seed=1,2

Model, data, callbacks, loggers and Trainer come from ``configs/``. It trains, then tests with the best checkpoint, and
prints the metrics.
"""

from typing import Any

import hydra
import lightning as L
from hydra.utils import instantiate
from omegaconf import DictConfig

import lightning_recycle  # noqa: F401  registers the strategy


def train(config: DictConfig) -> dict[str, float]:
    """Trains and tests what ``config`` says; returns the metrics of both."""
    L.seed_everything(config.seed, workers=True)
    data: L.LightningDataModule = instantiate(config.data)
    model: L.LightningModule = instantiate(config.model)
    callbacks = [instantiate(callback) for callback in config.callbacks.values()]
    loggers = [instantiate(logger) for logger in config.logger.values()]
    trainer: L.Trainer = instantiate(config.trainer, callbacks=callbacks, logger=loggers)
    for logger in trainer.loggers:
        logger.log_hyperparams({"seed": config.seed, "parameters": sum(p.numel() for p in model.parameters())})
    trainer.fit(model, datamodule=data)
    metrics = dict(trainer.callback_metrics)
    # The optimizer's recipe is among its hyper-parameters, and torch allows such objects in trusted files only.
    trainer.test(model, datamodule=data, ckpt_path="best", weights_only=False)
    return {name: float(value) for name, value in {**metrics, **trainer.callback_metrics}.items()}


@hydra.main(version_base="1.3", config_path="configs", config_name="train")
def main(config: DictConfig) -> Any:
    """The command; returns the metric that a hyper-parameter search optimizes."""
    metrics = train(config)
    print(", ".join(f"{name}: {value:.3f}" for name, value in sorted(metrics.items()) if "/" in name))
    return metrics[config.optimized_metric]


if __name__ == "__main__":
    main()
