"""The suite runs in the background of a shell without job control, where every process ignores SIGINT, too."""

import signal
import sys

from support.scripts import completed


def test_ctrl_c_interrupts_as_a_terminal_has_it():
    """Neither this process nor what it starts ignores it: a test that sends it would wait for nothing."""
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    shows = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    assert completed([sys.executable, "-c", shows]).stdout == "True\n"


def test_so_it_is_when_the_suite_was_started_with_sigint_ignored():
    ignoring = ["sh", "-c", 'trap "" INT; exec "$@"', "sh"]
    code = "import test_sigint; test_sigint.test_ctrl_c_interrupts_as_a_terminal_has_it()"
    done = completed([*ignoring, sys.executable, "-c", f"import conftest; {code}"])
    assert done.returncode == 0, done.stderr
    assert completed([*ignoring, sys.executable, "-c", code]).returncode, "without what conftest.py does"
