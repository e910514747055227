"""The transport of payloads over an imitated NCCL, over random histories; and that breaking it is noticed.

A history is a number: ``python tests/runtime/nccl_histories.py NUMBER`` replays it. All 100,000 of them:
``pytest -m exhaustive tests/runtime/test_nccl_histories.py``.
"""

from __future__ import annotations

import inspect
import sys
from types import ModuleType

import nccl_histories
import pytest
from nccl_histories import BrokenPromiseError, check_histories

from lightning_recycle.runtime import payloads

SAMPLE = 150  # histories in the ordinary run
HUNT = 150  # within so many a broken transport must be noticed
MEETS = {"quiet", "abort", "late abort", "death", "error", "lost", "noticed", "received"}


def test_no_payload_is_lost_or_swapped_and_nobody_waits_beyond_an_abort() -> None:
    met = check_histories(range(SAMPLE))
    assert met["histories"] == SAMPLE
    assert not {kind for kind in MEETS if not met[kind]}


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("block", range(20))
def test_the_same_in_all_histories(block: int) -> None:
    check_histories(range(block * 5_000, (block + 1) * 5_000))


MUTATIONS: dict[str, list[tuple[str, str]]] = {
    "the tensors of a payload are sent in another order": [
        ("            sending.tensors,\n", "            list(reversed(sending.tensors)),\n"),
    ],
    "a receive does not wait for an offer": [
        (
            "self._wanted[receiving.peer, receiving.key] = receiving",
            "self._wanted[receiving.peer, receiving.key] = receiving\n"
            "        self._offers.setdefault((receiving.peer, receiving.key),"
            " Note(Kind.OFFER, receiving.key, 1, receiving.digest))",
        )
    ],
    "a payload is offered before it is computed": [
        ("while self._computing and self._computing[0].ready.query():", "while self._computing:"),
    ],
    "a send does not wait for a go": [
        (
            "self._offered[sending.peer, sending.number] = sending",
            "self._offered[sending.peer, sending.number] = sending\n            self._told_to_go.append(sending)",
        )
    ],
    "a go comes before the buffer is free": [("if not free or receiving.free.query():", "if True:")],
    "a go names another payload": [("Note(Kind.GO, note.key, note.number, ", "Note(Kind.GO, note.key, 0, ")],
    "a tensor is freed once it is launched": [
        (
            "            self.launched += 1\n",
            "            self.launched += 1\n"
            "            self.tensors = [None] * self.launched + list(self.tensors[self.launched :])\n",
        )
    ],
    "an event is not waited for": [("return self.end.query()", "return True")],
    "what is in progress is not waited for": [
        (
            "self.launched += 1\n            if library.in_progress(self.comm):\n                return False\n",
            "self.launched += 1\n",
        )
    ],
    "two receives are under way at a time": [("        if self._receiving is None:\n", "        if True:\n")],
    "both directions share a stream": [
        (
            "self._send_stream, self._receive_stream = streams.create(), streams.create()",
            "self._send_stream = self._receive_stream = streams.create()",
        )
    ],
    "communicators begin one after the other": [
        (
            "            for peer, unique_id in ids.items():\n",
            "            for peer, unique_id in ids.items():\n"
            "                if peer in begun:\n                    continue\n"
            "                if any(self._library.in_progress(comm) for comm in self._beginning):\n"
            "                    return\n",
        )
    ],
    "communicators of the generation before are used": [
        (
            "begun[peer] = self._library.init(unique_id, 2, rank)",
            "kept = self._library.__dict__.setdefault('kept', {})\n"
            "                if (peer, rank) not in kept:\n"
            "                    kept[peer, rank] = self._library.init(unique_id, 2, rank)\n"
            "                begun[peer] = kept[peer, rank]",
        )
    ],
    "communicators are destroyed instead of aborted": [
        ("self._library.abort(comm)", "self._library.destroy(comm)"),
    ],
    "only some communicators are aborted": [
        ("for comm in (*self._outgoing.values(), *self._incoming.values()):", "for comm in self._outgoing.values():"),
    ],
    "communicators are aborted one after the other": [
        ("        self._library.group_start()\n", ""),
        ("        self._library.group_end()\n", ""),
    ],
    "nobody aborts": [("        self._aborted = True\n", "        return\n")],
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_broken_transport_is_noticed(monkeypatch: pytest.MonkeyPatch, mutation: str) -> None:
    source = inspect.getsource(payloads)
    for old, new in MUTATIONS[mutation]:
        assert source.count(old) == 1, f"{old!r} must be in the source once"
        source = source.replace(old, new)
    broken = ModuleType("broken_payloads")
    monkeypatch.setitem(sys.modules, broken.__name__, broken)  # where dataclasses look for their annotations
    exec(compile(source, mutation, "exec"), broken.__dict__)
    monkeypatch.setattr(nccl_histories, "product", broken)
    with pytest.raises(BrokenPromiseError):
        check_histories(range(HUNT))
