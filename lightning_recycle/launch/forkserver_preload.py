"""Preload of the fork server: imports and a signal handler for all processes that it forks.

A process that hangs while it imports the user's script has run none of this package's code. On SIGUSR2 it writes its
stacks to stderr all the same; the launching process sends that to a worker that it is about to give up.

The slow imports are done without the garbage collector, which finds nothing in them and takes a sixth of the time. What
they made is frozen: workers neither look through it nor copy its pages for that.
"""

import faulthandler
import gc
import importlib
import signal

if hasattr(faulthandler, "register"):
    faulthandler.register(signal.SIGUSR2)

gc.disable()
try:
    for _name in ("lightning_recycle.strategy", "lightning_recycle.launch.worker_process"):
        importlib.import_module(_name)
    gc.freeze()
finally:
    gc.enable()
