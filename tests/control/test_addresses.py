"""Where a coordinator listens: names, IPv4 and IPv6, and errors in one line."""

import os
import resource
import socket
from typing import Any

import pytest
from control_plane import KEY, listening, together
from support.pipes import without_reader
from support.thread_client import ThreadClient
from support.waiting import PATIENCE

from lightning_recycle.control.coordinator import standalone as standalone_module
from lightning_recycle.control.coordinator.standalone import allow_descriptors, main
from lightning_recycle.control.network.addresses_and_keys import address_from, http_address, listen_at, shown
from lightning_recycle.control.protocol.messages import RunRequest
from lightning_recycle.errors import ConfigurationError
from lightning_recycle.planning.grid import Grid


def _has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


WANTS = RunRequest("fit", Grid(2, 1, 1), microbatches_given=True)
ipv6 = pytest.mark.skipif(not _has_ipv6(), reason="this machine has no IPv6")


@pytest.mark.parametrize(
    ("text", "address"),
    [("10.0.0.1:29400", ("10.0.0.1", 29400)), ("name.of-it:1", ("name.of-it", 1)), ("[fe80::1]:7", ("fe80::1", 7))],
)
def test_an_address_is_read_and_shown(text: str, address: tuple[str, int]) -> None:
    assert address_from(text, "X") == address
    assert shown(address) == text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("somewhere", "give host:port"),
        (":5", "give host:port"),
        ("host:70000", "the port must be one of 0 to 65535"),
        ("host:\N{SUPERSCRIPT TWO}", "give host:port"),
        ("http://host:80", "give host:port"),
        ("8080", "give host:port"),
        ("x:y:z", "give host:port"),
        ("x:y:5", "give host:port"),
        ("::1:5", r"brackets, as in '\[::1\]:5'"),
    ],
)
def test_what_is_no_address_is_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        address_from(text, "X")


@pytest.mark.parametrize("text", ["99999", "127.0.0.1:99999", "x"])
def test_a_wrong_address_of_the_page_is_shown_as_it_was_given(text: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^RECYCLE_HTTP='{text}': "):
        http_address(text, "RECYCLE_HTTP")


@pytest.mark.parametrize(
    ("name", "given"), [("RECYCLE_HTTP", "RECYCLE_HTTP='x'"), ("Options(status)", "Options(status='x')")]
)
def test_a_port_alone_is_offered_where_it_is_enough(name: str, given: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        http_address("x", name)
    assert str(caught.value) == f"{given}: give host:port, such as '10.0.0.1:8265', or a port."


@pytest.fixture
def resolves(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Names and the addresses that they stand for."""
    names: dict[str, str] = {}
    ask = socket.getaddrinfo

    def answer(host: str, *args: Any, **options: Any) -> Any:
        return ask(names.get(host, host), *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", answer)
    return names


def test_the_name_of_a_machine_that_stands_for_itself_alone_is_refused(resolves: dict[str, str]) -> None:
    """Debian's /etc/hosts says 127.0.1.1 of a machine's own name."""
    resolves["node7"] = "127.0.1.1"
    with pytest.raises(
        ConfigurationError, match=r"node7:29400 could be reached from this machine only: .*127\.0\.1\.1"
    ):
        listen_at(("node7", 29400), 1)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.1.1", "localhost"])
def test_who_wants_this_machine_alone_says_so(host: str) -> None:
    listen_at((host, 0), 1).close()


def test_a_port_in_use_is_an_error_that_says_so() -> None:
    with (
        listen_at(("127.0.0.1", 0), 1) as first,
        pytest.raises(ConfigurationError, match=r"\(Address already in use\): another process listens"),
    ):
        listen_at(first.getsockname(), 1)


def test_an_address_of_another_machine_is_an_error_that_says_so() -> None:
    with pytest.raises(ConfigurationError, match=r"this machine has no address 192\.0\.2\.1"):
        listen_at(("192.0.2.1", 0), 1)


@ipv6
def test_all_addresses_are_those_of_ipv4_too() -> None:
    with listen_at(("::", 0), 1) as server:
        port = server.getsockname()[1]
        for host in ("::1", "127.0.0.1"):
            socket.create_connection((host, port), timeout=5).close()


@pytest.mark.parametrize("problem", ["in use", "no name"])
def test_the_command_says_in_one_line_why_it_cannot_listen(
    problem: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RECYCLE_KEY", KEY)
    with listen_at(("127.0.0.1", 0), 1) as other:
        place = shown(other.getsockname()) if problem == "in use" else "no-such-machine.invalid:0"
        assert main(["--listen", place]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"recycle-coordinator: A coordinator cannot listen at {place}")
    assert said.count("\n") == 1


def test_a_coordinator_whose_address_has_no_reader_ends_without_a_traceback() -> None:
    environ = {**os.environ, "RECYCLE_KEY": "a secret of 16 bytes or more"}
    status, said = without_reader(standalone_module, "--listen", "127.0.0.1:0", env=environ, timeout=PATIENCE)
    assert status == 141
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--timeout", "-3"], "--timeout -3: give a number of seconds, more than 0."),
        (["--verify", "2"], "--verify 2: give a share between 0 and 1."),
        (["--split-backward", "yes"], "--split-backward yes: use auto, true or false."),
        (["--min-pipelines", "0"], "--min-pipelines 0: give an integer of at least 1, or null for all."),
        (
            ["--state", "/nonexistent/a"],
            "--state=/nonexistent/a: there is no folder /nonexistent: give another path, or make it with"
            " mkdir -p /nonexistent.",
        ),
        (["--runs", "few"], "--runs few: give an integer of at least 1."),
        (["--http", "nowhere"], "--http='nowhere': give host:port, such as '10.0.0.1:8265', or a port."),
        (["--http", "29400"], "--http and --listen have the same address: give another port."),
        (["--http", "0.0.0.0:29400"], "--http and --listen have the same address: give another port."),
    ],
)
def test_the_command_says_in_one_line_what_was_typed_wrong(
    options: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RECYCLE_KEY", KEY)
    assert main(["--listen", "127.0.0.1:29400", *options]) == 2
    assert capsys.readouterr().err == f"recycle-coordinator: {words}\n"


@ipv6
def test_workers_meet_over_ipv6() -> None:
    with listening("--runs", "1", listen="[::1]:0") as (_, address):
        assert address[0] == "::1"
        clients = [ThreadClient(None, address, KEY.encode(), 0.05, wants=WANTS) for _ in range(2)]
        assert sorted(found.rank for found in together(*(c.await_assignment for c in clients))) == [0, 1]
        assert [client.local_host for client in clients] == ["::1", "::1"]
        for client in clients:
            client.leave()
    assert all(client.exited.wait(15.0) for client in clients)


def test_the_limit_of_descriptors_is_raised_as_far_as_the_system_allows(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    limits = [(1024, 4096)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: limits.append(new))
    allow_descriptors(1000)
    assert limits == [(1024, 4096)]
    allow_descriptors(2256)
    assert limits[-1] == (2256, 4096)
    assert not caplog.records
    allow_descriptors(9000)
    assert limits[-1] == (4096, 4096)
    assert "may open 4096 files and sockets, and needs 9000" in caplog.text
