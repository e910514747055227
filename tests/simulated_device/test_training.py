"""What everyone with several accelerators meets first, each worker on a device of its own."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.callbacks import ModelCheckpoint
from support.growth import AwaitReplacement, happened
from support.models import Regression
from support.options import recycle_strategy
from support.training import QUIET, TOLERANCE, difference, exact_fit, failures, fit, samples_for
from support.waiting import PATIENCE, wait_for
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_recycle.callbacks import Fault
from lightning_recycle.control.network.addresses_and_keys import free_port
from lightning_recycle.runtime.communicator import SMALL_BYTES
from lightning_recycle.runtime.groups_and_transports import Transport
from lightning_recycle.session import checkpoints as checkpoints_module
from simulated_device.accelerator import SimulatedAccelerator

KILL = Fault("kill", pipeline=1, stage=0, step=3)
KINDS = {"undisturbed": (), "killed": (KILL,), "replaced": (KILL,)}


class OnDevices(L.Callback):
    """Every worker computes on its own device, and nowhere else."""

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        expected = torch.device("simulated", trainer.local_rank)
        assert trainer.strategy.root_device == expected
        assert {p.device for p in module.parameters()} == {expected}


class Logs(Regression):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("loss", outputs["loss"])
        self.log("mean", outputs["loss"], sync_dist=True)
        losses = self.all_gather(outputs["loss"])
        assert losses.device == self.device
        assert torch.equal(losses, losses[:1].expand_as(losses))


def run_of(kind: str, train: Callable[..., Any], model: Regression, *args: Any, **options: Any) -> L.Trainer:
    """Trains on 2 x 2 devices: undisturbed, with a loss, or with a loss and a replacement."""
    callbacks = [OnDevices(), *options.pop("callbacks", [])]
    if kind == "replaced":
        callbacks.append(AwaitReplacement([6]))
        options["strategy"] = {"max_restarts": 1, **options.get("strategy", {})}
    run: L.Trainer = train(model, 2, 2, KINDS[kind], *args, callbacks=callbacks, **options)
    assert failures(run) == [(1, 0)] * len(KINDS[kind])
    assert len(happened(run, "rejoined")) == (kind == "replaced")
    assert {value.device.type for value in model.state_dict().values()} == {"cpu"}
    return run


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_those_of_one_process(kind):
    run_of(kind, exact_fit, Regression().double(), gradient_clip_val=1.0)


def monitored(kind: str, folder: Path, callbacks: Sequence[L.Callback] = ()) -> None:
    """Scores of one worker reach all; each is on a device that the others lack."""
    saves = ModelCheckpoint(folder, monitor="loss", save_top_k=2, every_n_train_steps=1)
    model = Logs().double()
    run = run_of(
        kind, fit, model, callbacks=[saves, *callbacks], enable_checkpointing=True, log_every_n_steps=1, max_steps=12
    )
    assert len(list(folder.glob("*.ckpt"))) == 2
    scores = {Path(name).name: float(score) for name, score in saves.best_k_models.items()}
    assert scores.keys() == {path.name for path in folder.glob("*.ckpt")}
    assert all(not isinstance(v, Tensor) or v.device.type == "cpu" for v in run.callback_metrics.values())
    states = [torch.load(path, weights_only=False) for path in folder.glob("*.ckpt")]
    assert {tensor.device.type for state in states for tensor in state["state_dict"].values()} == {"cpu"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_by_a_monitored_value(kind, tmp_path):
    monitored(kind, tmp_path)


class NoMemory(L.Callback):
    """There is no memory for copies of what a checkpoint holds: it is written from the tensors themselves."""

    def setup(self, *_: Any, **__: Any) -> None:
        checkpoints_module.free_bytes = lambda peers: 0.0


def written_without_copies(folder: Path, callbacks: Sequence[L.Callback] = ()) -> None:
    """Sharded checkpoints, which torch's writer reads in a thread, are those of the step."""
    saves = ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1, filename="{step}")
    options = {"save_distributed_checkpoint": True, "background": True}
    first, second = Regression().double(), Regression().double()
    run_of(
        "undisturbed", exact_fit, first, callbacks=[saves, NoMemory(), *callbacks], strategy=options,
        enable_checkpointing=True,
    )  # fmt: skip
    exact_fit(second, 2, 2, strategy=options, ckpt_path=folder / "step=6.ckpt")
    assert difference(first.state_dict(), second.state_dict()) < TOLERANCE


def test_a_sharded_checkpoint_that_is_written_from_the_weights_themselves(tmp_path):
    written_without_copies(tmp_path)


class Apart(L.Callback):
    """Values travel behind their headers, each in memory of its own, as large ones do."""

    def __init__(self) -> None:
        self.most = SMALL_BYTES

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        Transport.packed_bytes = lambda transport, peer: self.most


class Wide(Regression):
    """Activations of one micro-batch are larger than a header's message."""

    def configure_pipeline(self) -> list[nn.Module]:
        torch.manual_seed(0)
        return [nn.Linear(8, 16), nn.Linear(16, 5_000), nn.Tanh(), nn.Linear(5_000, 1)]


def sent_apart(folder: Path, callbacks: Sequence[L.Callback] = ()) -> None:
    run_of("killed", exact_fit, Wide().double(), callbacks=[Apart(), *callbacks])


def test_values_that_travel_behind_their_headers(tmp_path):
    sent_apart(tmp_path)


class Scales(L.Callback):
    """The loss is scaled on every worker, where it is to be."""

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        assert scaler is None or scaler.get_scale() > 1


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "16-mixed"])
def test_lower_precision_is_that_of_the_processor(precision):
    trained = []
    for accelerator in (SimulatedAccelerator(), CPUAccelerator()):
        strategy: Any = recycle_strategy(pipeline_parallel_size=2, num_microbatches=2)
        run = L.Trainer(
            accelerator=accelerator, devices=4, strategy=strategy, precision=precision, max_steps=4,
            callbacks=[Scales()], **QUIET,
        )  # fmt: skip
        model = Regression()
        data = TensorDataset(*(tensor.float() for tensor in samples_for(4).tensors))
        run.fit(model, DataLoader(data, 12))
        trained.append(model.state_dict())
    assert difference(*trained) == 0


def drawn(kind: str, callbacks: Sequence[L.Callback] = ()) -> None:
    """Dropout draws from the device's generator, for a micro-batch the same wherever it runs."""
    undisturbed, other = Regression(dropout=0.5).double(), Regression(dropout=0.5).double()
    run_of("undisturbed", fit, undisturbed, callbacks=list(callbacks))
    run_of(kind, fit, other, callbacks=list(callbacks))
    assert difference(undisturbed.state_dict(), other.state_dict()) < TOLERANCE


@pytest.mark.parametrize("kind", ["killed", "replaced"])
def test_dropout_is_the_same_wherever_it_runs(kind):
    drawn(kind)


def test_a_plan_is_made_for_the_memory_of_the_device():
    run = run_of("killed", exact_fit, Regression().double(), strategy={"memory": 0.5})
    peaks = [event.details["peak_bytes"] for event in run.strategy.history if event.kind == "memory"]
    assert peaks
    assert all(0 < peak < 2**24 for each in peaks for peak in each)  # not the process with its libraries


def test_a_plan_is_made_for_the_worker_with_the_least_memory(monkeypatch):
    monkeypatch.setenv("SIMULATED_MEMORY", f"{2**32},{2**32},{2**32},{2**30}")
    run = run_of("killed", exact_fit, Regression().double(), strategy={"memory": 0.5})
    memory = run.strategy.schedules[-1].problem.memory
    assert memory.capacity[0] > 2**30 > 2 * memory.capacity[1] > 0


SPARE = """
from simulated_device import test_training
if __name__ == "__main__":
    test_training.while_a_spare_waits()
"""


def while_a_spare_waits(callbacks: Sequence[L.Callback] = ()) -> None:
    """What the launching process and the spare both run."""
    fit(Regression().double(), 2, 2, [KILL], callbacks=list(callbacks), max_steps=8)


class AwaitRefusal(L.Callback):
    """The leader goes on once a worker that came from outside has ended."""

    def __init__(self, spare: subprocess.Popen[str]) -> None:
        self.pid = spare.pid

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        wait_for(lambda: "Z" in Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0])


def test_a_worker_on_another_kind_of_device_is_refused_by_name(monkeypatch):
    address = f"127.0.0.1:{free_port('127.0.0.1')}"
    monkeypatch.setenv("RECYCLE_KEY", "the key of this test")
    environ = {name: value for name, value in os.environ.items() if name != "SIMULATED_DEVICES_IN_TESTS"}
    command: Any = [sys.executable, "-c", SPARE]
    with subprocess.Popen(
        command, env={**environ, "RECYCLE_COORDINATOR": address}, stderr=subprocess.PIPE, text=True
    ) as spare:
        monkeypatch.setenv("RECYCLE_LISTEN", address)
        while_a_spare_waits([AwaitRefusal(spare)])
        _, errors = spare.communicate(timeout=PATIENCE)
    assert "This worker computes on 'cpu', the run on 'simulated'" in errors
    assert spare.returncode != 0
