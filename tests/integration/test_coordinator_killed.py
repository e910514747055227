"""A coordinator that is killed and started again goes on with the run: no step is lost, the weights are exact."""

import time

import pytest
from support.waiting import PATIENCE
from surviving import cluster

from lightning_recycle.control.client import EXIT_LOST_COORDINATOR

pytestmark = pytest.mark.long


def test_kills_at_the_start_in_the_middle_and_while_it_goes_on_from_the_last_one(tmp_path):
    with cluster(tmp_path, 16, 0.1, "validate") as run:
        run.start("--runs", "2")
        for _ in range(3):  # some have a position, others none, and nobody has begun
            time.sleep(1.0)
            run.kill_coordinator()
            run.start_coordinator("--runs", "2")
        for step, pause in ((3, 0.0), (6, 0.4), (9, 0.7), (15, 0.2)):
            run.await_step(step)
            run.kill_coordinator()
            run.start_coordinator("--runs", "2")
            time.sleep(pause)
            run.kill_coordinator()
            run.start_coordinator("--runs", "2")
        run.end()


def test_without_the_file_the_workers_end_and_the_log_says_what_to_do(tmp_path):
    with cluster(tmp_path, 1000, 0.1) as run:
        run.start()
        run.await_step(4)
        run.kill_coordinator()
        run.state.unlink()
        run.start_coordinator()
        codes = [worker.wait(PATIENCE) for worker in run.workers]
        assert codes == [EXIT_LOST_COORDINATOR] * 4, run.words()
        assert "start it again from its newest checkpoint" in run.words()
