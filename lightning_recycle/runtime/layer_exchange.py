"""How the layers that a worker has become others, at a step boundary.

Concept: what a worker gets lies beside what it has until the coordinator has decided: see
:mod:`~lightning_recycle.control.protocol.relayout`. :class:`LayerKeeper` knows what a layer is, and what belongs to it;
this module knows who gives it to whom, and what is decided.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from lightning_recycle.control.client import ControlClient
from lightning_recycle.control.protocol.messages import Cuts, Resume
from lightning_recycle.control.protocol.relayout import Transfer, ranges, transfers
from lightning_recycle.errors import ReCycleError
from lightning_recycle.model.tying import Tie
from lightning_recycle.planning.grid import Grid, Worker
from lightning_recycle.runtime.communicator import Communicator
from lightning_recycle.runtime.holding import Holding
from lightning_recycle.runtime.transfer import receive_object, send_object

__all__ = ["FixedLayers", "LayerKeeper", "LayerMoves"]


class LayerKeeper(Protocol):
    """Gives layers away and takes them up, with all that belongs to them."""

    @property
    def cuts(self) -> Cuts:
        """The layout whose layers this worker has."""

    def ties(self, cuts: Cuts) -> tuple[Tie, ...]:
        """The weights that several stages hold under the layout ``cuts``."""

    def give(self, layers: Iterable[int]) -> Any:
        """These layers, for another worker; they stay here."""

    def take_up(self, cuts: Cuts, given: Sequence[Any]) -> Holding:
        """From now on this worker has the layers of its stage under ``cuts``: those of them that it has, and those that
        others have ``given``.
        """


class FixedLayers:
    """Keeps the layers that a worker has: a :class:`LayerKeeper` of a run in which none move.

    Args:
        ties: the weights that several stages hold.
    """

    cuts: Cuts = ()

    def __init__(self, ties: tuple[Tie, ...]) -> None:
        self._ties = ties

    def ties(self, cuts: Cuts) -> tuple[Tie, ...]:
        return self._ties

    def give(self, layers: Iterable[int]) -> Any:
        raise ReCycleError("This worker cannot give layers away, and was asked to.")

    def take_up(self, cuts: Cuts, given: Sequence[Any]) -> Holding:
        raise ReCycleError("This worker cannot take layers up, and was asked to.")


@dataclass(frozen=True)
class _Held:
    """What this worker has got for the layout ``cuts``."""

    cuts: Cuts
    given: tuple[Any, ...]


class LayerMoves:
    """The changes of one worker's layers.

    Args:
        keeper: has them.
        grid: the grid of the run.
        worker: the worker's position.
        client: the connection to the coordinator.
        communicator: the connection to the other workers.
    """

    def __init__(
        self, keeper: LayerKeeper, grid: Grid, worker: Worker, client: ControlClient, communicator: Communicator
    ) -> None:
        self._keeper, self._grid, self._worker = keeper, grid, worker
        self._client, self._communicator = client, communicator
        self._start = keeper.cuts
        self._held: _Held | None = None

    @property
    def cuts(self) -> Cuts:
        """The layout whose layers this worker has."""
        return self._keeper.cuts

    def ties(self, cuts: Cuts) -> tuple[Tie, ...]:
        return self._keeper.ties(cuts or self._start)

    def partners(self, resume: Resume) -> set[int]:
        """The ranks with which this worker exchanges layers."""
        rank = self._client.rank
        return {other for one in self._transfers(resume) for other in (one.donor, one.receiver) if other != rank}

    def exchange(self, resume: Resume) -> None:
        """Gives others the layers that they lack of the layout ``resume.becomes``, and gets those that this worker
        lacks.

        Raises:
            CommunicationError: if the generation is aborted.
        """
        given = []
        with self._client.waiting("layers of other stages"):
            for one in self._transfers(resume):
                if one.donor == self._client.rank:
                    send_object(self._communicator, self._keeper.give(one.layers), one.receiver)
                else:
                    given.append(receive_object(self._communicator, one.donor))
        self._held = _Held(resume.becomes, tuple(given))

    def _transfers(self, resume: Resume) -> list[Transfer]:
        rank = self._client.rank
        if not resume.becomes:
            return []
        all_of_them = transfers(self._grid, resume.roster, resume.cuts or self._start, resume.becomes)
        return [one for one in all_of_them if rank in (one.donor, one.receiver)]

    def decided(self, cuts: Cuts) -> Holding | None:
        """All have the layout ``cuts`` from now on; what this worker has changed to, if it has. Who joins gets the
        layers of its donor instead.
        """
        held, self._held = self._held, None
        cuts = cuts or self._start
        if cuts == self.cuts:
            return None
        if held is None or held.cuts != cuts:
            raise ReCycleError(f"Worker {self._worker} has no layers for the layout {cuts}: the protocol was violated.")
        with self._client.busy("another layout of the layers"):
            return self._keeper.take_up(cuts, held.given)

    def give_all(self, rank: int) -> None:
        """Gives all layers of this stage to ``rank``, which joins with others."""
        send_object(self._communicator, self._keeper.give(ranges(self.cuts)[self._worker.stage]), rank)

    def take_all(self, donor: int, cuts: Cuts) -> Holding:
        """The counterpart of :meth:`give_all`."""
        with self._client.waiting("the layers of its stage"):
            given = receive_object(self._communicator, donor)
        with self._client.busy("another layout of the layers"):
            return self._keeper.take_up(cuts or self._start, [given])
