"""Starts two workers, says when they work and which processes they are, and waits: ``local_workers_script.py``."""

import os
import time

from lightning_recycle.launch.worker_group import LocalWorkerGroup


def work(_: None) -> None:
    print(os.getpid(), flush=True)
    time.sleep(600.0)


if __name__ == "__main__":
    with LocalWorkerGroup(work, None) as group:
        for name in ("first", "second"):
            group.start(None, name)
        time.sleep(600.0)
