"""The remedy for a checkpoint that could not be written fits the cause."""

import errno

import pytest

from lightning_recycle.control.protocol.messages import SaveFailure
from lightning_recycle.session.checkpoint_files import attempt


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (errno.ENOSPC, "Free some space"),
        (errno.EROFS, "writable"),
        (errno.ENOENT, "folder is gone"),
        (errno.ENOTDIR, "A file has"),
        (errno.EIO, ""),
    ],
)
def test_the_remedy_fits_the_cause(code, expected, tmp_path):
    def write() -> None:
        raise OSError(code, "refused")

    failure = attempt(write, tmp_path / "last.ckpt", None)
    assert isinstance(failure, SaveFailure)
    assert expected in failure.remedy
    assert bool(failure.remedy) == bool(expected)
