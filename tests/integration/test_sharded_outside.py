"""Members of positions that a cluster manager starts, each a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from outside_member import STEPS
from sharded import plain_loop
from support.scripts import COORDINATOR
from support.training import TOLERANCE
from support.waiting import PATIENCE

from lightning_recycle.control.client import EXIT_LOST_COORDINATOR
from lightning_recycle.control.network.addresses_and_keys import free_port

HERE = Path(__file__).parent


@pytest.mark.long
def test_members_that_are_started_by_hand_and_spares_that_replace_two(tmp_path):
    port = free_port("127.0.0.1")
    environment = {**os.environ, "RECYCLE_KEY": "the key of this test", "OMP_NUM_THREADS": "1"}
    command = [*COORDINATOR, "--runs", "1", "--listen", f"127.0.0.1:{port}"]
    coordinator = subprocess.Popen(command, env=environment)
    environment["RECYCLE_COORDINATOR"] = f"127.0.0.1:{port}"
    worker = [sys.executable, str(HERE / "outside_member.py"), str(tmp_path)]
    workers = [subprocess.Popen(worker, env=environment) for _ in range(6)]
    try:
        statuses = sorted(one.wait(PATIENCE) for one in workers)
        assert coordinator.wait(PATIENCE) == 0
    finally:
        for process in (coordinator, *workers):
            process.kill()
            process.wait()
    # The other member of the lost position goes when it is two steps behind, or with all if the spares come before.
    assert statuses[:5] == [-9, 0, 0, 0, 0]
    assert statuses[5] in (0, EXIT_LOST_COORDINATOR)
    expected = {f"model.{name}": p for name, p in plain_loop(2, steps=STEPS).named_parameters()}
    trained = torch.load(tmp_path / f"step={STEPS}.ckpt", weights_only=True)["state_dict"]
    assert trained.keys() == expected.keys()
    assert max(float((trained[name] - p).detach().abs().max()) for name, p in expected.items()) < TOLERANCE
