import threading
from collections.abc import Callable

import pytest
from harness import Gate, Turns


def in_thread(function: Callable[[], None]) -> tuple[threading.Thread, list[BaseException]]:
    raised: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except OSError as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, raised


def test_sides_take_turns(tmp_path):
    turns = Turns(str(tmp_path), {"a": 1, "b": 2}, lambda: None)
    workers = [("a", 0), ("b", 0), ("b", 1)]
    threads = [in_thread(lambda s=s, r=r: [Gate(str(tmp_path), s).wait(r) for _ in range(4)]) for s, r in workers]
    played = turns.play(3)
    assert {side: len(taken) for side, taken in played.items()} == {"a": 3, "b": 3}
    for thread, raised in threads:
        thread.join(timeout=10)
        assert not thread.is_alive()
        assert not raised
    turns.close()


def test_whoever_waits_or_comes_when_another_side_has_failed_does_not_wait_for_ever(tmp_path):
    def fail() -> None:
        raise RuntimeError("the other side has failed")

    turns = Turns(str(tmp_path), {"a": 1, "b": 1}, fail)
    early = in_thread(lambda: Gate(str(tmp_path), "a").wait(0))
    with pytest.raises(RuntimeError, match="has failed"):
        turns.play(1)
    turns.close()
    late = in_thread(lambda: Gate(str(tmp_path), "a").wait(0))
    for thread, raised in (early, late):
        thread.join(timeout=10)
        assert not thread.is_alive()
        assert len(raised) == 1
