"""Effects of faults on a process and on numbers."""

import contextlib
import multiprocessing
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from support.waiting import wait_for
from torch import nn

from lightning_recycle.callbacks import Fault, faults
from lightning_recycle.callbacks.faults import WrongArithmetic, flip, flip_in_next_output, flipped
from lightning_recycle.errors import ConfigurationError, InjectedFaultError

SECONDS = 10.0  # more than anything here takes
context: Any = multiprocessing.get_context("fork")


@contextlib.contextmanager
def child(target: Callable[..., None], *args: Any) -> Iterator[BaseProcess]:
    """A process that runs ``target`` and is gone afterwards, whatever it does."""
    process = context.Process(target=target, args=args, daemon=True)
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join(SECONDS)


def heard(pipe: Any) -> Any:
    assert pipe.poll(SECONDS)
    return pipe.recv()


# ---------------------------------------------------------------------- processes that end


def fail_with_all_sorts_of_clean_up(fail: Callable[[], None], path: Path) -> None:
    try:
        fail()
        path.write_text("went on")
    finally:
        path.write_text("cleaned up")


@pytest.mark.parametrize(("fail", "code"), [(faults.EFFECTS["kill"], -signal.SIGKILL), (faults.EFFECTS["exit"], 1)])
def test_the_process_ends_at_once_without_clean_up(fail, code, tmp_path):
    with child(fail_with_all_sorts_of_clean_up, fail, tmp_path / "witness") as process:
        process.join(SECONDS)
        assert process.exitcode == code
    assert not (tmp_path / "witness").exists()


# ---------------------------------------------------------------------- processes that stay


def beat(pipe: Any) -> None:
    while True:
        pipe.send("beat")
        time.sleep(0.02)


def beat_and(fail: Callable[[], None], pipe: Any) -> None:
    threading.Thread(target=beat, args=(pipe,), daemon=True).start()
    fail()
    pipe.send("went on")
    time.sleep(SECONDS)


def drain(pipe: Any) -> list[str]:
    received = []
    while pipe.poll():
        received.append(pipe.recv())
    return received


def test_hang_stops_all_threads_until_the_process_is_continued():
    ours, theirs = context.Pipe()
    with child(beat_and, faults.EFFECTS["hang"], theirs) as process:
        assert wait_for(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)
        drain(ours)
        time.sleep(0.2)
        assert not ours.poll(), "a stopped process sent something"
        os.kill(process.pid, signal.SIGCONT)
        assert wait_for(lambda: "went on" in drain(ours))


def test_deadlock_blocks_the_main_thread_while_others_live():
    ours, theirs = context.Pipe()
    with child(beat_and, faults.deadlock, theirs) as process:
        assert ours.poll(SECONDS)
        time.sleep(0.3)
        received = drain(ours)
        assert received.count("beat") >= 3
        assert "went on" not in received
        assert psutil.Process(process.pid).status() == psutil.STATUS_SLEEPING


def test_a_deadlock_that_nobody_finds_ends_with_an_error(monkeypatch):
    monkeypatch.setattr(faults, "_DEADLOCK_SECONDS", 0.05)
    with pytest.raises(InjectedFaultError, match="not found"):
        faults.deadlock()


# ---------------------------------------------------------------------- partition

CHATTER = 0.02  # seconds between two messages
PACKETS = 2  # that may slip through in a second: without the partition it is 50


def chat(sock: socket.socket, received: list[bytes], size: int = 5) -> None:
    """Sends a line again and again, and notes what arrives."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # as everything does that trains
    sock.settimeout(CHATTER)
    while True:
        with contextlib.suppress(TimeoutError):  # the buffer of the system is full
            sock.send(bytes(size))
        with contextlib.suppress(TimeoutError):
            received.append(sock.recv(1 << 16))


def live_cut_off(server: socket.socket, pipe: Any, size: int) -> None:
    """Talks over a connection, is cut off, opens another one, and reports what still arrives."""
    port = server.getsockname()[1]
    server.close()  # inherited: it is the other side's
    old_lines: list[bytes] = []
    new_lines: list[bytes] = []
    listener = socket.create_server(("127.0.0.1", 0))
    unconnected = socket.socket()
    old = socket.create_connection(("127.0.0.1", port), timeout=SECONDS)
    in_background(chat, old, old_lines, size)
    assert wait_for(lambda: len(old_lines) > 20)
    descriptors = len(os.listdir("/proc/self/fd"))

    faults.partition()
    pipe.send(listener.getsockname()[1])
    kept = len(os.listdir("/proc/self/fd")) - descriptors
    unconnected.settimeout(0.3)
    reached = unconnected.connect_ex(("127.0.0.1", port)) == 0
    new = socket.create_connection(("127.0.0.1", port), timeout=SECONDS)  # cut off within 50 ms
    in_background(chat, new, new_lines)
    time.sleep(0.2)
    old_lines.clear()
    new_lines.clear()
    pipe.send("both are cut off")
    time.sleep(1.0)
    pipe.send((kept, reached, old_lines, new_lines))
    time.sleep(SECONDS)


def in_background(target: Callable[..., None], *args: Any) -> None:
    def run() -> None:
        with contextlib.suppress(OSError):  # the connection is closed at the end of the test
            target(*args)

    threading.Thread(target=run, daemon=True).start()


@pytest.mark.parametrize("size", [5, 20_000], ids=["chatty", "busy"])
def test_partition_drops_everything_both_ways_and_keeps_connections_open(size):
    ours, theirs = context.Pipe()
    old_lines: list[bytes] = []
    new_lines: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server, child(live_cut_off, server, theirs, size):
        server.settimeout(SECONDS)
        old, _ = server.accept()
        in_background(chat, old, old_lines)
        port = heard(ours)
        assert wait_for(lambda: old_lines), "nothing was said before the partition"
        old_lines.clear()
        new, _ = server.accept()
        in_background(chat, new, new_lines)
        assert heard(ours) == "both are cut off"
        new_lines.clear()

        with pytest.raises(TimeoutError):  # nobody reaches what listens there
            socket.create_connection(("127.0.0.1", port), timeout=0.3)
        kept, reached, old_arrived, new_arrived = heard(ours)
        assert (old_arrived, new_arrived) == ([], []), "the partitioned process received something"
        assert not reached, "a socket that was not connected yet could connect"
        assert kept == 0, "the partition keeps descriptors open"
        assert len(old_lines) <= PACKETS
        assert len(new_lines) <= PACKETS
        assert b"" not in old_lines + new_lines, "a connection was closed"
        old.close()
        new.close()


DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
def test_by_default_one_number_doubles_or_halves(dtype):
    tensors = [torch.full((3, 2), 1.5, dtype=dtype), torch.full((4,), 1.5, dtype=dtype).expand(2, 4)[0]]
    assert flip(tensors, None, random.Random(0))
    changed = [float(x) for tensor in tensors for x in tensor.flatten() if float(x) != 1.5]
    assert changed in ([3.0], [0.75])


@pytest.mark.parametrize("dtype", DTYPES)
def test_bit_0_is_one_unit_in_the_last_place_and_the_highest_bit_is_the_sign(dtype):
    tensor = torch.ones(1, dtype=dtype)
    flip([tensor], 0, random.Random(0))
    assert float(tensor) == 1 + torch.finfo(dtype).eps
    flip([tensor], 8 * tensor.element_size() - 1, random.Random(0))
    assert float(tensor) == -1 - torch.finfo(dtype).eps


def test_the_same_fault_flips_the_same_bit():
    one, other = torch.zeros(50), torch.zeros(50)
    flip([one], 5, random.Random("fault"))
    flip([other], 5, random.Random("fault"))
    assert torch.equal(one.view(torch.int32), other.view(torch.int32))
    assert int(one.ne(0).sum()) == 1


def test_what_has_no_floating_point_numbers_stays():
    assert not flip([torch.ones(3, dtype=torch.int64), None, "adam", torch.empty(0)], None, random.Random(0))


def test_a_message_is_copied():
    sent = (torch.ones(4, requires_grad=True), None)
    wrong = flipped(sent, None, random.Random(0))
    assert int((wrong[0] != sent[0]).sum()) == 1
    assert wrong[0].requires_grad
    assert wrong[1] is None


def test_the_next_output_alone_is_wrong():
    layer, value = nn.Linear(3, 3), torch.randn(2, 3)
    right = layer(value)
    flip_in_next_output([layer], None, random.Random(0))
    assert int((layer(value) != right).sum()) == 1
    assert torch.equal(layer(value), right)


def test_every_nth_product_is_wrong_in_forward_and_backward():
    def run() -> tuple[torch.Tensor, torch.Tensor | None]:
        torch.manual_seed(0)
        layer = nn.Linear(3, 3)
        output = layer(torch.randn(2, 3))
        output.sum().backward()
        return output, layer.weight.grad

    right, right_grad = run()
    with WrongArithmetic(2, 0, random.Random(0)):
        output, grad = run()
    assert grad is not None
    assert right_grad is not None
    assert torch.equal(output, right)
    assert int((grad != right_grad).sum()) == 1
    assert torch.allclose(grad, right_grad)


@pytest.mark.parametrize(("arguments", "words"), [
    ({}, ["target=None", "'activation'"]),
    ({"target": "heart"}, ["'heart'", "'gradient'"]),
    ({"target": "parameter", "bit": -1}, ["bit=-1"]),
    ({"target": "parameter", "every": 2}, ["every=2", "matmul"]),
    ({"target": "matmul"}, ["every=None"]),
    ({"target": "matmul", "every": 0}, ["every=0"]),
    ({"target": "activation", "at": "reduce"}, ["at='forward'"]),
    ({"target": "gradient"}, ["at='backward_weight', when='after'"]),
    ({"target": "parameter", "at": "end"}, ["'end' is a point"]),
    ({"kind": "kill", "target": "parameter"}, ["belong to the kind 'bitflip'"]),
])  # fmt: skip
def test_what_makes_no_sense_is_refused(arguments, words):
    with pytest.raises(ConfigurationError) as error:
        Fault(**{"kind": "bitflip", "stage": 0, "pipeline": 0, "step": 1, **arguments})
    assert all(word in str(error.value) for word in words)
