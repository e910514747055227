"""What a header says of a value."""

import random

import numpy as np
import pytest
import torch

from lightning_recycle.runtime import wire


def test_a_header_says_which_gradients_are_wanted_back():
    wanted = torch.ones(2, 3, dtype=torch.bfloat16, requires_grad=True)
    mask, tokens = torch.ones(4, dtype=torch.float64), torch.zeros(1, 0, dtype=torch.int64)
    layout = wire.ValueLayout.of((wanted, None, mask, tokens))
    parsed, packed = wire.ValueLayout.parse(layout.header(packed=False))
    assert (parsed, packed) == (layout, False)
    for _ in range(2):  # buffers are reused
        received = parsed.value(parsed.empty(wire.HostMemory(torch.device("cpu")).empty))
        assert [None if t is None else t.requires_grad for t in received] == [True, None, False, False]
    kept = parsed.empty(wire.HostMemory(torch.device("cpu")).empty)
    parsed.value(kept)
    wire.ValueLayout.of((wanted.detach(), None, mask, tokens)).value(kept)
    assert not any(t.requires_grad for t in kept if t is not None), "a buffer may hold another kind of message next"


@pytest.mark.parametrize("size", [1, 7, 8, 9, 64, 1003])
def test_every_flipped_bit_shows(size):
    draw = random.Random(size)
    data = np.frombuffer(draw.randbytes(size), dtype=np.uint8).copy()
    whole = wire.sum_of_bytes(data)
    for bit in draw.sample(range(8 * size), min(100, 8 * size)):
        data[bit // 8] ^= 1 << bit % 8
        assert wire.sum_of_bytes(data) != whole
        data[bit // 8] ^= 1 << bit % 8
    assert 0 < wire.sum_of_bytes(data) == whole


def test_tensors_have_the_sum_of_their_bits_in_order():
    ones, square = torch.ones(3, dtype=torch.bfloat16), torch.randn(5, 7)
    assert wire.sum_of_tensors([ones, None, square.t()]) == wire.sum_of_tensors([ones, square.t().contiguous()])
    assert wire.sum_of_tensors([ones, square]) != wire.sum_of_tensors([square, ones])
    assert wire.sum_of_tensors([torch.empty(0), torch.tensor(True), torch.randn(2, dtype=torch.complex64).conj()]) > 0


@pytest.mark.parametrize("size", [5, 100_000], ids=["packed", "payload"])
def test_a_message_that_changes_on_its_way_is_not_whole(size):
    memory, tensors = wire.HostMemory(torch.device("cpu")), (torch.randn(size), None, torch.arange(3))
    layout = wire.ValueLayout.of(tensors)
    packed = size == 5
    outbox, inbox = wire.SendBuffer(layout, packed, packed, memory), wire.ReceiveBuffer(64 * 1024, memory)
    outbox.pack(tensors)
    outbox.add_sum(tensors)
    sent = outbox.message.numpy()

    def arrived(place: int | None = None, payload: tuple[torch.Tensor | None, ...] = tensors) -> bool:
        inbox.message.numpy()[: len(sent)] = sent
        if place is not None:
            inbox.message.numpy()[place] ^= 4
        return inbox.read_header(lambda layout: 0) and inbox.is_whole(inbox.views if packed else payload)

    assert not arrived(wire.HEADER_BYTES - 20)
    assert arrived()
    assert arrived()
    assert not arrived(3), "a header that has come before is not looked at again"
    assert not arrived(wire.HEADER_BYTES - 3)
    assert arrived()
    if packed:
        assert not arrived(wire.HEADER_BYTES + 7)
    else:
        assert not arrived(payload=(tensors[0] * 2, *tensors[1:]))
