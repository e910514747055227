"""Keys that some workers of a generation publish and others look up."""

from lightning_recycle.control.protocol.control_collectives import PublishedKeys
from lightning_recycle.control.protocol.messages import Found, LookUp, Publish


def begun(generation: int = 3) -> PublishedKeys:
    rendezvous = PublishedKeys()
    rendezvous.begin(generation)
    return rendezvous


def test_a_question_is_answered_once_by_one_message_with_all_that_it_asks_for():
    rendezvous = begun()
    assert rendezvous.look_up(LookUp(0, 3, ("a", "b", "a"))) == []
    assert rendezvous.publish(Publish(1, 3, "a", b"1")) == []
    assert rendezvous.publish(Publish(2, 3, "b", b"2")) == [(0, Found(3, {"a": b"1", "b": b"2"}))]
    assert rendezvous.publish(Publish(2, 3, "b", b"3")) == []
    assert rendezvous.look_up(LookUp(1, 3, ("b",))) == [(1, Found(3, {"b": b"3"}))], "the newest value, at once"


def test_a_new_generation_forgets_the_one_before():
    rendezvous = begun()
    rendezvous.publish(Publish(0, 3, "a", b"1"))
    rendezvous.look_up(LookUp(0, 3, ("b",)))
    rendezvous.begin(4)
    assert rendezvous.look_up(LookUp(0, 4, ("a",))) == []
    assert rendezvous.publish(Publish(1, 4, "b", b"2")) == []
    assert rendezvous.publish(Publish(1, 3, "a", b"2")) == [], "it is late"
    assert rendezvous.look_up(LookUp(1, 3, ("b",))) == [], "likewise"
