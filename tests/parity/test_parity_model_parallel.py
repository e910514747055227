"""Lightning's ModelParallelStrategy and FSDPStrategy on the same mesh: the same weights in float32, and each other's
checkpoints.
"""

from pathlib import Path

import pytest
import torch
from support.scripts import consolidated, output_of
from torch import Tensor

from lightning_recycle.session.checkpoint_files import load_sharded

SCRIPT = Path(__file__).with_name("model_parallel_script.py")
TOLERANCE = 1e-4  # in float32, after ten steps of AdamW with a rate of 3e-3, which enlarge what is small

TENSOR_PARALLEL, FSDP2, FSDP = ("model_parallel", "1x2"), ("model_parallel", "2x1"), ("fsdp", "2x1")
OTHERS = [(theirs, form) for theirs in (TENSOR_PARALLEL, FSDP2) for form in ("file", "folder")]
OTHERS += [(FSDP, "folder")]  # torch's FSDP1 writes no files on CPUs


def trained(strategy: tuple[str, str], steps: int, folder: Path, *more: str) -> list[Path]:
    """Trains with a strategy on a mesh; returns the checkpoints after 10 and 20 steps."""
    output_of(SCRIPT, *strategy, steps, folder, *more, env={"OMP_NUM_THREADS": "1"})
    return [folder / "step=10.ckpt", folder / "step=20.ckpt"]


def weights(path: Path) -> dict[str, Tensor]:
    stored = load_sharded(path) if path.is_dir() else torch.load(path, weights_only=True)
    found: dict[str, Tensor] = stored["state_dict"]
    return found


def difference(one: Path, other: Path) -> float:
    a, b = weights(one), weights(other)
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


@pytest.mark.long
@pytest.mark.parametrize(("theirs", "form"), OTHERS, ids=str)
def test_the_same_weights_and_each_others_checkpoints(theirs, form, tmp_path):
    more = ["folder"] if form == "folder" else []
    recycle = ("recycle", theirs[1])
    before, expected = trained(theirs, 20, tmp_path / "theirs", *more)
    own, _ = trained(recycle, 10, tmp_path / "ours", *more)
    assert difference(own, before) < TOLERANCE
    for strategy, checkpoint in ((recycle, before), (theirs, own)):
        resumed = trained(strategy, 20, tmp_path / f"{strategy[0]} goes on", f"resume={checkpoint}", *more)
        assert difference(resumed[1], expected) < TOLERANCE, strategy
    if form == "folder":
        assert difference(consolidated(own, tmp_path / "one.ckpt"), own) == 0.0
