"""Runs Python with the simulated device: ``PYTHONPATH=tests python -m simulated_device -m pytest ...``.

Tests that ask for the processor and this package's strategy get simulated devices.
"""

import os
import sys

from simulated_device import environment, why_not

if reason := why_not():
    sys.exit(f"The simulated device cannot be compiled here: {reason}.")
# As tests/conftest.py has it, before torch is loaded.
of_tests = environment(SIMULATED_DEVICES_IN_TESTS="1", OMP_WAIT_POLICY="PASSIVE")
os.execve(sys.executable, [sys.executable, *sys.argv[1:]], of_tests)
