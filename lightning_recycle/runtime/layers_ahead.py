"""Layers that are copied to the workers that will need them, while the training goes on.

Concept: a :class:`LayerCopy` begins with the state of some layers after a step, and goes on with what each later step
of the optimizer has used; both stream to the receiver. When all wait at the step boundary, the receiver needs only what
has not arrived, and makes the steps itself (:meth:`Copier.caught_up`). Whether it has come to the bits that the giver
has, a checksum tells; if not, or if something is missing, it gets the layers whole.

Contract: a copy ahead saves time and decides nothing. It ends with the generation that it was begun in.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

from lightning_recycle.control.protocol.member import Interrupted
from lightning_recycle.control.protocol.messages import Cuts
from lightning_recycle.control.protocol.relayout import Transfer
from lightning_recycle.errors import ReCycleError
from lightning_recycle.runtime.communicator import Communicator
from lightning_recycle.runtime.layer_streams import Incoming, Outgoing, Parcel
from lightning_recycle.runtime.transfer import receive_object, send_object

__all__ = ["Copier", "LayerCopy", "LayersAhead", "give", "take"]

log = logging.getLogger(__name__)

_CONNECT_SECONDS = 60.0  # for all to begin to copy
_MOST_PARCELS = 33  # that lie at a receiver: the layers, and 32 steps


class LayerCopy(Protocol):
    """Some layers of this worker, as they are copied."""

    def rest(self, steps: int) -> Any:
        """What a receiver lacks that has the copy and ``steps`` steps; None if that is not known any more."""

    def end(self) -> None:
        """They are copied no longer."""


class Copier(Protocol):
    """Knows what layers and steps are."""

    def give(self, layers: Iterable[int]) -> Any:
        """These layers, whole."""

    def copy(self, layers: Sequence[int], receivers: int, tell: Callable[[Parcel], None]) -> LayerCopy | None:
        """Begins a copy: ``tell`` gets its beginning at once, and each step of the optimizer from now on. None if there
        is no room for it.
        """

    def caught_up(self, parcels: Sequence[Parcel], rest: Any) -> Any:
        """The layers whose copy has arrived as ``parcels`` and ``rest``, as :meth:`give` gives them. None if they are
        not the same, to the bit.
        """


class LayersAhead:
    """The copies that this worker gives and gets for one layout. Made between two steps.

    Args:
        cuts: the layout.
        rank: of this worker.
        transfers: those of this worker.
        copier: copies its layers.
        communicator: connects it.
        done: called, from another thread, when all that it gets has arrived, or will not.
    """

    def __init__(
        self,
        cuts: Cuts,
        rank: int,
        transfers: Collection[Transfer],
        copier: Copier,
        communicator: Communicator,
        done: Callable[[], None],
    ) -> None:
        self.cuts = cuts
        self._communicator, self._done = communicator, done
        self._outgoing: dict[int, Outgoing] = {}
        self._incoming: dict[int, Incoming] = {}
        self._copies: dict[int, LayerCopy] = {}  # by receiver; some share one
        self._donors = {one.donor for one in transfers if one.receiver == rank}
        self._awaited = set(self._donors)
        self._lock = threading.Lock()
        self._cancelled = threading.Event()  # connecting
        self._has_ended = False
        receivers: dict[tuple[int, ...], dict[int, Outgoing]] = {}  # by layers
        for one in transfers:
            if one.donor == rank:
                receivers.setdefault(one.layers, {})[one.receiver] = Outgoing()
        for layers, outgoing in receivers.items():
            self._outgoing.update(outgoing)
            copy = copier.copy(layers, len(outgoing), _to_all(outgoing.values()))
            if copy is not None:
                self._copies.update(dict.fromkeys(outgoing, copy))
        for receiver in self._outgoing.keys() - self._copies.keys():
            self._outgoing[receiver].close()
        threading.Thread(target=self._connect, name="recycle-layers", daemon=True).start()

    def copy_for(self, receiver: int) -> LayerCopy | None:
        """What ``receiver`` gets."""
        return self._copies.get(receiver)

    def parcels_of(self, donor: int) -> list[Parcel]:
        """What has come from ``donor``."""
        incoming = self._incoming.get(donor)
        return [] if incoming is None else list(incoming.parcels)

    def end(self) -> None:
        """Nothing is copied any more; what has arrived stays."""
        self._cancelled.set()
        for copy in set(self._copies.values()):
            copy.end()
        with self._lock:
            self._has_ended = True
            for outgoing in self._outgoing.values():
                outgoing.close()
            for incoming in self._incoming.values():
                incoming.close()

    def _connect(self) -> None:
        timer = threading.Timer(_CONNECT_SECONDS, self._cancelled.set)
        timer.daemon = True
        timer.start()
        links: Mapping[int, Any] = {}
        try:
            peers = self._donors | self._outgoing.keys()
            links = self._communicator.links("layers", peers, self._cancelled) if peers else {}
        except (Interrupted, ReCycleError, RuntimeError, OSError) as error:
            log.info("Layers are not copied ahead: %s", error)
        finally:
            timer.cancel()
        with self._lock:
            for peer, sock in links.items():
                if self._has_ended:
                    sock.close()
                elif peer in self._outgoing:
                    self._outgoing[peer].start(sock)
                else:
                    self._incoming[peer] = Incoming(sock, _MOST_PARCELS, lambda peer=peer: self._has_begun(peer))  # type: ignore[misc]
            for peer in self._outgoing.keys() - links.keys():
                self._outgoing[peer].close()
        for donor in self._donors - self._incoming.keys():
            self._has_begun(donor)
        if not self._donors:
            self._done()

    def _has_begun(self, donor: int) -> None:
        with self._lock:
            self._awaited.discard(donor)
            is_last = not self._awaited and not self._has_ended
        if is_last:
            self._done()


def _to_all(outgoings: Collection[Outgoing]) -> Callable[[Parcel], None]:
    def tell(parcel: Parcel) -> None:
        for outgoing in outgoings:
            outgoing.put(parcel)

    return tell


# ---------------------------------------------------------------------- at the boundary


def give(
    communicator: Communicator, copier: Copier, layers: Iterable[int], receiver: int, copy: LayerCopy | None
) -> None:
    """Gives ``receiver`` what it lacks of ``layers``; ``copy``: what it may have.

    Raises:
        CommunicationError: if the generation is aborted.
    """
    if copy is not None:
        send_object(communicator, None, receiver)
        steps = receive_object(communicator, receiver)
        rest = None if steps is None else copy.rest(steps)
        send_object(communicator, rest, receiver)
        if rest is not None and receive_object(communicator, receiver):
            return
    send_object(communicator, copier.give(layers), receiver)


def take(communicator: Communicator, copier: Copier, donor: int, parcels: Sequence[Parcel]) -> tuple[Any, bool]:
    """The counterpart of :func:`give`.

    Args:
        communicator, copier: as there.
        donor: who gives.
        parcels: what has come before.

    Returns:
        The layers, and whether they are what has come before and the rest.
    """
    whole = receive_object(communicator, donor)
    if whole is not None:
        return whole, False  # the donor has copied nothing
    send_object(communicator, len(parcels) - 1 if parcels else None, donor)
    rest = receive_object(communicator, donor)
    if rest is not None:
        given = copier.caught_up(parcels, rest)
        send_object(communicator, given is not None, donor)
        if given is not None:
            return given, True
    return receive_object(communicator, donor), False
