"""Whatever users keep in their objects is there after a restart and a training."""

import re
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from support.growth import AwaitReplacement, happened, rejoined
from support.training import grid_trainer, on_one_device
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, RandomSampler, TensorDataset

from lightning_recycle import ReCycleError
from lightning_recycle.callbacks import Fault

EPOCH, EPOCHS = 5, 4  # steps of an epoch
SAMPLES = 8 * EPOCH


class Curriculum(Dataset[Tensor]):
    """Samples that become harder: the module sets ``level``."""

    def __init__(self) -> None:
        self.data = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        self.level = 1.0

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        return self.data[index]


class Data(L.LightningDataModule):
    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.batch_size, self.rate = batch_size, 1.0

    def setup(self, stage: str) -> None:
        self.train = Curriculum()

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.train, batch_size=self.batch_size)


class Damp(nn.Module):
    p = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return x.tanh() * (1 - self.p)


class Annealed(L.LightningModule):
    """Its loss depends on attributes that hooks set at the beginning of an epoch, here and there."""

    alpha = 0.0

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(4, 8), Damp(), nn.Linear(8, 2)).double()
        self.register_buffer("bank", None)

    def on_train_epoch_start(self) -> None:
        data: Any = self.trainer.datamodule
        epoch = self.current_epoch
        self.alpha = 0.5 * epoch
        self.net[1].p = 0.1 * epoch
        data.rate = 1 + epoch
        data.train.level = 1 + 0.25 * epoch
        rows = torch.full((1, 2), float(epoch), dtype=torch.float64, device=self.device)
        self.bank = rows if self.bank is None else torch.cat([self.bank, rows])

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        data: Any = self.trainer.datamodule
        output = self.net(batch * data.train.level)
        return (output - self.bank.mean(0)).pow(2).mean() * data.rate + self.alpha * output.mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Memory:
    def __init__(self) -> None:
        self.epochs: list[int] = []


class Scales(L.Callback):
    """Scales gradients by the number of epochs that an object of its has seen."""

    def __init__(self) -> None:
        self.memory = Memory()

    def on_train_epoch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self.memory.epochs.append(trainer.current_epoch)

    def on_before_optimizer_step(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        for parameter in module.parameters():
            parameter.grad.mul_(0.5 + 0.1 * len(self.memory.epochs))


def _assert_same(model: nn.Module, expected: nn.Module) -> None:
    for (name, parameter), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert (parameter - other).abs().max() < 1e-10, name


def test_a_run_that_begins_again_has_what_hooks_had_set_by_the_checkpoint(tmp_path):
    """Also when all processes die at once, in the middle of an epoch."""
    undisturbed = Annealed()
    grid_trainer(2, 1, callbacks=[Scales()], max_epochs=EPOCHS).fit(undisturbed, datamodule=Data(batch_size=4))
    checkpoints = ModelCheckpoint(tmp_path, every_n_train_steps=3, save_top_k=-1, filename="{step}")
    faults = [Fault("kill", d, 0, step=8 + d) for d in range(2)]
    callbacks = [Scales(), checkpoints]
    options = {"callbacks": callbacks, "max_epochs": EPOCHS, "enable_checkpointing": True}
    trainer = grid_trainer(2, 1, faults, {"on_stage_lost": "restart"}, **options)
    model = Annealed()
    trainer.fit(model, datamodule=Data(batch_size=4))
    assert happened(trainer, "stage_lost")
    _assert_same(model, undisturbed)
    assert callbacks[0].memory.epochs == [0, 1, 2, 3]
    with torch.serialization.safe_globals([]):  # what the checkpoint holds for this is safe to load
        torch.load(tmp_path / "step=6.ckpt", weights_only=True)


def test_what_is_left_in_objects_comes_home_into_the_same_objects():
    """As on one device: attributes of the module, a layer, a callback, its own object, data, and a sampler."""
    found = {}
    for devices in (1, 2):
        model, data, scales = Annealed(), Data(batch_size=8 // devices), Scales()
        dataset = Curriculum()
        sampler = RandomSampler(dataset, generator=torch.Generator().manual_seed(3))
        memory, loader = scales.memory, DataLoader(dataset, batch_size=8 // devices, sampler=sampler)
        make = on_one_device if devices == 1 else partial(grid_trainer, 2, 1)
        make(callbacks=[scales], max_epochs=EPOCHS).fit(model, datamodule=data)
        assert scales.memory is memory
        make(callbacks=[Levels(dataset)], max_epochs=EPOCHS).fit(Plain(), loader)
        found[devices] = {
            "alpha": model.alpha, "damp": model.net[1].p, "bank": model.bank.tolist(), "epochs": memory.epochs,
            "rate": data.rate, "level": data.train.level, "given level": dataset.level, "drawn": list(sampler),
        }  # fmt: skip
    assert found[2] == found[1]
    assert found[2]["given level"] == 4.0


class Levels(L.Callback):
    def __init__(self, dataset: Curriculum) -> None:
        self.dataset = dataset

    def on_train_epoch_start(self, *_: Any) -> None:
        self.dataset.level += 0.75


class Plain(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 2).double()

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Relabels(L.Callback):
    """Puts new objects in the place of those that it was given, and writes into others."""

    def __init__(self, data: TensorDataset, seen: list[int], epochs: dict[str, int]) -> None:
        self.data, self.seen, self.kept, self.epochs = data, seen, seen, epochs

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, _: int) -> None:
        self.batch = batch

    def on_train_epoch_end(self, trainer: L.Trainer, *_: Any) -> None:
        samples, labels = self.data.tensors
        self.data.tensors = (samples, labels + 1)
        self.seen = [*self.seen, trainer.current_epoch]
        self.kept.append(trainer.current_epoch)
        self.epochs["last"] = trainer.current_epoch


class PlainOnFirst(Plain):
    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        return super().training_step(batch[0], index)


@pytest.mark.parametrize("lost", [None, 0, 1])
def test_what_hooks_put_in_the_place_of_an_object_leaves_that_as_it_was(lost):
    samples, labels = torch.randn(SAMPLES, 4, dtype=torch.float64), torch.zeros(SAMPLES, dtype=torch.int64)
    data, seen, epochs = TensorDataset(samples, labels), [], {}
    callback = Relabels(data, seen, epochs)
    faults = [] if lost is None else [Fault("kill", lost, 0, step=7), Fault("kill", 1 - lost, 0, step=12)]
    callbacks = [callback, AwaitReplacement([11, 16])]
    trainer = grid_trainer(2, 1, faults, {"max_restarts": 2}, callbacks=callbacks, max_epochs=EPOCHS)
    trainer.fit(PlainOnFirst(), DataLoader(data, batch_size=4))
    assert rejoined(trainer) == [] if lost is None else [(lost, 0), (1 - lost, 0)]
    assert data.tensors[0] is samples
    assert labels.eq(0).all()
    assert data.tensors[1].eq(EPOCHS).all()
    assert callback.seen == callback.kept == [0, 1, 2, 3]
    assert [tuple(part.shape) for part in callback.batch] == [(8, 4), (8,)]
    assert callback.kept is seen
    assert callback.epochs is epochs == {"last": 3}


class Gain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(2, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class GrowsInSetup(Plain):
    """The workers, each with one stage, have a module more."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).double()

    def setup(self, stage: str) -> None:
        self.gain = Gain()

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        return self.gain(self.net(batch)).square().mean()


class ShapedInSetup(Plain):
    """The workers find the shapes of lazy layers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d(), nn.LazyLinear(2)).double().eval()

    def setup(self, stage: str) -> None:
        torch.manual_seed(1)
        self.net(torch.zeros(1, 4, dtype=torch.float64))

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        return self.net.eval()(batch).square().mean()


def test_lazy_layers_that_the_workers_have_shaped_come_home():
    ours, theirs = ShapedInSetup(), ShapedInSetup()
    on_one_device(max_epochs=1).fit(theirs, DataLoader(Curriculum(), batch_size=8))
    grid_trainer(2, 1, max_epochs=1).fit(ours, DataLoader(Curriculum(), batch_size=4))
    _assert_same(ours, theirs)


def test_weights_that_do_not_fit_are_kept_in_a_file_that_the_error_names(tmp_path):
    model = GrowsInSetup()
    trainer = grid_trainer(1, 2, max_epochs=EPOCHS, default_root_dir=tmp_path)
    with pytest.raises(ReCycleError, match="do not fit into the GrowsInSetup of this process") as caught:
        trainer.fit(model, DataLoader(Curriculum(), batch_size=8))
    found = re.search(r"They are in (\S+\.pt):", str(caught.value))
    assert torch.load(found.group(1)).keys() == {"gain.factor", *model.state_dict()}
