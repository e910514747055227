"""What cannot work is refused with an error that names the value and the remedy."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from support.models import Regression, dataset
from support.options import recycle_strategy
from support.training import fit, trainer
from support.waiting import PATIENCE
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_recycle import ConfigurationError, LayerSpec, PipelineModule, PlanningOptions, ReCycleStrategy
from lightning_recycle.callbacks import Fault, HeartbeatCallback
from lightning_recycle.errors import CheckpointError, ReCycleError
from lightning_recycle.launch.run_preparation import PreparedRun
from lightning_recycle.planning.grid import Grid


class VectorLoss(Regression):
    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square()


class FloatLoss(Regression):
    def loss(self, output: Tensor, target: Tensor) -> Any:
        return (output - target).square().mean().item()


class EmptyStage(Regression):
    def configure_pipeline(self) -> list[Any]:
        return [nn.Linear(8, 1), nn.Tanh(), nn.Tanh(), nn.Tanh()]


class NothingTrains(Regression):
    def configure_pipeline(self) -> list[Any]:
        layers = super().configure_pipeline()
        for layer in layers:
            layer.requires_grad_(False)
        return layers


class WrongSpec(Regression):
    def configure_pipeline(self) -> list[Any]:
        return [nn.Linear(8, 8), nn.Tanh(), LayerSpec(nn.Linear, 8), nn.Linear(8, 1)]


class ChangesBatch(Regression):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        inputs, _ = batch
        inputs.mul_(2)


class BuiltSpec(Regression):
    def configure_pipeline(self) -> list[Any]:
        return [nn.Linear(8, 8), LayerSpec(nn.Linear(8, 1))]


class NoPipeline(PipelineModule):
    pass


class WrongEntry(Regression):
    def configure_pipeline(self) -> list[Any]:
        return [nn.Linear(8, 8), "a layer"]


class ClassEntry(Regression):
    def configure_pipeline(self) -> list[Any]:
        return [nn.Linear(8, 8), nn.Tanh]


class NoEntries(Regression):
    def configure_pipeline(self) -> list[Any]:
        return []


class Outside(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2, 2)


class NoOptimizer(Regression):
    def configure_optimizers(self) -> Any:
        return None


class TwoOptimizers(Regression):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), lr=0.1), torch.optim.SGD(self.parameters(), lr=0.1)]


class WrongBatch(Regression):
    def split_batch(self, batch: Any) -> tuple[Any, Any]:
        return super().split_batch([*batch, 1])


class NoLoss(Regression):
    loss = PipelineModule.loss


class AbsentLayers(Regression):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([self.layers[0].weight, self.layers[-1].weight], lr=0.1)


class WrongShape(Regression):
    def configure_pipeline(self) -> list[Any]:
        return [*super().configure_pipeline()[:-1], nn.Linear(9, 1)]


class NotAPipeline(L.LightningModule):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return batch[0].sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        yield torch.zeros(8)


@pytest.mark.parametrize(
    ("strategy", "devices", "words"),
    [
        ({"pipeline_parallel_size": 3}, 4, ["4 devices", "pipeline_parallel_size=3", "pipeline_parallel_size=1 or 2."]),
        ({"pipeline_parallel_size": 0}, 4, ["pipeline_parallel_size=0", "at least 1"]),
        ({"pipeline_parallel_size": 7}, 7, ["6 layers", "pipeline_parallel_size=7", "configure_pipeline"]),
        ({"pipeline_parallel_size": 2, "num_microbatches": 5}, 4, ["batch_size=12", "num_microbatches=5", "1, 2, 3"]),
        ({"tensor_parallel_size": 2}, 4, ["With tensor_parallel_size=2, Regression needs a configure_model()"]),
        ({"fsdp_size": 2}, 4, ["With fsdp_size=2, Regression needs a configure_model()"]),
    ],
)
def test_wrong_grids_are_refused_before_anything_starts(
    strategy: dict[str, Any], devices: int, words: list[str]
) -> None:
    def run() -> None:
        run = L.Trainer(accelerator="cpu", devices=devices, strategy=recycle_strategy(**strategy), logger=False)
        run.fit(Regression().double(), DataLoader(dataset(), batch_size=12))

    with pytest.raises(ConfigurationError) as caught:
        run()
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (VectorLoss, ["shape (2, 1)", "scalar", ".mean()"]),
        (FloatLoss, ["float", "scalar", ".item()"]),
        (EmptyStage, ["Stage 1", "no parameters", "pipeline_parallel_size"]),
        (NothingTrains, ["NothingTrains", "requires_grad"]),
        (WrongSpec, ["Layer 2", "LayerSpec(Linear, 8)", "configure_pipeline()"]),
        (BuiltSpec, ["LayerSpec(nn.Linear, 8, 8): the class itself, then its arguments"]),
        (NoPipeline, ["NoPipeline", "configure_pipeline()"]),
        (WrongEntry, ["'a layer'", "layer 1", "LayerSpec"]),
        (ClassEntry, ["torch.nn.modules.activation.Tanh", "layer 1", "Write Tanh(...)."]),
        (NoEntries, ["NoEntries.configure_pipeline() returned no layers: return at least one."]),
        (Outside, ["head.weight", "configure_pipeline()"]),
        (NoOptimizer, ["configure_optimizers()", "exactly one"]),
        (TwoOptimizers, ["TwoOptimizers.configure_optimizers()", "has one", "pipeline_parallel_size=1"]),
        (WrongBatch, ["split_batch", "length 3", "(input, target)"]),
        (NotAPipeline, ["PipelineModule", "NotAPipeline"]),
        (NoLoss, ["NoLoss", "loss(self, output, target)"]),
        (AbsentLayers, ["self.layers[", "'weight'", "another stage", "self.named_parameters()"]),
        (ChangesBatch, ["A hook has changed the batch", "on_after_batch_transfer"]),
        (WrongShape, ["In layers[5]", "Linear(in_features=9", "(2, 4) torch.float64"]),
    ],
)
def test_wrong_modules_are_refused_by_name(model: Any, words: list[str]) -> None:
    with pytest.raises((ReCycleError, AttributeError, RuntimeError)) as caught:
        trainer(2, 2).fit(model().double(), DataLoader(dataset(), batch_size=12))
    shown = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert all(word in shown for word in words), shown
    if model in (NoPipeline, WrongEntry):
        assert caught.value.__context__ is None, "one error"


def test_layers_named_for_a_module_that_has_none_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"ReCycleStrategy\(layers='blocks'\)"):
        trainer(2, 2, strategy={"layers": "blocks"}).fit(NoPipeline(), DataLoader(dataset(), batch_size=12))


def test_the_environment_of_workers_is_checked_first(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = trainer(2, 2)
    monkeypatch.setenv("RECYCLE_COORDINATR", "127.0.0.1:1")
    monkeypatch.setenv("RECYCLE_TIMEOUT", "5")
    monkeypatch.setenv("RECYCLE_PORTS", "30000-30100")
    with pytest.raises(CheckpointError):
        run.fit(Regression().double(), DataLoader(dataset(), batch_size=12), ckpt_path="nowhere")
    assert "RECYCLE_COORDINATR has no meaning here. Did you mean 'RECYCLE_COORDINATOR'?" in caplog.text
    assert "The variable RECYCLE_TIMEOUT has no meaning here.\n" in caplog.text
    monkeypatch.setenv("RECYCLE_PORTS", "30000")
    with pytest.raises(ConfigurationError, match="RECYCLE_PORTS='30000'"):
        run.fit(Regression().double(), DataLoader(dataset(), batch_size=12))


def test_a_profile_that_is_to_be_measured_is_announced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = ReCycleStrategy(planning=PlanningOptions(profile=tmp_path / "p.json")).options
    unused: Any = None
    setup: Any = SimpleNamespace(grid=Grid(2, 2, 2))
    assert PreparedRun(unused, setup, unused, options, 4).find_profile() == (tmp_path / "p.json", None)
    assert f"profile='{tmp_path}/p.json': there is no such file; it will be measured and written there." in caplog.text


@pytest.mark.parametrize("entry", ["fit", "validate", "test", "predict"])
def test_no_data_is_refused_before_workers_start(entry: str) -> None:
    with pytest.raises(ConfigurationError, match=r"no data, and Regression has no \w+_dataloader\(\): give"):
        getattr(trainer(2, 2), entry)(Regression().double())


def test_a_run_that_can_lose_no_worker_says_so(caplog: pytest.LogCaptureFixture) -> None:
    trainer(1, 2, max_steps=1).fit(Regression().double(), DataLoader(dataset(), batch_size=12))
    assert "With devices=2 and 2 stages each stage has one worker" in caplog.text


def test_options_without_effect_on_one_worker_are_named(caplog: pytest.LogCaptureFixture) -> None:
    data, strategy = DataLoader(RandomDataset(32, 24), batch_size=12), {"layers": "nolayer", "verify": 0.1}
    with pytest.raises(ConfigurationError, match=r"partition=\[1, 2\]\) describes 2 stages; pipeline_par"):
        trainer(1, 1, strategy={"partition": [1, 2]}).fit(BoringModel(), data)
    trainer(1, 1, max_steps=1, strategy=strategy).fit(BoringModel(), data)
    for text in (
        "With devices=1 and 1 stage each stage has one worker",
        "layers='nolayer' has no effect: pipeline_parallel_size is 1.",
        "verify=0.1 has no effect: no stage has two workers.",
    ):
        assert caplog.text.count(text) == 1


@pytest.mark.parametrize("entry", ["fit", "validate", "test", "predict"])
def test_missing_checkpoints_are_refused_before_workers_start(entry: str, caplog: pytest.LogCaptureFixture) -> None:
    run = getattr(trainer(2, 2), entry)
    with pytest.raises(CheckpointError, match="ckpt_path='nowhere': there is no such file"):
        run(Regression().double(), DataLoader(dataset(), batch_size=12), ckpt_path="nowhere")
    assert "lost" not in caplog.text


def test_a_file_that_only_workers_read_is_refused_if_no_trainer_wrote_it(tmp_path: Path) -> None:
    torch.save({"a": 1}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match="is not a checkpoint of Lightning"):
        trainer(2, 2).fit(Regression().double(), DataLoader(dataset(), batch_size=12), ckpt_path=tmp_path / "old.pt")


@pytest.mark.parametrize(
    ("loader", "words"),
    [
        (lambda: DataLoader(Stream(), batch_size=12), ["Stream", "less than one global batch of 24 samples"]),
        (lambda: DataLoader(dataset(0), batch_size=12), ["0 samples", "a dataset that is not empty"]),
        (lambda: DataLoader(dataset(), batch_size=None), ["lengths [1, 8]", "DataLoader with a batch_size"]),
        (lambda: (batch for batch in DataLoader(dataset(), batch_size=12)), ["generator", "only once", "DataLoader"]),
        (lambda: None, ["given no data, and Regression has no train_dataloader()", "DataLoader(...)"]),
        (lambda: [1, 2, 3], ["data is 1,", "cannot be iterated over", "DataLoader"]),
        (lambda: DataLoader(dataset(12), batch_size=12), ["12 samples", "2 pipelines", "batch_size=12"]),
    ],
)
def test_data_without_addresses_is_refused(loader: Any, words: list[str]) -> None:
    with pytest.raises(ReCycleError) as caught:
        trainer(2, 2).fit(Regression().double(), loader())
    assert all(word in str(caught.value) for word in words), caught.value


def test_something_that_cannot_be_sent_to_the_workers_is_refused_with_its_path_and_the_reason() -> None:
    model = Regression().double()
    model.helpers = {"database": [1, threading.Lock()]}
    expected = r"model\.helpers\['database'\]\[1\] cannot be sent to the worker processes.*lock.*in setup\(\)"
    with pytest.raises(ConfigurationError, match=expected):
        fit(model, 2, 2)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (lambda: HeartbeatCallback(interval=3, timeout=5), ["interval=3", "timeout=5"]),
        (lambda: HeartbeatCallback(timeout=5, last_holder_timeout=4), ["last_holder_timeout=4", "the timeout"]),
        (lambda: HeartbeatCallback(coordinator_timeout=0.5), ["coordinator_timeout=0.5", "at least 1 second"]),
        (lambda: HeartbeatCallback(timeout="5s"), ["HeartbeatCallback(timeout='5s'): give a number of seconds"]),
        (lambda: HeartbeatCallback(interval="a"), ["HeartbeatCallback(interval='a'): give a number of seconds"]),
        (lambda: HeartbeatCallback(last_holder_timeout="x"), ["HeartbeatCallback(last_holder_timeout='x'): give a"]),
        (lambda: HeartbeatCallback(timeout=float("nan")), ["HeartbeatCallback(timeout=nan): give a number of seconds"]),
        (lambda: HeartbeatCallback(heartbeat_timeout=3), ["Write timeout=3."]),
        (lambda: fit(Regression(), 2, 2, callbacks=[HeartbeatCallback()] * 2), ["2 HeartbeatCallbacks", "give one."]),
        (lambda: fit(Regression(), 2, 2, [Fault("kill", 2, 0, 1)]), ["(2, 0)", "2 pipelines"]),
        *(
            (lambda n=n: fit(Regression(), 2, 2, accumulate_grad_batches=n), [f"accumulate_grad_batches={n}): give an"])
            for n in (0, {0: 2})
        ),
    ],
)
def test_wrong_callbacks_and_flags_are_refused(fault: Any, words: list[str]) -> None:
    """More of faults in tests/callbacks."""
    with pytest.raises(ConfigurationError) as caught:
        fault()
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.long
def test_a_script_that_trains_outside_of_its_main_guard_is_told_so_once(tmp_path: Path) -> None:
    """With a guard it is imported by the workers; they must not train, and have nothing to say."""
    script = tmp_path / "half_guarded.py"
    script.write_text(
        "from support.models import Regression\nfrom support.training import fit\n"
        "fit(Regression().double(), 2, 2)\nif __name__ == '__main__':\n    print('done')\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 1
    assert "if __name__ == '__main__':" in done.stderr.splitlines()[-1]
    assert done.stderr.count("Traceback") == 1
