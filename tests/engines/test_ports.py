"""Ports at which a worker is reached."""

import errno
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_recycle import ConfigurationError
from lightning_recycle.engines.worker_environment import port_range
from lightning_recycle.runtime.worker_links import Gate, listen

WORKER = {"RECYCLE_COORDINATOR": "10.0.0.1:29400", "RECYCLE_KEY": "a secret of 16 bytes or more"}


def test_a_range_of_ports():
    assert port_range({}) is port_range({"RECYCLE_PORTS": ""}) is None
    assert port_range({"RECYCLE_PORTS": "30000-30100"}) == range(30000, 30101)


@given(st.one_of(st.text(max_size=12).filter(bool), st.sampled_from(["1", "0-5", "7-5", "1-65536", "-5", "5-"])))
def test_what_is_no_range_is_refused(text):
    try:
        found = port_range({"RECYCLE_PORTS": text})
    except ConfigurationError as error:
        assert "30000-30100" in str(error)  # noqa: PT017 - either is right, whatever the text is
    else:
        assert 0 < found[0] <= found[-1] < 65536


def free_ports(count: int) -> range:
    """So many ports in a row that are free now."""
    for first in range(20_000, 30_000, count):
        sockets = []
        try:
            sockets = [socket.create_server(("127.0.0.1", port)) for port in range(first, first + count)]
            return range(first, first + count)
        except OSError as error:
            assert error.errno == errno.EADDRINUSE  # noqa: PT017
        finally:
            for sock in sockets:
                sock.close()
    raise AssertionError("no free ports")


def test_whoever_listens_for_others_keeps_to_the_range_and_says_when_it_is_used_up(monkeypatch):
    ports = free_ports(2)
    monkeypatch.setenv("RECYCLE_PORTS", f"{ports[0]}-{ports[-1]}")
    gates = [Gate("127.0.0.1"), Gate("127.0.0.1")]
    assert {int(gate.address.split()[1]) for gate in gates} == set(ports)
    with pytest.raises(
        ConfigurationError, match=rf"RECYCLE_PORTS={ports[0]}-{ports[-1]}: none of these 2 ports is free"
    ):
        Gate("127.0.0.1")
    gates[0].close()
    with listen("127.0.0.1", 1, ports) as again:
        assert again.getsockname()[1] in ports
    for gate in gates:
        gate.close()
