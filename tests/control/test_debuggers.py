"""A worker that somebody debugs is recognised, and looking for a debugger does not harm it."""

import io
import os
import pdb  # noqa: T100 - it is what is looked for
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
from support.waiting import wait_for

from lightning_recycle.control.activity import is_debugged

PATIENCE = 10.0


@pytest.mark.parametrize("how", ["set_trace", "post_mortem"])
def test_a_thread_in_pythons_debugger_is_being_debugged(how: str) -> None:
    read, write = os.pipe()

    def debug() -> None:
        with os.fdopen(read) as commands:
            debugger = pdb.Pdb(stdin=commands, stdout=io.StringIO(), nosigint=True, readrc=False)
            if how == "set_trace":
                debugger.set_trace()
            else:
                try:
                    raise ValueError
                except ValueError as error:
                    debugger.reset()
                    debugger.interaction(None, error.__traceback__)  # type: ignore[arg-type]
            goes_on.wait(PATIENCE)
        sys.settrace(None)

    goes_on = threading.Event()
    thread = threading.Thread(target=debug)
    thread.start()
    with os.fdopen(write, "w") as commands:
        assert wait_for(lambda: is_debugged(thread.ident))
        assert not is_debugged(threading.get_ident())
        commands.write("continue\n" if how == "set_trace" else "quit\n")
        commands.flush()
        if how == "post_mortem":
            assert wait_for(lambda: not is_debugged(thread.ident))
        goes_on.set()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert not is_debugged(thread.ident)


def test_a_process_that_gdb_looks_at_is_being_debugged(tmp_path: Path) -> None:
    """Any process may say that it traces its child; a debugger does nothing else."""
    script = """
        import ctypes, os, time
        from lightning_recycle.control.activity import is_debugged
        child = os.fork()
        if not child:
            assert not is_debugged(None)
            ctypes.CDLL(None).ptrace(0, 0, 0, 0)  # PTRACE_TRACEME
            os._exit(is_debugged(None))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=60)


def test_looking_for_a_debugger_leaves_a_process_running_that_collects_garbage_and_starts_threads() -> None:
    """``sys._current_frames()`` in its place stops Python 3.11.7 in one of three runs."""
    script = """
        import bdb, gc, threading, time
        from lightning_recycle.control.activity import is_debugged

        class Unhurried:
            def __init__(self):
                self.cycle = self
            def __del__(self):
                time.sleep(0)  # lets go of the GIL

        def start_threads():
            while time.monotonic() < end:
                thread = threading.Thread(target=time.sleep, args=(0.0001,))
                thread.start()
                thread.join()

        gc.set_threshold(40, 1, 1)
        end = time.monotonic() + 2
        for _ in range(3):
            threading.Thread(target=start_threads).start()
        looks = 0
        while time.monotonic() < end:
            looks += 1
            Unhurried(), Unhurried()
            held = [[] for _ in range(looks % 40)]  # the next collection is due anywhere in what follows
            is_debugged(threading.main_thread().ident)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=60)


def test_looking_for_a_debugger_leaves_a_process_running_that_clears_what_functions_held() -> None:
    """``faulthandler`` in its place kills Python 3.13.0 at once."""
    script = """
        import bdb, threading, time
        from lightning_recycle.control.activity import is_debugged

        class Unhurried:
            def __del__(self):
                time.sleep(0)  # lets go of the GIL

        def called_by_c(_):
            held = Unhurried()

        def look():
            while time.monotonic() < end:
                assert not is_debugged(threading.main_thread().ident)

        end = time.monotonic() + 2
        threading.Thread(target=look).start()
        while time.monotonic() < end:
            list(map(called_by_c, range(100)))
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=60)
