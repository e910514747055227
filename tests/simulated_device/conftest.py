"""Tests on the device run in processes that have it, which :mod:`test_on_devices` starts; here there is only that."""

from simulated_device import is_here

collect_ignore = ["test_on_devices.py"] if is_here() else ["test_operators.py", "test_training.py", "test_mutants.py"]
