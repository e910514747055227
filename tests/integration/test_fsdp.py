"""Positions whose layers FSDP2 divides: weights equal those of a plain loop, whichever member is lost."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import sharded
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from sharded import (
    BATCH,
    STEPS,
    AtCollective,
    AtHook,
    Kill,
    Piped,
    Waits,
    dataset,
    die,
    error,
    fit,
    kinds,
    lost,
    make_parallel,
    parts_of,
    plain_loop,
    trainer_for,
)
from support.blocks import WIDTH, blocks
from support.training import TOLERANCE
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.utils.data import DataLoader, Subset
from torchmetrics import MeanMetric

from lightning_recycle.errors import ConfigurationError, UnsupportedFeatureError


class Ordinary(sharded.Ordinary):
    """Logs its loss; without a mesh it is trained alone."""

    def configure_model(self) -> None:
        if self.device_mesh is not None:
            super().configure_model()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = (self.model(x) - y).square().mean()
        self.log("train", loss, on_step=False, on_epoch=True)
        return loss


def test_an_ordinary_module_trains_with_fsdp() -> None:
    module = Ordinary()
    fit(module, (2, 1, 2, 1))
    assert error(module, plain_loop(4)) < TOLERANCE


@pytest.mark.parametrize(("rank", "operation"), [(1, 2), pytest.param(2, 0, marks=pytest.mark.long)])
def test_weights_equal_after_a_member_is_killed(rank: int, operation: int) -> None:
    module = Ordinary()
    assert lost(fit(module, (2, 1, 2, 1), Kill(rank, 1, operation))) == 1
    assert error(module, plain_loop(4)) < TOLERANCE


@pytest.mark.long
@pytest.mark.parametrize(("rank", "step", "operation"), [(2, 1, 4), (7, 2, 3), (0, 0, 3)])
def test_weights_equal_after_a_member_of_a_stage_is_killed(rank: int, step: int, operation: int) -> None:
    module = Piped()
    assert lost(fit(module, (2, 2, 2, 1), Kill(rank, step, operation))) == 1
    assert error(module, plain_loop(4)) < TOLERANCE


@pytest.mark.long
def test_layers_are_divided_by_both() -> None:
    module = Ordinary()
    assert lost(fit(module, (2, 1, 2, 2), Kill(3, 1, 3))) == 1
    assert error(module, plain_loop(4)) < TOLERANCE


@pytest.mark.long
def test_stages_of_one_position_are_divided_by_both() -> None:
    module = Piped()
    fit(module, (1, 2, 2, 2))
    assert error(module, plain_loop(2)) < TOLERANCE


@pytest.mark.long
def test_a_replacement_gets_the_shards_of_its_column() -> None:
    """Later the position from which it has its state is lost."""
    module = Ordinary()
    kills = Kill(1, 1, 2), Kill(2, 18, 1)
    limits = {"max_steps": 20, "max_epochs": 9, "strategy": {"max_restarts": 4}}
    trainer = fit(module, (2, 1, 2, 1), *kills, Waits(2), **limits)
    assert "rejoined" in kinds(trainer), kinds(trainer)
    assert error(module, plain_loop(4, steps=20)) < TOLERANCE


@pytest.mark.long
@pytest.mark.parametrize("grid", [(2, 1, 2, 1), (2, 1, 2, 2)])
def test_gradients_are_clipped_by_the_norm_of_all_members(grid: tuple[int, int, int, int]) -> None:
    module = Ordinary()
    fit(module, grid, Kill(3, 2, 1), gradient_clip_val=0.1)
    assert error(module, plain_loop(4, clip=0.1)) < TOLERANCE


class Unevenly(nn.Module):
    """Its shards have different sizes, and some have no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 3), nn.Linear(3, WIDTH)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(torch.tanh(self.up(x)))


class Metrics(Ordinary):
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


def test_evaluation_metrics_and_gathering_count_parts_of_the_data() -> None:
    module, layers = Metrics(), uneven()
    trainer = fit(
        module,
        (2, 1, 3, 1),
        Kill(4, 1, 1),
        validates=True,
        val=Subset(dataset(), range(50)),
        max_epochs=1,
        max_steps=-1,
    )
    optimizer, data = torch.optim.AdamW(layers.parameters(), lr=0.01), dataset()
    losses = []
    for step in range(len(data) // (6 * BATCH)):
        x, y = data[step * 6 * BATCH : (step + 1) * 6 * BATCH]
        optimizer.zero_grad()
        loss = (layers(x) - y).square().mean()
        loss.backward()
        losses.append(float(loss))
        optimizer.step()
    assert error(module, layers) < TOLERANCE
    x, y = data[:50]
    output = layers(x).detach()
    found = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert abs(found["train"] - sum(losses) / len(losses)) < TOLERANCE
    assert abs(found["val"] - float((output - y).square().mean())) < TOLERANCE
    assert abs(found["mean"] - float(output.sum(-1).mean())) < 1e-5
    assert module.seen["ranks"] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


class OnMeta(Ordinary):
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
    trainer = fit(module, grid, keep, *callbacks, enable_checkpointing=True, **kwargs)
    state = torch.load(path / "last.ckpt", weights_only=True)["state_dict"]
    return trainer, {name.removeprefix("model."): value for name, value in state.items()}


@pytest.mark.long
def test_first_values_of_layers_made_on_the_meta_device_do_not_depend_on_the_grid(tmp_path: Path) -> None:
    grids = ((1, 1, 2, 1), (2, 1, 2, 1), (1, 1, 2, 2))
    found = [saved(tmp_path / str(g), OnMeta(False, 0.0), g, max_steps=1)[1] for g in grids]
    for name, value in found[0].items():
        assert all(torch.equal(value, other[name]) for other in found[1:]), name
        assert name.startswith(("0.norm", "1.norm")) or 0.01 < float(value.std()) < 0.5


@pytest.mark.long
def test_a_replacement_for_a_member_whose_layers_were_made_on_the_meta_device(tmp_path: Path) -> None:
    limits = {"max_steps": 20, "max_epochs": 9, "strategy": {"max_restarts": 4}}
    trainer, weights = saved(tmp_path, OnMeta(), (2, 1, 2, 1), Kill(1, 1, 2), Kill(2, 18, 1), Waits(2), **limits)
    assert "rejoined" in kinds(trainer), kinds(trainer)
    expected = plain_loop(4, steps=20)
    assert max(float((weights[name] - p).detach().abs().max()) for name, p in expected.named_parameters()) < TOLERANCE


@pytest.mark.long
@pytest.mark.parametrize("grid", [(2, 1, 2, 1), (1, 1, 2, 2)])
def test_a_checkpoint_is_that_of_one_device(tmp_path: Path, grid: tuple[int, int, int, int]) -> None:
    _, weights = saved(tmp_path, Ordinary(), grid)
    parts = grid[0] * grid[2]
    expected = plain_loop(parts)
    assert max(float((weights[name] - p).detach().abs().max()) for name, p in expected.named_parameters()) < TOLERANCE
    again = Ordinary()
    fit(again, (parts, 1, 1, 1) if grid[3] > 1 else (1, 1, parts, 1), max_steps=6, ckpt_path=tmp_path / "last.ckpt")
    assert error(again, plain_loop(parts, steps=6)) < TOLERANCE


@pytest.mark.long
def test_batches_are_accumulated_in_shards() -> None:
    module, alone = Ordinary(), Ordinary()
    fit(module, (2, 1, 2, 1), Kill(1, 2, 2), accumulate_grad_batches=2)
    fit(alone, (4, 1, 1, 1), accumulate_grad_batches=2)
    assert error(module, alone.model) < TOLERANCE


@pytest.mark.long
def test_a_split_backward_leaves_the_sums_to_fsdp() -> None:
    module = Piped()
    fit(module, (2, 2, 2, 1), Kill(1, 1, 3), strategy={"split_backward": True})
    assert error(module, plain_loop(4)) < TOLERANCE


class Partly(Ordinary):
    def configure_model(self) -> None:
        make_parallel(self.model[:1], self.device_mesh)


class Itself(Ordinary):
    def configure_model(self) -> None:
        fully_shard(self, mesh=self.device_mesh["data_parallel"])


@pytest.mark.long
@pytest.mark.parametrize(
    ("module", "error", "expected"),
    [
        (Partly(), ConfigurationError, "leaves parameters that each of them would train alone: model.1.norm.weight"),
        (Itself(), UnsupportedFeatureError, r"calls fully_shard\(self\), whose forward a step does not call"),
    ],
)
def test_what_would_be_wrong_is_refused(module: Any, error: Any, expected: str) -> None:
    with pytest.raises(error, match=expected):
        fit(module, (1, 1, 2, 1))


class EachLayer(Ordinary):
    def configure_model(self) -> None:
        make_parallel(self.model, self.device_mesh)


@pytest.mark.long
def test_layers_of_an_ordinary_module_are_cut_into_stages_after_they_are_sharded() -> None:
    module = EachLayer()
    fit(module, (2, 2, 2, 1), Kill(1, 1, 2), strategy={"layers": "model"})
    assert error(module, plain_loop(4)) < TOLERANCE


class AsOne(Ordinary):
    def configure_model(self) -> None:
        fully_shard(self.model, mesh=self.device_mesh["data_parallel"])


@pytest.mark.long
def test_several_layers_of_a_stage_that_are_sharded_as_one_are_refused() -> None:
    with pytest.raises(
        UnsupportedFeatureError, match=r"fully_shard\(\) for AsOne\.model, whose layers are on several stages"
    ):
        fit(AsOne(), (1, 2, 2, 1), strategy={"layers": "model"})


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
def test_weights_equal_after_a_member_is_killed_before_a_collective(grid: Any, number: int) -> None:
    module = Ordinary()
    members = grid[2] * grid[3]
    trainer = fit(module, grid, AtCollective(members + number % members, 1, number))
    assert lost(trainer) == 1
    assert error(module, plain_loop(4)) < TOLERANCE


class Uneven(Ordinary):
    def __init__(self) -> None:
        super().__init__()
        self.model = uneven()


def uneven() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Unevenly(), Unevenly()).double()


@pytest.mark.long
@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        ((1, 1, 3, 1), (3, 1, 1, 1)),
        ((3, 1, 1, 1), (1, 1, 3, 1)),
        ((2, 1, 3, 1), (1, 1, 6, 1)),
        ((3, 1, 2, 1), (2, 1, 3, 1)),
    ],
)
def test_a_folder_goes_on_with_any_number_of_uneven_shards(writer: Any, reader: Any, tmp_path: Path) -> None:
    options: Any = {"strategy": {"save_distributed_checkpoint": True}, "enable_checkpointing": True}
    keep = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, every_n_train_steps=2)
    fit(Uneven(), writer, keep, max_steps=2, **options)
    module = Uneven()
    fit(module, reader, max_steps=4, ckpt_path=tmp_path / "step=2.ckpt")
    parts = writer[0] * writer[2]
    assert error(module, plain_loop(parts, layers=uneven())) < TOLERANCE


@pytest.mark.long
@pytest.mark.parametrize("folder", [False, True])
def test_a_run_starts_again_after_a_column_is_lost(folder: bool, tmp_path: Path) -> None:
    module = Ordinary()
    keep = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, every_n_train_steps=2)
    options = {"on_stage_lost": "restart", "max_restarts": 2, "save_distributed_checkpoint": folder}
    kills = Kill(0, 3, 2), Kill(2, 3, 2)
    trainer = fit(module, (2, 1, 2, 1), keep, *kills, strategy=options, enable_checkpointing=True)
    assert "stage_lost" in kinds(trainer), kinds(trainer)
    assert error(module, plain_loop(4)) < TOLERANCE


# ---------------------------------------------------------------------- outside of steps

MESHES = [(2, 1, 2, 1), (2, 1, 2, 2), (1, 2, 2, 1), (2, 1, 2), (1, 2, 2)]
"""Pipelines, stages, FSDP shards if there are any, and tensor parallelism."""


class Evaluated(Ordinary):
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
        strategy: Any = trainer.strategy
        if strategy.grid_rank == self.rank and strategy.incarnation == 0:
            model: Any = pl_module.model
            model[-1].register_forward_hook(self.count)

    def count(self, *_: Any) -> None:
        self.seen += 1
        if self.seen == 2:
            die()


@pytest.mark.long
@pytest.mark.parametrize(
    ("grid", "dies"), [*((grid, False) for grid in MESHES), *((grid, True) for grid in MESHES if grid[0] > 1)], ids=str
)
def test_tests_and_predictions_are_those_of_one_device(grid: tuple[int, ...], dies: bool) -> None:
    layers, data = blocks(), Subset(dataset(), range(50))
    x, y = dataset()[:50]
    for function in ("test", "predict"):
        options: dict[str, Any] = {"strategy": {"layers": "model"} if grid[1] > 1 else {}}
        trainer = trainer_for(grid, *([InDying(1)] if dies else []), **options)
        found = getattr(trainer, function)(Evaluated(), DataLoader(data, batch_size=BATCH))
        assert lost(trainer) == dies
        output = layers(x).detach()
        if function == "test":
            assert abs(found[0]["val"] - float((output - y).square().mean())) < 1e-6
        else:
            assert torch.cat(found).sub(output).abs().max() < TOLERANCE


class Asking(AsOne):
    """Evaluates itself in hooks; keeps its answers."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: list[Tensor] = []

    def configure_model(self) -> None:
        if self.device_mesh is not None and self.device_mesh["data_parallel"].size() == 1:
            return Ordinary.configure_model(self)
        return super().configure_model() if self.device_mesh is not None else None

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.model(x)
        return output

    def ask(self) -> None:
        with torch.no_grad():
            self.answers.append(self(dataset()[:6][0]).clone())

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.ask()

    def on_train_batch_end(self, *_: Any) -> None:
        self.ask()


def answers_of_one_device(parts: int) -> list[Tensor]:
    found, x = [blocks()(dataset()[:6][0])], dataset()[:6][0]
    for step in range(1, STEPS + 1):
        found += [plain_loop(parts, steps=step)(x)] * 2
    return [answer.detach() for answer in found[:-1]]


@pytest.mark.long
@pytest.mark.parametrize("grid", [(2, 1, 2, 1), (2, 1, 2)], ids=str)
@pytest.mark.parametrize("victim", [None, AtHook(1, "on_train_batch_end", 1), AtHook(2, "on_train_batch_start", 2)])
def test_hooks_evaluate_the_module_as_on_one_device(grid: tuple[int, ...], victim: L.Callback | None) -> None:
    module, parts = Asking(), parts_of(grid)
    fit(module, grid, *([] if victim is None else [victim]), validates=True, val_check_interval=2)
    assert error(module, plain_loop(parts)) < TOLERANCE
    for found, expected in zip(module.answers, answers_of_one_device(parts), strict=True):
        assert (found - expected).abs().max() < TOLERANCE


PRECISIONS = [("bf16-true", torch.bfloat16, 0.03), ("bf16-mixed", torch.float32, 0.01)]


class InFloat32(Ordinary):
    def __init__(self) -> None:
        super().__init__()
        self.model.float()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = (part.float() for part in batch)
        output = self.model(x.to(next(self.parameters()).dtype))
        return (output - y).square().mean()


@pytest.mark.long
@pytest.mark.parametrize("grid", [(2, 1, 2, 1), (2, 1, 2, 2), (2, 1, 2)], ids=str)
@pytest.mark.parametrize(("precision", "dtype", "tolerance"), PRECISIONS)
def test_half_precisions_train_as_on_one_device(grid: Any, precision: Any, dtype: Any, tolerance: float) -> None:
    module, alone = InFloat32(), InFloat32()
    fit(module, grid, Kill(1, 1, 2), precision=precision)
    fit(alone, (parts_of(grid), 1, 1), precision=precision)
    assert {p.dtype for p in module.parameters()} == {dtype}
    assert error(module, alone.model) < tolerance
    assert error(module, blocks().to(dtype)) > tolerance, "the training changed nothing"
