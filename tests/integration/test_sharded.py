"""Positions of several processes: weights equal those of a plain loop, whichever member of a position is lost.

Tensor parallelism, FSDP2, and both. What only FSDP2 has is in test_fsdp.py.
"""

import time
from multiprocessing import forkserver
from typing import Any

import lightning as L
import pytest
import sharded as sh
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging
from support.options import recycle_strategy
from support.training import QUIET
from torch import Tensor
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.utils.data import DataLoader
from torchmetrics import SumMetric

from lightning_recycle.callbacks import Fault, FaultInjectionCallback, HeartbeatCallback
from lightning_recycle.errors import ConfigurationError, StageLostError, UnsupportedFeatureError
from lightning_recycle.planning import Op

STAGES, FSDP_STAGES = (2, 2, 2), (2, 2, 2, 1)
PLACES = [(2, 1, 4), (7, 2, 3), (0, 0, 3)]


class EachLayer(sh.Ordinary):
    """Its layers are sharded, and not what is around them."""

    def configure_model(self) -> None:
        sh.make_parallel(self.model, self.device_mesh)


class SequenceParallelBlocks(sh.Ordinary):
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


ALWAYS = [
    (sh.Ordinary, sh.TENSOR, [], {}),
    (sh.Ordinary, sh.TENSOR, [sh.Kill(1, 1, 2)], {}),
    (sh.Ordinary, sh.FSDP, [], {}),
    (sh.Ordinary, sh.FSDP, [sh.Kill(1, 1, 2)], {}),
    (sh.Ordinary, (1, 1, 4), [], {}),
    (sh.Piped, (1, 2, 2, 1), [], {}),  # two forwards of a root of FSDP2, which stays gathered, before a backward
]
LONG: list[Any] = [
    (sh.Ordinary, sh.TENSOR, [sh.Kill(2, 1, 0)], {}),
    (sh.Ordinary, sh.FSDP, [sh.Kill(2, 1, 0)], {}),
    (sh.Ordinary, sh.BOTH, [sh.Kill(3, 1, 3)], {}),
    (sh.Ordinary, (2, 1, 4), [sh.Kill(6, 1, 2)], {}),
    (sh.Ordinary, (3, 1, 2), [sh.Kill(3, 2, 1)], {}),
    (sh.Piped, (1, 2, 2), [], {}),
    (sh.Piped, (1, 2, 2, 2), [], {}),
    *(
        (sh.Piped, grid, [sh.Kill(*place)], {})
        for grid in (STAGES, FSDP_STAGES)
        for place in ((2, 1, 4), (7, 2, 3), (0, 0, 3))
    ),
    (sh.Piped, STAGES, [sh.Kill(1, 1, 3)], {"strategy": {"split_backward": True}}),
    (sh.Piped, FSDP_STAGES, [sh.Kill(1, 1, 3)], {"strategy": {"split_backward": True}}),
    (sh.Ordinary, STAGES, [sh.Kill(1, 1, 2)], {"strategy": {"layers": "model"}}),
    (EachLayer, FSDP_STAGES, [sh.Kill(1, 1, 2)], {"strategy": {"layers": "model"}}),
    (sh.Ordinary, sh.TENSOR, [sh.Kill(1, 2, 2)], {"accumulate_grad_batches": 2}),
    (sh.Ordinary, sh.FSDP, [sh.Kill(1, 2, 2)], {"accumulate_grad_batches": 2}),
    *((sh.Ordinary, grid, [sh.Kill(3, 2, 1)], {"gradient_clip_val": 0.1}) for grid in (sh.TENSOR, sh.FSDP, sh.BOTH)),
    (sh.Ordinary, sh.TENSOR, [sh.Kill(3, 2, 1)], {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"}),
    (sh.Piped, STAGES, [sh.Kill(0, 1, 5)], {"gradient_clip_val": 0.45}),  # speculative steps
    (SequenceParallelBlocks, sh.TENSOR, [sh.Kill(2, 1, 2)], {}),
]


@pytest.mark.parametrize(
    ("module", "grid", "kills", "options"),
    [*ALWAYS, *(pytest.param(*case, marks=pytest.mark.long) for case in LONG)],
    ids=sh.name,
)
def test_weights_equal_those_of_a_plain_loop_whichever_member_is_killed(module, grid, kills, options):
    sh.exact_fit(module(), grid, *kills, **options)


@pytest.mark.parametrize("grid", [sh.TENSOR, pytest.param(sh.FSDP, marks=pytest.mark.long)], ids=str)
def test_a_replacement_gets_the_shards_of_its_column(grid):
    """Later the position from which it has its state is lost."""
    limits = {"max_steps": 20, "max_epochs": 9, "strategy": {"max_restarts": 4}}
    sh.exact_fit(sh.Ordinary(), grid, sh.Kill(1, 1, 2), sh.Kill(2, 18, 1), sh.Waits(2), **limits)


class Hang(sh.Kill):
    """The main thread never goes on; its heartbeats do."""

    def count(self, step: int, _: Op) -> None:
        if step == self.step:
            time.sleep(3600)


@pytest.mark.long
def test_a_member_that_hangs_is_told_from_its_sibling_that_waits_for_it(caplog):
    sh.exact_fit(sh.Ordinary(), sh.TENSOR, Hang(1, 2, 0), HeartbeatCallback(interval=0.2, timeout=2.0))
    assert "Worker (0, 0, 1) was lost" in caplog.text


@pytest.mark.long
@pytest.mark.parametrize(("grid", "kill"), [
    ((1, 2, 2), sh.Kill(3, 1, 2)),
    (STAGES, sh.KillTwo(2, 6, step=1, operation=2)),
    (STAGES, sh.KillTwo(2, 7, step=1, operation=2)),
], ids=["without peers", "one column twice", "two columns"])  # fmt: skip
def test_a_stage_is_lost_with_its_last_whole_position(grid, kill):
    with pytest.raises(StageLostError, match="stage 1"):
        sh.fit(sh.Piped(), grid, kill)


@pytest.mark.parametrize(("module", "options", "expected"), [
    (sh.Ordinary(), {"devices": 3}, "multiple of 2"),
    (sh.Ordinary(), {"devices": 4, "strategy": {"pipeline_parallel_size": 4}}, "4 devices .* multiple of 8, or"),
    (sh.Ordinary(), {"strategy": {"verify": 0.1}}, "verify"),
    (sh.Ordinary(), {"callbacks": [StochasticWeightAveraging(0.1)]}, "StochasticWeightAveraging"),
    (sh.Ordinary(), {"callbacks": [FaultInjectionCallback([Fault("kill", 0, 0, 1, member=2)])]}, "one of 0 to 1"),
], ids=lambda value: value if isinstance(value, str) else "")  # fmt: skip
def test_what_is_not_supported_is_refused_before_a_worker_starts(module, options, expected):
    strategy = recycle_strategy(**{"tensor_parallel_size": 2, **options.pop("strategy", {})})
    trainer = L.Trainer(accelerator="cpu", strategy=strategy, **{"devices": 2, "max_steps": 1, **QUIET, **options})
    with pytest.raises((UnsupportedFeatureError, ConfigurationError), match=expected):
        trainer.fit(module, DataLoader(sh.dataset(), batch_size=sh.BATCH))


class Idle(sh.Ordinary):
    """Each process of a position does all of the work."""

    def configure_model(self) -> None:
        pass

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (self.model(batch[0]) - batch[1]).square().mean()


class Misnamed(sh.Ordinary):
    def configure_model(self) -> None:
        parallelize_module(self.model, self.device_mesh["tensor_parallel"], {"0.upp": ColwiseParallel()})


@pytest.mark.long
def test_a_plan_that_names_no_module_is_an_error_and_an_idle_mesh_a_warning(capfd):
    with pytest.raises(ConfigurationError, match=r"its plan names 'upp'"):
        sh.fit(Misnamed(), (1, 1, 2))
    forkserver._forkserver._stop()  # workers write to where stderr was when it started
    sh.exact_fit(Idle(), (1, 1, 2))
    assert "2 processes of each position do the same work" in capfd.readouterr().err


class Metered(sh.Ordinary):
    """Counts its samples with torchmetrics."""

    def __init__(self) -> None:
        super().__init__()
        self.samples = SumMetric()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.samples.update(float(len(batch[0])))
        self.log("samples", self.samples)


def test_the_members_of_a_position_are_no_replicas_for_metrics():
    trainer = sh.fit(Metered(), sh.TENSOR, validates=True, val_check_interval=4)
    assert float(trainer.callback_metrics["samples"]) == len(sh.dataset())


class KeepsItsMesh(sh.Ordinary):
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
def test_meshes_and_sharded_tensors_in_attributes_travel_to_replacements_and_stay_in_the_workers():
    module = KeepsItsMesh()
    sh.exact_fit(module, sh.TENSOR, sh.Kill(1, 1, 2), sh.Waits(2), max_steps=8, strategy={"max_restarts": 4})
    assert not hasattr(module, "mesh")
