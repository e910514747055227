"""Modules that optimize by themselves train as under Lightning's DDP, whoever dies at whatever moment of a step."""

from __future__ import annotations

import os
import signal
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from support.training import QUIET, difference, failures
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_recycle import ReCycleStrategy
from lightning_recycle.callbacks import Fault, FaultInjectionCallback

PIPELINES = 3
BATCH = 4  # of each worker
STEPS = 5  # of an epoch
EPOCHS = 2


class GAN(L.LightningModule):
    """Two networks that train against each other, with all that Lightning offers for that.

    Args:
        dies: (rank, step, place in the step) at which a worker dies.
    """

    def __init__(self, dies: tuple[int, int, str] | None = None) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.dies = dies
        torch.manual_seed(0)
        self.generator = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6))
        self.discriminator = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        self.average = nn.Linear(6, 8).requires_grad_(False)  # of the discriminator's first layer
        self.fake: Tensor | None = None
        self.norms: list[float] = []

    def die(self, place: str, batch_idx: int) -> None:
        strategy: Any = self.trainer.strategy
        if self.dies is None or not isinstance(strategy, ReCycleStrategy) or strategy.incarnation:
            return
        if (strategy.grid_rank, self.trainer.current_epoch * STEPS + batch_idx, place) == self.dies:
            os.kill(os.getpid(), signal.SIGKILL)

    def against(self, x: Tensor, real: bool) -> Tensor:
        y = self.discriminator(x)
        return nn.functional.binary_cross_entropy_with_logits(y, torch.full_like(y, float(real)))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        z, x = batch
        of_generator, of_discriminator = self.optimizers()
        self.die("start", batch_idx)

        self.toggle_optimizer(of_generator)
        self.fake = self.generator(z)
        loss = self.against(self.fake, True)
        of_generator.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(of_generator, 0.1, "norm")
        of_generator.step()
        self.untoggle_optimizer(of_generator)
        self.die("between", batch_idx)

        with of_discriminator.toggle_model():
            worst = (self.against(x, True) + self.against(self.fake.detach(), False)) / 2
            of_discriminator.zero_grad()
            self.manual_backward(worst)
            self.die("after the last backward", batch_idx)
            of_discriminator.step()
        with torch.no_grad():
            for mine, theirs in zip(self.average.parameters(), self.discriminator[0].parameters(), strict=True):
                mine.mul_(0.9).add_(theirs, alpha=0.1)
        self.log("g_loss", loss, prog_bar=True, on_step=True, on_epoch=True, sync_dist=True)
        self.log("d_loss", worst, on_epoch=True, sync_dist=True)
        self.die("end", batch_idx)
        if self.dies is not None and self.dies[2] == "commit" and batch_idx == self.dies[1] % STEPS:
            self._die_in_commit()
        return {"loss": loss, "fake": self.fake.detach()}

    def _die_in_commit(self) -> None:
        strategy: Any = self.trainer.strategy
        if strategy.incarnation or self.trainer.current_epoch * STEPS + self.dies[1] % STEPS != self.dies[1]:
            return
        client = strategy.session.client

        def commit(step: int, payload: Any) -> Any:
            send = type(client).commit
            if strategy.grid_rank == self.dies[0]:
                client.send(client.member.commit(step, b""))
                os.kill(os.getpid(), signal.SIGKILL)
            return send(client, step, payload)

        client.commit = commit

    def on_train_epoch_end(self) -> None:
        for scheduler in self.lr_schedulers():
            scheduler.step()

    def configure_optimizers(self) -> Any:
        optimizers = [
            torch.optim.Adam(self.generator.parameters(), lr=0.02),
            torch.optim.SGD(self.discriminator.parameters(), lr=0.1, momentum=0.5),
        ]
        return optimizers, [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) for optimizer in optimizers]


def data(samples: int = PIPELINES * BATCH * STEPS) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(samples, 4, generator=generator, dtype=torch.float64),
        torch.randn(samples, 6, generator=generator, dtype=torch.float64) + 1,
    )


class Returned(L.Callback):
    """What reaches callbacks of the steps."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.steps: list[int] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]))
        self.steps.append(trainer.global_step)


def under_ddp(model: L.LightningModule, **kwargs: Any) -> L.Trainer:
    strategy = DDPStrategy(start_method="forkserver", find_unused_parameters=True)
    trainer = L.Trainer(
        accelerator="cpu", devices=PIPELINES, strategy=strategy, **{**QUIET, "max_epochs": EPOCHS, **kwargs}
    )
    trainer.fit(model, DataLoader(data(), BATCH))
    return trainer


def on_grid(
    model: L.LightningModule, faults: Any = (), strategy: Any = None, pipelines: int = PIPELINES, **kwargs: Any
) -> L.Trainer:
    loader = kwargs.pop("loader", None) or DataLoader(data(), PIPELINES * BATCH // pipelines)
    fit = {"ckpt_path": kwargs.pop("ckpt_path", None)}
    trainer = L.Trainer(
        accelerator="cpu",
        devices=pipelines,
        strategy=ReCycleStrategy(**(strategy or {})),
        callbacks=[FaultInjectionCallback(list(faults)), *kwargs.pop("callbacks", [])],
        **{**QUIET, "max_epochs": EPOCHS, **kwargs},
    )
    trainer.fit(model, loader, **fit)
    return trainer


def seen(trainer: L.Trainer, model: L.LightningModule) -> dict[str, Any]:
    metrics = {n: float(v) for n, v in trainer.callback_metrics.items() if not n.startswith("recycle/")}
    return {
        "weights": model.state_dict(),
        "metrics": metrics,
        "steps": (trainer.global_step, trainer.current_epoch),
        "rates": [group["lr"] for o in trainer.optimizers for group in o.param_groups],
    }


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert difference(found["weights"], expected["weights"]) < 1e-10
    assert found["metrics"] == pytest.approx(expected["metrics"], rel=1e-6)
    assert found["steps"] == expected["steps"]


@pytest.fixture(scope="module")
def ddp() -> dict[str, Any]:
    cache = os.environ.get("DDP_CACHE")
    if cache and os.path.exists(cache):
        return torch.load(cache, weights_only=False)
    model = GAN().double()
    found = seen(under_ddp(model), model)
    if cache:
        torch.save(found, cache)
    return found


def test_a_gan_trains_as_under_ddp(ddp: dict[str, Any]) -> None:
    model, returned = GAN().double(), Returned()
    trainer = on_grid(model, callbacks=[returned])
    assert_equal(seen(trainer, model), ddp)
    assert trainer.global_step == 2 * STEPS * EPOCHS
    assert returned.steps == list(range(2, 2 * STEPS * EPOCHS + 1, 2))
    assert returned.losses[-1] == pytest.approx(ddp["metrics"]["g_loss_step"])
    assert [group["lr"] for o in trainer.optimizers for group in o.param_groups] == [0.005, 0.025]


@pytest.mark.parametrize("place", ["start", "between", "after the last backward", "end", "commit"])
def test_a_worker_dies_in_a_step(ddp: dict[str, Any], place: str) -> None:
    model, returned = GAN(dies=(1, 3, place)).double(), Returned()
    trainer = on_grid(model, callbacks=[returned])
    assert failures(trainer) == [(1, 0)]
    assert_equal(seen(trainer, model), ddp)
    assert returned.steps == list(range(2, 2 * STEPS * EPOCHS + 1, 2))


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("at", ["forward", "reduce", "optimizer"])
def test_a_worker_dies_at_an_operation(ddp: dict[str, Any], at: str, when: str) -> None:
    model = GAN().double()
    faults = [Fault("kill", 0, 0, step=2, at=at, when=when), Fault("kill", 2, 0, step=7, at=at, when=when)]
    trainer = on_grid(model, faults)
    assert failures(trainer) == [(0, 0), (2, 0)]
    assert_equal(seen(trainer, model), ddp)
