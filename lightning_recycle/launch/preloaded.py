"""Imported by the fork server alone: what each process that it forks can do from its first moment on.

A process that hangs while it imports the user's script has run none of this package's code. On SIGUSR2 it writes its
stacks to stderr all the same; the launching process sends that to a worker that it is about to give up.
"""

import faulthandler
import signal

if hasattr(faulthandler, "register"):
    faulthandler.register(signal.SIGUSR2)
