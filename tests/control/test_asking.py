"""Questions that are answered in another thread."""

import threading
import time

from support.waiting import wait_for

from lightning_recycle.control.plans.asking import Asking

PATIENCE = 30.0  # seconds


def test_the_newest_question_is_answered() -> None:
    woken = threading.Event()
    asking: Asking[int] = Asking("recycle-test", woken.set)
    asking.ask(lambda cancelled: 1 if cancelled.wait(PATIENCE) else 2)
    asking.ask(lambda _: 3)
    assert woken.wait(PATIENCE)
    assert asking.take_answers() == [3]
    asking.close()
    assert asking.take_answers() == []


def test_closing_waits_for_earlier_questions_as_well() -> None:
    def slow_to_end(cancelled: threading.Event) -> None:
        cancelled.wait(PATIENCE)
        time.sleep(0.5)

    asking: Asking[None] = Asking("recycle-test", lambda: None)
    for _ in range(3):
        asking.ask(slow_to_end)
    threads = [thread for thread in threading.enumerate() if thread.name == "recycle-test"]
    assert len(threads) == 3
    asking.close()
    assert not any(thread.is_alive() for thread in threads)


def test_what_has_ended_is_forgotten() -> None:
    asking: Asking[None] = Asking("recycle-test", lambda: None)
    for _ in range(5):
        asking.ask(lambda _: None)
        assert wait_for(lambda: not any(thread.name == "recycle-test" for thread in threading.enumerate()))
    asking.ask(lambda _: None)
    assert len(asking._threads) == 1
    asking.close()
