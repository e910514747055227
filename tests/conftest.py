"""What every test leaves as it found it."""

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def loggers_as_they_were() -> Iterator[None]:
    """Commands, benchmarks and Hydra configure logging; the next test must see the project's messages all the same."""
    disabled = logging.root.manager.disable
    root = (logging.root.level, list(logging.root.handlers))
    yield
    logging.disable(disabled)
    logging.root.setLevel(root[0])
    for handler in logging.root.handlers[:]:
        if handler not in root[1] and type(handler).__module__.startswith("logging"):
            logging.root.removeHandler(handler)
    for name, logger in logging.root.manager.loggerDict.items():
        if name.partition(".")[0] == "lightning_recycle" and isinstance(logger, logging.Logger):
            logger.setLevel(logging.NOTSET)
            logger.propagate, logger.disabled = True, False
