"""A worker is killed on Ray: engine="ray" and Ray Train with RayDDPStrategy, on the same model and data.

    python benchmarks/on_ray.py                # two workers each: 2 pipelines of 1 stage, and 2 DDP ranks
    python benchmarks/on_ray.py --stages 2     # this package with 2 x 2 workers
    python benchmarks/on_ray.py --only engine

Both train on a Ray of this machine. In step ``KILLED_AT`` one worker kills itself; measured is the time until anybody
ends a later step, and how many steps ran again. Ray Train restarts all workers from the newest checkpoint, which is
written every ``CHECKPOINT_EVERY`` steps; this package needs none.
"""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning as L
import ray
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_recycle import PipelineModule, RecoveryOptions, ReCycleStrategy

STEPS, KILLED_AT, CHECKPOINT_EVERY = 60, 29, 20
STEP_SECONDS, BATCH = 0.3, 16  # Ray Train asks its workers for new checkpoints every other second
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "max_steps": STEPS,
}


class Model(PipelineModule):
    """A small network; the same LightningModule under both."""

    def configure_pipeline(self) -> list[nn.Module]:
        torch.manual_seed(0)
        return [nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)]

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output - target).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Killed(L.Callback):
    """Writes down when each step ended, and kills one worker in its step once."""

    def __init__(self, directory: str) -> None:
        self._directory = Path(directory)

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        time.sleep(STEP_SECONDS)
        victim = trainer.global_rank == 1 and getattr(trainer.strategy, "grid_rank", trainer.global_rank) % 2 == 1
        if trainer.global_step == KILLED_AT and victim and not (self._directory / "killed").exists():
            (self._directory / "killed").write_text(repr(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        with open(self._directory / f"{os.getpid()}.steps", "a") as file:
            file.write(f"{trainer.global_step} {time.time()}\n")


def loader() -> DataLoader[Any]:
    """BATCH samples for each of two replicas and step."""
    generator = torch.Generator().manual_seed(1)
    count = 2 * BATCH * STEPS
    x, y = torch.randn(count, 32, generator=generator), torch.randn(count, 1, generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=BATCH)


def engine(directory: str, stages: int) -> int:
    """The script that trains with ``engine="ray"``; returns how many steps ran again."""
    strategy = ReCycleStrategy(stages, 4, engine="ray", recovery=RecoveryOptions(max_restarts=10))
    trainer = L.Trainer(
        strategy=strategy, devices=2 * stages, callbacks=[Killed(directory)], enable_checkpointing=False, **QUIET
    )
    trainer.fit(Model(), loader())
    return sum(event.kind == "redone" for event in strategy.history)


def ddp(config: dict[str, Any]) -> None:
    """What a worker of Ray Train runs."""
    import ray.train
    from ray.train.lightning import RayDDPStrategy, RayLightningEnvironment, prepare_trainer

    class Reported(L.Callback):
        """A checkpoint every CHECKPOINT_EVERY steps, as Ray Train wants them."""

        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            if trainer.global_step % CHECKPOINT_EVERY:
                return
            with tempfile.TemporaryDirectory() as folder:
                trainer.save_checkpoint(f"{folder}/checkpoint.ckpt")
                ray.train.report({"step": trainer.global_step}, checkpoint=ray.train.Checkpoint.from_directory(folder))

    trainer = prepare_trainer(
        L.Trainer(
            devices="auto",
            strategy=RayDDPStrategy(),
            plugins=[RayLightningEnvironment()],
            callbacks=[Killed(config["directory"]), Reported()],
            enable_checkpointing=False,
            **QUIET,
        )
    )
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        trainer.fit(Model(), loader())
        return
    with checkpoint.as_directory() as folder:
        trainer.fit(Model(), loader(), ckpt_path=f"{folder}/checkpoint.ckpt", weights_only=False)


def measured(directory: Path) -> tuple[float, int]:
    """Seconds from the kill to the end of a step after the killed one; and how many steps ran more than once."""
    killed = float((directory / "killed").read_text())
    rows = [[(int(step), float(at)) for step, at in map(str.split, file.open())] for file in directory.glob("*.steps")]
    recovered = min(at for lines in rows for step, at in lines if step > KILLED_AT and at > killed)
    before = max(step for lines in rows for step, at in lines if at <= killed)
    again = {step for lines in rows for step, at in lines if at > killed and step <= before}
    return recovered - killed, len(again)


def main() -> None:
    parser = argparse.ArgumentParser(description="A worker is killed on Ray.")
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--only", choices=("engine", "ddp"), default=None)
    options = parser.parse_args()
    ray.init(address="local", num_cpus=6, object_store_memory=100 << 20, include_dashboard=False, log_to_driver=False)
    print(f"{'':28} {'kill to next step s':>20} {'steps run again':>16}")
    if options.only in (None, "engine"):
        directory = Path(tempfile.mkdtemp())
        again = engine(str(directory), options.stages)
        name = f'engine="ray" 2 x {options.stages}'
        print(f"{name:28} {measured(directory)[0]:20.2f} {again:16d}")
    if options.only in (None, "ddp"):
        from ray.train import FailureConfig, RunConfig, ScalingConfig
        from ray.train.torch import TorchTrainer

        directory = Path(tempfile.mkdtemp())
        TorchTrainer(
            ddp,
            train_loop_config={"directory": str(directory)},
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(storage_path=tempfile.mkdtemp(), failure_config=FailureConfig(max_failures=2)),
        ).fit()
        seconds, again = measured(directory)
        print(f"{'Ray Train, RayDDPStrategy x 2':28} {seconds:20.2f} {again:16d}")


if __name__ == "__main__":
    main()
