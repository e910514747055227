"""Starts two workers, says when they work and which processes they are, and waits: ``local_workers_script.py``."""

import os
import time

from lightning_recycle.launch.local_workers import Crew


def work(_: None) -> None:
    print(os.getpid(), flush=True)
    time.sleep(600.0)


if __name__ == "__main__":
    with Crew(work, None) as crew:
        for name in ("first", "second"):
            crew.start(None, name)
        time.sleep(600.0)
