"""States of other processes, and titles of processes."""

import os
import signal
import subprocess
import sys

import pytest
from support.scripts import completed
from support.waiting import wait_for

from lightning_recycle.processes import process_space, thread_states

pytestmark = pytest.mark.skipif(not process_space(), reason="the system shows no processes")


def test_threads_that_compute_sleep_and_are_stopped_are_told_apart():
    space = process_space()
    command = [sys.executable, "-c", "import sys, time\nexec(sys.argv[1])"]
    with (
        subprocess.Popen([*command, "while True: pass"]) as busy,
        subprocess.Popen([*command, "time.sleep(100)"]) as sleeps,
    ):
        try:
            assert wait_for(lambda: thread_states(busy.pid, space) == "R", 30)
            assert wait_for(lambda: thread_states(sleeps.pid, space) == "S", 30)
            os.kill(busy.pid, signal.SIGSTOP)
            assert wait_for(lambda: thread_states(busy.pid, space) == "T", 30)
            assert thread_states(busy.pid, "of another machine") == ""
        finally:
            busy.kill()
            sleeps.kill()
    assert thread_states(busy.pid, space) == ""


def test_a_process_has_a_name():
    code = (
        "from lightning_recycle.processes import name_process\n"
        "name_process('recycle 1,0')\n"
        "print(open('/proc/self/comm').read())"
    )
    named = completed([sys.executable, "-c", code], check=True)
    assert named.stdout.strip() == "recycle:1,0", "SLURM splits at spaces"
