"""Workers that are started by somebody else, on two machines: two network namespaces with a cable between them."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from machines import Machine, await_line, coordinator, with_a_cable, worker
from outside_worker import Slow
from support.models import GLOBAL_BATCH, dataset
from support.training import difference, plain_loop
from support.waiting import PATIENCE

STEPS = 30


@pytest.fixture
def machines() -> Iterator[tuple[Machine, Machine]]:
    a, b = Machine("a", "10.77.13.1"), Machine("b", "10.77.13.2")
    with with_a_cable(a, b):
        yield a, b


def seen(pid: int) -> dict[str, Any]:
    """What ``recycle-status`` says of the coordinator with this process id: its user's socket is no network."""
    command = [sys.executable, "-m", "lightning_recycle.control.monitoring.status_command", str(pid), "--json"]
    return dict(json.loads(subprocess.run(command, capture_output=True, check=True, timeout=PATIENCE).stdout))


def import_seconds() -> float:
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import lightning.pytorch"], check=True)
    return time.monotonic() - began


@pytest.mark.long
def test_the_loss_of_a_whole_machine_changes_nothing(machines, tmp_path):
    a, b = machines
    # The second run waits that long for those that are lost: four workers start in it on a machine as busy as now.
    served = coordinator(a, 2, "--start-timeout", str(5 * import_seconds()))
    output = tmp_path / "trained.pt"
    mine = [worker(a, a.address, STEPS, 0.2, output, "validate") for _ in range(2)]
    for _ in range(2):
        worker(b, a.address, STEPS, 0.2, output, "validate")
    await_line(mine[0], "step", 8)
    before = seen(served.pid)
    hosts = [position["host"] for position in before["positions"]]
    assert hosts in ([a.name] * 2 + [b.name] * 2, [b.name] * 2 + [a.name] * 2)  # a pipeline each
    assert (before["phase"], before["step"] >= 6) == ("training", True)
    b.kill()
    began = time.monotonic()
    await_line(mine[0], "step", 12)
    assert time.monotonic() - began < 20
    after = seen(served.pid)
    lost = [position for position in after["positions"] if position["state"] == "lost"]
    assert {(position["host"], position["pid"]) for position in lost} == {
        (position["host"], position["pid"]) for position in before["positions"] if position["host"] == b.name
    }
    assert after["step"] >= 10
    said = [process.communicate(timeout=PATIENCE)[0] for process in mine]
    assert [process.returncode for process in mine] == [0, 0], "".join(said)
    model = Slow().double()
    weights, metrics = torch.load(output, weights_only=True)
    assert difference(weights, plain_loop(model, dataset(GLOBAL_BATCH * STEPS), STEPS)) < 1e-10
    model.load_state_dict(weights)
    x, y = dataset(20)[:]
    assert metrics["val_loss"] == pytest.approx(float(model.loss(model(x), y)), abs=1e-6)
    assert served.wait(PATIENCE) == 0
