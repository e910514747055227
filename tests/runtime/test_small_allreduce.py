"""Sums over a mesh of connections: between threads, each of which has the end of a worker."""

import itertools
import socket
import struct
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support.waiting import PATIENCE

from lightning_recycle.runtime.groups_and_transports import _HEADER, SmallAllreduce
from lightning_recycle.runtime.wire import sum_of_bytes


def mesh_of(size: int, timeout: float = PATIENCE) -> tuple[list[SmallAllreduce], dict[tuple[int, int], socket.socket]]:
    """The meshes of ``size`` workers, and the end of each worker of its connection to each other."""
    ends = {}
    for a, b in itertools.combinations(range(size), 2):
        ends[a, b], ends[b, a] = socket.socketpair()
    for end in ends.values():
        end.setblocking(False)
    return [
        SmallAllreduce(rank, {peer: end for (owner, peer), end in ends.items() if owner == rank}, timeout)
        for rank in range(size)
    ], ends


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """What each of ``calls`` returned or raised, in threads of their own."""
    results: list[Any] = [None] * len(calls)

    def run(index: int) -> None:
        try:
            results[index] = calls[index]()
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    return results


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64], ids=str)
def test_everybody_gets_the_same_bits_in_every_sum(size, dtype):
    meshes, _ = mesh_of(size)
    for numel in (1, 0, 66, 20_000, 66):  # the longest is more than a connection holds
        parts = [torch.randn(numel, dtype=torch.float64).mul(1e3 ** (rank - 1)).to(dtype) for rank in range(size)]
        sums = [part.clone() for part in parts]
        assert at_once(*map(partial, (mesh.sum for mesh in meshes), sums)) == [None] * size
        expected = parts[0]
        for part in parts[1:]:
            expected = expected + part
        assert all(torch.equal(total, expected) for total in sums)


def test_whether_a_tensor_is_small_does_not_depend_on_the_worker():
    meshes, _ = mesh_of(3)
    assert {mesh.takes(torch.empty(10)) for mesh in meshes} == {True}
    assert {mesh.takes(torch.empty(10_000_000)) for mesh in meshes} == {False}


@pytest.mark.parametrize("arrives", [0, 5, 300], ids=["nothing", "a part of the header", "a part of the numbers"])
def test_an_end_of_a_connection_ends_a_sum_and_leaves_the_tensor_alone(arrives):
    meshes, ends = mesh_of(3)
    tensor = torch.ones(200)

    def end() -> None:
        ends[1, 0].send(bytes(arrives))
        time.sleep(0.1)
        ends[0, 1].shutdown(socket.SHUT_RDWR)  # as an abort does, in another thread of the same process

    error, _ = at_once(lambda: meshes[0].sum(tensor), end)
    assert isinstance(error, ConnectionError)
    assert torch.equal(tensor, torch.ones(200))


def test_a_sum_without_progress_fails():
    meshes, _ = mesh_of(2, timeout=0.05)
    with pytest.raises(TimeoutError, match=r"0\.05 s"):
        meshes[0].sum(torch.ones(2))


@pytest.mark.parametrize("header", [(1, 8), (0, 4)], ids=["another sum", "another size"])
def test_parts_that_do_not_belong_together_are_an_error(header):
    meshes, ends = mesh_of(2)
    ends[1, 0].send(_HEADER.pack(*header, 0) + struct.pack("=2f", 1, 1))
    tensor = torch.ones(2)
    with pytest.raises(ConnectionError, match=f"sum {header[0]} of {header[1]} bytes"):
        meshes[0].sum(tensor)
    assert tensor.tolist() == [1, 1]


@pytest.mark.parametrize("place", [_HEADER.size, 17], ids=["a number", "the sum in the header"])
def test_a_part_that_changes_on_its_way_is_an_error(place):
    meshes, ends = mesh_of(2)
    message = bytearray(_HEADER.pack(0, 8, sum_of_bytes(struct.pack("=2f", 1, 1))) + struct.pack("=2f", 1, 1))
    message[place] ^= 4
    ends[1, 0].send(message)
    tensor = torch.ones(2)
    with pytest.raises(ConnectionError, match="part of worker 1 is damaged"):
        meshes[0].sum(tensor)
    assert tensor.tolist() == [1, 1]
