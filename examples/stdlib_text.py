"""Used by train_gpt.py and others: the sources of Python's standard library as windows of bytes.

The text depends only on the interpreter: files in sorted order, cut at a bounded number of bytes. It is read in
:meth:`StdlibText.setup`, so workers receive a pickled recipe instead of megabytes.
"""

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

_SKIPPED_DIRECTORIES = frozenset({"__pycache__", "dist-packages", "idle_test", "site-packages", "test", "tests"})


def read_stdlib(max_bytes: int, root: Path | None = None) -> bytes:
    """The first ``max_bytes`` bytes of the Python files below ``root`` (default: the standard library), tests left out.

    Raises:
        FileNotFoundError: There is no Python source below ``root``.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if root is None else root
    text = bytearray()
    for path in _sources(root):
        text += path.read_bytes()
        if len(text) >= max_bytes:
            break
    if not text:
        raise FileNotFoundError(f"no Python source below {root}: this interpreter comes without its library's sources")
    return bytes(text[:max_bytes])


def _sources(directory: Path) -> Iterator[Path]:
    """Python files below ``directory``; sorted by name level by level, which no locale or file system changes."""
    for path in sorted(directory.iterdir()):
        if path.is_dir():
            if path.name not in _SKIPPED_DIRECTORIES:
                yield from _sources(path)
        elif path.suffix == ".py":
            yield path


class ByteWindows(Dataset[tuple[Tensor, Tensor]]):
    """Non-overlapping windows of a text; item i is (input, target), two int64 tensors (context,), one byte apart.

    Raises:
        ValueError: The text is shorter than one window.
    """

    def __init__(self, text: bytes, context: int) -> None:
        if len(text) <= context:
            raise ValueError(f"a text of {len(text)} bytes has no window of context={context} + 1 bytes")
        self.context = context
        self._bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def __len__(self) -> int:
        return (len(self._bytes) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        start = index * self.context
        window = self._bytes[start : start + self.context + 1].long()
        return window[:-1], window[1:]


class StdlibText(L.LightningDataModule):
    """Shuffled windows of the standard library's sources.

    Args:
        context: Bytes per window.
        batch_size: Windows per batch; with ``strategy="recycle"`` that is per pipeline and step.
        max_bytes: Most bytes of text.
        num_workers: Data-loading processes of each worker; 0 loads in the worker itself.
    """

    def __init__(
        self, context: int = 128, batch_size: int = 8, max_bytes: int = 4_000_000, num_workers: int = 0
    ) -> None:
        super().__init__()
        self.context = context
        self.batch_size = batch_size
        self.max_bytes = max_bytes
        self.num_workers = num_workers
        self._train: ByteWindows | None = None

    def setup(self, stage: str) -> None:
        """Read the text, once per process."""
        if self._train is None:
            self._train = ByteWindows(read_stdlib(self.max_bytes), self.context)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        """Batches of (input, target), each (batch, context)."""
        if self._train is None:
            raise RuntimeError("call setup() before train_dataloader()")
        return DataLoader(
            self._train, batch_size=self.batch_size, shuffle=True, drop_last=True, num_workers=self.num_workers
        )
