"""Positions of several processes: weights equal those of a plain loop, whichever member of a position is lost."""

import time
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging
from sharded import (
    BATCH,
    STEPS,
    Alone,
    Kill,
    KillTwo,
    Ordinary,
    Piped,
    Waits,
    dataset,
    error,
    fit,
    kinds,
    lost,
    plain_loop,
)
from support.options import recycle_strategy
from support.training import QUIET, TOLERANCE
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.utils.data import DataLoader
from torchmetrics import SumMetric

from lightning_recycle.callbacks import Fault, FaultInjectionCallback, HeartbeatCallback
from lightning_recycle.errors import ConfigurationError, UnsupportedFeatureError
from lightning_recycle.planning import Op


class SequenceParallelBlocks(Ordinary):
    """The samples of a micro-batch are divided like positions of a sequence; the loss is a DTensor."""

    def configure_model(self) -> None:
        plan = {
            "norm": SequenceParallel(sequence_dim=0),
            "up": ColwiseParallel(input_layouts=Shard(0)),
            "down": RowwiseParallel(output_layouts=Shard(0), use_local_output=False),
        }
        for block in self.model:
            parallelize_module(block, self.device_mesh["tensor_parallel"], plan)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        mesh = self.device_mesh["tensor_parallel"]
        x, y = (distribute_tensor(part, mesh, [Shard(0)], src_data_rank=None) for part in batch)
        for block in self.model:
            x = x + block.down(torch.tanh(block.up(block.norm(x))))
        return (x - y).square().mean()


def test_an_ordinary_module_trains_with_tensor_parallelism() -> None:
    module = Ordinary()
    fit(module, (2, 1, 2))
    assert error(module, plain_loop(2)) < TOLERANCE


@pytest.mark.parametrize(("rank", "operation"), [(1, 2), pytest.param(2, 0, marks=pytest.mark.long)])
def test_weights_equal_after_a_member_is_killed(rank: int, operation: int) -> None:
    module = Ordinary()
    assert lost(fit(module, (2, 1, 2), Kill(rank, 1, operation))) == 1
    assert error(module, plain_loop(2)) < TOLERANCE


@pytest.mark.long
@pytest.mark.parametrize(("rank", "step", "operation"), [(2, 1, 4), (7, 2, 3), (0, 0, 3)])
def test_weights_equal_after_a_member_of_a_stage_is_killed(rank: int, step: int, operation: int) -> None:
    module = Piped()
    assert lost(fit(module, (2, 2, 2), Kill(rank, step, operation))) == 1
    assert error(module, plain_loop(2)) < TOLERANCE


class Hang(Kill):
    """The main thread never goes on; its heartbeats do."""

    def count(self, step: int, _: Op) -> None:
        if step == self.step:
            time.sleep(3600)


@pytest.mark.long
def test_a_member_that_hangs_is_told_from_its_sibling_that_waits_for_it(caplog: pytest.LogCaptureFixture) -> None:
    module = Ordinary()
    fit(module, (2, 1, 2), Hang(1, 2, 0), HeartbeatCallback(interval=0.2, timeout=2.0))
    assert "Worker (0, 0, 1) was lost" in caplog.text
    assert error(module, plain_loop(2)) < TOLERANCE


@pytest.mark.long
def test_sequence_parallel_layers_and_a_loss_that_is_sharded() -> None:
    module = SequenceParallelBlocks()
    assert lost(fit(module, (2, 1, 2), Kill(2, 1, 2))) == 1
    assert error(module, plain_loop(2)) < TOLERANCE


@pytest.mark.long
def test_batches_are_accumulated_in_shards() -> None:
    module, alone = Ordinary(), Alone()
    fit(module, (2, 1, 2), Kill(1, 2, 2), accumulate_grad_batches=2)
    fit(alone, (2, 1, 1), accumulate_grad_batches=2)
    assert error(module, alone.model) < TOLERANCE


@pytest.mark.long
def test_layers_of_an_ordinary_module_are_cut_into_stages_after_they_are_sharded() -> None:
    module = Ordinary()
    fit(module, (2, 2, 2), Kill(1, 1, 2), strategy={"layers": "model"})
    assert error(module, plain_loop(2)) < TOLERANCE


@pytest.mark.long
@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_gradients_are_clipped_by_the_norm_of_all_members_or_by_value(algorithm: str) -> None:
    module = Ordinary()
    clips = {"norm": nn.utils.clip_grad_norm_, "value": nn.utils.clip_grad_value_}[algorithm]
    fit(module, (2, 1, 2), Kill(3, 2, 1), gradient_clip_val=0.1, gradient_clip_algorithm=algorithm)
    assert error(module, plain_loop(2, clip=0.1, clips=clips)) < TOLERANCE


@pytest.mark.long
def test_stages_of_several_members_clip_on_a_guess() -> None:
    module = Piped()
    fit(module, (2, 2, 2), Kill(0, 1, 5), gradient_clip_val=0.45)
    assert error(module, plain_loop(2, clip=0.45)) < TOLERANCE


@pytest.mark.long
@pytest.mark.parametrize("step", [0, 2])
def test_what_is_left_of_two_positions_is_put_together(step: int) -> None:
    module = Ordinary()
    assert lost(fit(module, (2, 1, 2), KillTwo(0, 3, step=step, operation=1))) == 2
    assert error(module, plain_loop(2)) < TOLERANCE


@pytest.mark.long
def test_a_split_backward_defers_the_gradients_of_shards() -> None:
    module = Piped()
    fit(module, (2, 2, 2), Kill(1, 1, 3), strategy={"split_backward": True})
    assert error(module, plain_loop(2)) < TOLERANCE


@pytest.mark.parametrize(
    ("module", "options", "expected"),
    [
        (Ordinary(), {"devices": 3}, "multiple of 2"),
        (Ordinary(), {"devices": 4, "strategy": {"pipeline_parallel_size": 4}}, "4 devices .* multiple of 8, or"),
        (Ordinary(), {"strategy": {"verify": 0.1}}, "verify"),
        (Ordinary(), {"callbacks": [StochasticWeightAveraging(0.1)]}, "StochasticWeightAveraging"),
        (Ordinary(), {"callbacks": [FaultInjectionCallback([Fault("kill", 0, 0, 1, member=2)])]}, "one of 0 to 1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_supported_is_refused_before_a_worker_starts(
    module: L.LightningModule, options: dict[str, Any], expected: str
) -> None:
    strategy = recycle_strategy(**{"tensor_parallel_size": 2, **options.pop("strategy", {})})
    trainer = L.Trainer(accelerator="cpu", strategy=strategy, **{"devices": 2, "max_steps": 1, **QUIET, **options})
    with pytest.raises((UnsupportedFeatureError, ConfigurationError), match=expected):
        trainer.fit(module, DataLoader(dataset(), batch_size=BATCH))


class Misnamed(Ordinary):
    def configure_model(self) -> None:
        parallelize_module(self.model, self.device_mesh["tensor_parallel"], {"0.upp": ColwiseParallel()})


@pytest.mark.long
def test_a_plan_that_names_no_module_is_an_error_and_an_idle_mesh_a_warning(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigurationError, match=r"its plan names 'upp'"):
        fit(Misnamed(), (1, 1, 2))
    module = Alone()
    forkserver._forkserver._stop()  # type: ignore[attr-defined]  # workers write to where stderr was when it started
    fit(module, (1, 1, 2))
    assert "2 processes of each position do the same work" in capfd.readouterr().err
    assert error(module, plain_loop(1)) < TOLERANCE


class Metered(Ordinary):
    """Counts its samples with torchmetrics."""

    def __init__(self) -> None:
        super().__init__()
        self.samples = SumMetric()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.samples.update(float(len(batch[0])))
        self.log("samples", self.samples)


def test_the_members_of_a_position_are_no_replicas_for_metrics() -> None:
    trainer = fit(Metered(), (2, 1, 2), validates=True, val_check_interval=4)
    assert float(trainer.callback_metrics["samples"]) == len(dataset())


class KeepsItsMesh(Ordinary):
    """In an attribute, and a sharded average of its weights in another one."""

    def configure_model(self) -> None:
        super().configure_model()
        self.mesh = self.device_mesh["tensor_parallel"]
        self.average = [p.detach().clone() for p in self.parameters()]

    def on_train_batch_end(self, *_: Any) -> None:
        assert self.mesh.size() == 2
        for average, parameter in zip(self.average, self.parameters(), strict=True):
            average.mul_(0.5).add_(parameter.detach(), alpha=0.5)


@pytest.mark.long
def test_meshes_and_sharded_tensors_in_attributes_travel_to_replacements_and_stay_in_the_workers() -> None:
    module = KeepsItsMesh()
    trainer = fit(module, (2, 1, 2), Kill(1, 1, 2), Waits(2), max_steps=8, strategy={"max_restarts": 4})
    assert "rejoined" in kinds(trainer), kinds(trainer)
    assert error(module, plain_loop(2, steps=8)) < TOLERANCE
    assert not hasattr(module, "mesh")


def test_a_replacement_gets_the_shards_of_its_column() -> None:
    """Later the position from which it has its state is lost."""
    module = Ordinary()
    later = Kill(2, 18, 1)
    trainer = fit(
        module, (2, 1, 2), Kill(1, 1, 2), later, Waits(2), max_steps=20, strategy={"max_restarts": 4}, max_epochs=9
    )
    assert "rejoined" in kinds(trainer), kinds(trainer)
    assert error(module, plain_loop(2, steps=20)) < TOLERANCE


def test_a_checkpoint_is_that_of_one_device(tmp_path: Path) -> None:
    module = Ordinary()
    keep = ModelCheckpoint(tmp_path, save_last=True, every_n_train_steps=2)
    checks = {"enable_checkpointing": True, "validates": True, "val_check_interval": 4}
    trainer = fit(module, (2, 1, 2), keep, Kill(0, 2, 3), **checks)
    layers = plain_loop(2)
    loss = float((layers(dataset()[:][0]) - dataset()[:][1]).square().mean())
    assert abs(float(trainer.callback_metrics["val"]) - loss) < TOLERANCE
    path = tmp_path / "last.ckpt"
    stored = torch.load(path, weights_only=True)
    expected = {f"model.{name}": p for name, p in layers.named_parameters()}
    assert max(float((stored["state_dict"][name] - p).abs().max()) for name, p in expected.items()) < TOLERANCE
    again = Ordinary()
    fit(again, (1, 1, 2), max_steps=2 * STEPS, ckpt_path=path)
    alone = Alone()
    fit(alone, (1, 1, 1), max_steps=2 * STEPS, ckpt_path=path)
    assert error(again, alone.model) < TOLERANCE
