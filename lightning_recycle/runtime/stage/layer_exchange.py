"""Exchange of layers between stages, at a step boundary.

Concept: layers that a worker gets lie beside those that it has until the coordinator has decided: see
:mod:`~lightning_recycle.control.protocol.layout_change`. :class:`LayerKeeper` knows what a layer is, and what belongs
to it; this module knows which worker gives it to which, and what is decided.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from lightning_recycle.control.client import ControlClient
from lightning_recycle.control.protocol.layout_change import Transfer, ranges, transfers
from lightning_recycle.control.protocol.messages import Cuts, Resume
from lightning_recycle.errors import ReCycleError
from lightning_recycle.planning.grid import Grid, Worker
from lightning_recycle.runtime.comm.communicator import Communicator
from lightning_recycle.runtime.comm.state_transfer import receive_object, send_object
from lightning_recycle.runtime.stage.stage_bundle import StageBundle

__all__ = ["FixedLayers", "LayerKeeper", "LayerMoves"]


class LayerKeeper(Protocol):
    """Gives layers away and takes them up, with all that belongs to them."""

    @property
    def cuts(self) -> Cuts:
        """The layout whose layers this worker has."""

    def tied_stages(self, cuts: Cuts) -> Collection[tuple[int, ...]]:
        """Which stages hold the same weights under the layout ``cuts``, whoever of them this worker's is."""

    def give(self, layers: Iterable[int]) -> Any:
        """These layers, to be sent to another worker."""

    def take_up(self, cuts: Cuts, given: Sequence[Any]) -> StageBundle:
        """From now on this worker has the layers of its stage under ``cuts``: those of them that it has, and those that
        others have ``given``.
        """


class FixedLayers:
    """Keeps the layers that a worker has: a :class:`LayerKeeper` of a run in which none move.

    Args:
        tied_stages: the stages that hold the same weights.
    """

    cuts: Cuts = ()

    def __init__(self, tied_stages: Collection[tuple[int, ...]]) -> None:
        self._tied_stages = tied_stages

    def tied_stages(self, cuts: Cuts) -> Collection[tuple[int, ...]]:
        return self._tied_stages

    def give(self, layers: Iterable[int]) -> Any:
        raise ReCycleError("This worker cannot give layers away, and was asked to.")

    def take_up(self, cuts: Cuts, given: Sequence[Any]) -> StageBundle:
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

    def tied_stages(self, cuts: Cuts) -> Collection[tuple[int, ...]]:
        """Which stages hold the same weights under the layout ``cuts``."""
        return self._keeper.tied_stages(cuts or self._start)

    def partners(self, resume: Resume) -> set[int]:
        """The ranks with which this worker exchanges layers."""
        rank = self._client.rank
        transfers = self._transfers(resume.becomes, resume.roster)
        return {other for one in transfers for other in (one.donor, one.receiver) if other != rank}

    def exchange(self, resume: Resume) -> None:
        """Gives others the layers that they lack of the layout ``resume.becomes``, and gets those that this worker
        lacks.

        Raises:
            CommunicationError: if the generation is aborted.
        """
        given = []
        with self._client.waiting("layers of other stages"):
            for transfer in self._transfers(resume.becomes, resume.roster):
                if transfer.donor == self._client.rank:
                    send_object(self._communicator, self._keeper.give(transfer.layers), transfer.receiver)
                else:
                    given.append(receive_object(self._communicator, transfer.donor))
        self._held = _Held(resume.becomes, tuple(given))

    def _transfers(self, becomes: Cuts, roster: tuple[int, ...]) -> list[Transfer]:
        """Those of this worker when the workers ``roster`` change from its layout to ``becomes``."""
        rank = self._client.rank
        if not becomes:
            return []
        return [one for one in transfers(self._grid, roster, self.cuts, becomes) if rank in (one.donor, one.receiver)]

    def decided(self, cuts: Cuts) -> StageBundle | None:
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

    def take_all(self, donor: int, cuts: Cuts) -> StageBundle:
        """The counterpart of :meth:`give_all`."""
        with self._client.waiting("the layers of its stage"):
            given = receive_object(self._communicator, donor)
        with self._client.busy("another layout of the layers"):
            return self._keeper.take_up(cuts or self._start, [given])
