"""Many tensors on their way from one worker to another."""

from collections import deque
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_recycle.runtime.comm import state_transfer
from lightning_recycle.runtime.comm.communicator import CommunicationError
from lightning_recycle.runtime.comm.state_transfer import PARTS_AT_ONCE, ByteReceiver, ByteSender


class Wire:
    """Both sides' parts: one has arrived when the sender waits for it; a bit of part ``damages`` flips."""

    def __init__(self, damages: int = -1) -> None:
        self.damages = damages
        self.messages = self
        self.sent: deque[bytearray] = deque()
        self.under_way: dict[int, int] = {}  # numbers of parts, and their bytes
        self.most_parts = self.most_bytes = 0

    def send_part(self, part: Tensor, destination: int, number: int, carried: bool) -> tuple[Tensor, Any]:
        assert number % PARTS_AT_ONCE not in {other % PARTS_AT_ONCE for other in self.under_way}
        self.under_way[number] = part.nbytes
        self.most_parts = max(self.most_parts, len(self.under_way))
        self.most_bytes = max(self.most_bytes, sum(self.under_way.values()))
        self.sent.append(bytearray(part.numpy().tobytes()))
        if number == self.damages:
            self.sent[-1][len(self.sent[-1]) // 2] ^= 4
        return part, number

    def await_arrival(self, number: int) -> None:
        del self.under_way[number]

    def post_part(self, part: Tensor, source: int, number: int) -> Tensor:
        return part

    def await_part(self, part: Tensor, source: int, number: int) -> None:
        part.copy_(torch.frombuffer(self.sent.popleft(), dtype=torch.uint8))

    def damaged(self, source: int) -> CommunicationError:
        return CommunicationError(f"damaged by {source}")


@pytest.fixture(autouse=True)
def wires(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_transfer, "_Parts", lambda wire: wire)


TENSORS = [torch.arange(1000), torch.zeros(0), torch.full((3, 5), 2.5), torch.arange(70, dtype=torch.int16)[::2]]


def transferred(wire: Any) -> list[Tensor]:
    sender, receiver = ByteSender(wire, 1), ByteReceiver(wire, 0)
    for tensor in TENSORS:
        sender.put(tensor)
    sender.end()
    found = [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in TENSORS]
    for tensor in found:
        receiver.take(tensor)
    receiver.end()
    return found


@pytest.mark.parametrize("part_bytes", [1 << 20, 100])
def test_all_of_them_arrive(monkeypatch: pytest.MonkeyPatch, part_bytes: int) -> None:
    monkeypatch.setattr(state_transfer, "_PART_BYTES", part_bytes)
    wire = Wire()
    assert all(torch.equal(*pair) for pair in zip(TENSORS, transferred(wire), strict=True))
    assert not wire.under_way
    assert wire.most_parts == (4 if part_bytes > 100 else PARTS_AT_ONCE), "no part waits for the one before"


@pytest.mark.parametrize("most", [50, 300, 1000])
def test_only_so_many_bytes_are_under_way(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(state_transfer, "_PART_BYTES", 100)
    monkeypatch.setattr(state_transfer, "_BYTES_AT_ONCE", most)
    wire = Wire()
    transferred(wire)
    assert wire.most_bytes <= max(most, 8 * 83)  # the sums are one part
    assert wire.most_parts <= max(1, most // 64)


@pytest.mark.parametrize("part", range(4))
def test_what_arrives_otherwise_than_it_was_sent_is_an_error(part: int) -> None:
    with pytest.raises(CommunicationError, match="damaged by 0"):
        transferred(Wire(damages=part))
