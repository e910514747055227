"""Payloads from device to device, by NCCL.

Concept: one thread per generation, the *courier*, owns everything of NCCL: it connects the communicators, hears and
tells notes over plain links to the neighbours, and launches what :mod:`~lightning_recycle.runtime.payloads` says. So no
call of NCCL is made by two threads at a time, a send leaves although the main thread is computing, and an abort is not
held up by whatever the main thread waits for. The main thread hands over what it wants, and waits on the processor
until a payload is there: nothing that an aborted transfer has left behind is ever computed with.

Contract: as :class:`~lightning_recycle.runtime.transports.Transport`. With a worker that has no device of its own, or
whose links cannot be had, payloads go by Gloo; both sides decide that from what both have published. Unique ids are
published once per worker and generation.

Not tried with a device: see docs/gpu.md.

Must not know: schedules, and what a payload is for.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import threading
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_recycle.errors import ConfigurationError
from lightning_recycle.runtime.device_streams import Streams
from lightning_recycle.runtime.groups import CommunicationError, Group, GroupPlan, Rendezvous
from lightning_recycle.runtime.nccl import NcclLibrary
from lightning_recycle.runtime.payloads import NOTE_BYTES, Note, Payloads, Receiving, Sending
from lightning_recycle.runtime.transports import Channel, GlooTransport
from lightning_recycle.runtime.wire import Layout

__all__ = ["NcclTransport"]

_LINKS = "payloads"  # name of the group of links
_PACKED_BYTES = 64 * 1024  # what is smaller is there by Gloo before two notes have gone to and fro
_POLL_SECONDS = 50e-6  # between two looks at a device that is busy
_LOOK_SECONDS = 0.1  # between checks of what nobody is woken up for
_ABORT_SECONDS = 10.0  # what an abort may take; it waits for the device, which is asked to stop
_CHANNELS = {channel: number for number, channel in enumerate(Channel)}


class NcclTransport:
    """Payloads by NCCL, and by Gloo where two workers cannot use it.

    Args:
        rank: of this worker.
        device: where payloads are received.
        library: NCCL; None if this worker has none.
        streams: of the device.
        name: of the device; no two workers have one of the same name if each has its own.
        gloo: for workers that cannot be reached by NCCL.
        required: whether that is an error instead.
    """

    def __init__(
        self,
        rank: int,
        device: torch.device,
        library: NcclLibrary | None,
        streams: Streams,
        name: str,
        gloo: GlooTransport,
        required: bool = False,
    ) -> None:
        self._rank, self._device, self._library, self._streams = rank, device, library, streams
        self._name, self._gloo, self._required = name, gloo, required
        self._lock = threading.Lock()
        self._courier: _Courier | None = None

    def plans(self, ranks: tuple[int, ...]) -> Sequence[GroupPlan]:
        return [GroupPlan(_LINKS, ranks, None, meshed=False)]

    def connect(
        self, generation: int, groups: Mapping[str, Group], rendezvous: Rendezvous, cancelled: threading.Event
    ) -> None:
        self._gloo.connect(generation, groups, rendezvous, cancelled)
        links = groups.get(_LINKS, Group()).links
        neighbours = {rank for channel in Channel for rank in groups.get(channel.value, Group()).places} - {self._rank}
        outgoing, incoming = self._agree(generation, links, rendezvous, cancelled)
        if self._required and neighbours - set(outgoing):
            raise ConfigurationError(
                f"Worker {self._rank} cannot exchange payloads by NCCL with {sorted(neighbours - set(outgoing))}: each"
                " worker needs a device of its own, and connections that prove who is at the other end. Give every"
                ' worker its own device (LOCAL_RANK), or choose ReCycleStrategy(transport="auto").'
            )
        for peer in set(links) - set(outgoing):
            links.pop(peer).close()
        if not outgoing:
            return
        assert self._library is not None
        with self._lock:
            if cancelled.is_set():  # and the next generation may be connecting already
                raise CommunicationError(f"Generation {generation} was aborted.")
            payloads = partial(
                Payloads, self._rank, generation, self._library, self._streams, outgoing, incoming, self._device
            )
            self._courier = courier = _Courier(payloads, generation, self._streams, links, cancelled)
        courier.start()
        courier.wait_for(lambda: courier.connected)

    def _agree(
        self,
        generation: int,
        links: Mapping[int, socket.socket],
        rendezvous: Rendezvous,
        cancelled: threading.Event,
    ) -> tuple[dict[int, bytes], dict[int, bytes]]:
        """Unique ids of the communicators to, and from, the workers that have a device of their own."""
        if not links:
            return {}, {}
        ids: dict[int, bytes] = {}
        if self._library is not None:
            ids = {peer: self._library.unique_id() for peer in sorted(links)}
        own = {"device": None if self._library is None else self._name, "ids": {p: i.hex() for p, i in ids.items()}}
        prefix = f"generation{generation}/nccl"
        rendezvous.publish(f"{prefix}{self._rank}", json.dumps(own).encode())
        peers = sorted(links)
        answers = rendezvous.lookup([f"{prefix}{peer}" for peer in peers], cancelled)
        cards: dict[int, Any] = {peer: json.loads(answer) for peer, answer in zip(peers, answers, strict=True)}
        able = [peer for peer in peers if None not in (own["device"], cards[peer]["device"])]
        able = [peer for peer in able if cards[peer]["device"] != own["device"]]
        return (
            {peer: ids[peer] for peer in able},
            {peer: bytes.fromhex(cards[peer]["ids"][str(self._rank)]) for peer in able},
        )

    def _courier_to(self, peer: int) -> _Courier | None:
        courier = self._courier
        return courier if courier is not None and peer in courier.peers else None

    def packed_bytes(self, peer: int) -> int:
        return self._gloo.packed_bytes(peer) if self._courier_to(peer) is None else _PACKED_BYTES

    def send(
        self, channel: Channel, layout: Layout, tensors: Sequence[Tensor], destination: int, tag: int
    ) -> list[tuple[Any, Tensor]]:
        courier = self._courier_to(destination)
        if courier is None:
            return self._gloo.send(channel, layout, tensors, destination, tag)
        payload = [tensor.contiguous() for tensor in tensors if tensor.numel() > 0]
        ready = self._streams.current.record()
        courier.send(Sending(destination, (_CHANNELS[channel], tag), _digest(layout), payload, ready))
        return []  # the courier keeps them

    def receive(self, channel: Channel, layout: Layout, source: int, tag: int) -> list[Tensor | None]:
        courier = self._courier_to(source)
        if courier is None:
            return self._gloo.receive(channel, layout, source, tag)
        tensors = layout.empty(self._device)
        payload = [tensor for tensor in tensors if tensor is not None and tensor.numel() > 0]
        # Memory that is free again for the stream that computes may still be in use there.
        free = self._streams.current.record()
        courier.receive(Receiving(source, (_CHANNELS[channel], tag), _digest(layout), payload, free))
        return tensors

    def abort(self) -> None:
        courier = self._courier
        if courier is not None:
            courier.wake()

    def close(self) -> None:
        """Waits until the device uses none of the generation's tensors any more.

        Raises:
            RuntimeError: if that takes too long. This process cannot go on with its device.
        """
        with self._lock:
            courier, self._courier = self._courier, None
        if courier is not None:
            courier.end()
        self._gloo.close()


class _Courier:
    """The thread that owns the communicators of one generation.

    Args:
        payloads: makes what moves the payloads, given how it tells notes and that something has finished.
        generation: the number of the generation.
        streams: of the device.
        links: the connections to the workers that it exchanges payloads with.
        cancelled: set when the generation is aborted.

    Attributes:
        peers: workers that it exchanges payloads with.
        connected: whether payloads can be exchanged.
    """

    def __init__(
        self,
        payloads: Callable[[Callable[[int, Note], None], Callable[[], None]], Payloads],
        generation: int,
        streams: Streams,
        links: Mapping[int, socket.socket],
        cancelled: threading.Event,
    ) -> None:
        self._generation, self._cancelled, self._streams = generation, cancelled, streams
        self.peers = frozenset(links)
        self._links = {peer: _Link(sock) for peer, sock in links.items()}
        self._payloads = payloads(self._tell, self._notify)
        self._asked: deque[Callable[[], None]] = deque()  # by the main thread
        self._changed = threading.Condition()
        self._failure: Exception | None = None
        self._selector = selectors.DefaultSelector()
        self._alarm, self._bell = socket.socketpair()
        self._bell.setblocking(False)
        self._alarm.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="recycle-courier", daemon=True)

    @property
    def connected(self) -> bool:
        return self._payloads.connected

    def start(self) -> None:
        self._thread.start()

    # the main thread

    def send(self, sending: Sending) -> None:
        """Has ``sending`` sent."""
        self._ask(lambda: self._payloads.send(sending))

    def receive(self, receiving: Receiving) -> None:
        """Returns when ``receiving`` is there.

        Raises:
            CommunicationError: if the generation was aborted, or the sender is gone.
            RuntimeError: if the device is lost.
        """
        self._ask(lambda: self._payloads.receive(receiving))
        self.wait_for(lambda: receiving.finished, receiving.peer)

    def _ask(self, request: Callable[[], None]) -> None:
        self._asked.append(request)
        self.wake()

    def wake(self) -> None:
        """Has the thread look at what has changed."""
        with contextlib.suppress(OSError):  # full, so it has been rung; or closed, as the thread has ended
            self._bell.send(b"!")
        self._notify()

    def wait_for(self, condition: Callable[[], bool], peer: int | None = None) -> None:
        """Waits for ``condition``, as long as it can come to be: worker ``peer`` must be there for it."""
        with self._changed:
            while True:
                # In this order: what an abort ends is not there, whatever the device says.
                there = condition()
                if self._cancelled.is_set():
                    raise CommunicationError(f"Generation {self._generation} was aborted.")
                if self._failure is not None:
                    raise self._failure
                if there:
                    return
                if peer in self._payloads.lost:
                    raise CommunicationError(f"Generation {self._generation}: the link to worker {peer} has ended.")
                self._changed.wait(_LOOK_SECONDS)

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def end(self) -> None:
        """Waits for the end of the thread, once the generation is cancelled."""
        self.wake()
        if self._thread.ident is not None:
            self._thread.join(_ABORT_SECONDS)
        if self._thread.is_alive():
            raise RuntimeError(
                f"CUDA error, presumably: NCCL has not aborted generation {self._generation} within"
                f" {_ABORT_SECONDS:.0f} s, so this process cannot use its device any more."
            )

    # its own thread

    def _run(self) -> None:
        try:
            self._streams.use()
            self._selector.register(self._alarm, selectors.EVENT_READ, None)
            for peer, link in self._links.items():
                self._selector.register(link.socket, selectors.EVENT_READ, peer)
            while not self._cancelled.is_set():
                while self._asked:
                    self._asked.popleft()()
                busy = self._payloads.advance()
                self._listen(_POLL_SECONDS if busy else _LOOK_SECONDS)
        except Exception as error:  # the main thread raises it
            self._failure = error
        finally:
            self._notify()
            self._end()

    def _end(self) -> None:
        try:
            self._payloads.abort()
        except Exception as error:  # of a device that is lost; what failed first says more
            self._failure = self._failure or error
        finally:
            self._selector.close()
            for sock in (self._alarm, self._bell, *(link.socket for link in self._links.values())):
                sock.close()
            self._notify()

    def _listen(self, timeout: float) -> None:
        for link in self._links.values():
            link.flush()
        for key, _ in self._selector.select(timeout):
            if key.data is None:
                self._alarm.recv(4096)
                continue
            link = self._links[key.data]
            for note in link.notes():
                self._payloads.hear(key.data, note)
            if link.ended:
                self._selector.unregister(link.socket)
                self._payloads.lost.add(key.data)
                self._notify()

    def _tell(self, peer: int, note: Note) -> None:
        self._links[peer].put(note)


class _Link:
    """Notes over a connection that does not block."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self.ended = False
        self._outgoing, self._incoming = bytearray(), bytearray()

    def put(self, note: Note) -> None:
        self._outgoing += note.encode()
        self.flush()

    def flush(self) -> None:
        """Sends what it can. What is left is sent with the next look, since notes never fill a connection for long."""
        if not self._outgoing or self.ended:
            return
        try:
            del self._outgoing[: self.socket.send(self._outgoing)]
        except BlockingIOError:
            pass
        except OSError:  # reading tells
            self._outgoing.clear()

    def notes(self) -> list[Note]:
        """What has come."""
        try:
            data = self.socket.recv(64 * 1024)
        except BlockingIOError:
            return []
        except OSError:  # ended by the other side, or cut off by an abort
            data = b""
        self.ended = not data
        self._incoming += data
        whole = len(self._incoming) // NOTE_BYTES * NOTE_BYTES
        notes, self._incoming = self._incoming[:whole], self._incoming[whole:]
        return [Note.decode(bytes(notes[start : start + NOTE_BYTES])) for start in range(0, whole, NOTE_BYTES)]


def _digest(layout: Layout) -> int:
    return zlib.crc32(layout.header(packed=False))
