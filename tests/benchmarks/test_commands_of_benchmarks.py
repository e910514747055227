"""Benchmarks that run as commands: of devices, tiny and on the processor, and of the control plane."""

import re
import sys
from pathlib import Path

import pytest
from support.scripts import completed

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run(name: str, *arguments: str) -> str:
    command = [sys.executable, str(BENCHMARKS / name), *arguments]
    done = completed(command, timeout=280)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


@pytest.mark.long
def test_what_is_measured_on_the_processor_says_that_it_is_nothing_of_a_device():
    shown = run("gpu.py", "--device", "cpu", "--quick")
    assert shown.count("NOT figures of a GPU") == 2
    could_not = set(re.findall(r"^could not run: ([^:]+):", shown, re.MULTILINE))
    assert could_not == {"NCCL", "MFU", "memory peaks"}


@pytest.mark.long
@pytest.mark.parametrize("workers", [2, 3])
def test_groups_of_torch_connect_are_aborted_and_connect_without_the_worker_that_was_killed(workers):
    shown = run("process_groups.py", "--device", "cpu", "--workers", str(workers))
    assert "NOT figures of a GPU" in shown
    counts = {"connected": workers, "aborted": workers - 1, "connected again": workers - 1 if workers > 2 else 0}
    assert {what: len(re.findall(rf": {what}, s: ", shown)) for what in counts} == counts


@pytest.mark.long
def test_without_a_device_nothing_is_measured_and_nothing_fails():
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a device")
    assert "there is no CUDA device" in run("gpu.py")


@pytest.mark.long
def test_the_control_plane_of_a_small_grid_is_measured():
    shown = run("control_plane.py", "--workers", "16")
    assert re.search(r"^ +16 .*\d\.\d{3}", shown, re.MULTILINE), shown
