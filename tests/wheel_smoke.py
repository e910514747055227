"""A smoke run of an installed wheel: ``python wheel_smoke.py``, half a minute. The release workflow runs it; no pytest.

A worker is killed in the middle of a step, and the weights are those of the undisturbed run; each command answers.
"""

import subprocess
import sys
from pathlib import Path

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_recycle import LayerSpec, PipelineModule, ReCycleStrategy
from lightning_recycle.callbacks import Fault, FaultInjectionCallback

COMMANDS = [
    ["recycle-plan", "grid.pipelines=3", "grid.stages=4", "grid.microbatches=6", "failures=[[1,2]]",
     "output=plan.json"],
    ["recycle-simulate", "model=gpt3_medium", "policy=recycle", "duration=1h", "seeds=1", "output=results"],
    ["recycle-report", "results", "-o", "report.html"],
    *([name, "--help"] for name in ("recycle-coordinator", "recycle-run", "recycle-status")),
]  # fmt: skip


class Classifier(PipelineModule):
    """Two linear layers in float64."""

    def configure_pipeline(self):
        return [
            LayerSpec(nn.Linear, 8, 8, dtype=torch.float64),
            nn.Tanh(),
            LayerSpec(nn.Linear, 8, 2, dtype=torch.float64),
        ]

    def loss(self, output, target):
        return nn.functional.cross_entropy(output, target)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trained(*faults: Fault) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The weights after 8 steps on 2 x 2 workers, and the kinds of events."""
    L.seed_everything(1)
    model = Classifier()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=4,
        strategy=ReCycleStrategy(pipeline_parallel_size=2, num_microbatches=2),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        callbacks=[FaultInjectionCallback(list(faults))] if faults else [],
    )
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(128, 8, generator=generator, dtype=torch.float64)
    trainer.fit(model, DataLoader(TensorDataset(inputs, (inputs[:, 0] > 0).long()), batch_size=8))
    return model.state_dict(), [event.kind for event in trainer.strategy.history]


def main() -> None:
    """Run all of it; an assertion or a command that fails ends the program."""
    undisturbed, _ = trained()
    weights, events = trained(Fault("kill", pipeline=1, stage=0, step=3, at="backward_input"))
    assert "recovered" in events, events
    for name, value in undisturbed.items():
        assert torch.allclose(weights[name], value, rtol=0, atol=1e-10), name
    for command in COMMANDS:
        print("$", *command, flush=True)
        subprocess.run(
            [Path(sys.executable).with_name(command[0]), *command[1:]], check=True, stdout=subprocess.DEVNULL
        )
    for file in ("plan.json", "plan.svg", "results/result.json", "report.html"):
        assert Path(file).stat().st_size, file
    print("The wheel works.")


if __name__ == "__main__":
    main()
