"""A stage's layers, parameters, gradients and ties, replaced as a unit.

Layers from other stages, got at a step boundary, lie beside the worker's own until the coordinator has decided: see
:mod:`~lightning_recycle.control.protocol.step_commit`. A *tie* is a weight that several stages hold
(:mod:`~lightning_recycle.model.layers`). Its gradient is one sum over the workers of all of them, with the same bits
everywhere; a stage counts as REDUCED after that sum. When a step is run again, a stage that is *ahead*, REDUCED in an
attempt before, gives that sum to the others, so the copies stay equal. The *shadow* has the parameters of the previous
version, with which a stage that is ahead computes while others redo a step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lightning_recycle.control.client import ControlClient
from lightning_recycle.control.protocol.messages import Cuts, Resume
from lightning_recycle.devices import is_accelerator
from lightning_recycle.errors import ReCycleError
from lightning_recycle.model.layers import Tie
from lightning_recycle.planning.grid import Grid, Worker
from lightning_recycle.planning.layer_cuts import Transfer, held_ranges, transfers
from lightning_recycle.runtime.communicator import Communicator, receive_object, send_object
from lightning_recycle.runtime.gradients import GradientBuffers
from lightning_recycle.runtime.stage import Stage
from lightning_recycle.tensor_memory import is_sharded, local_part
from lightning_recycle.torch_internals import foreach_copy_


@dataclass(frozen=True)
class StageBundle:
    """The parts of a worker that change when it gets other layers.

    ``moved_gradients``: those that parameters from other workers held there. ``replicated``: parameters that another
    member of the position holds, too, and counts.
    """

    stage: Stage
    parameters: Sequence[nn.Parameter]
    gradients: GradientBuffers
    ties: StageTies
    moved_gradients: Mapping[nn.Parameter, Tensor] = field(default_factory=dict)
    replicated: tuple[nn.Parameter, ...] = ()

    @property
    def not_counted(self) -> tuple[nn.Parameter, ...]:
        """Parameters whose gradients another stage or member counts in the norm."""
        return (*self.ties.not_counted, *self.replicated)


@dataclass(frozen=True)
class StageTies:
    """The ties between stages of a run, as one worker sees them.

    ``ties``: those of its stage at least, in the same order on all workers of their stages.
    """

    ties: tuple[Tie, ...] = ()
    stage: int = 0
    parameters: Mapping[str, nn.Parameter] = field(default_factory=dict)

    @property
    def copies(self) -> dict[tuple[int, str], str]:
        """By stage and name of each copy, except the owner's, the owner's name."""
        return {copy: tie.copies[0][1] for tie in self.ties for copy in tie.copies[1:]}

    @property
    def tie_stages(self) -> dict[nn.Parameter, tuple[int, ...]]:
        """All stages that hold each of this stage's shared parameters."""
        return {
            self.parameters[name]: tie.stages for tie in self.ties for stage, name in tie.copies if stage == self.stage
        }

    @property
    def not_counted(self) -> tuple[nn.Parameter, ...]:
        """This stage's parameters whose gradients another stage counts in the norm."""
        return tuple(
            self.parameters[name] for tie in self.ties for stage, name in tie.copies[1:] if stage == self.stage
        )

    def givers(self, ahead: Collection[int]) -> dict[tuple[int, ...], int]:
        """For ties that only stages ``ahead`` have reduced: their stages, and the giver.

        The giver broadcasts the sum to the other stages of the tie.
        """
        of_ties = {tie.stages for tie in self.ties if self.stage in tie.stages}
        partly = [stages for stages in of_ties if not set(stages) <= set(ahead)]
        return {stages: min(have) for stages in partly if (have := set(stages).intersection(ahead))}


class Shadow:
    """A copy of ``parameters``, one version old; without values before :meth:`update`.

    Its memory is taken at once. ``on_host``: kept in host instead of device memory, at the cost of a transfer per step.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], on_host: bool = False) -> None:
        self._parameters = list(parameters)
        self._has_shards = any(map(is_sharded, parameters))
        parts = self._parts()
        pinned = on_host and any(is_accelerator(part.device) for part in parts)
        self._copies: list[Tensor] = [
            torch.empty_like(part, device="cpu" if on_host else part.device, pin_memory=pinned) for part in parts
        ]

    def _parts(self) -> list[Tensor]:
        """The parameters, of sharded ones the shards of this process."""
        return [local_part(p).detach() for p in self._parameters] if self._has_shards else [*self._parameters]

    def copies_on(self, device: torch.device) -> list[Tensor]:
        return [copy for copy in self._copies if copy.device.type == device.type]

    @torch.no_grad()
    def update(self) -> None:
        """Copies the current parameters; called right before they change."""
        if self._copies:  # a stage may have layers without parameters only
            foreach_copy_(self._copies, self._parts())

    @torch.no_grad()
    def restore(self) -> None:
        """Restores the parameters of the previous version."""
        if self._copies:
            foreach_copy_(self._parts(), self._copies)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within the block, the parameters hold the values of the previous version."""
        with torch.no_grad():
            newest = [_swap_part(p, copy) for p, copy in zip(self._parameters, self._copies, strict=True)]
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, data in zip(self._parameters, newest, strict=True):
                    _swap_part(parameter, data)


def _swap_part(parameter: nn.Parameter, value: Tensor) -> Tensor:
    """Makes ``value`` this process's part of ``parameter``; returns the old part."""
    part = local_part(parameter).detach()
    if not is_sharded(parameter):
        old, parameter.data = parameter.data, value.to(parameter.device)
        return old
    old = part.clone()
    part.copy_(value)  # a shard stays where it is: FSDP knows it by its memory
    return old


class LayerKeeper(Protocol):
    """Packs layers for other workers and installs theirs, with all of their state."""

    @property
    def cuts(self) -> Cuts:
        """The layout whose layers this worker has."""

    def tied_stages(self, cuts: Cuts) -> Collection[tuple[int, ...]]:
        """The stages that hold the same weights under ``cuts``, also without this one."""

    def pack_layers(self, layers: Iterable[int]) -> Any:
        """These layers and their state, to be sent to another worker."""

    def install_layers(self, cuts: Cuts, received: Sequence[Any]) -> StageBundle:
        """Takes over the layers of its stage under ``cuts``, its own and ``received``."""


class LayerMoves:
    """The changes of one worker's layers; without ``keeper`` they stay."""

    def __init__(
        self,
        keeper: LayerKeeper | None,
        tied: Collection[tuple[int, ...]],
        grid: Grid,
        worker: Worker,
        client: ControlClient,
        communicator: Communicator,
    ) -> None:
        self._layer_keeper, self._tied, self._grid, self._worker = keeper, tied, grid, worker
        self._client, self._communicator = client, communicator
        self._start = self.cuts
        self._received_layers: tuple[Cuts, list[Any]] | None = None  # got for that layout

    @property
    def cuts(self) -> Cuts:
        return () if self._layer_keeper is None else self._layer_keeper.cuts

    @property
    def _required_keeper(self) -> LayerKeeper:
        if self._layer_keeper is None:
            raise ReCycleError(f"Worker {self._worker} cannot give or take layers, and was asked to.")
        return self._layer_keeper

    def tied_stages(self, cuts: Cuts) -> Collection[tuple[int, ...]]:
        return self._tied if self._layer_keeper is None else self._layer_keeper.tied_stages(cuts or self._start)

    def partners(self, resume: Resume) -> set[int]:
        """The ranks with which this worker exchanges layers."""
        rank = self._client.rank
        transfers = self._transfers(resume.becomes, resume.roster)
        return {other for transfer in transfers for other in (transfer.donor, transfer.receiver) if other != rank}

    def exchange(self, resume: Resume) -> None:
        received = []
        with self._client.waiting("layers of other stages"):
            for transfer in self._transfers(resume.becomes, resume.roster):
                if transfer.donor == self._client.rank:
                    layers = self._required_keeper.pack_layers(transfer.layers)
                    send_object(self._communicator, layers, transfer.receiver)
                else:
                    received.append(receive_object(self._communicator, transfer.donor))
        self._received_layers = resume.becomes, received

    def _transfers(self, becomes: Cuts, roster: tuple[int, ...]) -> list[Transfer]:
        """This worker's transfers when ``roster`` changes from its layout to ``becomes``."""
        rank = self._client.rank
        if not becomes:
            return []
        return [t for t in transfers(self._grid, roster, self.cuts, becomes) if rank in (t.donor, t.receiver)]

    def install_layout(self, cuts: Cuts) -> StageBundle | None:
        """Installs the exchanged layers of layout ``cuts``; None if it is the present one."""
        received, self._received_layers = self._received_layers, None
        cuts = cuts or self._start
        if cuts == self.cuts:
            return None
        if received is None or received[0] != cuts:
            raise ReCycleError(f"Worker {self._worker} has no layers for the layout {cuts}: the protocol was violated.")
        with self._client.busy("another layout of the layers"):
            return self._required_keeper.install_layers(cuts, received[1])

    def send_all_layers(self, rank: int) -> None:
        """Sends all layers of this stage to ``rank``, which joins with others; waits."""
        layers = self._required_keeper.pack_layers(held_ranges(self.cuts)[self._worker.stage])
        send_object(self._communicator, layers, rank)

    def receive_all_layers(self, donor: int, cuts: Cuts) -> StageBundle:
        """Waits for what ``donor`` sends by :meth:`send_all_layers`, and installs it."""
        with self._client.waiting("the layers of its stage"):
            layers = receive_object(self._communicator, donor)
        with self._client.busy("another layout of the layers"):
            return self._required_keeper.install_layers(cuts or self._start, [layers])
