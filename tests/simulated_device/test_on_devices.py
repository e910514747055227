"""Starts tests in a process that has the simulated device; ``make test-device`` runs all that can run on it."""

import subprocess
import sys
from pathlib import Path

import pytest

from simulated_device import environment, why_not

HERE = Path(__file__).parent
SAMPLE = "operators or (weights or monitored) and replaced or early or first_device or 16-mixed or least_memory"


def test_operators_and_a_sample_of_the_trainings():
    if reason := why_not():
        pytest.skip(f"the simulated device cannot be compiled: {reason}")
    of_tests = environment(SIMULATED_DEVICES_IN_TESTS="1")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", SAMPLE, HERE]
    done = subprocess.run(command, env=of_tests, cwd=HERE.parents[1], stdout=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stdout
