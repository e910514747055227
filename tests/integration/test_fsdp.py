"""Positions whose layers FSDP2 divides: weights equal those of a plain loop, whichever member is lost."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import sharded
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from support.blocks import WIDTH, blocks
from support.training import TOLERANCE
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.utils.data import DataLoader, Subset
from torchmetrics import MeanMetric

from lightning_recycle.errors import ConfigurationError, UnsupportedFeatureError


class Unevenly(nn.Module):
    """Its shards have different sizes, and some have no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 3), nn.Linear(3, WIDTH)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(torch.tanh(self.up(x)))


class Metrics(sharded.Ordinary):
    """Logs, metrics and what hooks gather must not depend on how many processes hold a position."""

    def __init__(self) -> None:
        super().__init__()
        self.model = uneven()
        self.mean = MeanMetric()
        self.seen: dict[str, Any] = {}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        output = self.model(x)
        self.mean.update(output.sum(-1))
        self.log("val", (output - y).square().mean())
        self.log("mean", self.mean)

    def on_train_batch_end(self, *_: Any) -> None:
        gathered = self.all_gather(torch.tensor([float(self.trainer.global_rank)]))
        self.seen.setdefault("ranks", gathered.flatten().tolist())


def test_evaluation_metrics_and_gathering_count_parts_of_the_data():
    module, layers = Metrics(), uneven()
    val = Subset(sharded.dataset(), range(50))
    trainer = sharded.fit(
        module, (2, 1, 3, 1), sharded.Kill(4, 1, 1), validates=True, val=val, max_epochs=1, max_steps=-1
    )
    optimizer, data = torch.optim.AdamW(layers.parameters(), lr=0.01), sharded.dataset()
    losses = []
    for step in range(len(data) // (6 * sharded.BATCH)):
        x, y = data[step * 6 * sharded.BATCH : (step + 1) * 6 * sharded.BATCH]
        optimizer.zero_grad()
        loss = (layers(x) - y).square().mean()
        loss.backward()
        losses.append(float(loss))
        optimizer.step()
    assert sharded.error(module, layers) < TOLERANCE
    x, y = data[:50]
    output = layers(x).detach()
    found = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert abs(found["train"] - sum(losses) / len(losses)) < TOLERANCE
    assert abs(found["val"] - float((output - y).square().mean())) < TOLERANCE
    assert abs(found["mean"] - float(output.sum(-1).mean())) < 1e-5
    assert module.seen["ranks"] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


class OnMeta(sharded.Ordinary):
    """No process ever has all layers; a hook gives them their first values."""

    def __init__(self, hook: bool = True, learning_rate: float = 0.01) -> None:
        super().__init__()
        del self.model
        self.hook, self.learning_rate = hook, learning_rate

    def configure_model(self) -> None:
        with torch.device("meta"):
            self.model = blocks()
        super().configure_model()

    @torch.no_grad()
    def on_train_start(self) -> None:
        assert not any(p.is_meta for p in self.parameters())
        for name, whole in blocks().named_parameters() if self.hook else ():
            here: Any = self.model.get_parameter(name)
            here.copy_(distribute_tensor(whole, here.device_mesh, here.placements, src_data_rank=None))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate, weight_decay=0.01)


def saved(
    path: Path, module: L.LightningModule, grid: tuple[int, int, int, int], *callbacks: Any, **kwargs: Any
) -> Any:
    """The weights in the last checkpoint of a run."""
    keep = ModelCheckpoint(path, save_last=True, every_n_train_steps=1)
    trainer = sharded.fit(module, grid, keep, *callbacks, enable_checkpointing=True, **kwargs)
    state = torch.load(path / "last.ckpt", weights_only=True)["state_dict"]
    return trainer, {name.removeprefix("model."): value for name, value in state.items()}


@pytest.mark.long
def test_first_values_of_layers_made_on_the_meta_device_do_not_depend_on_the_grid(tmp_path):
    grids = ((1, 1, 2, 1), (2, 1, 2, 1), (1, 1, 2, 2))
    found = [saved(tmp_path / str(g), OnMeta(False, 0.0), g, max_steps=1)[1] for g in grids]
    for name, value in found[0].items():
        assert all(torch.equal(value, other[name]) for other in found[1:]), name
        assert name.startswith(("0.norm", "1.norm")) or 0.01 < float(value.std()) < 0.5


@pytest.mark.long
def test_a_replacement_for_a_member_whose_layers_were_made_on_the_meta_device(tmp_path):
    limits = {"max_steps": 20, "max_epochs": 9, "strategy": {"max_restarts": 4}}
    trainer, weights = saved(
        tmp_path, OnMeta(), (2, 1, 2, 1), sharded.Kill(1, 1, 2), sharded.Kill(2, 18, 1), sharded.Waits(2), **limits
    )
    assert any(event.kind == "rejoined" for event in trainer.strategy.history)
    expected = sharded.plain_loop(4, steps=20)
    assert max(float((weights[name] - p).detach().abs().max()) for name, p in expected.named_parameters()) < TOLERANCE


class Partly(sharded.Ordinary):
    def configure_model(self) -> None:
        sharded.make_parallel(self.model[:1], self.device_mesh)


class Itself(sharded.Ordinary):
    def configure_model(self) -> None:
        fully_shard(self, mesh=self.device_mesh["data_parallel"])


class AsOne(sharded.Ordinary):
    def configure_model(self) -> None:
        fully_shard(self.model, mesh=self.device_mesh["data_parallel"])


@pytest.mark.long
@pytest.mark.parametrize(("module", "stages", "error", "expected"), [
    (Partly(), 1, ConfigurationError, "leaves parameters that each of them would train alone: model.1.norm.weight"),
    (Itself(), 1, UnsupportedFeatureError, r"calls fully_shard\(self\), whose forward a step does not call"),
    (AsOne(), 2, UnsupportedFeatureError, r"fully_shard\(\) for AsOne\.model, whose layers are on several stages"),
], ids=lambda value: type(value).__name__)  # fmt: skip
def test_what_would_be_wrong_is_refused(module, stages, error, expected):
    with pytest.raises(error, match=expected):
        sharded.fit(module, (1, stages, 2, 1), strategy={"layers": "model"} if stages > 1 else {})


COLLECTIVES = {(2, 1): 14, (2, 2): 22}
"""Of a member in a step, by FSDP shards and tensor parallelism: to begin it, for losses and what was logged, and of
each of two micro-batches 4 gathers of parameters and 2 sums of gradients, or 4 more of tensor parallelism.
"""


@pytest.mark.parametrize(
    ("grid", "number"),
    [
        pytest.param((2, 1, *mesh), number, marks=[pytest.mark.long] if number % 5 == 2 else [pytest.mark.exhaustive])
        for mesh, count in COLLECTIVES.items()
        for number in range(count)
    ],
)
def test_weights_equal_after_a_member_is_killed_before_a_collective(grid, number):
    members = grid[2] * grid[3]
    sharded.exact_fit(sharded.Ordinary(), grid, sharded.AtCollective(members + number % members, 1, number))


class Uneven(sharded.Ordinary):
    def __init__(self) -> None:
        super().__init__()
        self.model = uneven()


def uneven() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Unevenly(), Unevenly()).double()


@pytest.mark.long
@pytest.mark.parametrize(("writer", "reader"), [
    ((1, 1, 3, 1), (3, 1, 1, 1)),
    ((3, 1, 1, 1), (1, 1, 3, 1)),
    ((2, 1, 3, 1), (1, 1, 6, 1)),
    ((3, 1, 2, 1), (2, 1, 3, 1)),
])  # fmt: skip
def test_a_folder_goes_on_with_any_number_of_uneven_shards(writer, reader, tmp_path):
    options: Any = {"strategy": {"save_distributed_checkpoint": True}, "enable_checkpointing": True}
    keep = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, every_n_train_steps=2)
    sharded.fit(Uneven(), writer, keep, max_steps=2, **options)
    sharded.exact_fit(Uneven(), reader, max_steps=4, ckpt_path=tmp_path / "step=2.ckpt", layers=uneven())


# ---------------------------------------------------------------------- outside of steps

MESHES = [sharded.FSDP, sharded.BOTH, (1, 2, 2, 1), sharded.TENSOR, (1, 2, 2)]


class Evaluated(sharded.Ordinary):
    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        output: Tensor = self.model(batch[0])
        return output


class InDying(L.Callback):
    """The worker of ``rank`` dies as it computes the second batch."""

    def __init__(self, rank: int) -> None:
        self.rank, self.seen = rank, 0

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if trainer.strategy.grid_rank == self.rank and trainer.strategy.incarnation == 0:
            pl_module.model[-1].register_forward_hook(self.count)

    def count(self, *_: Any) -> None:
        self.seen += 1
        if self.seen == 2:
            sharded.die()


@pytest.mark.long
@pytest.mark.parametrize(
    ("grid", "dies"), [*((grid, False) for grid in MESHES), *((grid, True) for grid in MESHES if grid[0] > 1)], ids=str
)
def test_tests_and_predictions_are_those_of_one_device(grid, dies):
    layers, data = blocks(), Subset(sharded.dataset(), range(50))
    x, y = sharded.dataset()[:50]
    for function in ("test", "predict"):
        options: dict[str, Any] = {"strategy": {"layers": "model"} if grid[1] > 1 else {}}
        trainer = sharded.trainer_for(grid, *([InDying(1)] if dies else []), **options)
        found = getattr(trainer, function)(Evaluated(), DataLoader(data, batch_size=sharded.BATCH))
        assert sharded.lost(trainer) == dies
        output = layers(x).detach()
        if function == "test":
            assert abs(found[0]["val"] - float((output - y).square().mean())) < 1e-6
        else:
            assert torch.cat(found).sub(output).abs().max() < TOLERANCE


PRECISIONS = [("bf16-true", torch.bfloat16, 0.03), ("bf16-mixed", torch.float32, 0.01)]


class InFloat32(sharded.Ordinary):
    def __init__(self) -> None:
        super().__init__()
        self.model.float()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = (part.float() for part in batch)
        output = self.model(x.to(next(self.parameters()).dtype))
        return (output - y).square().mean()


@pytest.mark.long
@pytest.mark.parametrize("grid", [sharded.FSDP, sharded.BOTH, sharded.TENSOR], ids=str)
@pytest.mark.parametrize(("precision", "dtype", "tolerance"), PRECISIONS)
def test_half_precisions_train_as_on_one_device(grid, precision, dtype, tolerance):
    module, alone = InFloat32(), InFloat32()
    sharded.fit(module, grid, sharded.Kill(1, 1, 2), precision=precision)
    sharded.fit(alone, (sharded.parts_of(grid), 1, 1), precision=precision)
    assert {p.dtype for p in module.parameters()} == {dtype}
    assert sharded.error(module, alone.model) < tolerance
    assert sharded.error(module, blocks().to(dtype)) > tolerance, "the training changed nothing"
