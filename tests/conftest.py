"""What every test leaves as it found it, and where scripts that a test starts find :mod:`support`."""

import functools
import gc
import importlib.metadata
import logging
import os
import random
import signal
import tempfile
from collections.abc import Generator, Iterator
from multiprocessing import forkserver
from pathlib import Path

import hypothesis
import pytest
from simulated_device.choice import ON_DEVICES, skip_unsuited
from support.sampling import LONG_SAMPLE, LONGEST, chooses_by_default

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a background job of a script: its children would ignore it too
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Before torch is loaded: by default an idle thread of OpenMP spins, on cores that other tests and their workers need.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# What coordinators keep of runs; not in the home of who runs the tests.
os.environ["XDG_STATE_HOME"] = os.path.join(tempfile.gettempdir(), f"lightning_recycle_tests_{os.getuid()}")
# The coordinator and the members of every run check the state of the protocol after each event.
os.environ["RECYCLE_VALIDATE"] = "1"
os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])

# Each Trainer looks through all installed packages.
importlib.metadata.entry_points = functools.cache(importlib.metadata.entry_points)

_preload = forkserver.set_forkserver_preload


def _preload_with_pytest(names: list[str]) -> None:
    """Classes of test modules make each worker import pytest, a quarter of what the worker of a short run does: the
    fork server does it for all.
    """
    _preload([*names, "pytest", "support.growth", "support.training"])


forkserver.set_forkserver_preload = _preload_with_pytest

# The same examples in every run; `pytest --hypothesis-profile default` draws others.
hypothesis.settings.register_profile("seeded", derandomize=True)
hypothesis.settings.load_profile("seeded")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="run all tests marked long, not a sample of them")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collecting tests imports millions of objects that stay: the garbage collector looks through none of them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None:
        import torch  # not for the tests of what needs none

        if not torch.cuda.is_available():
            pytest.skip("there is no CUDA device")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves a seeded sample of the long tests in a run of many; ``make test-long`` runs all of them.

    The longest files begin first: at the end, nothing would run beside them. A name with an address would differ
    between the processes of pytest-xdist, which then run nothing.
    """
    if unstable := [item.nodeid for item in items if " at 0x" in item.nodeid]:
        raise pytest.UsageError(f"{unstable[0]} is named by an address; give its parameter an id")
    items.sort(key=lambda item: item.path.name not in LONGEST)
    if ON_DEVICES:
        skip_unsuited(items)
    if not chooses_by_default(config):
        return
    long = [item for item in items if item.get_closest_marker("long") and not item.get_closest_marker("exhaustive")]
    sample = set(random.Random(0).sample(sorted(item.nodeid for item in long), min(LONG_SAMPLE, len(long))))
    left = {item for item in long if item.nodeid not in sample}
    items[:] = [item for item in items if item not in left]
    config.hook.pytest_deselected(items=left)


@pytest.fixture(autouse=True, scope="module")
def one_thread(request) -> Iterator[None]:
    """Tiny layers in several threads wait for one another; and sums are in the order of a worker, which has one."""
    if request.path.parent.name not in ("examples", "model", "parity"):
        yield
        return
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def loggers_as_they_were() -> Iterator[None]:
    """Commands, examples, benchmarks and Hydra configure logging; the next test must see all messages all the same."""
    disabled = logging.root.manager.disable
    root = (logging.root.level, list(logging.root.handlers))
    known = {name: (each.level, each.filters[:]) for name, each in _loggers()}
    yield
    logging.disable(disabled)
    logging.root.setLevel(root[0])
    for handler in logging.root.handlers[:]:
        if handler not in root[1] and type(handler).__module__.startswith("logging"):
            logging.root.removeHandler(handler)
    for name, logger in _loggers():
        if name in known:
            level, logger.filters[:] = known[name]
            logger.setLevel(level)
        if name.startswith("lightning_recycle"):
            logger.setLevel(logging.NOTSET)
            logger.propagate, logger.disabled = True, False


def _loggers() -> list[tuple[str, logging.Logger]]:
    named = logging.root.manager.loggerDict.items()
    return [(name, logger) for name, logger in named if isinstance(logger, logging.Logger)]
