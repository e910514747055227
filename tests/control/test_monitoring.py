"""A run seen from outside: what the coordinator shows, who serves it, and what strangers can do to that."""

import contextlib
import http.client
import importlib.util
import json
import os
import re
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
from control_plane import ControlPlane, die, listening, together
from support.pipes import without_reader
from support.waiting import PATIENCE, wait_for

from lightning_recycle.control.monitoring import monitor as monitor_module
from lightning_recycle.control.monitoring import status_command
from lightning_recycle.control.monitoring.history import Event
from lightning_recycle.control.monitoring.logs import plain
from lightning_recycle.control.monitoring.monitor import Monitor, Views, served
from lightning_recycle.control.monitoring.status import PositionState, Status
from lightning_recycle.control.network import addresses_and_keys
from lightning_recycle.control.network.addresses_and_keys import free_port
from lightning_recycle.control.options import RecoveryOptions
from lightning_recycle.control.protocol.state import RESULT
from lightning_recycle.errors import ConfigurationError, ControlPlaneError
from lightning_recycle.planning.grid import Grid


def seen(plane: ControlPlane) -> Status:
    """How it is now, not a quarter of a second ago."""
    time.sleep(0.26)
    return plane.coordinator.view().status


def states(status: Status) -> list[str]:
    return [position.state.value for position in status.positions]


# ---------------------------------------------------------------------- what the coordinator shows


def test_a_run_is_seen_from_its_start_to_its_end(plane: ControlPlane) -> None:
    status = seen(plane)
    assert (status.phase, status.generation, status.leader, status.step) == ("starting", -1, None, -1)
    assert states(status) == ["starting"] * 4
    members = plane.members()
    together(*(partial(member.client.commit, 0, b"") for member in members))
    plane.until(lambda: seen(plane).phase == "training")
    status = seen(plane)
    assert (status.generation, status.leader, states(status)) == (0, (0, 1), ["live"] * 4)
    assert {(position.host, position.pid) for position in status.positions} == {(socket.gethostname(), os.getpid())}
    assert status.plan is not None
    assert (status.plan.found_by, status.plan.failed, status.plan.number) == ("made", (), 1)
    together(*(partial(member.client.arrive, RESULT, b"") for member in members))
    plane.until(lambda: seen(plane).phase == "over")
    assert seen(plane).outcome == "Finished"
    plane.close()
    assert plane.coordinator.view().status.outcome == "Finished", "the last view stays"


def test_a_lost_worker_its_cause_and_the_plan_without_it_are_seen_and_shown(
    plane: ControlPlane, runtime: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    members = plane.members()
    die(plane, members[2])
    together(*(member.step for member in (members[0], members[1], members[3])))
    plane.until(lambda: seen(plane).phase == "training" and seen(plane).counts["failures"] == 1)
    status = seen(plane)
    assert states(status) == ["live", "live", "lost", "live"]
    assert status.positions[2].cause == "it was killed by SIGKILL"
    assert status.plan is not None
    assert status.plan.failed == ((1, 0),)
    assert "adaptive pipelining" in status.plan.techniques
    (failure,) = status.failures
    assert (failure.worker, failure.details, failure.pid) == (
        (1, 0),
        {"cause": "it was killed by SIGKILL"},
        os.getpid(),
    )
    assert (status.counts["failures"], states(status).count("live")) == (1, 3)
    assert [event.kind for event in status.events].count("failure") == 1
    assert sum(status.worker_seconds["failed"].values()) > 0
    with shown(plane, http=False):
        assert status_command.main([]) == 0
    output = capsys.readouterr().out
    assert re.search(r"^1 failure, \d+ redone steps?, 0 replacements; \d+\.\d s to recover$", output, re.M)
    assert re.search(r"^  .* ago: worker \(1, 0\) \(process \d+ on .*\): it was killed by SIGKILL$", output, re.M)
    assert re.search(r"^\(1, 0\) +lost ", output, re.M)


def test_spares_and_replacements_are_seen() -> None:
    with ControlPlane() as plane:
        members = plane.members()
        spare = plane.client(None)
        plane.until(lambda: len(seen(plane).spares) == 1)
        assert seen(plane).spares[0].pid == os.getpid()
        die(plane, members[2])
        plane.until(lambda: seen(plane).positions[2].state is PositionState.JOINING)
        status = seen(plane)
        assert (status.spares, status.positions[2].incarnation) == ((), 1)
        assert spare.await_assignment().rank == 2


def test_a_replacement_that_is_being_started_has_no_process_yet() -> None:
    with ControlPlane(recovery=RecoveryOptions(max_restarts=10)) as plane:
        members = plane.members()
        die(plane, members[2])
        plane.until(lambda: plane.started)
        position = seen(plane).positions[2]
        assert (position.state, position.incarnation, position.pid) == (PositionState.JOINING, 1, None)


def test_nothing_is_made_unless_somebody_asks_and_not_more_than_four_times_a_second() -> None:
    made: list[int] = []
    views: Any = Views(lambda: made.append(1) or len(made), lambda: None)  # type: ignore[func-returns-value]
    views.answer()
    assert made == []
    views._wake = views.answer
    assert [views.ask() for _ in range(100)] == [1] * 100
    views.close()
    assert [views.ask() for _ in range(2)] == [2, 2]


def test_a_coordinator_that_does_not_answer_is_an_error_within_its_time() -> None:
    with pytest.raises(ControlPlaneError, match=r"does not answer: it was asked 0\.1 s ago"):
        Views(lambda: 1, lambda: None).ask(0.1)


def test_a_defect_of_who_looks_does_not_end_the_run(plane: ControlPlane, monkeypatch: pytest.MonkeyPatch) -> None:
    plane.members()
    monkeypatch.setattr(plane.coordinator._views, "_make", lambda: 1 // 0)
    with pytest.raises(ControlPlaneError, match="could not say how it is"):
        plane.coordinator.view()
    monkeypatch.undo()

    def is_seen_again() -> bool:
        with contextlib.suppress(ControlPlaneError):  # kept for fifty times what making it took
            return seen(plane).phase == "training"
        return False

    plane.until(is_seen_again)


def test_a_status_is_json_whatever_the_loss_is(plane: ControlPlane) -> None:
    status = replace(seen(plane), loss=float("nan"))
    again = json.loads(json.dumps(plain(status), allow_nan=False))
    assert again["loss"] is None
    assert again["schema"] == 1
    assert again["positions"][3] == {**again["positions"][0], "pipeline": 1, "stage": 1, "rank": 3}


# ---------------------------------------------------------------------- who serves it


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A runtime folder of this test's own, the only place that is looked at. Sockets have no long paths."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setattr(addresses_and_keys, "_folders", lambda: iter([Path(folder) / "runs"]))
        yield Path(folder) / "runs"


def test_a_place_with_too_long_a_path_is_passed_over(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime.mkdir(mode=0o700)
    places = [runtime / ("a" * 120), runtime / "b"]
    monkeypatch.setattr(addresses_and_keys, "_folders", lambda: iter(places))
    with addresses_and_keys.listen_here():
        assert [path.parent for path in addresses_and_keys.sockets()] == [runtime / "b"]


@contextlib.contextmanager
def shown(plane: ControlPlane | None, name: str = "train.py", http: bool = True) -> Iterator[int]:
    """Serves a run; gives the port."""
    monitor = Monitor(name, samples_per_step=12)
    monitor.show(None if plane is None else plane.coordinator.view)
    with served(monitor, ("127.0.0.1", 0) if http else None) as server:
        yield server._listeners[-1].getsockname()[1] if http else 0


def get(port: int, path: str, **headers: str) -> tuple[int, str, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", path, headers=headers)
    response = connection.getresponse()
    return response.status, response.read().decode(), response.headers


def test_page_status_and_probes_are_served(plane: ControlPlane, runtime: Path) -> None:
    plane.members()
    plane.until(lambda: seen(plane).phase == "training")
    with shown(plane) as port:
        code, content, headers = get(port, "/status")
        assert (code, headers["Content-Type"]) == (200, "application/json")
        status = json.loads(content)
        assert (status["name"], status["coordinator"]["pid"]) == ("train.py", os.getpid())
        code, content, headers = get(port, "/")
        assert (code, "<!doctype html>" in content.lower()) == (200, True)
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert get(port, "/healthz")[0] == get(port, "/readyz")[0] == 200
        assert get(port, "/schedule.svg")[0] == 503  # nothing was measured
        assert get(port, "/nothing")[0] == 404
        code, content, _ = get(port, "/status", Host="localhost:1")
        assert code == 200


def test_no_run_is_healthy_and_not_ready(runtime: Path) -> None:
    with shown(None) as port:
        assert get(port, "/healthz")[0] == 200
        assert get(port, "/readyz")[0] == get(port, "/status")[0] == 503
        metrics = get(port, "/metrics")[1].splitlines()
    if importlib.util.find_spec("prometheus_client"):
        assert [line for line in metrics if not line.startswith("#")] == ["recycle_up 0.0"]


def test_only_reading_is_possible(plane: ControlPlane, runtime: Path) -> None:
    with shown(plane) as port:
        for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
            connection.request(method, "/status")
            assert connection.getresponse().status == 501


def test_no_thread_is_left_when_it_has_ended(plane: ControlPlane, runtime: Path) -> None:
    before = set(threading.enumerate())
    for _ in range(20):
        with shown(plane) as port:
            client = socket.create_connection(("127.0.0.1", port))  # accepted just then, and silent
        assert set(threading.enumerate()) <= before
        client.close()


def test_a_page_from_elsewhere_cannot_read_it_through_the_browser(plane: ControlPlane, runtime: Path) -> None:
    """DNS rebinding: its name leads to 127.0.0.1, and the browser sends that name."""
    with shown(plane) as port:
        assert get(port, "/status", Host="attacker.example")[0] == 403
        assert get(port, "/status", Host=f"127.0.0.1:{port}")[0] == 200
        assert get(port, "/status", Host=f"[::1]:{port}")[0] == 200
        assert "Access-Control-Allow-Origin" not in get(port, "/status")[2]


def answers(port: int, path: str = "/status") -> bool:
    try:
        return get(port, path)[0] == 200
    except (ConnectionError, http.client.HTTPException):
        return False


def test_connections_are_bounded_in_number_and_time(
    plane: ControlPlane, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitor_module, "_CONNECTION_SECONDS", 1.0)
    with shown(plane) as port:
        held = [socket.create_connection(("127.0.0.1", port)) for _ in range(monitor_module._MOST_CONNECTIONS)]
        for connection in held:
            connection.sendall(b"GET /sta")
        plane.until(lambda: not answers(port))
        assert status_command.main([]) == 0, "whoever holds the port does not hold this user's socket"
        for connection in held:
            connection.settimeout(10)
            while connection.recv(4096):  # an answer that its request is too slow, or none
                pass
            connection.close()
        plane.until(lambda: answers(port))


def test_a_default_timeout_of_the_users_script_is_none_of_the_server(
    runtime: Path, caplog: pytest.LogCaptureFixture
) -> None:
    socket.setdefaulttimeout(0.05)
    try:
        with served(Monitor("x"), ("127.0.0.1", 0)):
            time.sleep(0.3)
    finally:
        socket.setdefaulttimeout(None)
    assert not caplog.records


def test_an_address_that_is_taken_is_an_error_that_says_so(runtime: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = taken.getsockname()
        reason = r"^RECYCLE_HTTP: A coordinator cannot listen.*another process listens"
        with pytest.raises(ConfigurationError, match=reason), served(Monitor("x"), address):
            pass


def test_another_interface_is_served_with_a_warning(runtime: Path, caplog: pytest.LogCaptureFixture) -> None:
    with served(Monitor("x"), ("0.0.0.0", 0)):
        assert "without authentication" in caplog.text


# ---------------------------------------------------------------------- for this user on this machine


def test_a_run_is_found_without_an_address_and_leaves_nothing(
    plane: ControlPlane, runtime: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status_command.main([]) == 1
    assert "no run of this user" in capsys.readouterr().err
    plane.members()
    with shown(plane, http=False):
        assert stat.S_IMODE(runtime.stat().st_mode) == 0o700
        assert status_command.main([]) == 0
        assert re.match(r"train.py  2 x 2 x 1  \w+  generation 0  step -  4 of 4 workers ", capsys.readouterr().out)
        assert status_command.main(["--watch", str(os.getpid())]) == 2
        assert f"give the process before it: recycle-status {os.getpid()} --watch" in capsys.readouterr().err
        assert status_command.main(["--json", str(os.getpid())]) == 0
        assert json.loads(capsys.readouterr().out)["generation"] == 0
        (listens,) = runtime.glob("*.sock")
        for arguments in ([], ["--json"]):
            assert without_reader(status_command, str(listens), *arguments) == (141, "")
        with shown(plane, "other.py", http=False):
            assert status_command.main([]) == 0
            listed = capsys.readouterr().out
            assert "train.py" in listed
            assert "other.py" in listed
        with shown(None, "not_yet.py", http=False), shown(None, "nor_yet.py", http=False):
            for target in status_command._targets(str(os.getpid()))[1:]:
                with pytest.raises(status_command.NoRun, match=f"^process {os.getpid()}: The run has ended"):
                    target.ask()
        with shown(None, "not_yet.py", http=False):
            assert status_command.main([]) == 0
            output = capsys.readouterr()
            assert "train.py  2 x 2 x 1" in output.out
            assert "The run has ended" in output.err
    assert not runtime.exists()


def test_lines_of_a_pipe_are_whole_and_the_last_one_stands_alone(
    plane: ControlPlane, runtime: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"{'a long name ' * 9}of a script"
    plane.members()
    answers = [1, 1]
    with shown(plane, name, http=False):
        ask = status_command._Target.ask

        def ends_soon(target: Any) -> dict[str, Any]:
            if not answers:
                raise status_command.NoRun("over")
            answers.pop()
            return ask(target)

        monkeypatch.setattr(status_command._Target, "ask", ends_soon)
        assert status_command.main(["--watch", "0.01"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(name in line and line.endswith("s") for line in lines) == 2
    assert lines[-1] == "The run is over."
    assert all(line == line.rstrip() for line in lines)


@pytest.mark.parametrize(
    ("grid", "members", "workers"),
    [
        (Grid(2, 1, 1), 2, ["(0, 0) member 0 leads", "(0, 0) member 1", "(1, 0) member 0", "(1, 0) member 1"]),
        (Grid(2, 2, 1), 1, ["(0, 0)", "(0, 1) leads", "(1, 0)", "(1, 1)"]),
    ],
)
def test_each_process_of_a_position_has_a_row_and_samples_of_its_own(
    grid: Grid, members: int, workers: list[str], runtime: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with ControlPlane(grid, of_position=members) as plane, shown(plane) as port:
        plane.members()
        plane.until(lambda: seen(plane).phase == "training")
        assert status_command.main([f"127.0.0.1:{port}"]) == 0
        rows = capsys.readouterr().out.partition("worker  ")[2].splitlines()[1:]
        metrics = get(port, "/metrics")[1]
    assert [row.partition("  ")[0] for row in rows] == workers
    if "recycle_" in metrics:  # with the extra
        labels = re.findall(r"^recycle_worker_live({.*}) 1.0$", metrics, re.M)
        assert len(set(labels)) == len(workers)
        assert all(("member=" in label) == (members > 1) for label in labels)


def page_in_browser(port: int, folder: Path) -> str:
    """The page's elements in a real browser after three seconds."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("needs chromium")
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}"]
    command += ["--virtual-time-budget=3000", "--dump-dom", f"http://127.0.0.1:{port}/"]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True).stdout


@pytest.mark.long
def test_without_a_run_the_page_waits_and_shows_no_empty_boxes(runtime: Path, tmp_path: Path) -> None:
    with shown(None) as port:
        page = page_in_browser(port, tmp_path)
    assert '<div id="gone" role="alert" class="waits">Waiting for workers</div>' in page
    assert '<main hidden="">' in page


@pytest.mark.long
@pytest.mark.parametrize(
    ("grid", "members", "title", "columns"),
    [
        (Grid(2, 2, 1), 1, "Workers: 2 pipelines (rows) of 2 stages", "2"),
        (Grid(2, 1, 1), 2, "Workers: 2 pipelines (rows) of 2 members", "2"),
        (Grid(1, 2, 1), 2, "Workers: 1 pipeline (rows) of 2 stages of 2 members", "4"),
        (Grid(3, 1, 1), 1, "Workers: 3 pipelines", "auto-fit"),
    ],
)
def test_the_page_has_a_column_for_each_process_of_a_pipeline(
    grid: Grid, members: int, title: str, columns: str, runtime: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = Monitor.status
    monkeypatch.setattr(Monitor, "status", lambda monitor: replace(status(monitor), loss=0.000123456))
    with ControlPlane(grid, of_position=members) as plane, shown(plane) as port:
        plane.members()
        plane.until(lambda: seen(plane).phase == "training")
        page = page_in_browser(port, tmp_path)
    assert re.findall(r'id="grid-title">([^<]*)<', page) == [title]
    assert f"repeat({columns}, " in page
    names = re.findall(r"<b>([^<]*)</b>", page)
    assert len(set(names)) == len(names) == grid.num_workers * members
    assert sum("★" in name for name in names) == 1
    assert re.findall(r'id="loss"[^>]*>([^<]*)<', page) == ["loss 0.0001235"]


def test_watching_waits_for_a_start_and_for_a_run_that_is_too_busy_to_answer(
    plane: ControlPlane, runtime: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plane.members()
    with shown(plane, http=False):
        (target,) = status_command._targets(None)
        status = target.ask()
        looks = iter([[], [], [target]])
        busy = status_command.Busy("process 1 does not answer")
        answers: Any = iter([status_command.Idle("starting."), status, busy, status, status_command.Idle("over")])

        def ask(_: Any) -> dict[str, Any]:
            answer = next(answers)
            if isinstance(answer, Exception):
                raise answer
            return cast(dict[str, Any], answer)

        monkeypatch.setattr(status_command, "_targets", lambda address: next(looks))
        monkeypatch.setattr(status_command._Target, "ask", ask)
        assert status_command.main(["--watch", "0.01"]) == 0
    output = capsys.readouterr()
    assert output.out.count("2 x 2 x 1") == 2
    assert output.out.endswith("The run is over.\n")
    assert output.err.splitlines() == [
        "recycle-status: waiting for a run of this user on this machine",
        "recycle-status: starting; asking again",
        "recycle-status: process 1 does not answer; asking again",
    ]


def test_what_a_killed_process_left_is_removed(runtime: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = "import socket, sys; s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); s.listen()"
    runtime.mkdir(mode=0o700)
    dead = runtime / "1-00.sock"
    subprocess.run([sys.executable, "-c", code, str(dead)], check=True)
    assert dead.exists()
    assert status_command.main([]) == 1
    assert not dead.exists()


@pytest.mark.parametrize("how", ["open", "link"])
def test_a_folder_that_others_can_enter_is_neither_used_nor_read(
    how: str, runtime: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if how == "open":
        runtime.mkdir()
        runtime.chmod(0o755)
    else:
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        runtime.symlink_to(tmp_path / "elsewhere")
    with caplog.at_level("INFO", "lightning_recycle"), served(Monitor("x")) as server:
        assert not server._listeners
        assert "recycle-status will not find this run" in caplog.text
        assert addresses_and_keys.sockets() == []


@pytest.mark.parametrize(
    ("arguments", "status", "reason"),
    [
        (["--watch", "0"], 2, "--watch 0: give a number of seconds, more than 0.\n"),
        (["--watch", "inf"], 2, "--watch inf: give a number of seconds, more than 0.\n"),
        (["--watch", "soon"], 2, "--watch soon: give a number of seconds, more than 0.\n"),
        (["--watch", "host:80"], 2, "--watch host:80: give the address before it: recycle-status host:80 --watch.\n"),
        (["--watch"], 2, "--watch shows one run, and there are 2: give one of the ids"),
        (["127.0.0.1:1"], 1, "(Connection refused): was the run started with --http or RECYCLE_HTTP?"),
        (["99999999"], 1, "no run in process"),
        (["nowhere"], 2, "'nowhere' is not an address: give host:port"),
        (["10.0.0.1:http"], 2, "'10.0.0.1:http' is not an address: give host:port"),
        (["10.0.0.1:99999"], 2, "'10.0.0.1:99999' is not an address: give host:port"),
    ],
)
def test_what_cannot_be_shown_is_refused(
    arguments: list[str], status: int, reason: str, runtime: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with shown(None, http=False), shown(None, "other.py", http=False):
        assert status_command.main(arguments) == status
    assert reason in capsys.readouterr().err


def test_a_server_of_something_else_is_no_coordinator(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:

        def answer() -> None:
            connection, _ = other.accept()
            connection.recv(4096)
            connection.sendall(b"HTTP/1.0 200 OK\r\n\r\n[1, 2]")
            connection.close()

        threading.Thread(target=answer, daemon=True).start()
        assert status_command.main([f"127.0.0.1:{other.getsockname()[1]}"]) == 1
    assert "is not a coordinator" in capsys.readouterr().err


HOSTILE = "\x1b]0;owned\x07<img src=x onerror=alert(1)>[red]\x1b[2J"


def test_what_workers_say_is_shown_and_not_obeyed(
    plane: ControlPlane, runtime: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plane.members()
    monkeypatch.setattr(plane.coordinator._history, "processes", {0: (HOSTILE, 1)})
    plane.coordinator._history.digest.failures.append(Event("failure", 0.0, 0, 0, (0, 0), 0.0, {"cause": HOSTILE}))
    with shown(plane, HOSTILE, http=False):
        assert status_command.main([]) == 0
    out = capsys.readouterr().out
    assert "\x1b]" not in out
    assert "\x1b[2J" not in out
    assert "[red]" in out


# ---------------------------------------------------------------------- metrics


def test_without_the_package_the_metrics_say_what_to_install(
    plane: ControlPlane, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with shown(plane) as port:
        code, content, _ = get(port, "/metrics")
    assert code == 501
    assert "pip install '.[metrics]'" in content


@pytest.mark.parametrize("accept", ["text/plain", "application/openmetrics-text; version=1.0.0"])
def test_the_metrics_are_what_the_package_s_own_parser_reads(plane: ControlPlane, runtime: Path, accept: str) -> None:
    pytest.importorskip("prometheus_client", reason="the extra 'metrics' is not installed")
    from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
    from prometheus_client.parser import text_string_to_metric_families as read_text

    members = plane.members()
    together(*(partial(member.client.commit, 0, b"") for member in members))
    with shown(plane, 'a "name" \\ with\nquotes') as port:
        time.sleep(0.3)
        status = json.loads(get(port, "/status")[1])
        code, content, headers = get(port, "/metrics", Accept=accept)
    assert code == 200
    assert headers["Content-Type"].startswith(accept.partition(";")[0])
    families = list((read_openmetrics if "openmetrics" in accept else read_text)(content))
    samples = {(s.name, *sorted(s.labels.values())): s.value for family in families for s in family.samples}
    assert samples["recycle_workers", "live"] == 4
    assert samples["recycle_worker_live", "1", "1"] == 1
    assert samples["recycle_generation",] == 0
    assert samples["recycle_phase", "training"] == 1
    assert samples["recycle_failures_total",] == 0
    assert len([name for name, *_ in samples if name == "recycle_worker_seconds_total"]) == 9
    assert status["phase"] == "training"


# ---------------------------------------------------------------------- recycle-coordinator


def test_a_standalone_coordinator_is_seen_before_its_first_worker(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    port = free_port("127.0.0.1")
    monkeypatch.setenv("RECYCLE_HTTP", str(port))
    with listening() as (process, _):
        assert wait_for(lambda: answers(port, "/healthz"), pause=0.05)
        assert get(port, "/readyz")[0] == get(port, "/healthz")[0] == 200
        for address in (str(process.pid), f"127.0.0.1:{port}", f"http://localhost:{port}/"):
            assert status_command.main([address, "--json"]) == 1
            assert "No run is going on: it waits for workers." in capsys.readouterr().err
    assert status_command.main([str(process.pid)]) == 1
