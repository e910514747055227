"""Gloo's groups over connections that it has not made, in one process."""

import contextlib
import gc
import os
import runpy
import signal
import socket
import struct
from collections.abc import Iterator
from datetime import timedelta

import communicator_team as tasks
import pytest
import torch
from communicator_team import Team
from support.strangers import knock, listening, sequence_numbers
from support.waiting import wait_for
from torch.distributed.distributed_c10d import AllreduceOptions

from lightning_recycle.errors import ConfigurationError
from lightning_recycle.runtime import groups_and_transports as gloo
from lightning_recycle.runtime.groups_and_transports import Device, GroupFactory, UnsupportedError, _with_address


@pytest.fixture(scope="module")
def device() -> Device:
    return Device()


def connected() -> tuple[socket.socket, socket.socket]:
    """The two ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        return ours, server.accept()[0]


def pair(device: Device, ends: tuple[socket.socket, socket.socket]) -> list[object]:
    """The two halves of a group, both in this process."""
    return [device.create_group(rank, 2, {1 - rank: end})[0] for rank, end in enumerate(ends)]


def all_reduce(groups: list[object]) -> list[torch.Tensor]:
    tensors = [torch.full((100_000,), 10.0**rank) for rank in range(len(groups))]
    works = [group.allreduce([tensor], AllreduceOptions()) for group, tensor in zip(groups, tensors, strict=True)]
    for work in works:
        work.wait()
    return tensors


def test_a_group_uses_the_connection_that_it_is_given(device):
    ends = connected()
    names = {end.getsockname() for end in ends}
    first, opened = device.create_group(0, 2, {1: ends[0]})
    second, also = device.create_group(1, 2, {0: ends[1]})
    found = set()
    for descriptor in (*opened, *also):
        with socket.socket(fileno=os.dup(descriptor)) as sock:
            found.add(sock.getsockname())
    assert found == names
    for tensor in all_reduce([first, second]):
        assert torch.equal(tensor, torch.full((100_000,), 11.0))


def test_what_arrives_before_the_group_exists_is_not_lost(device):
    ends = connected()
    early, _ = device.create_group(0, 2, {1: ends[0]})
    sent = torch.arange(10.0)
    sending = early.send([sent], 1, 0)
    late, _ = device.create_group(1, 2, {0: ends[1]})
    received = torch.zeros(10)
    late.recv([received], 0, 0).wait()
    sending.wait()
    assert torch.equal(received, sent)


def test_a_forked_process_does_not_destroy_a_group_that_is_garbage(device):
    """Or it would wait for threads that it has not: a process of a DataLoader, forked after a failure, hung."""
    cycle = [*pair(device, connected())]
    cycle.append(cycle)
    del cycle
    child = os.fork()
    if child == 0:
        gc.collect()
        os._exit(0)
    ended = wait_for(lambda: os.waitpid(child, os.WNOHANG)[0], 10.0)
    if not ended:
        os.kill(child, signal.SIGKILL)
    assert ended


def test_nothing_reaches_the_ports_of_gloo(device):
    ports = {address for address in listening([os.getpid()]) if address[0] == "127.0.0.2"}
    assert ports
    for address in ports:
        for number in sequence_numbers(0, 3):
            assert knock(address, number) is None


def test_an_address_is_replaced_and_nothing_else():
    name, rest = b"machine", b"x" * 126
    info = struct.pack("=Q", 7) + name + struct.pack("=QHH4s", 136, socket.AF_INET, 0, bytes([127, 0, 0, 2]))
    other = _with_address(info + rest, "127.0.0.1", 0x1234)
    assert other == info[:-6] + b"\x12\x34" + bytes([127, 0, 0, 1]) + rest


@pytest.mark.parametrize("info", [
    b"",
    b"\x02",
    bytes(200),
    struct.pack("=QQ", 0, 136) + struct.pack("=H", socket.AF_INET6) + bytes(150),
    struct.pack("=QQ", 0, 136) + struct.pack("=HH4s", socket.AF_INET, 0, bytes([10, 0, 0, 1])) + bytes(150),
], ids=["nothing", "one byte", "zeros", "IPv6", "another address"])  # fmt: skip
def test_an_address_of_another_layout_is_not_guessed_at(info):
    with pytest.raises(UnsupportedError, match="the address that Gloo stores"):
        _with_address(info, "127.0.0.1", 1)


# ---------------------------------------------------------------------- where it is not possible


def test_a_torch_whose_devices_always_connect_at_once_is_not_told_to(monkeypatch):
    class Older:
        """Up to torch 2.6."""

        @staticmethod
        def create_device(hostname: str = "", interface: str = "") -> None:
            """create_device(hostname: str = '', interface: str = '') -> torch._C._distributed_c10d.Device"""
            raise RuntimeError("was called")

    monkeypatch.setattr(torch.distributed, "ProcessGroupGloo", Older)
    older = runpy.run_path(gloo.__file__)
    with pytest.raises(older["UnsupportedError"], match="was called"):
        older["Device"]()


def test_another_transport_of_gloo_is_left_alone(monkeypatch):
    monkeypatch.setenv("GLOO_DEVICE_TRANSPORT", "TCP_TLS")
    with pytest.raises(UnsupportedError, match="GLOO_DEVICE_TRANSPORT is 'TCP_TLS'"):
        Device()


def test_without_filters_workers_say_what_they_need(monkeypatch, tmp_path):
    def refuse(sock: socket.socket) -> None:
        raise OSError(92, "Protocol not available")

    monkeypatch.setattr(gloo, "drop_everything", refuse)
    with pytest.raises(ConfigurationError, match=r"connected here: \[Errno 92\] Protocol not available.* needs Linux"):
        GroupFactory(0, tasks.HOST, tasks.Meeting(str(tmp_path)), tasks.KEY, 1, timedelta(seconds=1))


# ---------------------------------------------------------------------- strangers


@pytest.fixture(scope="module")
def team() -> Iterator[Team]:
    team = Team(3)
    with contextlib.closing(team):
        yield team


GLOO_MESSAGE = struct.pack("=6Q", 48 + (1 << 40), 2, 0, 0, 1 << 40, 0)


@pytest.mark.parametrize("message", [b"", b"x" * 200, GLOO_MESSAGE], ids=["nothing more", "garbage", "a message"])
def test_who_knows_the_next_numbers_of_gloo_takes_nobodys_place(team, message):
    team.regroup(0, 1, 2)
    held = [
        knock(address, number + message)
        for address in listening([member.process.pid for member in team.members])
        for number in sequence_numbers(0, 60)
    ]
    team.regroup(0, 1, 2)
    results = team.run(tasks.all_reduce, 10, torch.float32)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    for sock in held:
        if sock is not None:
            sock.close()
