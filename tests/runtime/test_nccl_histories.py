"""The transport of payloads over an imitated NCCL, over random histories; and that breaking it is noticed.

A history is a number: ``python tests/runtime/nccl_histories.py NUMBER`` replays it. All 100,000 of them:
``pytest -m exhaustive tests/runtime/test_nccl_histories.py``.
"""

import inspect
import sys
from types import ModuleType

import pytest
from nccl_histories import BrokenPromiseError, check_histories
from support.sampling import sampled

from lightning_recycle.runtime.nccl import nccl_comms, nccl_transport, transfer_order

SAMPLE = 100  # histories in the ordinary run
HUNT = 150  # within so many a broken transport must be noticed
MEETS = {"quiet", "abort", "late abort", "death", "error", "lost", "noticed", "received", "summed", "kept"}


def test_no_payload_is_lost_or_swapped_and_nobody_waits_beyond_an_abort():
    met = check_histories(range(SAMPLE))
    assert met["histories"] == SAMPLE
    assert not {kind for kind in MEETS if not met[kind]}


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("block", range(20))
def test_the_same_in_all_histories(block):
    check_histories(range(block * 5_000, (block + 1) * 5_000))


# fmt: off
MUTATIONS: list[tuple[str, ModuleType, list[tuple[str, str]]]] = [
    ("the tensors of a payload are sent in another order", transfer_order,
     [("PendingOp(comm, sending.tensors, ", "PendingOp(comm, sending.tensors[::-1], ")]),
    ("a receive does not wait for an offer", transfer_order, [
        ("self._wanted[receiving.peer, receiving.key] = receiving",
         "self._wanted[receiving.peer, receiving.key] = receiving\n"
         "        self._offers.setdefault((receiving.peer, receiving.key),"
         " Note(Kind.OFFER, receiving.key, 1, receiving.digest))"),
    ]),
    ("a payload is offered before it is computed", transfer_order,
     [("while self._computing and self._computing[0].ready.query():", "while self._computing:")]),
    ("a send does not wait for a go", transfer_order,
     [("self._offered[sending.peer, sending.number] = sending",
       "self._offered[sending.peer, sending.number] = sending\n            self._told_to_go.append(sending)")]),
    ("a go names another payload", transfer_order,
     [("Note(Kind.GO, note.key, note.number, ", "Note(Kind.GO, note.key, 0, ")]),
    ("a tensor is freed once it is launched", nccl_comms, [
        ("            self.launched, self.end = self.launched + 1, None\n",
         "            self.launched, self.end = self.launched + 1, None\n"
         "            self.tensors = [None] * self.launched + list(self.tensors[self.launched :])\n"),
    ]),
    ("an event is not waited for", nccl_comms, [("if not self.end.query():", "if False:")]),
    ("what is in progress is not waited for", nccl_comms,
     [("while not library.in_progress(self.comm):", "library.in_progress(self.comm)\n        while True:")]),
    ("two receives are under way at a time", transfer_order,
     [("        if self._receiving is None:\n            self._accept_offer()\n", "        self._accept_offer()\n")]),
    ("both directions share a stream", transfer_order,
     [("self._send_stream, self._receive_stream = self._streams.create(), self._streams.create()",
       "self._send_stream = self._receive_stream = self._streams.create()")]),
    ("communicators begin one after the other", nccl_comms, [
        ("            self._has_begun = True\n            outdated, self", "            outdated, self"),
        ("            self._wanted.begin(self._to_begin)\n",
         "            begun = (one.comm for one in self._wanted.comms.values())\n"
         "            if self._wanted.has_begun and not any(map(self._library.in_progress, begun)):\n"
         "                self._to_begin.sort(key=lambda place: place.founder != self._wanted._rank)\n"
         "                self._wanted.begin(self._to_begin[:1])\n"
         "                self._to_begin = self._to_begin[1:]\n"
         "            self._has_begun = not self._to_begin\n"),
    ]),
    ("communicators of the generation before are used", nccl_comms,
     [("        return kept\n", "        return kept | self._wanted.comms\n")]),
    ("communicators are destroyed instead of aborted", nccl_comms, [("library.abort(comm)", "library.destroy(comm)")]),
    ("only the communicators of pairs are aborted", nccl_comms,
     [("used = [each.comm for each in self._wanted.comms.values()]",
       "used = [each.comm for place, each in self._wanted.comms.items() if place.kind == _PAIR]")]),
    ("only those of groups are aborted", nccl_comms,
     [("used = [each.comm for each in self._wanted.comms.values()]",
       "used = [each.comm for place, each in self._wanted.comms.items() if place.kind != _PAIR]")]),
    ("communicators are aborted one after the other", nccl_comms,
     [("    library.group_start()\n", ""), ("    library.group_end()\n", "")]),
    ("an abort does not reach what begins in the background", nccl_comms,
     [("[*used, *incomplete, *self._outdated]", "[*used, *self._outdated]")]),
    ("what is incomplete is kept", nccl_comms,
     [("return not self._library.in_progress(reserved.comm)", "return True")]),
    ("what others have not kept is used", nccl_comms, [("place in kept and all(", "place in kept and any(")]),
    ("what is kept and not needed is forgotten", nccl_comms,
     [("abort_together(self._library, outdated)", "outdated.clear()")]),
    ("nobody aborts", nccl_transport, [("        self._aborted = True\n", "        return {}\n")]),
    ("a group starts before all members are ready", transfer_order,
     [("len(ready) < len(members.ranks)", "len(ready) < len(members.ranks) - 1")]),
    ("a member is ready before its device is", transfer_order, [("if not collective.ready.query():", "if False:")]),
    ("a member does not wait for the start", transfer_order,
     [("if first.number >= self._states[first.group].may_start:",
       "if first.number >= self._states[first.group].told:")]),
    ("the newest collective is launched first", transfer_order,
     [("            first = self._asked[0]\n", "            first = self._asked[-1]\n"),
      ("            self._asked.popleft()\n", "            self._asked.remove(first)\n")]),
    ("a member is ready for several groups at a time", transfer_order, [
        ("if collective.group != self._asked[0].group:", "if False:"),
        ("            first = self._asked[0]\n",
         "            may = [c for c in self._asked if c.number < self._states[c.group].may_start]\n"
         "            first = may[-1] if may and self._under_way is None else self._asked[0]\n"
         "            self._asked.remove(first)\n"
         "            self._asked.appendleft(first)\n"),
    ]),
    ("a collective counts once it is launched", transfer_order,
     [("if not self._under_way.proceed(self._library):",
       "self._under_way.proceed(self._library)\n            if False:")]),
    ("one member is not told to start", transfer_order, [("members.ranks[1:]:", "members.ranks[1:-1]:")]),
    ("a broadcast comes from another member", transfer_order,
     [("ranks.index(collective.root), stream)", "ranks.index(collective.root) or 1, stream)")]),
    ("a sum is freed once it is launched", transfer_order, [
        ("        return PendingOp(comm, [collective.tensor], launch, stream)\n",
         "        tensors = [collective.tensor]\n"
         "        if self.connected:\n"
         "            collective.tensor = None\n"
         "\n"
         "        def launch_and_forget(tensor):\n"
         "            launch(tensor)\n"
         "            tensors[0] = None\n"
         "\n"
         "        return PendingOp(comm, tensors, launch_and_forget, stream)\n"),
    ]),
    ("tensors are let go of before the abort", nccl_transport,
     [("        self._aborted = True\n",
       "        self._aborted = True\n        self.pairs.drop()\n        self.groups.drop()\n")]),
]
# fmt: on
"""What breaks, the module, and what is replaced in its source."""


def test_every_mutation_applies_to_the_transport_as_it_is():
    for _, module, changes in MUTATIONS:
        assert [inspect.getsource(module).count(old) for old, _ in changes] == [1] * len(changes)


@pytest.mark.parametrize(
    ("mutation", "module", "changes"),
    sampled(MUTATIONS, 12, rest=pytest.mark.long),
    ids=[name for name, *_ in MUTATIONS],
)
def test_a_broken_transport_is_noticed(monkeypatch, mutation, module, changes):
    source = inspect.getsource(module)
    for old, new in changes:
        source = source.replace(old, new)
    broken = ModuleType("broken")
    monkeypatch.setitem(sys.modules, broken.__name__, broken)  # where dataclasses look for their annotations
    exec(compile(source, mutation, "exec"), broken.__dict__)
    own = [name for name, value in vars(broken).items() if getattr(value, "__module__", None) == broken.__name__]
    for name in own:
        for user in (transfer_order, nccl_transport, nccl_comms):
            if getattr(getattr(user, name, None), "__module__", None) == module.__name__:
                monkeypatch.setattr(user, name, getattr(broken, name))
    with pytest.raises(BrokenPromiseError):
        check_histories(range(HUNT))
