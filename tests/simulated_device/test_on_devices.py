"""Starts tests in a process that has the simulated device; ``make test-device`` runs all that can run on it."""

import subprocess
import sys
from pathlib import Path

import pytest

from simulated_device import environment, why_not

HERE = Path(__file__).parent


def test_what_is_here_and_a_sample_of_what_is_tested_on_the_processor():
    if reason := why_not():
        pytest.skip(f"the simulated device cannot be compiled: {reason}")
    of_tests = environment(SIMULATED_DEVICES_IN_TESTS="1", SIMULATED_SAMPLE="2")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", HERE, HERE.parent / "integration"]
    done = subprocess.run(command, env=of_tests, cwd=HERE.parents[1], stdout=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stdout
