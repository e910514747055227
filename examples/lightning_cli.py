"""Lightning's own command line, with the strategy chosen in a YAML file: a minute on two cores.

    python examples/lightning_cli.py fit --config examples/lightning_cli.yaml
    python examples/lightning_cli.py validate --config examples/lightning_cli.yaml --ckpt_path CHECKPOINT
    python examples/lightning_cli.py fit --config examples/lightning_cli.yaml --trainer.max_steps=1000
    python examples/lightning_cli.py fit --config examples/lightning_cli.yaml --trainer.strategy.planning.planner=highs

Nothing here knows of the strategy: any ``LightningCLI`` program whose model is a ``PipelineModule`` works like this. It
needs jsonargparse: ``pip install '.[cli]'``.
"""

from lightning.pytorch.cli import LightningCLI


def main() -> None:
    """The command line."""
    LightningCLI(save_config_kwargs={"overwrite": True})


if __name__ == "__main__":  # workers import this file
    main()
