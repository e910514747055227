"""Forwards that are computed again because memory is short: shorter steps within the limit, and the same result."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from support.held import EACH, Heavy, Hold, Peaks, peaks
from support.options import recycle_strategy
from support.planning_in_background import is_idle
from support.sampling import sampled
from support.training import QUIET, TOLERANCE, difference, exact_fit, failures, fit, on_one_device
from support.waiting import wait_for
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.data import DataLoader, TensorDataset

from lightning_recycle import PipelineModule, PlanningOptions, ReCycleStrategy
from lightning_recycle.callbacks import Fault
from lightning_recycle.control.plans.run_plans import RunPlans
from lightning_recycle.planning import Costs, Schedule, plan, retime
from lightning_recycle.planning.costs import Profile, StageProfile, save_profile

pytestmark = pytest.mark.long

LIMIT = EACH + EACH // 2
"""Room for the activations of one micro-batch in a stage that holds one large tensor for each."""


@pytest.fixture
def seconds(tmp_path_factory) -> str:
    """The path of a profile: plans do not depend on how fast this runs."""
    path = tmp_path_factory.mktemp("profile") / "profile.json"
    stage = StageProfile(0.01, 0.02, 0.01, 0.0, 0.0, EACH, 1000)
    save_profile(path, Profile((stage, stage), latency=0.0, bandwidth=0.0, steps=1))
    return str(path)


@pytest.fixture
def plans_at_once(monkeypatch) -> None:
    """No step begins before the plan for the memory that was measured is there."""
    begin = RunPlans.plan_ahead

    def plan_ahead(plans: RunPlans) -> None:
        begin(plans)
        wait_for(lambda: is_idle(plans._background))

    monkeypatch.setattr(RunPlans, "plan_ahead", plan_ahead)


def again(schedule: Schedule) -> int:
    return sum(len(schedule.recomputed(worker)) for worker in schedule.live_workers)


@pytest.mark.parametrize(
    ("pipelines", "worker"), sampled([(2, (0, 0)), (2, (1, 0)), (3, (1, 0)), (3, (2, 0))], 1), ids=str
)
def test_a_kill_costs_less_within_the_same_limit(pipelines, worker, seconds, tmp_path):
    """Without recomputation one micro-batch at a time fits into stage 0, whose workers then wait for each gradient."""
    faults = [Fault("kill", *worker, step=6)]
    strategy = {"split_backward": True, "memory": LIMIT, "profile": seconds}
    run = exact_fit(Heavy().double(), pipelines, 2, faults, callbacks=[Peaks(tmp_path)], strategy=strategy)
    assert failures(run) == [worker]
    after = retime(run.strategy.schedules[-1], Costs.uniform(2, 1.0, 2.0, 1.0))  # what it was planned for
    assert again(after)
    problem = after.problem
    without = plan(replace(problem, memory=replace(problem.memory, checkpoint=None)))
    assert after.period < 0.95 * without.period
    held = peaks(tmp_path)
    assert held[f"{2 * pipelines - 1} measured"] == 1, "counted in the survivors: at most what fits"


def test_it_can_be_switched_off(seconds):
    strategy = {"split_backward": True, "memory": LIMIT, "profile": seconds, "activation_checkpointing": "never"}
    run = exact_fit(Heavy().double(), 2, 2, [Fault("kill", 1, 0, step=6)], strategy=strategy)
    assert not any(map(again, run.strategy.schedules))


class Drawing(Heavy):
    """With dropout and running statistics in the first stage."""

    def configure_pipeline(self) -> list[Any]:
        first, *rest = super().configure_pipeline()
        return [first, nn.BatchNorm1d(16), *rest]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # The gradient of a bias before batch norm is rounding noise, which AdamW would scale up.
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


@pytest.mark.usefixtures("plans_at_once")
def test_dropout_and_running_statistics_are_as_without(seconds):
    runs = []
    for memory in (LIMIT, 1 << 40):
        L.seed_everything(7)
        model = Drawing(dropout=0.3).double()
        run = fit(model, 1, 2, strategy={"split_backward": True, "memory": memory, "profile": seconds, "seed": 3})
        runs.append((run, model.state_dict()))
    (tight, actual), (roomy, expected) = runs
    assert again(tight.strategy.schedules[-1])
    assert not any(map(again, roomy.strategy.schedules))
    assert difference(actual, expected) < 1e-10
    assert int(actual["layers.1.num_batches_tracked"]) == 10, "as on one device, each step counts once"


class Ordinary(L.LightningModule):
    """No PipelineModule: its own step runs on the first stage, up to the layers of the next one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 16), Hold(), nn.Tanh(), nn.Linear(16, 16), Hold(), nn.Linear(16, 1))
        self.steps = 0
        self.seen: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        self.steps += 1
        self.seen.append(float(x.sum()))
        loss = (self.net(x) - y).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


@pytest.mark.usefixtures("plans_at_once")
def test_the_step_of_an_ordinary_module_is_seen_once(seconds):
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(*(torch.randn(240, n, generator=generator, dtype=torch.float64) for n in (8, 1)))
    model, expected = Ordinary().double(), Ordinary().double()
    strategy = ReCycleStrategy(2, 12, planning=PlanningOptions(split_backward=True, memory=LIMIT, profile=seconds))
    run = L.Trainer(accelerator="cpu", devices=2, strategy=strategy, max_epochs=1, **QUIET)
    run.fit(model, DataLoader(data, batch_size=24))
    plain = on_one_device(max_epochs=1)
    plain.fit(expected, DataLoader(data, batch_size=24))
    assert again(run.strategy.schedules[-1])
    assert difference(model.state_dict(), expected.state_dict()) < 1e-10
    assert float(run.callback_metrics["loss"]) == pytest.approx(float(plain.callback_metrics["loss"]))


class Wrapped(PipelineModule):
    """Its first and last layers have a weight in common, and torch computes both again."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        first, middle, last = (nn.Linear(8, 8).double() for _ in range(3))
        last.weight = first.weight
        self.given = [checkpoint_wrapper(first), middle, checkpoint_wrapper(last)]

    def configure_pipeline(self) -> nn.Sequential:
        return nn.Sequential(*self.given)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


@pytest.mark.parametrize("folder", [False, True])
def test_weights_that_stages_have_in_common_may_be_in_checkpoint_wrappers(folder, tmp_path):
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(*(torch.randn(64, 8, generator=generator, dtype=torch.double) for _ in range(2)))

    def trained(stages: int, steps: int, ckpt_path: Path | None = None) -> dict[str, Tensor]:
        module, keep = Wrapped(), ModelCheckpoint(tmp_path / f"{stages}", save_last=True, every_n_train_steps=1)
        strategy = recycle_strategy(
            pipeline_parallel_size=stages, num_microbatches=2, save_distributed_checkpoint=folder
        )
        limits = {"devices": stages, "max_steps": steps, **QUIET, "enable_checkpointing": True}
        trainer = L.Trainer(accelerator="cpu", strategy=strategy, callbacks=[keep], **limits)
        trainer.fit(module, DataLoader(data, batch_size=4), ckpt_path=ckpt_path)
        return module.state_dict()

    trained(2, 2)
    found, expected = trained(1, 4, tmp_path / "2" / "last.ckpt"), trained(1, 4)
    assert max(float((found[name] - expected[name]).abs().max()) for name in expected) < TOLERANCE
