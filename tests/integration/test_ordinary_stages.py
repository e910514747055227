"""Modules that know nothing of pipelines train in several stages as on one device."""

from functools import cache
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from support.comparison import differences
from support.sampling import sampled
from support.training import difference, failures, grid_trainer, on_one_device
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_recycle import ConfigurationError, PipelineModule, ReCycleError
from lightning_recycle.callbacks import Fault

pytestmark = pytest.mark.long

BATCH, LENGTH, WIDTH, TOKENS = 24, 5, 8, 11
STEPS = 6


class Vision(L.LightningModule):
    """A chain that is all of the model."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 12), nn.ReLU(inplace=True), nn.Linear(12, 3)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, bias=False, batch_first=True)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, y, attn_mask=mask, need_weights=False)[0]
        return x + self.drop(self.down(torch.tanh(self.up(x))))


class Gpt(L.LightningModule):
    """Embeddings and a tied head outside of the chain, a parameter of its own, a mask for the blocks, two groups."""

    def __init__(self, dropout: float = 0.0, noise: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.noise = noise
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.position = nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.triu(torch.ones(LENGTH, LENGTH, dtype=torch.bool), 1))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position
        if self.noise:
            x = x + self.noise * torch.randn_like(x)
        for block in self.blocks:
            x = block(x, self.mask)
        return self.head(self.norm(x))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (tokens,) = batch
        loss = nn.functional.cross_entropy(self(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> Any:
        vectors = [p for p in self.parameters() if p.dim() < 2]
        matrices = [p for p in self.parameters() if p.dim() >= 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2, eps=1e-5)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)}


def images() -> TensorDataset:
    x = torch.randn(BATCH * STEPS, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return TensorDataset(x, (x.sum(1) > 0).long() + (x[:, 0] > 0).long())


def text() -> TensorDataset:
    return TensorDataset(torch.randint(TOKENS, (BATCH * STEPS, LENGTH + 1), generator=torch.Generator().manual_seed(1)))


def on_grid(pipelines: int, stages: int, faults: Any = (), strategy: Any = None, **kwargs: Any) -> L.Trainer:
    options = {"num_microbatches": 4 // pipelines, **(strategy or {})}
    return grid_trainer(pipelines, stages, faults, options, **{"max_epochs": 1, **kwargs})


def train(run: L.Trainer, model: L.LightningModule, data: TensorDataset, batch: int, **kwargs: Any) -> dict[str, Any]:
    """Fits with a validation; returns the metrics."""
    run.fit(model, DataLoader(data, batch), DataLoader(data, batch), **kwargs)
    return {name: float(value) for name, value in run.callback_metrics.items()}


@cache
def gpt_alone(clip: float | None = None, epochs: int = 1) -> dict[str, Tensor]:
    model = Gpt().double()
    train(on_one_device(max_epochs=epochs, gradient_clip_val=clip), model, text(), BATCH)
    return model.state_dict()


@pytest.mark.parametrize(("grid", "faults", "clip"), [
    ((2, 2), [Fault("kill", 0, 1, step=2)], None),
    ((2, 2), [Fault("kill", 1, 0, step=3, at="reduce", when="after")], 0.05),
    ((1, 4), [], 0.05),
    ((2, 3), [Fault("kill", 1, 1, step=2), Fault("kill", 0, 2, step=4, at="optimizer")], None),
], ids=str)  # fmt: skip
def test_what_is_outside_of_the_chain_trains_as_one_parameter(grid, faults, clip):
    model, run = Gpt().double(), on_grid(*grid, faults, gradient_clip_val=clip)
    train(run, model, text(), BATCH // grid[0])
    assert sorted(failures(run)) == sorted((fault.pipeline, fault.stage) for fault in faults)
    assert difference(model.state_dict(), gpt_alone(clip)) < 1e-10
    assert model.head.weight is model.embed.weight


def test_noise_and_dropout_are_the_same_on_all_grids():
    def weights(pipelines: int, stages: int, faults: list[Fault]) -> dict[str, Tensor]:
        model = Gpt(dropout=0.3, noise=0.1).double()
        train(on_grid(pipelines, stages, faults), model, text(), BATCH // pipelines)
        return model.state_dict()

    expected = weights(1, 2, [])
    assert difference(weights(2, 3, [Fault("kill", 0, 0, step=2)]), expected) < 1e-10
    assert difference(expected, gpt_alone()) > 1e-4


@pytest.mark.parametrize("sharded", [False, True], ids=["file", "folder"])
def test_a_checkpoint_is_that_of_one_device_and_resumes_on_another_grid(sharded, tmp_path):
    def saves(folder: str) -> ModelCheckpoint:
        return ModelCheckpoint(tmp_path / folder, save_top_k=-1, every_n_train_steps=4, filename="{step}")

    strategy = {"save_distributed_checkpoint": sharded}
    run = on_grid(1, 3, strategy=strategy, enable_checkpointing=True, callbacks=[saves("")])
    train(run, Gpt().double(), text(), BATCH)
    path = tmp_path / "step=4.ckpt"
    resumed = Gpt().double()
    train(on_grid(2, 2), resumed, text(), BATCH // 2, ckpt_path=path)
    assert difference(resumed.state_dict(), gpt_alone()) < 1e-10
    if not sharded:
        alone = on_one_device(max_epochs=1, enable_checkpointing=True, callbacks=[saves("alone")])
        train(alone, Gpt().double(), text(), BATCH)
        expected = torch.load(tmp_path / "alone/step=4.ckpt", weights_only=True)
        found = torch.load(path, weights_only=True)
        for part in ("state_dict", "optimizer_states", "lr_schedulers"):
            assert not list(differences(found[part], expected[part], 1e-10)), part


class Annealed(Vision):
    """Its loss depends on where the training is."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        factor = 1.0 + self.global_step + 10.0 * self.current_epoch + 0.1 * batch_idx
        return factor * nn.functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


@pytest.mark.parametrize("step", sampled([3, 5], 1))
def test_a_step_that_is_served_once_more_sees_the_counters_of_its_time(step):
    """The first stage loses a worker when the last one has applied the step, which may end an epoch."""
    ours, theirs = Annealed().double(), Annealed().double()
    on_one_device(max_epochs=2).fit(theirs, DataLoader(images(), BATCH))
    run = on_grid(2, 2, [Fault("kill", 0, 0, step=step, at="reduce")], max_epochs=2)
    run.fit(ours, DataLoader(images(), BATCH // 2))
    assert failures(run) == [(0, 0)]
    assert difference(ours.state_dict(), theirs.state_dict()) < 1e-10


class AutoEncoder(L.LightningModule):
    """Two containers, of which the user says that they are one chain; the loss needs the input again."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6, momentum=None), nn.Tanh())
        self.decoder = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8))

    def training_step(self, batch: Any) -> Tensor:
        return nn.functional.mse_loss(self.decoder(self.encoder(batch[0])), batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_layers_are_named_by_the_user():
    ours, theirs = AutoEncoder().double(), AutoEncoder().double()
    on_one_device(max_epochs=1).fit(theirs, DataLoader(images(), BATCH))
    strategy = {"layers": ["encoder", "decoder"], "partition": [1, 5], "num_microbatches": 1}
    on_grid(1, 2, strategy=strategy).fit(ours, DataLoader(images(), BATCH))
    assert difference(ours.state_dict(), theirs.state_dict()) < 1e-10


class Residual(Vision):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.net:
            x = x.relu() if isinstance(layer, nn.ReLU) else layer(x)
        return x


class Layers(PipelineModule):
    def configure_pipeline(self) -> Any:
        return [nn.Linear(8, 8), nn.Linear(8, 3)]


@pytest.mark.parametrize(("model", "strategy", "words"), [
    (Residual, {}, ["Residual.training_step()", "uses what layer 'net.2' returned (relu)", "'net.3'"]),
    (Vision, {"pipeline_parallel_size": 6}, ["Vision cannot be cut", "6 stages"]),
    (Vision, {"layers": "body"}, ["layers='body'", "net"]),
    (Vision, {"partition": [1, 1, 3]}, ["(partition=[1, 1, 3]) describes 3 stages"]),
    (Vision, {"pipeline_parallel_size": 3, "partition": [1, 1, 3]}, ["Stage 1 of 3 of Vision has no parameters"]),
    (AutoEncoder, {}, ["AutoEncoder", "'encoder'", "'decoder'", "layers="]),
    (Layers, {"layers": "layers"}, ["is a PipelineModule", "Leave the option out"]),
])  # fmt: skip
def test_what_cannot_be_cut_is_refused_by_name(model, strategy, words):
    stages = strategy.pop("pipeline_parallel_size", 2)
    run = on_grid(1, stages, strategy=strategy, num_sanity_val_steps=0)
    with pytest.raises(ConfigurationError) as caught:
        run.fit(model().double(), DataLoader(images(), BATCH))
    assert all(word in str(caught.value) for word in words), caught.value
    assert run.global_step == 0


class GroupOfEach(Vision):
    """A group for each parameter, so stages of different layers have different numbers of them."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([{"params": [parameter]} for parameter in self.parameters()], lr=1e-2)


def test_other_numbers_of_groups_on_stages_are_refused_before_a_step_is_applied():
    data = TensorDataset(torch.randn(BATCH, 8), torch.zeros(BATCH, dtype=torch.int64))
    run, module = grid_trainer(1, 2, max_steps=2), GroupOfEach()
    with pytest.raises(ReCycleError, match=r"After step 0 .*the number of parameter groups of the optimizer"):
        run.fit(module, DataLoader(data, batch_size=BATCH))
