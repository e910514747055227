"""However a script is started, workers have what it defines: the same script as plain Lightning runs it."""

import os
import re
import sys
import textwrap
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from support.sampling import sampled
from support.scripts import completed

TESTS = Path(__file__).parents[1]


DEFINITIONS = """
import enum
import sys
from collections import namedtuple
from dataclasses import dataclass

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_recycle import PipelineModule, ReCycleStrategy, RecoveryOptions
from lightning_recycle.callbacks import Fault, FaultInjectionCallback
from support.growth import AwaitReplacement

SCALE, SCALES = 2.0, {}
Sample = namedtuple("Sample", "x y")

class Kind(enum.Enum):
    SQUARED = 1

class Wrong(Exception):
    pass

@dataclass
class Config:
    width: int = 8
    kind: Kind = Kind.SQUARED

def shifted(x):
    return x

def scaled(x):
    return SCALE * shifted(x) + SCALES["shift"] * settings.width

class Scaled(nn.Module):
    def forward(self, x):
        return scaled(x)

def criterion():
    class Squared(nn.Module):
        def forward(self, output, target):
            return (output - target).square().mean()
    return Squared()

class Model(PipelineModule):
    def __init__(self, config, raises=False):
        super().__init__()
        self.config, self.raises = config, raises
        self.criterion = criterion()
        self.rate = lambda step: 1 / (1 + step)

    def configure_pipeline(self):
        torch.manual_seed(0)
        return [nn.Linear(8, self.config.width), Scaled(), nn.Tanh(), nn.Linear(self.config.width, 1)]

    def loss(self, output, target):
        if self.raises:
            raise Wrong("by mistake")
        assert self.config.kind is Kind.SQUARED
        return self.criterion(output, target)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, self.rate)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_predict_output(self, output):
        return Sample(output, 2 * output)

class Data(Dataset):
    def __len__(self):
        return 24 * 6

    def __getitem__(self, index):
        x = torch.sin(torch.arange(8, dtype=torch.float64) * (index + 1))
        return x, x.sum(0, keepdim=True)
"""

TRAINING = """
SCALE, settings = 1.5, Config()
SCALES["shift"], Config.bias = 0.5, 0.25
shifted = lambda x: x + Config.bias

def trainer(strategy, devices, *callbacks):
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    quiet["enable_model_summary"] = False
    return L.Trainer(
        accelerator="cpu", devices=devices, strategy=strategy, max_epochs=2, callbacks=list(callbacks), **quiet
    )

def show(run, model, batch_size):
    run.fit(model, DataLoader(Data(), batch_size=batch_size))
    print("weights", repr(sum(float(p.abs().sum()) for p in model.parameters())))
    history = list(getattr(run.strategy, "history", []))
    (first, *_) = run.predict(model, DataLoader(Data(), batch_size=batch_size))
    print("predicted", type(first) is Sample, type(model.layers[1]) is Scaled, repr(float(first.y.sum())))
    return history

show(trainer("auto", 1), Model(Config()).double(), batch_size=24)
kill = FaultInjectionCallback([Fault("kill", 1, 0, step=3)])
strategy = ReCycleStrategy(pipeline_parallel_size=2, recovery=RecoveryOptions(max_restarts=10))
history = show(trainer(strategy, 4, kill, AwaitReplacement([10])), Model(Config()).double(), batch_size=12)
print("rejoined", [event.worker for event in history if event.kind == "rejoined"])
try:
    trainer("recycle", 2).fit(Model(Config(), raises=True).double(), DataLoader(Data(), batch_size=12))
except Wrong as error:
    print("caught", error)
"""

SCRIPT = DEFINITIONS + TRAINING
GUARD = '\nif __name__ == "__main__":\n'
STARTS = {
    "guarded": DEFINITIONS + GUARD + textwrap.indent(TRAINING, "    "),
    "all under the guard": GUARD + textwrap.indent(SCRIPT, "    "),
    "without a guard": SCRIPT,
    "python -c": SCRIPT,
    "python - <": SCRIPT,
    "python -m": SCRIPT,
    "python -m package": SCRIPT,
}


def arguments(start: str, folder: Path) -> list[str]:
    script = folder / ("__main__.py" if start == "python -m package" else "script.py")
    script.write_text(STARTS[start])
    match start:
        case "python -c":
            return ["-c", STARTS[start]]
        case "python - <":
            return ["-"]
        case "python -m":
            return ["-m", "script"]
        case "python -m package":
            return ["-m", folder.name]
        case _:
            return [str(script)]


def check(said: str) -> None:
    """What the script says of plain Lightning's run and of this strategy's is the same."""
    (alone, here) = (float(number) for number in re.findall(r"weights ([\d.]+)", said))
    assert here == pytest.approx(alone, abs=1e-10)
    (alone, here) = (float(number) for number in re.findall(r"predicted True True ([-\d.]+)", said))
    assert here == pytest.approx(alone, abs=1e-10)
    assert "rejoined [(1, 0)]" in said
    assert "caught by mistake" in said


@pytest.mark.long
@pytest.mark.parametrize("start", sampled(STARTS, 1))
def test_workers_and_replacements_have_what_the_script_defines(start, tmp_path):
    folder = tmp_path / "application"
    folder.mkdir()
    paths = [str(TESTS), str(folder if start == "python -m" else tmp_path), os.environ.get("PYTHONPATH", "")]
    typed = STARTS[start] if start == "python - <" else None
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = completed([sys.executable, *arguments(start, folder)], input=typed, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    check(done.stdout)


@pytest.mark.long
def test_a_notebook_trains(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    cells = [nbformat.v4.new_code_cell(part.strip()) for part in (DEFINITIONS, TRAINING)]
    notebook = nbformat.v4.new_notebook(cells=cells)
    NotebookClient(notebook, timeout=280, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = notebook.cells[-1].outputs
    check("".join(output.text for output in outputs if output.output_type == "stream" and output.name == "stdout"))


CHILDREN = """
import contextlib, multiprocessing, sys
import lightning as L, lightning_recycle
from lightning.pytorch.demos.boring_classes import BoringModel
def train():
    run = L.Trainer(accelerator="cpu", devices=2, strategy="recycle", fast_dev_run=2)
    run.fit(BoringModel()); sys.exit(run.global_step + 40)
if __name__ == "__main__":
    with contextlib.suppress(SystemExit): train()
    for daemon in (False, True):
        child = multiprocessing.get_context("fork").Process(target=train, daemon=daemon)
        child.start(); child.join(); print("ended with", child.exitcode)
"""


@pytest.mark.long
def test_a_child_of_a_process_that_has_trained_trains_unless_it_may_have_none(tmp_path):
    (tmp_path / "script.py").write_text(CHILDREN)
    result = completed([sys.executable, "script.py"], cwd=tmp_path)
    assert re.findall(r"ended with (\d+)", result.stdout) == ["42", "1"], result.stderr
    assert "it is daemonic, as those of multiprocessing.Pool are" in result.stderr
