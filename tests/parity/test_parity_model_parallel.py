"""Lightning's ModelParallelStrategy on the same mesh: the same weights in float32, and each other's checkpoints."""

from pathlib import Path

import pytest
import torch
from support.scripts import output_of
from torch import Tensor

from lightning_recycle.session.checkpoint_files import load_sharded

SCRIPT = Path(__file__).with_name("model_parallel_script.py")
TOLERANCE = 1e-4  # in float32, after ten steps of AdamW with a rate of 3e-3, which enlarge what is small


def trained(strategy: str, steps: int, folder: Path, *more: str) -> Path:
    """The checkpoint of a training with ``strategy``."""
    output_of(SCRIPT, strategy, steps, folder, *more, env={"OMP_NUM_THREADS": "1"})
    return folder / f"step={steps}.ckpt"


def weights(path: Path) -> dict[str, Tensor]:
    stored = load_sharded(path, lambda _: True) if path.is_dir() else torch.load(path, weights_only=True)
    found: dict[str, Tensor] = stored["state_dict"]
    return found


def difference(one: Path, other: Path) -> float:
    a, b = weights(one), weights(other)
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


@pytest.mark.long
@pytest.mark.parametrize("form", ["file", "folder"])
def test_the_same_weights_and_each_others_checkpoints(form: str, tmp_path: Path) -> None:
    """ModelParallelStrategy names what is in a folder otherwise, so it reads files of this package only."""
    more = ["folder"] if form == "folder" else []
    theirs = trained("model_parallel", 10, tmp_path / "theirs", *more)
    ours = trained("recycle", 10, tmp_path / "ours", *more)
    assert difference(ours, theirs) < TOLERANCE
    expected = trained("model_parallel", 20, tmp_path / "all", *more)
    from_theirs = trained("recycle", 20, tmp_path / "from_theirs", f"resume={theirs}", *more)
    assert difference(from_theirs, expected) < TOLERANCE
    if form == "file":
        from_ours = trained("model_parallel", 20, tmp_path / "from_ours", f"resume={ours}")
        assert difference(from_ours, expected) < TOLERANCE
