"""Logs as lines of JSON, with and without a run."""

import json
import os
import socket
import sys

import pytest
from support.scripts import completed

from lightning_recycle.control.coordinator.standalone import main
from lightning_recycle.control.monitoring.logs import JsonFormatter

SCRIPT = """
import logging, sys
from lightning_recycle.control.monitoring.logs import describe_process, install_if_wanted
{before}
install_if_wanted()
describe_process(lambda: {{"rank": 3, "generation": 2}})
log = logging.getLogger("lightning_recycle.control.test")
log.debug("not shown")
log.info('a "text" of %d\\nlines', 2)
try:
    1 / 0
except ZeroDivisionError:
    log.exception("it failed")
logging.getLogger("another").warning("hello")
import warnings
warnings.warn("careful")
"""


def logged(before: str = "", **environment: str) -> list[str]:
    env = {**os.environ, "RECYCLE_NODE": "n17", **environment}
    command = [sys.executable, "-c", SCRIPT.format(before=before)]
    done = completed(command, env=env, check=True)
    return (done.stdout + done.stderr).splitlines()


@pytest.mark.parametrize("before", ["", "logging.basicConfig(level=logging.INFO)"])
def test_lines_are_json_and_say_who_and_when(before):
    lines = [json.loads(line) for line in logged(before, RECYCLE_LOG="json")]
    assert [line["message"] for line in lines[:3]] == ['a "text" of 2\nlines', "it failed", "hello"]
    assert [line["level"] for line in lines] == ["INFO", "ERROR", "WARNING", "WARNING"]
    loggers = ["lightning_recycle.control.test"] * 2 + ["another", "py.warnings"]
    assert [line["logger"] for line in lines] == loggers
    assert "UserWarning: careful" in lines[3]["message"]
    assert all((line["rank"], line["generation"], line["host"]) == (3, 2, "n17") for line in lines)
    assert all(line["time"].endswith("Z") and line["pid"] > 1 for line in lines)
    assert "ZeroDivisionError" in lines[1]["exception"]
    assert "exception" not in lines[0]


def test_by_default_logs_are_text():
    assert "hello" in logged()


def test_a_file_of_the_user_s_own_stays_as_it_is(tmp_path):
    path = tmp_path / "log"
    logged(f"logging.getLogger().addHandler(logging.FileHandler({str(path)!r}))", RECYCLE_LOG="json")
    assert "hello\n" in path.read_text()


def test_another_format_is_an_error_that_names_the_choices(monkeypatch, capsys):
    monkeypatch.setenv("RECYCLE_LOG", "xml")
    assert main(["--listen", "127.0.0.1:0"]) == 2
    words = "recycle-coordinator: RECYCLE_LOG='xml': use json for lines of JSON, or text, the default.\n"
    assert capsys.readouterr().err == words


def test_events_keep_their_logger_and_have_their_fields(plane, caplog):
    with caplog.at_level("INFO", "lightning_recycle.events"):
        plane.members()
        plane.until(lambda: plane.events("regrouped"))
    records = [record for record in caplog.records if record.name == "lightning_recycle.events"]
    lines = [json.loads(JsonFormatter().format(record)) for record in records]
    assert [line["message"] for line in lines][:2] == ["resumed", "regrouped"]
    assert all(line["logger"] == "lightning_recycle.events" and line["generation"] == 0 for line in lines)
    assert lines[1]["event"]["details"] == {"roster": [0, 1, 2, 3]}
    assert lines[0]["host"] == (os.environ.get("RECYCLE_NODE") or socket.gethostname())


def test_a_loss_that_is_no_number_is_json_too(plane, caplog):
    """It was written as NaN, which no other reader of JSON takes."""
    with caplog.at_level("DEBUG", "lightning_recycle.events"):
        plane.coordinator._history.add("step", plane.coordinator._state, details={"loss": float("nan")})

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    assert json.loads(caplog.records[-1].getMessage(), parse_constant=refuse)["details"] == {"loss": None}
