"""Modules that optimize by themselves train as under Lightning's DDP, whoever dies at whatever moment of a step."""

import itertools
import os
import signal
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from support.growth import AwaitReplacement, rejoined
from support.sampling import sampled
from support.training import QUIET, difference, failures, grid_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_recycle import ConfigurationError, ReCycleError, ReCycleStrategy
from lightning_recycle.callbacks import Fault
from lightning_recycle.control.protocol.messages import Commit
from lightning_recycle.launch.worker_group import _ensure_fork_server, process_context

PIPELINES = 3
BATCH = 4  # of each worker
STEPS = 5  # of an epoch
EPOCHS = 2


class GAN(L.LightningModule):
    """Two networks that train against each other; a worker dies at a place of a step."""

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
                client.send(Commit(client.rank, client.generation, step, b""))
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


class Data(L.LightningDataModule):
    """The order that both strategies have: DDP shuffles what has no sampler of its own."""

    def __init__(self, batch: int = BATCH) -> None:
        super().__init__()
        self.batch = batch

    def train_dataloader(self) -> Any:
        samples, trainer = data(), self.trainer
        sampler: Any = DistributedSampler(samples, trainer.world_size, trainer.global_rank, shuffle=False)
        return DataLoader(samples, self.batch, sampler=sampler)


class OwnParameters(L.Callback):
    """With "forkserver" Lightning 2.6 lets the processes share the memory of the parameters, and all step them."""

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        for tensor in itertools.chain(pl_module.parameters(), pl_module.buffers()):
            tensor.data = tensor.data.clone()


def under_ddp(model: L.LightningModule, **kwargs: Any) -> L.Trainer:
    """Its processes are forked by the server that forks workers, which has imported what they need."""
    process_context()
    _ensure_fork_server()
    strategy = DDPStrategy(start_method="forkserver", find_unused_parameters=True)
    options = {**QUIET, "max_epochs": EPOCHS, **kwargs}
    trainer = L.Trainer(accelerator="cpu", devices=PIPELINES, strategy=strategy, callbacks=OwnParameters(), **options)
    trainer.fit(model, Data())
    return trainer


def on_grid(
    model: L.LightningModule, faults: Any = (), strategy: Any = None, pipelines: int = PIPELINES, **kwargs: Any
) -> L.Trainer:
    ckpt_path = kwargs.pop("ckpt_path", None)
    trainer = grid_trainer(pipelines, 1, faults, strategy, **{"max_epochs": EPOCHS, **kwargs})
    trainer.fit(model, Data(PIPELINES * BATCH // pipelines), ckpt_path=ckpt_path)
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
    assert found["steps"] == (2 * STEPS * EPOCHS, EPOCHS)  # Lightning counts the steps of both optimizers


@pytest.fixture(scope="module")
def ddp() -> dict[str, Any]:
    model = GAN().double()
    return seen(under_ddp(model), model)


TWO_KILLS = [
    [Fault("kill", 0, 0, step=2, at=at, when=when), Fault("kill", 2, 0, step=7, at=at, when=when)]
    for at in ("forward", "reduce", "optimizer")
    for when in ("before", "after")
]
KILL = [Fault("kill", 1, 0, step=3)]
RUNS: list[Any] = [
    pytest.param({}, marks=pytest.mark.long, id="undisturbed"),
    *sampled([{"dies": (1, 3, place)} for place in ("start", "between", "after the last backward", "end", "commit")], 1,
        rest=pytest.mark.long),
    *sampled([{"faults": faults} for faults in TWO_KILLS], 1),
    *sampled([{"faults": faults, "strategy": {"num_microbatches": 2}, "pipelines": 2} for faults in ([], KILL)], 1,
        rest=pytest.mark.long),
    pytest.param({"pipelines": 1}, id="one worker, which has nobody to meet"),
]  # fmt: skip


@pytest.mark.parametrize("how", RUNS)
def test_a_gan_trains_as_under_ddp_whoever_dies(ddp, how):
    how = dict(how)
    model, returned = GAN(how.pop("dies", None)).double(), Returned()
    trainer = on_grid(model, callbacks=[returned], **how)
    assert_equal(seen(trainer, model), ddp)
    lost = [model.dies[0]] if model.dies else [fault.pipeline for fault in how.get("faults", ())]
    assert failures(trainer) == [(pipeline, 0) for pipeline in lost]
    assert returned.steps == list(range(2, 2 * STEPS * EPOCHS + 1, 2))
    assert returned.losses[-1] == pytest.approx(ddp["metrics"]["g_loss_step"])
    assert [group["lr"] for o in trainer.optimizers for group in o.param_groups] == [0.005, 0.025]


def test_a_replacement_joins(ddp):
    model = GAN().double()
    trainer = on_grid(model, KILL, {"max_restarts": 10}, callbacks=[AwaitReplacement([12])])
    assert rejoined(trainer) == [(1, 0)]
    assert_equal(seen(trainer, model), ddp)


@pytest.mark.parametrize("sharded", sampled([False, True], 1))
def test_a_checkpoint_resumes_on_another_grid(ddp, sharded, tmp_path):
    saves = ModelCheckpoint(tmp_path, save_top_k=-1, every_n_train_steps=6, filename="{step}")
    strategy = {"save_distributed_checkpoint": sharded}
    on_grid(GAN().double(), strategy=strategy, enable_checkpointing=True, callbacks=[saves], max_epochs=1)
    resumed = GAN().double()
    trainer = on_grid(resumed, pipelines=2, ckpt_path=tmp_path / "step=6.ckpt")
    assert difference(resumed.state_dict(), ddp["weights"]) < 1e-10
    assert trainer.global_step == 2 * STEPS * EPOCHS


# ---------------------------------------------------------------------- what users write


class Regression(L.LightningModule):
    """Learns one number by hand; :meth:`optimize` is what the variants differ in."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.0), nn.Linear(8, 1))

    def error(self, batch: Any) -> Tensor:
        z, x = batch
        return (self.net(x) - z.sum(1, keepdim=True)).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.optimize(batch, batch_idx, self.optimizers())

    def optimize(self, batch: Any, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad()
        self.manual_backward(self.error(batch))
        optimizer.step()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class PlainBackward(Regression):
    def optimize(self, batch: Any, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad()
        self.error(batch).backward()
        optimizer.step()


class TorchsOptimizer(Regression):
    def optimize(self, batch: Any, batch_idx: int, optimizer: Any) -> None:
        optimizer = self.optimizers(use_pl_optimizer=False)
        optimizer.zero_grad()
        torch.autograd.backward(self.error(batch))
        optimizer.step()


class Accumulates(Regression):
    """Steps every second batch; what is left goes into the next one."""

    def optimize(self, batch: Any, batch_idx: int, optimizer: Any) -> None:
        self.manual_backward(self.error(batch) / 2)
        if batch_idx % 2:
            optimizer.step()
            optimizer.zero_grad()


class Closure(Regression):
    def optimize(self, batch: Any, batch_idx: int, optimizer: Any) -> None:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = self.error(batch)
            self.manual_backward(loss)
            return loss

        optimizer.step(closure=closure)


class ChangesGradients(Regression):
    """Does things that are not to be done twice, and are not for all micro-batches at once."""

    def optimize(self, batch: Any, batch_idx: int, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
        optimizer.zero_grad()
        self.manual_backward(self.error(batch))
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.5)
        for parameter in self.parameters():
            parameter.grad.mul_(0.7)
        optimizer.step()
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(0.99)
        optimizer.zero_grad()
        self.net.eval()
        self.log("after", self.error(batch), on_epoch=True, on_step=False)
        self.net.train()


class GradientPenalty(Regression):
    def optimize(self, batch: Any, batch_idx: int, optimizer: Any) -> None:
        x = batch[1].clone().requires_grad_()
        (slope,) = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)
        optimizer.zero_grad()
        self.manual_backward(self.error(batch) + (slope.square().sum(1) - 1).square().mean())
        optimizer.step()


class StepsSchedulers(Regression):
    def optimize(self, batch: Any, batch_idx: int, optimizer: Any) -> None:
        super().optimize(batch, batch_idx, optimizer)
        self.lr_schedulers().step()

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


class Remembers(Regression):
    """Its output follows a hidden state, of which each place of the batch has one."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.hidden = nn.LSTM(6, 6, batch_first=True), None

    def on_train_epoch_start(self) -> None:
        self.hidden = None

    def error(self, batch: Any) -> Tensor:
        z, x = batch
        output, hidden = self.lstm(x[:, None], self.hidden)
        self.hidden = tuple(part.detach() for part in hidden)
        return super().error((z, output[:, 0]))


class Counts(L.Callback):
    """Counts hooks that run within steps."""

    def __init__(self) -> None:
        self.backward = self.steps = 0

    def on_after_backward(self, *_: Any) -> None:
        self.backward += 1

    def on_before_optimizer_step(self, *_: Any) -> None:
        self.steps += 1


@pytest.mark.parametrize(
    "kind",
    [
        Remembers,
        *sampled(
            [PlainBackward, TorchsOptimizer, Accumulates, Closure, ChangesGradients, GradientPenalty, StepsSchedulers],
            2,
            seed=13,
        ),
    ],
)
def test_what_users_write_is_what_it_is_on_one_device(kind):
    theirs, ours, counts, expected = kind().double(), kind().double(), Counts(), Counts()
    one = L.Trainer(accelerator="cpu", devices=1, max_epochs=EPOCHS, callbacks=[expected], **QUIET)
    one.fit(theirs, Data(PIPELINES * BATCH))
    trainer = on_grid(ours, [Fault("kill", 0, 0, step=3, at="reduce")], callbacks=[counts])
    assert failures(trainer) == [(0, 0)]
    assert difference(ours.state_dict(), theirs.state_dict()) < 1e-10
    assert trainer.global_step == one.global_step
    assert (counts.backward, counts.steps) == (expected.backward, expected.steps)
    assert {k: float(v) for k, v in trainer.callback_metrics.items()} == pytest.approx(
        {k: float(v) for k, v in one.callback_metrics.items()}
    )


class Drops(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.net[2].p = 0.5

    def optimize(self, batch: Any, batch_idx: int, optimizer: Any) -> None:
        for _ in range(2):
            super().optimize(batch, batch_idx, optimizer)


class SeedsAnew(L.Callback):
    """Calls ``seed_everything`` in the training; the seed of the run, which checkpoints have, stays what it was."""

    seed = 0

    def on_train_start(self, trainer: L.Trainer, *_: Any) -> None:
        self.seed = trainer.fit_loop.on_save_checkpoint()["seed"]
        L.seed_everything(self.seed + 1, verbose=False)

    def on_train_end(self, trainer: L.Trainer, *_: Any) -> None:
        assert trainer.fit_loop.on_save_checkpoint()["seed"] == self.seed


def test_what_is_random_is_the_same_whoever_computes_and_seeds_anew():
    one, other = Drops().double(), Drops().double()
    on_grid(one, pipelines=2, strategy={"num_microbatches": 2}, callbacks=[SeedsAnew()])
    on_grid(other, [Fault("kill", 1, 0, step=4, at="reduce")], {"num_microbatches": 2}, 2)
    assert difference(one.state_dict(), other.state_dict()) < 1e-10


# ---------------------------------------------------------------------- what cannot work is told


class GoesItsOwnWay(Regression):
    """Steps only if it likes its data."""

    def optimize(self, batch: Any, batch_idx: int, optimizer: Any) -> None:
        self.manual_backward(self.error(batch))
        if batch[0][0, 0] > 0:
            optimizer.step()


class OwnOptimizer(Regression):
    def optimize(self, batch: Any, batch_idx: int, optimizer: Any) -> None:
        self.manual_backward(self.error(batch))
        torch.optim.SGD(self.parameters(), lr=0.1).step()


class Searches(Closure):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1)


class Gathers(Regression):
    def optimize(self, batch: Any, batch_idx: int, optimizer: Any) -> None:
        self.all_gather(self.error(batch))


REFUSED = {
    GoesItsOwnWay: ["different things", "a step of optimizer 0 (SGD)", "the end of the step"],
    OwnOptimizer: ["SGD", "configure_optimizers() did not return"],
    Searches: ["LBFGS", "several times"],
    Gathers: ["all_gather", "on_train_batch_end"],
}


@pytest.mark.parametrize(("kind", "microbatches"), sampled(itertools.product(REFUSED, [1, 2]), 1, seed=7))
def test_what_cannot_work_is_refused_by_name(kind, microbatches):
    with pytest.raises(ReCycleError) as caught:
        on_grid(kind().double(), strategy={"num_microbatches": microbatches}, pipelines=2)
    assert all(word in str(caught.value) for word in REFUSED[kind]), caught.value


def test_several_stages_are_refused():
    with pytest.raises(ConfigurationError, match=r"Regression has manual optimization.*pipeline_parallel_size=1"):
        on_grid(Regression(), strategy={"pipeline_parallel_size": 2}, pipelines=4)
