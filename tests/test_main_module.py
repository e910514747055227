"""Which definitions of a script workers find by importing it, and what becomes of the others."""

import gc
import io
import pickle
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import pytest

from lightning_recycle.pickling import MainModule, MainPickler, dumps, import_of_main, read_script


@pytest.mark.parametrize(("script", "expected"), [
    ("class A: pass\nprint(A)", MainModule(imported=False)),
    ("class A: pass\nif __name__ == '__main__':\n    print(A)", MainModule(imported=True)),
    ("if '__main__' == __name__:\n    class A: pass", MainModule(True, frozenset({"A"}))),
    ("if __name__ == '__main__' and True:\n    for x in []:\n        def f(): y = 1", MainModule(True, {"x", "f"})),
    ("if True: A = 1\nif __name__ == '__main__':\n    A = B = 2", MainModule(True, frozenset({"B"}))),
    ("def main():\n    if __name__ == '__main__': pass\nmain()", MainModule(imported=False)),
    ("print('__main__', __name__)", MainModule(imported=False)),
    ("", MainModule(imported=False)),
    ("A = B = C = {}\ndef f():\n    global B\n    print(A, B, C, D, E)\nif '__main__' == __name__: A['x'].y = D = 1",
     MainModule(True, frozenset("D"), frozenset("ABD"))),
    ("import m\nclass C: x = 1\ndef f():\n    m.y = C.x = m.z['a'] = 1\n    f.a['b'].c = m.n.call()\n"
     "if '__main__' == __name__: pass",
     MainModule(True, frozenset(), frozenset({"m.y", "C.x", "m.z", "f.a", "m.n", "C", "f"}))),
    ("A = B = []\ndef f(): A.append(B)\nif '__main__' == __name__: C = 1",
     MainModule(True, frozenset("C"), frozenset("A"))),
])  # fmt: skip
def test_a_script_is_imported_if_it_has_a_guard_and_what_is_under_it_is_not_found(script, expected):
    assert read_script(script) == expected


SCRIPT = """
STEPS = 1
class Found: pass
class Hidden: pass
def count():
    global STEPS
    STEPS += 1
    return STEPS
def local():
    class Local: pass
    return Local
"""


@pytest.fixture
def script(monkeypatch) -> Callable[[], ModuleType]:
    """Makes a new ``__main__`` in which the script has run."""

    def run() -> ModuleType:
        module = ModuleType("__main__")
        monkeypatch.setitem(sys.modules, "__main__", module)
        exec(compile(SCRIPT, "script.py", "exec"), vars(module))
        return module

    return run


def through(value: Any, main: MainModule) -> bytes:
    file = io.BytesIO()
    pickler = MainPickler(file, main)
    pickler.dump((value, pickler.definitions))
    return file.getvalue()


def test_what_an_importer_finds_stays_a_name_and_the_rest_travels(script):
    there = script()
    data = through([there.Found, there.Hidden], MainModule(True, frozenset({"Hidden"})))
    here = script()
    (found, hidden), definitions = pickle.loads(data)
    assert found is here.Found
    assert hidden is definitions["Hidden"]
    assert set(definitions) == {"Hidden"}


def test_functions_that_travel_share_the_globals_of_the_worker(script):
    there = script()
    data = through([there.count, there.count], MainModule(imported=False))
    here = script()
    (count, again), _ = pickle.loads(data)
    assert [count(), again()] == [2, 3]
    assert here.STEPS == 3
    assert there.STEPS == 1


def test_what_comes_back_is_what_left(script):
    main = script()
    local = main.local()
    (copy, _), definitions = pickle.loads(through([local, main.Hidden], MainModule(imported=False)))
    assert definitions == {"Hidden": main.Hidden}
    assert pickle.loads(dumps(copy)) is local
    assert copy.__qualname__ == local.__qualname__ == "local.<locals>.Local", "states of callbacks go by this name"
    assert pickle.loads(dumps(main.Found)) is main.Found
    assert b"Found" in dumps(main.Found)
    assert len(dumps(main.Found)) < 100, "by name"


def test_only_the_thread_that_asks_hides_the_script():
    import threading
    from multiprocessing import spawn

    def imports() -> bool:
        return any(key.startswith("init_main") for key in spawn.get_preparation_data("x"))

    before, seen = imports(), []
    with import_of_main(wanted=False):
        other = threading.Thread(target=lambda: seen.append(imports()))
        other.start()
        other.join()
        assert not imports()
    assert seen == [before]
    assert imports() == before


def test_workers_do_not_hear_of_a_start_method_that_only_this_process_has(monkeypatch):
    """In a job of joblib the default is "loky"."""
    from multiprocessing import spawn

    for method, found in (("loky", None), ("forkserver", "forkserver")):
        monkeypatch.setattr(spawn, "get_start_method", lambda method=method: method)
        for wanted in (False, True):
            with import_of_main(wanted):
                assert spawn.get_preparation_data("x").get("start_method") == found


class Litter:
    """Garbage whose collection lets other threads run, also in the middle of a parser's work."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        time.sleep(0)


def test_scripts_are_read_in_several_threads():
    """Parsers of CPython up to 3.12 count the depth of all threads together, and raise SystemError."""
    script = (
        "\n".join(f"x = [[{number} for _ in range(2)]]" for number in range(100)) + "\nif __name__ == '__main__': pass"
    )
    ends = threading.Event()

    def litter() -> None:
        while not ends.is_set():
            Litter()
            time.sleep(0)

    thresholds = gc.get_threshold()
    gc.set_threshold(50)
    litterer = threading.Thread(target=litter)
    litterer.start()
    try:
        with ThreadPoolExecutor(4) as threads:
            assert all(main.imported for main in threads.map(read_script, [script] * 100))
    finally:
        gc.set_threshold(*thresholds)
        ends.set()
        litterer.join()
