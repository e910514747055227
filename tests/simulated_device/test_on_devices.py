"""Starts tests in processes that have the simulated device; ``make test-device`` runs all that can run on it."""

import subprocess
import sys
from pathlib import Path

import pytest

from simulated_device import environment, why_not

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def on_devices() -> dict[str, str]:
    """The environment of a process with the device, which is compiled if it is not yet."""
    if reason := why_not():
        pytest.skip(f"the simulated device cannot be compiled: {reason}")
    return environment(SIMULATED_DEVICES_IN_TESTS="1")


def passes(on_devices: dict[str, str], *arguments: str) -> None:
    """Pytest passes with ``arguments`` in a process that has the device."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, env=on_devices, cwd=HERE.parents[1], stdout=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("file", ["test_operators.py", "test_training.py", "test_mutants.py"])
def test_on_devices(on_devices: dict[str, str], file: str) -> None:
    passes(on_devices, HERE / file)


def test_a_sample_of_what_is_tested_on_the_processor(on_devices: dict[str, str]) -> None:
    passes({**on_devices, "SIMULATED_SAMPLE": "12"}, HERE.parent / "integration")
