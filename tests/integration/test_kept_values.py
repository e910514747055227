"""Whatever a step changes in its module begins for each micro-batch as at the step's beginning, whoever runs it."""

import copy
import itertools
import random
from collections import Counter, OrderedDict, defaultdict, deque
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


class Plain:
    """An object of the user's."""

    def __init__(self) -> None:
        self.count, self.values = 0, np.zeros(2)


class Slotted:
    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


def number(m: Any, x: Tensor) -> float:
    m.kept = (m.kept or 0) + 1
    return m.kept


def text(m: Any, x: Tensor) -> float:
    m.kept = (m.kept or "") + "x"
    return len(m.kept)


def entry(m: Any, x: Tensor) -> float:
    m.entries["count"] = m.entries.get("count", 0) + 1
    return m.entries["count"]


def counter(m: Any, x: Tensor) -> float:
    m.counter.update(["calls"])
    return m.counter["calls"]


def default(m: Any, x: Tensor) -> float:
    m.default["calls"] += 1.0
    return m.default["calls"]


def recent(m: Any, x: Tensor) -> float:
    m.recent.append(m.recent[-1] + 1)
    return sum(m.recent) / 3


def ordered(m: Any, x: Tensor) -> float:
    first = next(iter(m.ordered))
    m.ordered.move_to_end(first)
    return m.ordered[first]


def names(m: Any, x: Tensor) -> float:
    m.names.add(len(m.names))
    return len(m.names)


def array(m: Any, x: Tensor) -> float:
    m.array[0] += 1
    return float(m.array[0])


def own(m: Any, x: Tensor) -> float:
    m.own.count += 1
    m.own.values[1] += 0.5
    return m.own.count + float(m.own.values[1])


def slotted(m: Any, x: Tensor) -> float:
    m.slotted.count += 1
    return m.slotted.count


def nested(m: Any, x: Tensor) -> float:
    m.nested["a"][0]["b"] += 1
    return m.nested["a"][0]["b"]


def tensor(m: Any, x: Tensor) -> float:
    m.tensor += 1
    return float(m.tensor)


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


def drawn(m: Any, x: Tensor) -> float:
    draws = (m.random.random(), float(m.numbers.random()), float(torch.rand((), generator=m.generator)))
    return sum(draws)


def late_number(m: Any, x: Tensor) -> float:
    m.calls += 1
    if m.calls > LATE:
        m.kept = (m.kept or 0) + 1
    return m.kept or 0


def late_buffer(m: Any, x: Tensor) -> float:
    m.calls += 1
    if m.calls > LATE:
        m.buffer += 1
    return float(m.buffer)


def late_data(m: Any, x: Tensor) -> float:
    m.calls += 1
    if m.calls > LATE:
        m.buffer.data += 1
    return float(m.buffer)


def late_attribute(m: Any, x: Tensor) -> float:
    m.calls += 1
    if m.calls > LATE:
        m.new = getattr(m, "new", 0) + 1
    return getattr(m, "new", 0)


ALIKE = (
    *(number, text, entry, counter, default, recent, ordered, names, array, own, slotted, nested, tensor),
    *(tensor_in_list, buffer, buffer_assigned, frozen, drawn, late_number, late_buffer, late_data),
    late_attribute,
)


def mean(m: Any, x: Tensor) -> float:
    m.kept = 0.9 * (m.kept or 1.0) + 0.1 * float(x.detach().mean())
    return m.kept


def mean_in_array(m: Any, x: Tensor) -> float:
    m.array[:] = 0.9 * m.array + 0.1 * float(x.detach().mean())
    return float(m.array.sum())


def mean_in_object(m: Any, x: Tensor) -> float:
    m.own.count = 0.9 * m.own.count + float(x.detach().mean())
    return m.own.count


def hidden(m: Any, x: Tensor) -> float:
    m.tensor = 0.5 * m.tensor + x.detach().mean()
    return float(m.tensor)


def window(m: Any, x: Tensor) -> float:
    m.recent.append(float(x.detach().mean()))
    return sum(m.recent)


def extremes(m: Any, x: Tensor) -> float:
    m.entries["most"] = max(m.entries.get("most", -9.0), float(x.detach().max()))
    return m.entries["most"]


DIFFERENT = (mean, mean_in_array, mean_in_object, hidden, window, extremes)


class Keeps(nn.Module):
    """A layer that keeps something from call to call in one way, and depends on it."""

    def __init__(self, way: Callable[[Any, Tensor], float]) -> None:
        super().__init__()
        self.way, self.kept, self.calls = way, None, 0
        self.entries: dict[str, Any] = {}
        self.counter, self.default = Counter[str](), defaultdict[str, float](float)
        self.recent, self.ordered = deque([1.0, 2.0], maxlen=3), OrderedDict({"a": 1, "b": 2, "c": 4})
        self.names, self.array, self.own, self.slotted = set[int](), np.zeros(3), Plain(), Slotted()
        self.nested, self.tensor, self.tensors = {"a": [{"b": 0}]}, torch.zeros(()), [torch.zeros(())]
        self.register_buffer("buffer", torch.zeros(()))
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
    return state(model)


def alone(make: Callable[[], L.LightningModule]) -> dict[str, Tensor]:
    model = make()
    on_one_device(max_epochs=1).fit(model, DataLoader(data(), batch_size=16))
    return state(model)


def state(model: L.LightningModule) -> dict[str, Tensor]:
    """With what hooks can read of the numbers that it keeps."""
    numbers = [
        (n, m.kept) for n, m in model.named_modules() if isinstance(m, Keeps) and isinstance(m.kept, (int, float))
    ]
    return {**model.state_dict(), **{f"{n}.kept": torch.tensor(float(value)) for n, value in numbers}}


GRIDS = [(1, 1), (1, 4), (2, 1), (2, 4)]


def all_alike() -> Net:
    return Net(*map(Keeps, ALIKE))


def all_different() -> Net:
    return Net(*map(Keeps, DIFFERENT))


@pytest.mark.parametrize(("stages", "microbatches"), sampled(GRIDS, 1))
def test_what_all_micro_batches_leave_alike_counts_once(stages, microbatches):
    expected = alone(all_alike)
    kill = Fault("kill", 1, stages - 1, step=5, at="reduce")
    assert difference(train(all_alike, stages, microbatches, kill), expected) < 1e-10


@pytest.mark.exhaustive
@pytest.mark.parametrize(("way", "grid"), itertools.product([*ALIKE, *DIFFERENT], GRIDS))
def test_each_way_to_keep_a_value(way, grid):
    def make() -> Net:
        return Net(Keeps(way), Keeps(way))

    calm = train(make, *grid)
    if way in ALIKE:
        assert difference(calm, alone(make)) < 1e-10
    kill = Fault("kill", 1, 0, step=3)
    assert difference(train(make, *grid, kill), calm) < 1e-10
    assert difference(train(make, *grid, kill, replaces=True), calm) < 1e-10


@pytest.mark.parametrize(("stages", "microbatches"), sampled(GRIDS, 1, seed=5))
def test_what_they_leave_different_is_in_place_wherever_the_microbatch_runs(stages, microbatches):
    calm = train(all_different, stages, microbatches)
    kills = [Fault("kill", 1, 0, step=3), *([Fault("kill", 0, 1, step=5, at="forward")] if stages > 1 else [])]
    assert difference(train(all_different, stages, microbatches, *kills, replaces=True), calm) < 1e-10


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


@pytest.mark.parametrize(("stages", "microbatches"), sampled(GRIDS, 1, seed=3))
def test_running_statistics_are_the_mean_over_all_micro_batches(stages, microbatches):
    calm = train(batch_normed, stages, microbatches)
    kill = Fault("kill", 0, 0, step=3)
    assert difference(train(batch_normed, stages, microbatches, kill, replaces=True), calm) < 1e-10


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


def test_statistics_equal_those_of_one_device_that_takes_the_mean():
    """Of one step: the mean of what two halves of the batch leave."""
    model, x = batch_normed(), data().tensors[0][:16]
    first = model.layers[0](x)
    halves = [copy.deepcopy(model.layers[1]) for _ in range(2)]
    for norm, part in zip(halves, (first[0::2], first[1::2]), strict=True):
        norm(part)
    grid = batch_normed()
    grid_trainer(2, 1, max_steps=1).fit(grid, DataLoader(data(), batch_size=8))
    for name in ("running_mean", "running_var"):
        expected = sum(getattr(norm, name) for norm in halves) / 2
        assert torch.allclose(getattr(grid.layers[1], name), expected, atol=1e-12)


# ---------------------------------------------------------------------- trained weights


class Clamps(Net):
    """Writes its weights itself."""

    def __init__(self, how: str) -> None:
        super().__init__(nn.Linear(6, 6).double())
        self.how, self.calls = how, 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.calls += 1
        weight = self.layers[0].weight
        if self.how == "data":
            weight.data.clamp_(-0.1, 0.1)
        elif self.how == "in place" or (self.how == "late" and self.calls > LATE):
            with torch.no_grad():
                weight.mul_(0.99)
        return super().training_step(batch, batch_idx)


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
    with pytest.raises(UnsupportedFeatureError, match=r"layers\.0\.weight is trained, and was written"):
        train(lambda: Clamps(how), 1, 2)


@pytest.mark.parametrize(("stages", "microbatches"), sampled(GRIDS, 1))
def test_a_first_call_that_initialises_weights_is_refused_with_a_remedy(stages, microbatches):
    with pytest.raises(UnsupportedFeatureError, match=r"layers\.\d\.(scale|shift) is trained.*one call of the module"):
        train(lambda: Net(ActNorm()), stages, microbatches)
