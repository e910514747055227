"""Scripts that import Lightning as ``pytorch_lightning``."""

import re
from pathlib import Path

import pytest
from support.sampling import sampled
from support.scripts import output_of
from support.waiting import PATIENCE

SCRIPT = Path(__file__).parent / "other_lightning.py"


def result(output: str) -> tuple[float, int]:
    """The loss after the training, and the number of workers that were lost."""
    found = re.search(r"val_loss=(\S+) failures=(\d+)", output)
    assert found is not None, output
    return float(found[1]), int(found[2])


@pytest.mark.long
@pytest.mark.parametrize(
    ("strategy", "killed", "lost"), sampled([("name", (), 0), ("object", (3,), 1)], 1, rest=pytest.mark.long)
)
def test_a_script_of_pytorch_lightning_trains_as_on_one_device(strategy, killed, lost, tmp_path):
    expected, _ = result(output_of(SCRIPT, tmp_path / "one", "one", timeout=PATIENCE))
    output = output_of(SCRIPT, tmp_path / "grid", strategy, *killed, timeout=PATIENCE)
    assert result(output) == (pytest.approx(expected, rel=1e-12), lost)
    assert "stopped: `max_epochs=2`" not in output  # Lightning's logger has the level that the script gave it
