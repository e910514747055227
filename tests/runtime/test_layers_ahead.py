"""Who asks whom before layers are sent."""

import queue
import threading
from typing import Any

import pytest

from lightning_recycle.runtime import layers_ahead


class Copy:
    """The donor has copied layers, and can say what a receiver lacks that has ``steps`` steps of them."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def rest(self, steps: int) -> str | None:
        return "rest" if steps == self.steps else None


class Copier:
    """Layers as words."""

    def give(self, layers: list[int]) -> tuple[Any, ...]:
        return ("whole", *layers)

    def caught_up(self, parcels: list[str], rest: str) -> tuple[str, ...] | None:
        return (rest, *parcels) if parcels[0] == "right" else None


class Side:
    """One of two workers; ``told``: who has sent something, in order."""

    def __init__(self, name: str, told: list[str]) -> None:
        self.name, self.told = name, told
        self.inbox: queue.Queue[Any] = queue.Queue()


@pytest.mark.parametrize(
    ("copy", "parcels", "expected", "ways"),
    [
        (None, [], ("whole", 3), "donor"),
        (None, ["right", "step"], ("whole", 3), "donor"),
        (Copy(1), ["right", "step"], ("rest", "right", "step"), "donor receiver donor receiver"),
        (Copy(1), ["wrong", "step"], ("whole", 3), "donor receiver donor receiver donor"),
        (Copy(1), ["right"], ("whole", 3), "donor receiver donor donor"),
        (Copy(1), [], ("whole", 3), "donor receiver donor donor"),
    ],
    ids=["nothing copied", "nothing copied by the donor", "copied", "other bits", "behind", "nothing arrived"],
)
def test_layers_that_the_donor_has_not_copied_are_sent_without_asking(
    monkeypatch: pytest.MonkeyPatch, copy: Any, parcels: Any, expected: Any, ways: str
) -> None:
    told: list[str] = []
    donor, receiver = Side("donor", told), Side("receiver", told)

    def send(side: Side, value: Any, rank: int) -> None:
        told.append(side.name)
        (donor, receiver)[rank].inbox.put(value)

    monkeypatch.setattr(layers_ahead, "send_object", send)
    monkeypatch.setattr(layers_ahead, "receive_object", lambda side, rank: side.inbox.get(timeout=5))
    given: Any = (donor, Copier(), [3], 1, copy)
    gives = threading.Thread(target=layers_ahead.give, args=given)
    gives.start()
    taken: Any = (receiver, Copier(), 0, parcels)
    found, came_ahead = layers_ahead.take(*taken)
    gives.join()
    assert (found, came_ahead) == (expected, expected[0] == "rest")
    assert told == ways.split()
