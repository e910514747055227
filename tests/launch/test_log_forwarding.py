"""Log records on their way from workers to the handlers of the launching process."""

import json
import logging
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from support.forked import fork_context
from support.waiting import wait_for

from lightning_recycle.control.monitoring.logs import JsonFormatter, LogForwarding, LogSender


class Kept(logging.Handler):
    """Keeps what it writes; waits for ``may_write`` before."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []
        self.lines: list[dict[str, Any]] = []
        self.may_write = threading.Event()
        self.may_write.set()

    def emit(self, record: logging.LogRecord) -> None:
        self.may_write.wait(60)
        self.records.append(record)
        self.lines.append(json.loads(JsonFormatter().format(record)))
        record.msg = record.msg.replace("\ud800", "?")  # what pytest keeps it sends in UTF-8, which has no surrogates

    @property
    def texts(self) -> list[str]:
        return [record.getMessage() for record in self.records]


@pytest.fixture
def kept() -> Iterator[Kept]:
    logger, handler = logging.getLogger("worked"), Kept()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)


def run(target: Any, *arguments: Any) -> None:
    """Runs ``target`` in a worker process, and waits for the end of both."""
    logs = LogForwarding()
    process = fork_context().Process(target=target, args=(logs, *arguments))
    process.start()
    process.join(100)
    logs.close()


def logger_of_worker(logs: Any) -> logging.Logger:
    assert isinstance(logs, LogSender)
    logs.install(lambda: {"rank": 3, "generation": 5})
    logger = logging.getLogger("worked")
    logger.setLevel(logging.INFO)
    return logger


def log_one_of_each(logs: Any) -> None:
    logger = logger_of_worker(logs)
    logger.debug("below the level")
    logger.info("with %s", "arguments", extra={"sizes": (1, 2), "what": object})
    logger.getChild("child").warning("x" * 1_000_000)
    logger.info("lone \ud800 surrogate")
    try:
        raise ValueError("why")
    except ValueError:
        logger.exception("raised")


def test_a_record_keeps_its_text_level_origin_and_traceback(kept):
    run(log_one_of_each)
    first, long, lone, raised = kept.records
    assert (first.getMessage(), first.levelname, first.sizes) == ("with arguments", "INFO", [1, 2])
    assert first.process != os.getpid()
    assert (long.name, long.levelname) == ("worked.child", "WARNING")
    assert long.getMessage().endswith(" more characters]")
    assert lone.getMessage().startswith("lone ")
    assert "ValueError: why" in str(raised.exc_text)
    assert "log_one_of_each" in kept.lines[-1]["exception"]
    assert all((line["rank"], line["generation"]) == (3, 5) for line in kept.lines)


def log_many(logs: Any, count: int, is_through: Any, is_written: Any) -> None:
    logger = logger_of_worker(logs)
    for number in range(count):
        logger.info("%d %s", number, "x" * 1000)
    is_through.set()
    is_written.wait(100)
    logger.info("last")


def test_a_handler_that_hangs_holds_up_no_worker_and_lost_records_are_counted(kept, caplog):
    kept.may_write.clear()
    context = fork_context()
    is_through, is_written, count = context.Event(), context.Event(), 20_000

    def go_on() -> None:
        if is_through.wait(100):
            kept.may_write.set()
        wait_for(lambda: len(kept.records) > 100)  # there is room for more
        is_written.set()

    goes_on = threading.Thread(target=go_on)
    goes_on.start()
    run(log_many, count, is_through, is_written)
    goes_on.join()
    texts = kept.texts
    numbers = [int(text.split()[0]) for text in texts if text.endswith("x")]
    assert texts[-1] == "last"
    assert numbers == sorted(set(numbers))
    assert 0 < len(numbers) < count
    (line,) = [record.getMessage() for record in caplog.records if "are missing" in record.getMessage()]
    assert line.startswith(f"{count - len(numbers)} log records of process ")


def log_until_killed(logs: Any) -> None:
    logger = logger_of_worker(logs)
    threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    for number in range(10**9):
        logger.info("%d %s", number, "x" * 5000)


def test_a_worker_that_is_killed_leaves_whole_records_and_others_go_on(kept):
    logs, context = LogForwarding(), fork_context()
    workers = [context.Process(target=log_until_killed, args=(logs,)) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(100)
    after = context.Process(target=log_one_of_each, args=(logs,))
    after.start()
    after.join(100)
    logs.close()
    assert {len(text.split()[1]) for text in kept.texts if text.endswith("xx")} == {5000}
    assert kept.texts.count("raised") == 1
