"""Machines for tests: network namespaces with cables of their own, and the processes that a test starts in them.

Every command that touches the network names one of these namespaces: nothing is changed outside them.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from support.scripts import COORDINATOR
from support.waiting import PATIENCE, line_with

HERE = Path(__file__).parent
PORT = 29417


def ip(*arguments: str) -> None:
    assert arguments[0] == "netns" or arguments[0] == "-n", "never the machine's own network"
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=20)


class Machine:
    """A network namespace and the processes that a test starts in it."""

    def __init__(self, letter: str, address: str) -> None:
        self.name, self.address = f"recycle{os.getpid()}{letter}", address
        self.processes: list[subprocess.Popen[str]] = []

    def ip(self, *arguments: str) -> None:
        ip("-n", self.name, *arguments)

    def start(self, *command: str, **environment: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.name, *command],
            env={
                **os.environ,
                "RECYCLE_KEY": "a secret of 16 bytes or more",
                "RECYCLE_NODE": self.name,
                "OMP_NUM_THREADS": "1",
                **environment,
            },
            cwd=HERE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.processes.append(process)
        return process

    def kill(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)
            process.wait(20)


@contextlib.contextmanager
def namespaces(*machines: Machine) -> Iterator[None]:
    """The machines exist within the block, without a cable; skips the test where that is not allowed."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    made: list[Machine] = []
    try:
        for machine in machines:
            try:
                ip("netns", "add", machine.name)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"no network namespaces here: {error.stderr!r}")
            made.append(machine)
            machine.ip("link", "set", "lo", "up")
        yield
    finally:
        for machine in made:
            machine.kill()
            ip("netns", "delete", machine.name)


@contextlib.contextmanager
def with_a_cable(a: Machine, b: Machine) -> Iterator[None]:
    """As :func:`namespaces`, with a ``cable`` between the two."""
    with namespaces(a, b):
        a.ip("link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", b.name)
        for machine in (a, b):
            machine.ip("addr", "add", f"{machine.address}/24", "dev", "cable")
            machine.ip("link", "set", "cable", "up")
        yield


def coordinator(machine: Machine, runs: int, *options: str) -> subprocess.Popen[str]:
    command = [*COORDINATOR, "--listen", f"{machine.address}:{PORT}"]
    process = machine.start(*command, "--start-timeout", str(PATIENCE), "--runs", str(runs), *options)
    await_listening(process)
    return process


def await_listening(process: subprocess.Popen[str]) -> None:
    """Reads until a coordinator says that it listens."""
    line_with(process, lambda line: "listening" in line)


def worker(machine: Machine, at: str, steps: int, seconds: float, output: Path, *options: str) -> subprocess.Popen[str]:
    """A worker of a run of ``steps`` steps of ``seconds`` at least, whose coordinator is ``at`` that address."""
    script = [sys.executable, str(HERE / "outside_worker.py"), str(steps), str(seconds), str(output), *options]
    return machine.start(*script, RECYCLE_COORDINATOR=f"{at}:{PORT}")


def await_line(process: subprocess.Popen[str], word: str, least: int = 0) -> int:
    """Reads until a line says ``word`` and a number of at least ``least``; returns it."""
    found = line_with(process, lambda line: line.startswith(f"{word} ") and int(line.split()[1]) >= least)
    return int(found.split()[1])


def join(hub: Machine, spokes: Sequence[Machine]) -> None:
    """Lays a cable from ``hub`` to each of ``spokes``, and lets it pass on what they have for each other.

    The addresses of the spokes end in .2, in a network each; that of the hub is at their other end.
    """
    for number, spoke in enumerate(spokes):
        network = spoke.address.rpartition(".")[0]
        hub.ip("link", "add", f"cable{number}", "type", "veth", "peer", "name", "cable", "netns", spoke.name)
        hub.ip("addr", "add", f"{network}.1/24", "dev", f"cable{number}")
        spoke.ip("addr", "add", f"{spoke.address}/24", "dev", "cable")
        hub.ip("link", "set", f"cable{number}", "up")
        spoke.ip("link", "set", "cable", "up")
        spoke.ip("route", "add", "default", "via", f"{network}.1")
    forward = ["sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward"]
    if hub.start(*forward).wait(20):
        pytest.skip("no forwarding between network namespaces here")
