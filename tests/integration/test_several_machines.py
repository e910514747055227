"""Workers that are started by somebody else, on two machines: two network namespaces, joined by a cable of their own.

Every command that touches the network names one of the two namespaces: nothing is changed outside them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from outside_worker import Slow
from support import GLOBAL_BATCH, dataset, difference, plain_loop

HERE = Path(__file__).parent
STEPS = 30
PORT = 29417
pytestmark = pytest.mark.timeout(180)


def ip(*arguments: str) -> None:
    assert arguments[0] == "netns" or arguments[0] == "-n", "never the machine's own network"
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=20)


class Machine:
    """A network namespace and the processes that a test starts in it."""

    def __init__(self, name: str, address: str) -> None:
        self.name, self.address = name, address
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, *command: str, **environment: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.name, *command],
            env={
                **os.environ,
                "RECYCLE_KEY": "a secret",
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


@pytest.fixture
def machines() -> Iterator[tuple[Machine, Machine]]:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    pair = tuple(Machine(f"recycle{os.getpid()}{letter}", f"10.77.13.{i}") for i, letter in enumerate("ab", 1))
    a, b = pair
    made: list[Machine] = []
    try:
        for machine in pair:
            try:
                ip("netns", "add", machine.name)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"no network namespaces here: {error.stderr!r}")
            made.append(machine)
        ip("-n", a.name, "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", b.name)
        for machine in pair:
            ip("-n", machine.name, "addr", "add", f"{machine.address}/24", "dev", "cable")
            ip("-n", machine.name, "link", "set", "cable", "up")
            ip("-n", machine.name, "link", "set", "lo", "up")
        yield a, b
    finally:
        for machine in made:
            machine.kill()
            ip("netns", "delete", machine.name)


def coordinator(machine: Machine, runs: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "lightning_recycle.resilience.standalone", "--listen", f"{machine.address}:{PORT}"]
    grid = ["--pipelines", "2", "--stages", "2", "--microbatches", "6", "--start-timeout", "40"]
    process = machine.start(*command, *grid, "--runs", str(runs))
    assert process.stdout is not None
    while "listening" not in process.stdout.readline():
        assert process.poll() is None
    return process


def worker(machine: Machine, at: str, output: Path, seconds: float) -> subprocess.Popen[str]:
    script = [sys.executable, str(HERE / "outside_worker.py"), str(STEPS), str(seconds), str(output)]
    return machine.start(*script, RECYCLE_COORDINATOR=f"{at}:{PORT}")


def await_step(process: subprocess.Popen[str], step: int) -> None:
    assert process.stdout is not None
    said = []
    for line in process.stdout:
        said.append(line)
        if line.startswith("step ") and int(line.split()[1]) >= step:
            return
    raise AssertionError("".join(said))


def test_the_loss_of_a_whole_machine_changes_nothing(machines: tuple[Machine, Machine], tmp_path: Path) -> None:
    a, b = machines
    served = coordinator(a, runs=2)
    output = tmp_path / "trained.pt"
    mine = [worker(a, a.address, output, 0.2) for _ in range(2)]
    for _ in range(2):
        worker(b, a.address, output, 0.2)
    await_step(mine[0], 8)
    b.kill()
    began = time.monotonic()
    await_step(mine[0], 12)
    assert time.monotonic() - began < 20
    said = [process.communicate(timeout=90)[0] for process in mine]
    assert [process.returncode for process in mine] == [0, 0], "".join(said)
    model = Slow().double()
    weights, metrics = torch.load(output, weights_only=True)
    assert difference(weights, plain_loop(model, dataset(GLOBAL_BATCH * STEPS), STEPS)) < 1e-10
    model.load_state_dict(weights)
    x, y = dataset(20)[:]
    assert metrics["val_loss"] == pytest.approx(float(model.loss(model(x), y)), abs=1e-6)
    assert served.wait(20) == 0
