"""``16-mixed``: the scale of the loss and skipped steps are those of one device."""

import itertools
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from support.growth import AwaitReplacement, rejoined
from support.sampling import sampled
from support.training import committed_steps, difference, failures, grid_trainer, on_one_device
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_recycle import PipelineModule
from lightning_recycle.callbacks import Fault

BATCH = 12
STEPS = 8
OVERFLOWS = (2, 5)
"""Steps at which a scaled gradient is infinite in float64: of the loss of one sample, and so of all stages; of a
parameter of the first layer alone."""


def data(dtype: torch.dtype = torch.float64) -> TensorDataset:
    """Inputs, targets, weights of the losses, and what the first layer multiplies a parameter of its own by."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH * STEPS, 6, generator=generator, dtype=torch.float64)
    weight, spike = torch.ones(len(x), 1, dtype=torch.float64), torch.zeros(len(x), 1, dtype=torch.float64)
    huge = 1e305 if dtype is torch.float64 else 1e38
    weight[OVERFLOWS[0] * BATCH + 7] = spike[OVERFLOWS[1] * BATCH + 2] = huge
    return TensorDataset(*(tensor.to(dtype) for tensor in (x, x.sum(1, keepdim=True), weight, spike)))


class First(nn.Linear):
    """A linear layer with a parameter that stays zero unless a step is made with an infinite gradient of it."""

    def __init__(self) -> None:
        super().__init__(6, 8)
        self.alone = nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor, spike: Tensor) -> Tensor:
        return super().forward(x) + self.alone * spike


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [layer.double() for layer in (First(), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))]


class Piped(PipelineModule):
    def configure_pipeline(self) -> list[Any]:
        return layers()

    def split_batch(self, batch: Any) -> Any:
        x, y, weight, spike = batch
        return (x, spike), (y, weight)

    def loss(self, output: Tensor, target: Any) -> Tensor:
        return ((output - target[0]).square() * target[1]).mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Fused(Piped):
    """Its optimizer takes the scale into account by itself."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)


class InHalf(Piped):
    """In float32, of which autocast makes float16."""

    def configure_pipeline(self) -> list[Any]:
        return [layer.float() for layer in super().configure_pipeline()]

    def on_training_output(self, output: Tensor, target: Any) -> None:
        self.log("bytes", float(output.element_size()))


class Ordinary(L.LightningModule):
    """The same as an ordinary module."""

    def __init__(self, manual: bool = False) -> None:
        super().__init__()
        self.first, *others = layers()
        self.net = nn.Sequential(*others)
        self.automatic_optimization = not manual

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y, weight, spike = batch
        loss = ((self.net(self.first(x, spike)) - y).square() * weight).mean()
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Manual(Ordinary):
    def __init__(self) -> None:
        super().__init__(manual=True)


class Seen(L.Callback):
    """What callbacks see of each step, on whoever leads."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, float, float, float]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        scale = trainer.precision_plugin.scaler.get_scale()
        lr = trainer.optimizers[0].param_groups[0]["lr"]
        self.steps.append((trainer.global_step, scale, float(outputs["loss"]) if "loss" in outputs else 0.0, lr))

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = list(state["steps"])


def plugin(**kwargs: Any) -> MixedPrecision:
    scaler = torch.amp.GradScaler("cpu", **{"init_scale": 2.0**16, "growth_interval": 2, **kwargs})
    return MixedPrecision("16-mixed", "cpu", scaler=scaler)


def alone(module: Any, **kwargs: Any) -> tuple[L.Trainer, Seen]:
    seen = Seen()
    callbacks = [seen, *kwargs.pop("callbacks", [])]
    scaled = kwargs.pop("plugin", {})
    path, dataset = kwargs.pop("ckpt_path", None), kwargs.pop("data", None) or data()
    run = on_one_device(max_epochs=1, plugins=[plugin(**scaled)], callbacks=callbacks, **kwargs)
    run.fit(module, DataLoader(dataset, BATCH), ckpt_path=path)
    return run, seen


def on_grid(module: Any, grid: tuple[int, int, int], faults: Any = (), **kwargs: Any) -> tuple[L.Trainer, Seen]:
    pipelines, stages, microbatches = grid
    seen = Seen()
    callbacks = [seen, *kwargs.pop("callbacks", [])]
    plugins, path = [plugin(**kwargs.pop("plugin", {}))], kwargs.pop("ckpt_path", None)
    # An overflow is found when all buckets are reduced.
    options = {"num_microbatches": microbatches, "bucket_cap_mb": 1e-4, **kwargs.pop("strategy", {})}
    dataset = kwargs.pop("data", None) or data()
    run = grid_trainer(
        pipelines, stages, faults, options, plugins=plugins, callbacks=callbacks, **{"max_epochs": 1, **kwargs}
    )
    run.fit(module, DataLoader(dataset, BATCH // pipelines), ckpt_path=path)
    return run, seen


def assert_same(module: Any, found: tuple[L.Trainer, Seen], reference: Any, expected: tuple[L.Trainer, Seen]) -> None:
    (run, seen), (one, known) = found, expected
    assert difference(module.state_dict(), reference.state_dict()) < 1e-10
    assert [(step, scale) for step, scale, *_ in seen.steps] == [(step, scale) for step, scale, *_ in known.steps]
    for ours, theirs in zip(seen.steps, known.steps, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6)
    assert run.precision_plugin.state_dict() == one.precision_plugin.state_dict()
    assert run.global_step == one.global_step
    scales = [scale for _, scale, *_ in known.steps]
    assert any(later < earlier for earlier, later in itertools.pairwise(scales)), "no step was skipped"


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "plain": (Piped, {}),
    "clipped by norm": (Piped, {"gradient_clip_val": 0.1}),
    "clipped by value": (Piped, {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"}),
    "accumulated": (Piped, {"accumulate_grad_batches": 2}),
    "fused": (Fused, {}),
    "ordinary": (Ordinary, {"strategy": {"layers": "net"}}),
}
KILLS = {
    "": [],
    "in the overflow": [Fault("kill", 1, 0, step=OVERFLOWS[0], at="backward_weight")],
    "reducing it": [Fault("kill", 0, 1, step=OVERFLOWS[1], at="reduce")],
    "skipping the step": [Fault("kill", 1, 1, step=OVERFLOWS[1], at="optimizer")],
    "after it": [Fault("kill", 0, 0, step=OVERFLOWS[0] + 1, at="forward")],
}


@pytest.mark.parametrize(("name", "kill"), [
    ("clipped by norm", "reducing it"),
    ("fused", "skipping the step"),
    *sampled([(name, kill) for name in CASES for kill in KILLS], 1),
])  # fmt: skip
def test_weights_and_scale_are_those_of_one_device(name, kill):
    make, options = CASES[name]
    reference, module = make(), make()
    expected = alone(reference, **{key: value for key, value in options.items() if key != "strategy"})
    found = on_grid(module, (2, 2, 2), KILLS[kill], **options)
    assert_same(module, found, reference, expected)
    assert failures(found[0]) == [(fault.pipeline, fault.stage) for fault in KILLS[kill]]
    assert committed_steps(found[0]) == list(range(STEPS))


@pytest.mark.parametrize(("make", "at"), sampled(itertools.product([Ordinary, Manual], ["forward", "optimizer"]), 1))
def test_with_one_stage_too_whoever_steps_the_optimizer(make, at):
    reference, module = make(), make()
    expected = alone(reference)
    faults = [Fault("kill", 1, 0, step=OVERFLOWS[0], at=at)]
    found = on_grid(module, (3, 1, 2), faults)
    assert_same(module, found, reference, expected)
    assert failures(found[0]) == [(1, 0)]


def test_the_scale_is_resumed_on_another_grid(tmp_path):
    reference, half, there = Piped(), Piped(), Piped()
    expected = alone(reference)
    keep = ModelCheckpoint(tmp_path, filename="half", every_n_train_steps=4, save_top_k=-1, save_weights_only=False)
    on_grid(half, (2, 2, 2), max_steps=4, callbacks=[keep], enable_checkpointing=True)
    (path,) = tmp_path.glob("*.ckpt")
    found = on_grid(there, (1, 3, 3), ckpt_path=path)
    assert_same(there, found, reference, expected)
    saved = torch.load(path, weights_only=True)["MixedPrecision"]
    assert saved == alone(Piped(), max_steps=4)[0].precision_plugin.state_dict()


def test_a_worker_that_joins_has_the_scale_of_its_peers():
    reference, module = Piped(), Piped()
    expected = alone(reference)
    faults = [Fault("kill", 1, 1, step=1, at="forward")]
    found = on_grid(module, (2, 2, 2), faults, callbacks=[AwaitReplacement({4})], strategy={"max_restarts": 10})
    assert rejoined(found[0]) == [(1, 1)]
    assert_same(module, found, reference, expected)


def test_float16_overflows_and_recovers_as_on_one_device():
    """In float16 the rounding differs, but not what overflows: the scale begins far too high."""
    reference, module = InHalf(), InHalf()
    too_high = {"init_scale": 2.0**40, "backoff_factor": 2.0**-10, "growth_interval": 100}
    options = {"plugin": too_high, "data": data(torch.float32), "gradient_clip_val": 1.0}
    expected = alone(reference, **options)
    (run, seen) = on_grid(module, (2, 2, 2), [Fault("kill", 1, 0, step=1, at="reduce")], **options)
    assert failures(run) == [(1, 0)]
    assert [step[1] for step in seen.steps] == [step[1] for step in expected[1].steps]
    assert difference(module.state_dict(), reference.state_dict()) < 5e-3
    assert difference(module.state_dict(), InHalf().state_dict()) > 2e-2, "the training changed nothing"
    assert run.callback_metrics["bytes"] == 2.0
