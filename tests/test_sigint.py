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
    before = f"{__file__}::{test_ctrl_c_interrupts_as_a_terminal_has_it.__name__}"
    ignoring = ["sh", "-c", 'trap "" INT; exec "$@"', "sh"]
    command = [*ignoring, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", before]
    done = completed(command)
    assert done.returncode == 0, done.stdout
