"""Messages between workers, over torch's process groups: one object per process.

The connections of a generation (:mod:`~lightning_recycle.runtime.comm.connections`), the values that stages exchange
over them (:mod:`~lightning_recycle.runtime.comm.stage_messages`) and the sums within a stage
(:mod:`~lightning_recycle.runtime.comm.group_sums`). States of workers travel by
:mod:`~lightning_recycle.runtime.comm.state_transfer`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch

from lightning_recycle.runtime.comm.connections import Connections
from lightning_recycle.runtime.comm.group_sums import GroupSums
from lightning_recycle.runtime.comm.groups import CommunicationError, Rendezvous
from lightning_recycle.runtime.comm.stage_messages import StageMessages
from lightning_recycle.runtime.comm.transports import Transport

if TYPE_CHECKING:  # it imports torch's DTensors, which takes long
    from lightning_recycle.runtime.comm.position_mesh import PositionMesh


class Communicator:
    """Messages, sums and connections of one worker.

    Args:
        rank: rank of this worker in the grid.
        host: address at which other workers reach this one.
        device: device of received tensors; tensors on devices other than the CPU are staged through the CPU.
        rendezvous: where workers find each other.
        key: what only the workers of this run know; they prove it to each other before they exchange anything else.
        timeout: limit of any single operation, in seconds.
        transport: what carries payloads, the same kind on all workers; by default Gloo.
        mesh: the mesh of the worker's position, if that has several members.
    """

    def __init__(
        self,
        rank: int,
        host: str,
        device: torch.device,
        rendezvous: Rendezvous,
        key: bytes,
        timeout: float = 1800.0,
        transport: Transport | None = None,
        mesh: PositionMesh | None = None,
    ) -> None:
        self.connections = Connections(rank, host, device, rendezvous, key, timeout, transport, mesh)
        self.messages = StageMessages(self.connections)
        self.sums = GroupSums(self.connections)

    @property
    def device(self) -> torch.device:
        """The device of received tensors."""
        return self.connections.device

    def report_progress_to(self, on_progress: Callable[[], None]) -> None:
        """Has ``on_progress`` called when a part of what takes long has arrived, and while a transport connects."""
        self.connections.on_progress = on_progress

    def report_waits_to(self, waiting: Callable[[str], AbstractContextManager[None]]) -> None:
        """Has ``waiting`` called with a description of what is waited for in the collectives of the position."""
        self.connections.waiting = waiting

    def report_hooks_to(
        self, enters_hook: Callable[[], bool], lose_sibling: Callable[[CommunicationError], None]
    ) -> None:
        """Has ``enters_hook`` called before each collective of the position, which returns whether it must not end with
        the generation, and ``lose_sibling`` when such a one fails.
        """
        self.connections.lose_sibling = lose_sibling
        if self.connections.mesh is not None:
            self.connections.mesh.report_hooks_to(enters_hook)

    def configure(
        self,
        generation: int,
        neighbours: Collection[int],
        stage_roster: Sequence[int],
        tie_rosters: Mapping[tuple[int, ...], Sequence[int]] | None = None,
        check_links: bool = False,
        position: Sequence[int] = (),
    ) -> None:
        """Connects this worker with those that it exchanges messages with, each of whom does the same, and for
        reductions the workers of its stage.

        Args:
            neighbours: ranks of the grid that this worker exchanges messages with; its own does not matter.
            stage_roster: ranks of the workers of its stage, itself included.
            tie_rosters: for the sums of tied gradients, the ranks of the stages that hold a tie, by these stages (this
                worker's only).
            check_links: whether each worker, all or none of them, first checks whether it can reach the others.
            position: with a mesh, the ranks of the members of its position, in order.

        Raises:
            ConfigurationError: if the transport cannot be used with one of them.
            UnreachableError: if it cannot, after :data:`~lightning_recycle.runtime.comm.sockets.CHECK_SECONDS`.
            CommunicationError: if a worker is gone or the generation is aborted meanwhile.
        """
        self.connections.end()
        self.messages.begin_generation()
        self.connections.configure(generation, neighbours, stage_roster, tie_rosters or {}, check_links, position)

    @property
    def parts(self) -> tuple[int, int]:
        """The part of each micro-batch that this worker computes: its number, and how many there are."""
        mesh = self.connections.mesh
        return (0, 1) if mesh is None else mesh.parts

    def exchange(self, numbers: Sequence[float], data: bytes) -> list[tuple[list[float], bytes]]:
        """What the workers that compute the parts of the same micro-batches have given, this one too, in order."""
        mesh = self.connections.mesh
        if mesh is None or self.parts[1] == 1:
            return [(list(numbers), data)]
        with self.connections.translated:
            return mesh.exchange(numbers, data)

    def meet_siblings(self) -> None:
        """Waits for the other members of this worker's position."""
        self.connections.meet_siblings()

    def abort(self, generation: int, in_hook: Collection[int] = ()) -> None:
        """Makes all operations of ``generation`` and earlier ones fail. Callable from any thread, more than once.

        Args:
            in_hook: if all members of the position are among them, its collectives in hooks go on.
        """
        self.connections.abort(generation, in_hook)

    def close(self) -> None:
        """Drops everything. The caller must not be inside an operation."""
        self.connections.end()
        self.messages.begin_generation()
        self.connections.close()
