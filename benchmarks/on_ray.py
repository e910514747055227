"""A worker is killed, or a cluster breathes, on Ray: engine="ray" and Ray Train, on the same model and data.

    python benchmarks/on_ray.py                # two workers each: 2 pipelines of 1 stage, and 2 DDP ranks
    python benchmarks/on_ray.py --stages 2     # this package with 2 x 2 workers
    python benchmarks/on_ray.py --only engine
    python benchmarks/on_ray.py --resize       # two nodes become four, and then one: with as many workers

Both train on a Ray of this machine. In step ``KILLED_AT`` one worker kills itself; measured is the time until anybody
ends a later step, and how many steps ran again. Ray Train restarts all workers from the newest checkpoint, which is
written every ``CHECKPOINT_EVERY`` steps; this package needs none.

``--resize``: raylets of one CPU each; three of four are drained, as before a preemption, and end 30 s later. Measured
are the steps that ran again, the seconds without a step (beyond two steps), and the samples of a step by the number
of workers. Ray Train is elastic, ``ScalingConfig(num_workers=(1, 4))``, and looks for changes every 5 s.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import ray
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_recycle import PipelineModule, RecoveryOptions, ReCycleStrategy

STEPS, KILLED_AT, CHECKPOINT_EVERY = 60, 29, 20
MANY, PATIENCE = 2000, 300.0  # steps, until it is enough; seconds for a change of the cluster
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
    """Writes down when each step ended, and kills one worker in step ``at`` once."""

    def __init__(self, directory: str, at: int | None) -> None:
        self._directory, self._at = Path(directory), at

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        time.sleep(STEP_SECONDS)
        victim = trainer.global_rank == 1 and getattr(trainer.strategy, "grid_rank", trainer.global_rank) % 2 == 1
        if trainer.global_step == self._at and victim and not (self._directory / "killed").exists():
            (self._directory / "killed").write_text(repr(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        with open(self._directory / f"{os.getpid()}.steps", "a") as file:
            file.write(f"{trainer.global_step} {time.time()} {workers_of(trainer)}\n")
        trainer.should_stop = (self._directory / "enough").exists()


def workers_of(trainer: L.Trainer) -> int:
    """How many there are."""
    return len(getattr(trainer.strategy, "live_workers", range(trainer.world_size)))


def loader(steps: int = STEPS) -> DataLoader[Any]:
    """BATCH samples for each of two replicas and step."""
    generator = torch.Generator().manual_seed(1)
    count = 2 * BATCH * steps
    x, y = torch.randn(count, 32, generator=generator), torch.randn(count, 1, generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=BATCH)


def engine(directory: str, stages: int, recovery: RecoveryOptions, steps: int, at: int | None) -> int:
    """The script that trains with ``engine="ray"``; returns how many steps ran again."""
    strategy = ReCycleStrategy(stages, 4, engine="ray", recovery=recovery)
    arguments = {**QUIET, "max_steps": steps, "enable_checkpointing": False}
    trainer = L.Trainer(strategy=strategy, devices=2 * stages, callbacks=[Killed(directory, at)], **arguments)
    trainer.fit(Model(), loader(steps))
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
            callbacks=[Killed(config["directory"], config["at"]), Reported()],
            enable_checkpointing=False,
            **{**QUIET, "max_steps": config["steps"]},
        )
    )
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        trainer.fit(Model(), loader(config["steps"]))
        return
    with checkpoint.as_directory() as folder:
        trainer.fit(Model(), loader(config["steps"]), ckpt_path=f"{folder}/checkpoint.ckpt", weights_only=False)


def written(directory: Path) -> list[list[tuple[int, float, int]]]:
    """By process, the steps that it ended: (step, time, workers)."""
    return [
        [(int(step), float(at), int(workers)) for step, at, workers in map(str.split, file.open())]
        for file in directory.glob("*.steps")
    ]


def measured(directory: Path) -> tuple[float, int]:
    """Seconds from the kill to the end of a step after the killed one; and how many steps ran more than once."""
    killed = float((directory / "killed").read_text())
    rows = [[(step, at) for step, at, _ in lines] for lines in written(directory)]
    recovered = min(at for lines in rows for step, at in lines if step > KILLED_AT and at > killed)
    before = max(step for lines in rows for step, at in lines if at <= killed)
    again = {step for lines in rows for step, at in lines if at > killed and step <= before}
    return recovered - killed, len(again)


class Resizing(threading.Thread):
    """Adds two nodes once two workers train, drains three once four do, and ends the training when one is left."""

    def __init__(self, cluster: Any, directory: Path) -> None:
        super().__init__(daemon=True)
        self._cluster, self._directory = cluster, directory

    def _await(self, workers: int) -> None:
        deadline = time.monotonic() + PATIENCE
        while sum(row[2] == workers for lines in written(self._directory) for row in lines) < 5 * workers:
            if time.monotonic() > deadline:
                (self._directory / "enough").touch()
                raise TimeoutError(f"no training with {workers} workers within {PATIENCE:g} s")
            time.sleep(0.2)

    def run(self) -> None:
        command = [sys.executable, "-m", "ray.scripts.scripts"]
        address = ["--address", self._cluster.address]
        self._await(2)
        size = ["--num-cpus", "1", "--object-store-memory", str(100 << 20)]
        added = []
        for count in (3, 4):  # raylets that start at once on one machine may choose the same socket
            added.append(subprocess.Popen([*command, "start", "--block", *address, *size]))
            self._await(count)
        nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
        drain = [*command, "drain-node", *address, "--reason", "DRAIN_NODE_REASON_PREEMPTION"]
        drain += ["--reason-message", "preempted", "--deadline-remaining-seconds", "30", "--node-id"]
        own = next(node.node_id for node in self._cluster.worker_nodes)
        for process in [subprocess.Popen([*drain, node]) for node in nodes if node != own]:
            process.wait()
        time.sleep(30)
        for process in added:
            process.terminate()
        for node in [node for node in self._cluster.worker_nodes if node.node_id != own]:
            self._cluster.remove_node(node)
        self._await(1)
        (self._directory / "enough").touch()


def resized(name: str, train: Callable[[str], int | None], samples: Callable[[int], int]) -> None:
    """Trains on a cluster that grows and shrinks, and prints what that cost.

    Args:
        name: of the engine.
        train: trains, with a directory for what it writes; returns how many steps ran again if it knows.
        samples: those of a step, by the number of workers.
    """
    from ray.cluster_utils import Cluster

    sizes = {"object_store_memory": 100 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **sizes})
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1, **sizes)
        ray.init(address=cluster.address, logging_level="warning", log_to_driver=False)
        directory = Path(tempfile.mkdtemp())
        resizing = Resizing(cluster, directory)
        resizing.start()
        known = train(str(directory))
        resizing.join()
    finally:
        ray.shutdown()
        cluster.shutdown()
    rows = sorted((at, step, workers) for lines in written(directory) for step, at, workers in lines)
    redone = {step for at, step, _ in rows if any(other >= step and before < at - 1 for before, other, _ in rows)}
    again = len(redone) if known is None else known
    pauses = sum(max(0.0, later[0] - row[0] - 2 * STEP_SECONDS) for row, later in itertools.pairwise(rows))
    of_step = ", ".join(f"{count}: {samples(count)}" for count in sorted({row[2] for row in rows}))
    print(f"{name:28} {again:16d} {pauses:20.1f}   {of_step}", flush=True)


def resize(only: str | None) -> None:
    """The table of ``--resize``."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    print(f"{'':28} {'steps run again':>16} {'seconds without step':>20}   samples of a step by workers")
    recovery = RecoveryOptions(num_pipelines=2, min_pipelines=1, max_pipelines=4)
    if only != "ddp":
        resized('engine="ray"', lambda directory: engine(directory, 1, recovery, MANY, None), lambda _: 2 * BATCH)

    def train(directory: str) -> None:
        TorchTrainer(
            ddp,
            train_loop_config={"directory": directory, "steps": MANY, "at": None},
            scaling_config=ScalingConfig(num_workers=(1, 4), elastic_resize_monitor_interval_s=5.0),
            run_config=RunConfig(storage_path=tempfile.mkdtemp(), failure_config=FailureConfig(max_failures=10)),
        ).fit()

    if only != "engine":
        resized("Ray Train, elastic", train, lambda workers: workers * BATCH)


def main() -> None:
    parser = argparse.ArgumentParser(description="A worker is killed on Ray.")
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--only", choices=("engine", "ddp"), default=None)
    parser.add_argument("--resize", action="store_true", help="nodes come and go")
    options = parser.parse_args()
    if options.resize:
        return resize(options.only)
    ray.init(address="local", num_cpus=6, object_store_memory=100 << 20, include_dashboard=False, log_to_driver=False)
    print(f"{'':28} {'kill to next step s':>20} {'steps run again':>16}")
    if options.only in (None, "engine"):
        directory = Path(tempfile.mkdtemp())
        again = engine(str(directory), options.stages, RecoveryOptions(max_restarts=10), STEPS, KILLED_AT)
        name = f'engine="ray" 2 x {options.stages}'
        print(f"{name:28} {measured(directory)[0]:20.2f} {again:16d}")
    if options.only in (None, "ddp"):
        from ray.train import FailureConfig, RunConfig, ScalingConfig
        from ray.train.torch import TorchTrainer

        directory = Path(tempfile.mkdtemp())
        TorchTrainer(
            ddp,
            train_loop_config={"directory": str(directory), "steps": STEPS, "at": KILLED_AT},
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(storage_path=tempfile.mkdtemp(), failure_config=FailureConfig(max_failures=2)),
        ).fit()
        seconds, again = measured(directory)
        print(f"{'Ray Train, RayDDPStrategy x 2':28} {seconds:20.2f} {again:16d}")


if __name__ == "__main__":
    main()
