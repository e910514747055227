"""A copy of layers follows the steps of the optimizer, to the bit, or says that it does not."""

import copy
import pickle
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_recycle.model.apart import put_together, take_apart
from lightning_recycle.runtime.layer_streams import Incoming, Outgoing, Parcel
from lightning_recycle.session.layer_copies import FollowedLayers, follow, travels

CPU = torch.device("cpu")


def layer() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 3, bias=False))


def step(module: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    torch.manual_seed(seed)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = module(torch.randn(4, 5)).square().sum()
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 0.3)
        return loss

    optimizer.step(closure)  # as Lightning does: gradients are there after the step only


class InPlace(torch.optim.SGD):
    """Changes gradients where they are."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if closure is not None:
            with torch.enable_grad():
                closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(0.5)
                    parameter.sub_(parameter.grad, alpha=group["lr"])


class Noisy(InPlace):
    """Draws numbers."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(torch.randn_like(parameter), alpha=1e-3)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.1),
    "AdamW for each": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, foreach=False),
    "fused Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1, fused=True),
    "Nesterov": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.1, momentum=0.9, centered=True),
}


class Giver:
    """A worker that has made ``before`` steps and copies its layer; it has another one, too."""

    def __init__(self, make: Callable[[Any], torch.optim.Optimizer], before: int) -> None:
        self.module, self.other = layer(), nn.Linear(2, 2)
        groups = [{"params": [*self.module[0].parameters(), *self.other.parameters()]}, {"params": []}]
        groups[1]["params"] = [p for part in self.module[1:] for p in part.parameters()]
        self.optimizer = make(groups)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.8)
        self.steps = 0
        self.make_steps(before)
        self.parcels: list[Parcel] = []
        self.copy = FollowedLayers(list(self.module.parameters()), [self.optimizer], 1, self.tell, self.apart)

    def make_steps(self, count: int) -> None:
        for _ in range(count):
            step(nn.Sequential(self.module), self.optimizer, self.steps)
            self.schedule.step()
            self.steps += 1

    def tell(self, parcel: Parcel) -> None:
        self.parcels.append(parcel)

    def apart(self) -> tuple[bytes, list[Tensor], dict[str, Any]]:
        states = {n: self.optimizer.state[p] for n, p in enumerate(self.module.parameters())}
        skeleton, tensors = take_apart((self.module, states), travels)
        return skeleton, tensors, {}


def arrived(parcels: list[Parcel]) -> list[Parcel]:
    """What a receiver has of them now."""
    return [Parcel(parcel.skeleton, [tensor.clone() for tensor in parcel.tensors]) for parcel in parcels]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("missing", [0, 2])
def test_it_follows_to_the_bit(name: str, missing: int) -> None:
    giver = Giver(OPTIMIZERS[name], before=3)
    (beginning,) = arrived(giver.parcels)
    giver.make_steps(4)
    have = [beginning, *arrived(giver.parcels[1 : 5 - missing])]
    rest = pickle.loads(pickle.dumps(giver.copy.rest(len(have) - 1)))
    assert (
        sum(isinstance(tensor, Tensor) and tensor.is_floating_point() for tensor in rest.tensors) == 2
    )  # of BatchNorm
    tensors = follow(have, rest, [giver.optimizer], CPU)
    assert tensors is not None
    module, states = put_together(rest.skeleton, [nn.Parameter(t) if t.is_floating_point() else t for t in tensors])
    for key, value in giver.module.state_dict().items():
        assert torch.equal(module.state_dict()[key], value), key
    for number, parameter in enumerate(giver.module.parameters()):
        for key, value in giver.optimizer.state[parameter].items():
            assert torch.equal(torch.as_tensor(states[number][key]), torch.as_tensor(value)), key


@pytest.mark.parametrize("make", [InPlace, Noisy])
def test_who_comes_to_other_bits_says_so(make: Any) -> None:
    giver = Giver(lambda groups: make(groups, lr=0.1), before=1)
    have = arrived(giver.parcels)
    giver.make_steps(1)
    rest = giver.copy.rest(0)
    assert rest is not None
    assert follow(have, rest, [giver.optimizer], CPU) is None


def test_parameters_that_change_between_steps_are_noticed() -> None:
    giver = Giver(OPTIMIZERS["AdamW"], before=1)
    have = arrived(giver.parcels)
    giver.make_steps(1)
    with torch.no_grad():
        giver.module[0].weight.clamp_(-0.1, 0.1)
    rest = giver.copy.rest(0)
    assert rest is not None
    assert follow(have, rest, [giver.optimizer], CPU) is None


def test_what_is_too_old_is_sent_whole() -> None:
    giver = Giver(OPTIMIZERS["AdamW"], before=0)
    giver.make_steps(4)
    assert giver.copy.rest(0) is None
    assert giver.copy.rest(1) is not None


def test_the_optimizer_of_the_receiver_stays_as_it_is() -> None:
    giver = Giver(OPTIMIZERS["AdamW"], before=1)
    have = arrived(giver.parcels)
    giver.make_steps(1)
    before = copy.deepcopy(giver.optimizer.state_dict())
    rest = giver.copy.rest(0)
    assert rest is not None
    follow(have, rest, [giver.optimizer], CPU)
    after = giver.optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    assert all(torch.equal(after["state"][n][k], v) for n, s in before["state"].items() for k, v in s.items())


def test_it_ends_without_a_trace() -> None:
    giver = Giver(OPTIMIZERS["AdamW"], before=1)
    giver.copy.end()
    giver.make_steps(1)
    assert len(giver.parcels) == 1
    assert not giver.optimizer._optimizer_step_pre_hooks
    assert not giver.optimizer._optimizer_step_post_hooks


# ---------------------------------------------------------------------- the way


def ends() -> tuple[socket.socket, socket.socket]:
    one, other = socket.socketpair()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    return one, other


def test_what_changes_on_its_way_arrives_as_it_was() -> None:
    live = [torch.arange(3e6), torch.arange(5e5), torch.zeros(()), torch.zeros(0), torch.ones(3, 2).T]
    expected = [tensor.clone() for tensor in live]
    parcel = Parcel(b"skeleton", live, receivers=2)
    links = [ends(), ends()]
    outgoing = [Outgoing(), Outgoing()]
    for out, (mine, _) in zip(outgoing, links, strict=True):
        out.put(parcel)
        out.start(mine)
    begun = [threading.Event(), threading.Event()]
    first = Incoming(links[0][1], 3, begun[0].set)
    parcel.secure()  # some of it has left
    for tensor in live:
        tensor.fill_(-1)
    second = Incoming(links[1][1], 3, begun[1].set)
    for event, incoming, out in zip(begun, (first, second), outgoing, strict=True):
        assert event.wait(30)
        (received,) = incoming.parcels
        assert received.skeleton == b"skeleton"
        assert all(torch.equal(a, b) for a, b in zip(received.tensors, expected, strict=True))
        out.close()


def test_who_gets_nothing_learns_it() -> None:
    mine, other = ends()
    begun = threading.Event()
    incoming = Incoming(other, 3, begun.set)
    outgoing = Outgoing()
    outgoing.close()
    outgoing.start(mine)
    assert begun.wait(30)
    assert incoming.parcels == []


def test_a_connection_that_is_slower_than_the_steps_is_given_up() -> None:
    outgoing = Outgoing()
    for _ in range(20):
        outgoing.put(Parcel(b"", []))
    mine, other = ends()
    outgoing.start(mine)
    assert other.recv(1) == b""
    other.close()


@pytest.mark.parametrize("place", [0, 9, 23, 30], ids=["its size", "the size inverted", "its sum", "its bytes"])
def test_a_head_that_changes_on_its_way_ends_the_copies(place: int) -> None:
    giver, between = ends()
    outgoing = Outgoing()
    outgoing.put(Parcel(b"skeleton", [torch.ones(3)]))
    outgoing.start(giver)
    message = bytearray()
    between.settimeout(30)
    while not message.endswith(torch.ones(3).numpy().tobytes()):
        message += between.recv(4096)
    message[place] ^= 4
    relay, taker = ends()
    begun = threading.Event()
    incoming = Incoming(taker, 3, begun.set)
    relay.sendall(message)
    assert begun.wait(30)
    assert incoming.parcels == []
    outgoing.close()
