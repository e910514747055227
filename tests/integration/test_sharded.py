"""Positions of several processes: weights are exact, whichever member is lost."""

import time
from multiprocessing import forkserver
from typing import Any

import lightning as L
import pytest
import sharded
from lightning.pytorch.callbacks import StochasticWeightAveraging
from support.options import recycle_strategy
from support.training import QUIET
from torch import Tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.data import DataLoader
from torchmetrics import SumMetric

from lightning_recycle.callbacks import Fault, FaultInjectionCallback, HeartbeatCallback
from lightning_recycle.errors import ConfigurationError, StageLostError, UnsupportedFeatureError
from lightning_recycle.planning import Op

STAGES, FSDP_STAGES = (2, 2, 2), (2, 2, 2, 1)


class EachLayer(sharded.Ordinary):
    """Its layers are sharded, and not what is around them."""

    def configure_model(self) -> None:
        sharded.make_parallel(self.model, self.device_mesh)


ALWAYS = [
    (sharded.Ordinary, sharded.FSDP, [sharded.Kill(1, 1, 2)], {}),
    (sharded.Ordinary, (1, 1, 4), [], {}),
    (sharded.Piped, (1, 2, 2, 1), [], {}),  # two forwards of a root of FSDP2, which stays gathered, before a backward
]
LONG: list[Any] = [
    *((sharded.Ordinary, grid, [], {}) for grid in (sharded.TENSOR, sharded.FSDP)),
    (sharded.Ordinary, sharded.TENSOR, [sharded.Kill(1, 1, 2)], {}),
    (sharded.Ordinary, sharded.TENSOR, [sharded.Kill(2, 1, 0)], {}),
    (sharded.Ordinary, sharded.FSDP, [sharded.Kill(2, 1, 0)], {}),
    (sharded.Ordinary, sharded.BOTH, [sharded.Kill(3, 1, 3)], {}),
    (sharded.Ordinary, (2, 1, 4), [sharded.Kill(6, 1, 2)], {}),
    (sharded.Ordinary, (3, 1, 2), [sharded.Kill(3, 2, 1)], {}),
    (sharded.Piped, (1, 2, 2), [], {}),
    (sharded.Piped, (1, 2, 2, 2), [], {}),
    *(
        (sharded.Piped, grid, [sharded.Kill(*place)], {})
        for grid in (STAGES, FSDP_STAGES)
        for place in ((2, 1, 4), (7, 2, 3), (0, 0, 3))
    ),
    (sharded.Piped, STAGES, [sharded.Kill(1, 1, 3)], {"strategy": {"split_backward": True}}),
    (sharded.Piped, FSDP_STAGES, [sharded.Kill(1, 1, 3)], {"strategy": {"split_backward": True}}),
    (sharded.Ordinary, STAGES, [sharded.Kill(1, 1, 2)], {"strategy": {"layers": "model"}}),
    (EachLayer, FSDP_STAGES, [sharded.Kill(1, 1, 2)], {"strategy": {"layers": "model"}}),
    (sharded.Ordinary, sharded.TENSOR, [sharded.Kill(1, 2, 2)], {"accumulate_grad_batches": 2}),
    (sharded.Ordinary, sharded.FSDP, [sharded.Kill(1, 2, 2)], {"accumulate_grad_batches": 2}),
    *(
        (sharded.Ordinary, grid, [sharded.Kill(3, 2, 1)], {"gradient_clip_val": 0.1})
        for grid in (sharded.TENSOR, sharded.FSDP, sharded.BOTH)
    ),
    (
        sharded.Ordinary,
        sharded.TENSOR,
        [sharded.Kill(3, 2, 1)],
        {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"},
    ),
    (sharded.Piped, STAGES, [sharded.Kill(0, 1, 5)], {"gradient_clip_val": 0.45}),  # speculative steps
]


@pytest.mark.parametrize(
    ("module", "grid", "kills", "options"),
    [*ALWAYS, *(pytest.param(*case, marks=pytest.mark.long) for case in LONG)],
    ids=sharded.name,
)
def test_weights_equal_those_of_a_plain_loop_whichever_member_is_killed(module, grid, kills, options):
    sharded.exact_fit(module(), grid, *kills, **options)


class Hang(sharded.Kill):
    """The main thread never goes on; its heartbeats do."""

    def count(self, step: int, _: Op) -> None:
        if step == self.step:
            time.sleep(3600)


@pytest.mark.long
def test_a_member_that_hangs_is_told_from_its_sibling_that_waits_for_it(caplog):
    sharded.exact_fit(sharded.Ordinary(), sharded.TENSOR, Hang(1, 2, 0), HeartbeatCallback(interval=0.2, timeout=2.0))
    assert "Worker (0, 0, 1) was lost" in caplog.text


@pytest.mark.long
@pytest.mark.parametrize(("grid", "kill"), [
    ((1, 2, 2), sharded.Kill(3, 1, 2)),
    (STAGES, sharded.KillTwo(2, 6, step=1, operation=2)),
    (STAGES, sharded.KillTwo(2, 7, step=1, operation=2)),
], ids=["without peers", "one column twice", "two columns"])  # fmt: skip
def test_a_stage_is_lost_with_its_last_whole_position(grid, kill):
    with pytest.raises(StageLostError, match="stage 1"):
        sharded.fit(sharded.Piped(), grid, kill)


@pytest.mark.parametrize(("module", "options", "expected"), [
    (sharded.Ordinary(), {"devices": 3}, "multiple of 2"),
    (sharded.Ordinary(), {"devices": 4, "strategy": {"pipeline_parallel_size": 4}}, "4 devices .* multiple of 8, or"),
    (sharded.Ordinary(), {"strategy": {"verify": 0.1}}, "verify"),
    (sharded.Ordinary(), {"callbacks": [StochasticWeightAveraging(0.1)]}, "StochasticWeightAveraging"),
    (sharded.Ordinary(), {"callbacks": [FaultInjectionCallback([Fault("kill", 0, 0, 1, member=2)])]}, "one of 0 to 1"),
], ids=lambda value: value if isinstance(value, str) else "")  # fmt: skip
def test_what_is_not_supported_is_refused_before_a_worker_starts(module, options, expected):
    def start():
        strategy = recycle_strategy(**{"tensor_parallel_size": 2, **options.pop("strategy", {})})
        trainer = L.Trainer(accelerator="cpu", strategy=strategy, **{"devices": 2, "max_steps": 1, **QUIET, **options})
        trainer.fit(module, DataLoader(sharded.dataset(), batch_size=sharded.BATCH))

    with pytest.raises((UnsupportedFeatureError, ConfigurationError), match=expected):
        start()


class Idle(sharded.Ordinary):
    """Each process of a position does all of the work."""

    def configure_model(self) -> None:
        pass

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (self.model(batch[0]) - batch[1]).square().mean()


class Misnamed(sharded.Ordinary):
    def configure_model(self) -> None:
        parallelize_module(self.model, self.device_mesh["tensor_parallel"], {"0.upp": ColwiseParallel()})


@pytest.mark.long
def test_a_plan_that_names_no_module_is_an_error_and_an_idle_mesh_a_warning(capfd):
    with pytest.raises(ConfigurationError, match=r"its plan names 'upp'"):
        sharded.fit(Misnamed(), (1, 1, 2))
    forkserver._forkserver._stop()  # workers write to where stderr was when it started
    sharded.exact_fit(Idle(), (1, 1, 2))
    assert "2 processes of each position do the same work" in capfd.readouterr().err


class Metered(sharded.Ordinary):
    """Counts its samples with torchmetrics."""

    def __init__(self) -> None:
        super().__init__()
        self.samples = SumMetric()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.samples.update(float(len(batch[0])))
        self.log("samples", self.samples)


def test_the_members_of_a_position_are_no_replicas_for_metrics():
    trainer = sharded.fit(Metered(), sharded.TENSOR, validates=True, val_check_interval=4)
    assert float(trainer.callback_metrics["samples"]) == len(sharded.dataset())
