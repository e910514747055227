"""Worker processes of this machine, as the launching process holds them."""

import time

import psutil

from lightning_recycle.launch.processes import Crew, LocalWorker

SECONDS = 60.0  # more than anything here takes


def lose(worker: LocalWorker) -> None:
    worker.kill()
    assert worker.describe_exit(SECONDS) == "it was killed by SIGKILL"


def test_workers_that_ended_hold_no_descriptors_while_the_run_goes_on() -> None:
    with Crew(time.sleep, None) as crew:
        survivor = crew.start(SECONDS, "survivor")
        open_descriptors = []
        for _ in range(5):
            worker = crew.start(SECONDS, "lost and replaced")
            open_descriptors.append(psutil.Process().num_fds())
            lose(worker)
            worker.release()
        assert len(set(open_descriptors)) == 1, open_descriptors
        assert survivor.describe_exit(0.0) is None


def test_a_worker_that_somebody_may_still_ask_about_is_kept() -> None:
    with Crew(time.sleep, None) as crew:
        watched, released = crew.start(SECONDS, "watched"), crew.start(SECONDS, "released")
        lose(watched)
        released.release()
        crew.start(SECONDS, "another")
        assert watched.describe_exit(0.0) == "it was killed by SIGKILL"
        assert released.describe_exit(0.0) is None  # it lives
