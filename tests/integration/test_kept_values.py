"""Whatever a step changes in its module begins for each micro-batch as at the step's beginning, whoever runs it."""

import random
import re
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from support.growth import AwaitReplacement, rejoined
from support.sampling import sampled
from support.training import difference, failures, grid_trainer, on_one_device
from torch import Tensor, nn
from torch.nn.utils import parametrizations, spectral_norm, weight_norm
from torch.utils.data import DataLoader, TensorDataset

from lightning_recycle import UnsupportedFeatureError
from lightning_recycle.callbacks import Fault

LATE = 4  # the calls before a change that begins late


class Slotted:
    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


def default(m: Any, x: Tensor) -> float:
    m.default["calls"] += 1.0
    return m.default["calls"]


def ordered(m: Any, x: Tensor) -> float:
    first = next(iter(m.ordered))
    m.ordered.move_to_end(first)
    return m.ordered[first]


def slotted(m: Any, x: Tensor) -> float:
    m.slotted.count += 1
    return m.slotted.count


def tensor_in_list(m: Any, x: Tensor) -> float:
    m.tensors[0].add_(1)
    return float(m.tensors[0])


def buffer(m: Any, x: Tensor) -> float:
    m.buffer.data += 1
    return float(m.buffer)


def buffer_assigned(m: Any, x: Tensor) -> float:
    m.buffer = m.buffer + 1
    return float(m.buffer)


def frozen(m: Any, x: Tensor) -> float:
    with torch.no_grad():
        m.frozen.mul_(0.9).add_(m.weight.mean(), alpha=0.1)
    return float(m.frozen)


def frozen_data(m: Any, x: Tensor) -> float:
    m.frozen.data = m.frozen.data * 0.9 + m.weight.data.mean() * 0.1
    return float(m.frozen)


def made(m: Any, x: Tensor) -> float:
    m.made = x.new_zeros(()) if m.made is None else m.made + 1
    return float(m.made)


def drawn(m: Any, x: Tensor) -> float:
    draws = (m.random.random(), float(m.numbers.random()), float(torch.rand((), generator=m.generator)))
    return sum(draws)


def late(m: Any, x: Tensor) -> float:
    m.calls += 1
    if m.calls > LATE:
        m.new = getattr(m, "new", 0) + 1
        m.buffer.data += 1
    return getattr(m, "new", 0) + float(m.buffer)


WAYS = (
    default, ordered, slotted, tensor_in_list, buffer, buffer_assigned, made, frozen, frozen_data, drawn, late,
)  # fmt: skip


class Keeps(nn.Module):
    """A layer that keeps something from call to call in one way, and depends on it."""

    def __init__(self, way: Callable[[Any, Tensor], float]) -> None:
        super().__init__()
        self.way, self.calls = way, 0
        self.default, self.ordered = defaultdict[str, float](float), OrderedDict({"a": 1, "b": 2, "c": 4})
        self.slotted, self.tensors = Slotted(), [torch.zeros(())]
        self.register_buffer("buffer", torch.zeros(()))
        self.register_buffer("made", None, persistent=False)
        self.frozen = nn.Parameter(torch.zeros((), dtype=torch.float64), requires_grad=False)
        self.weight = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.random, self.numbers = random.Random(1), np.random.default_rng(2)
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.01 * float(self.way(self, x)) * (self.weight * x[:, :3]).sum(1, keepdim=True).tanh()


class Net(L.LightningModule):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        ends = nn.Linear(6, 6).double(), nn.Linear(6, 1).double()
        middle = len(layers) // 2
        self.layers = nn.Sequential(ends[0], *layers[:middle], nn.Tanh(), *layers[middle:], ends[1])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.layers(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(128, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(x, x.sum(1, keepdim=True).sin())


def train(
    make: Callable[[], L.LightningModule], stages: int, microbatches: int, *faults: Fault, replaces: bool = False
) -> dict[str, Tensor]:
    model = make()
    options: dict[str, Any] = {"num_microbatches": microbatches, "max_restarts": 10 if replaces else 0}
    options |= {"layers": "layers"} if stages > 1 else {}
    callbacks = [AwaitReplacement([6])] if replaces else []
    trainer = grid_trainer(2, stages, faults, options, max_epochs=1, callbacks=callbacks)
    trainer.fit(model, DataLoader(data(), batch_size=8))
    assert len(failures(trainer)) == len(faults)
    assert not replaces or rejoined(trainer)
    return model.state_dict()


def alone(make: Callable[[], L.LightningModule]) -> dict[str, Tensor]:
    model = make()
    on_one_device(max_epochs=1).fit(model, DataLoader(data(), batch_size=16))
    return model.state_dict()


GRIDS = [(1, 1), (1, 4), (2, 1), (2, 4)]


def all_ways() -> Net:
    return Net(*map(Keeps, WAYS))


@pytest.mark.parametrize(("stages", "microbatches"), sampled(GRIDS, 1))
def test_what_all_micro_batches_leave_alike_counts_once(stages, microbatches):
    """More kinds of values, and what they leave different, are in test_drawn_modules.py."""
    expected = alone(all_ways)
    kill = Fault("kill", 1, stages - 1, step=5, at="reduce")
    assert difference(train(all_ways, stages, microbatches, kill), expected) < 1e-10


class Large(Net):
    """What its steps write depends on their batches, and is large."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 6).double())
        self.register_buffer("centre", torch.zeros(700_000, dtype=torch.float64))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.centre.add_(batch[0].mean())
        return super().training_step(batch, batch_idx)


def test_what_is_too_large_to_be_kept_is_refused_by_name_once_its_worker_is_lost():
    train(Large, 1, 1)
    with pytest.raises(UnsupportedFeatureError, match=r"centre is written in a training step"):
        train(Large, 1, 1, Fault("kill", 0, 0, step=3))


# ---------------------------------------------------------------------- layers of torch


def normed() -> Net:
    torch.manual_seed(0)
    old_spectral = spectral_norm(nn.Linear(6, 6).double())
    spectral = parametrizations.spectral_norm(nn.Linear(6, 6).double())
    return Net(
        spectral,
        old_spectral,
        parametrizations.weight_norm(nn.Linear(6, 6).double()),
        weight_norm(nn.Linear(6, 6).double()),
    )


@pytest.mark.parametrize(("stages", "microbatches"), sampled(GRIDS, 1))
def test_norms_of_weights_advance_once_a_step(stages, microbatches):
    expected = alone(normed)
    kill = Fault("kill", 1, 0, step=3)
    assert difference(train(normed, stages, microbatches, kill, replaces=True), expected) < 1e-10


def batch_normed() -> Net:
    torch.manual_seed(0)
    return Net(nn.BatchNorm1d(6).double(), nn.BatchNorm1d(6, momentum=None).double())


class Same(L.Callback):
    """Ends with the same buffers on all peers, to the bit."""

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        for buffer in module.buffers():
            rows = trainer.strategy.all_gather(buffer)
            assert torch.equal(rows, rows[:1].expand_as(rows))


def test_peers_have_equal_statistics_after_each_step():
    faults = [Fault("kill", 0, 0, step=3)]
    trainer = grid_trainer(3, 1, faults, {"num_microbatches": 2}, max_epochs=1, callbacks=[Same()])
    trainer.fit(batch_normed(), DataLoader(data(), batch_size=4))
    assert len(failures(trainer)) == 1


# ---------------------------------------------------------------------- trained weights


class Clamps(Net):
    """Writes its weights itself."""

    def __init__(self, how: str) -> None:
        super().__init__(nn.Linear(6, 6).double())
        self.how, self.calls, self.warned = how, 0, ""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.calls += 1
        weight = self.layers[0].weight
        if self.how == "data":
            weight.data.clamp_(-0.1, 0.1)
        elif self.how == "in place" or (self.how == "late" and self.calls > LATE):
            with torch.no_grad():
                weight.mul_(0.99)
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        with warnings.catch_warnings(record=True) as caught:
            self.log("calls", float(self.calls), sync_dist=True, reduce_fx="sum")
        self.warned += " ".join(str(warning.message) for warning in caught)


class ActNorm(nn.Module):
    """Its first call initialises it by the data."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(6).double()), nn.Parameter(torch.zeros(6).double())
        self.register_buffer("initialised", torch.tensor(False))

    def forward(self, x: Tensor) -> Tensor:
        if not self.initialised:
            self.scale.data.copy_(1 / x.detach().std(0))
            self.shift.data.copy_(-x.detach().mean(0) / x.detach().std(0))
            self.initialised.fill_(True)
        return x * self.scale + self.shift


@pytest.mark.parametrize("how", sampled(["data", "in place", "late"], 1))
def test_a_step_that_writes_trained_weights_is_refused_by_name(how):
    with pytest.raises(UnsupportedFeatureError, match=r"layers\.0\.weight requires a gradient, and was written"):
        train(lambda: Clamps(how), 1, 2)


@pytest.mark.parametrize(("stages", "microbatches"), sampled(GRIDS, 1))
def test_a_first_call_that_initialises_weights_is_refused_with_a_remedy(stages, microbatches):
    with pytest.raises(UnsupportedFeatureError, match=r"layers\.\d\.(scale|shift) requires a gradient.*one call"):
        train(lambda: Net(ActNorm()), stages, microbatches)


def test_a_sum_over_workers_of_what_training_steps_count_is_warned_of():
    module = Clamps("not")
    grid_trainer(2, 1, [], max_epochs=2).fit(module, DataLoader(data(), batch_size=4))
    assert re.findall("training steps change (.*?)[.]", module.warned) == ["calls"]
