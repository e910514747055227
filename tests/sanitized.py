"""Runs tests of a device under NVIDIA's compute-sanitizer, if it is there; part of ``make gpu``.

Its memcheck finds accesses outside of allocated memory, and with an allocator that works in the order of streams
(torch's ``cudaMallocAsync``) also those that race with the allocation or the end of their memory on another stream. It
may run kernels of a process one after the other, for which those of NCCL cannot wait: their tests are left out.

Prints what could not run, and why. The exit status is that of the tests, or 0 where there is nothing to run them with.
"""

import os
import shutil
import subprocess
import sys

TESTS = ["tests/runtime/test_split_backward_on_devices.py", "tests/runtime/test_device_streams.py"]
LEFT_OUT = "host_does_not_wait"  # it is about time
ERRORS_FOUND = 86  # exit status
SECONDS = 1800


def command(sanitizer: str) -> list[str]:
    """Runs the tests under ``sanitizer``."""
    options = ["--tool", "memcheck", "--track-stream-ordered-races", "all", "--target-processes", "all"]
    pytest = ["-m", "pytest", "-q", "-x", "-m", "gpu", "-k", f"not {LEFT_OUT}", *TESTS]
    return [sanitizer, *options, "--error-exitcode", str(ERRORS_FOUND), sys.executable, *pytest]


def main() -> int:
    """Runs them; returns the exit status."""
    import torch

    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None or not torch.cuda.is_available():
        why = "there is no CUDA device" if sanitizer else "it is not installed; it is part of the CUDA toolkit"
        print(f"could not run: compute-sanitizer: {why}")
        return 0
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}
    try:
        status = subprocess.run(command(sanitizer), env=environment, timeout=SECONDS, check=False).returncode
    except subprocess.TimeoutExpired:
        print(f"could not run: compute-sanitizer: its tests were not done after {SECONDS} s")
        return 0
    if status == ERRORS_FOUND:
        print("compute-sanitizer has found errors: see above")
    return status


if __name__ == "__main__":
    sys.exit(main())
