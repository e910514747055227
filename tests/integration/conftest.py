"""Fixtures of several modules."""

import pytest
from support.leftovers import no_process_is_left as no_process_is_left

from lightning_recycle.control.network.addresses_and_keys import free_port


@pytest.fixture
def port(monkeypatch) -> int:
    """The port on which the next run of this process listens."""
    port = free_port("127.0.0.1")
    monkeypatch.setenv("RECYCLE_LISTEN", f"127.0.0.1:{port}")
    monkeypatch.setenv("RECYCLE_KEY", "the key of this test")
    return port
