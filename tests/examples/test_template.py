"""The project with a Hydra configuration: the strategy's name is all that changes."""

import csv
from pathlib import Path
from typing import Any

import pytest
from support.scripts import output_of

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "unmodified_template" / "train_template.py"
KILL = (
    "+callbacks.kill={_target_: lightning_recycle.callbacks.FaultInjectionCallback, _convert_: all, faults:"
    " [{_target_: lightning_recycle.callbacks.Fault, kind: kill, pipeline: 1, stage: 0, step: 10}]}"
)


def run(directory: Path, *arguments: str) -> tuple[str, dict[str, float], list[dict[str, Any]]]:
    """What the project prints, the metrics of its last line, and its log."""
    fixed = ["+trainer.enable_progress_bar=false", "trainer.max_epochs=2", "hydra.run.dir=run"]
    out = output_of(SCRIPT, *arguments, *fixed, env={"OMP_NUM_THREADS": "1"}, cwd=directory)
    (told,) = (line for line in out.splitlines() if line.startswith("test/acc: "))
    with (directory / "run" / "csv" / "version_0" / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return out, {name: float(value) for name, value in (part.split(": ") for part in told.split(", "))}, rows


@pytest.mark.long
@pytest.mark.parametrize("strategy", [
    pytest.param(("trainer.strategy=recycle", "trainer.devices=2"), marks=pytest.mark.exhaustive),
    ("trainer.strategy={_target_: lightning_recycle.ReCycleStrategy, pipeline_parallel_size: 2}", "trainer.devices=4"),
], ids=["data parallel", "stages"])  # fmt: skip
def test_a_project_of_configurations_trains_and_tests_its_best_checkpoint_though_a_worker_dies(tmp_path, strategy):
    out, metrics, rows = run(tmp_path, *strategy, KILL)
    assert "was lost at step 10" in out
    # 1280 images in batches of 64: the batch of all devices is that of the configuration.
    assert max(int(row["step"]) for row in rows if row["train/loss"]) == 2 * 20 - 1
    assert metrics["val/acc_best"] >= metrics["val/acc"] > 0.6
    assert metrics["test/acc"] > 0.6
    assert {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()} == {"epoch_001.ckpt", "last.ckpt"}
