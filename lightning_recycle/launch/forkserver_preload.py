"""Preload of the fork server: imports for all processes that it forks.

The slow imports are done without the garbage collector, which finds nothing in them and takes a sixth of the time. What
they made is frozen: workers neither look through it nor copy its pages for that.
"""

import gc
import importlib

gc.disable()
try:
    for _name in ("lightning_recycle.strategy", "lightning_recycle.launch.worker_process"):
        importlib.import_module(_name)
    gc.freeze()
finally:
    gc.enable()
