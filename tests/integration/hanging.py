"""One of four workers hangs while it imports this script: ``hanging.py FILE``, which that one creates."""

import contextlib
import os
import sys
import time

from support.models import Regression
from support.training import committed_steps, exact_fit, failures

from lightning_recycle.control.coordinator import failure_detector

STEPS = 5

failure_detector._LEAST_SECONDS = 2.0
if __name__ != "__main__":
    with contextlib.suppress(FileExistsError):
        os.close(os.open(sys.argv[1], os.O_CREAT | os.O_EXCL))
        time.sleep(600.0)  # the line where it hangs

if __name__ == "__main__":
    run = exact_fit(Regression().double(), 2, 2, max_steps=STEPS)
    assert committed_steps(run) == list(range(STEPS))
    (event,) = [event for event in run.strategy.history if event.kind == "failure"]
    print(len(failures(run)), event.details["cause"])
