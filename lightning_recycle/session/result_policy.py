"""Transport of the trained weights to the launching process: messages, files, or none.

Concept: the launching process has the trained model after ``fit``. Small ones come in messages through the coordinator.
Of a large one, each stage on the same machine leaves its part in a file that the launching process maps into memory: no
second copy is made of it on the way. Where workers are started by hand, each of them would get the whole model through
the coordinator, so that a large one stays where it is, unless the user wants it: that is what sharded checkpoints are
for.

Contract: all workers of a run decide alike, from what all know.

Must not know: how parts are made and taken.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, TypeAlias

from torch import Tensor

__all__ = ["FILE_BYTES", "LARGE_BYTES", "GatherResult", "Gathering", "Way", "bytes_of"]

GatherResult: TypeAlias = Literal["auto"] | bool

LARGE_BYTES = 1_000_000_000
"""Weights and optimizer states, of all stages together, from which on a result is large for workers elsewhere."""

FILE_BYTES = 50_000_000
"""The same for workers of this machine: files take less memory than messages."""


class Way(Enum):
    """How the result of a run comes home."""

    MESSAGES = "messages"
    FILES = "files"
    STAYS = "stays"


@dataclass(frozen=True)
class Gathering:
    """What decides it.

    Args:
        wanted: the user's option.
        large_bytes: the size from which on a result is large.
        local: whether all workers are on the machine of the launching process.
        folder: where they leave files for it then, to be made by whoever needs it first; None if there is no place.
    """

    wanted: GatherResult = "auto"
    large_bytes: int = LARGE_BYTES
    local: bool = False
    folder: str | None = None

    @property
    def depends_on_size(self) -> bool:
        """Whether :meth:`way` asks for the size."""
        return self.wanted is not False and (self.local or self.wanted == "auto")

    def way(self, size: int) -> Way:
        """How a result of ``size`` bytes comes home."""
        if self.wanted is False:
            return Way.STAYS
        if not self.depends_on_size or size < self.large_bytes:
            return Way.MESSAGES
        return Way.FILES if self.local else Way.STAYS


def bytes_of(values: Iterable[Any]) -> int:
    """The bytes of the tensors among ``values``."""
    return sum(value.nbytes for value in values if isinstance(value, Tensor))
