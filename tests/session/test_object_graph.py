"""The graph of the user's objects: whatever they hold arrives, in the receiver's own objects."""

import random
import threading
from dataclasses import dataclass
from functools import partial
from types import GeneratorType
from typing import Any
from unittest.mock import MagicMock

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import nn
from torchmetrics import MeanSquaredError

from lightning_recycle.session.object_graph import LargeData, ObjectGraph, Originals

_CPU = torch.device("cpu")


class Slotted:
    __slots__ = ("level",)

    def __init__(self) -> None:
        self.level = 0


@dataclass
class Schedule:
    rate: float = 0.0


@dataclass(frozen=True)
class Frozen:
    rate: float = 0.0


class Helper:
    """An object of the user's that knows its owner."""

    def __init__(self, owner: Any) -> None:
        self.owner, self.seen = owner, [1]
        self.lock = threading.Lock()


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.1))
        self.register_buffer("bank", None)
        self.register_buffer("queue", torch.zeros(2))
        self.helper = Helper(self)
        self.slotted, self.schedule, self.frozen = Slotted(), Schedule(), Frozen()
        self.outputs: list[Any] = []
        self.by_name: dict[str, list[int]] = {"a": []}
        self.generators = (torch.Generator(), np.random.default_rng(0), random.Random(0))
        self._alpha = 0.0

    @property
    def alpha(self) -> float:
        return self._alpha

    @alpha.setter
    def alpha(self, value: float) -> None:
        self._alpha = value


def _carried(sender: Any, receiver: Any, name: str = "module") -> None:
    packed = ObjectGraph({name: sender}, {}).pack()
    ObjectGraph({name: receiver}, {}).update(packed, _CPU)


def test_attributes_of_every_kind_arrive_in_the_receivers_own_objects():
    sender, receiver = Net(), Net()
    sender.alpha = 0.5
    sender.net[1].p = 0.7
    sender.net[1].eval()
    sender.slotted.level, sender.schedule.rate, sender.frozen = 3, 0.25, Frozen(0.75)
    sender.helper.seen.append(2)
    sender.outputs += [torch.ones(2), {"x": 1}]
    sender.by_name["b"] = [4]
    for generator in sender.generators:
        _draw(generator)
    sender.net[0].weight.requires_grad_(False)
    objects = ("net", "helper", "slotted", "schedule", "outputs", "by_name")
    before = [getattr(receiver, name) for name in objects]
    weight, seen, lock, generators = (
        receiver.net[0].weight, receiver.helper.seen, receiver.helper.lock, receiver.generators,
    )  # fmt: skip
    _carried(sender, receiver)
    assert all(getattr(receiver, name) is value for name, value in zip(objects, before, strict=True))
    assert receiver.alpha == 0.5
    assert receiver.net[1].p == 0.7
    assert not receiver.net[1].training
    assert (receiver.slotted.level, receiver.schedule.rate, receiver.frozen.rate) == (3, 0.25, 0.75)
    assert receiver.helper.seen is seen
    assert seen == [1, 2]
    assert receiver.helper.owner is receiver, "references lead to the receiver's own objects"
    assert receiver.helper.lock is lock, "what cannot be pickled stays the receiver's own"
    assert torch.equal(receiver.outputs[0], torch.ones(2))
    assert receiver.by_name == {"a": [], "b": [4]}
    assert receiver.net[0].weight is weight
    assert torch.equal(weight, sender.net[0].weight)
    assert not weight.requires_grad
    assert all(a is b for a, b in zip(receiver.generators, generators, strict=True))
    assert [_draw(g) for g in receiver.generators] == [_draw(g) for g in sender.generators]


def _draw(generator: Any) -> float:
    if isinstance(generator, torch.Generator):
        return torch.rand(1, generator=generator).item()
    return float(generator.random())


class Calls:
    """Is held by a method alone."""

    def __init__(self, seen: list[int]) -> None:
        self.number, self.seen = 0, seen

    def count(self) -> None:
        self.number += 1
        self.seen.append(-2)


class Counting:
    """Counts in all that functions hold, wherever that is kept."""

    def __init__(self) -> None:
        seen: list[int] = []
        calls, total = Calls(seen), 0

        def closes_over() -> None:
            nonlocal total
            total += 1
            seen.append(total)

        def has_default(counts: dict[str, int] = {"calls": 0}) -> None:  # noqa: B006
            counts["calls"] += 1

        self.functions = [closes_over, has_default, calls.count, partial(list.append, seen, -1)]
        self.found = lambda: (total, seen, has_default.__defaults__, calls.number)

    def call(self) -> None:
        for function in self.functions:
            function()


def test_what_functions_hold_arrives_in_the_receivers_own_functions():
    sender, receiver = Counting(), Counting()
    seen = receiver.found()[1]
    functions = list(receiver.functions)
    sender.call()
    _carried(sender, receiver, "helper")
    assert receiver.found() == sender.found() == (1, [1, -2, -1], ({"calls": 1},), 1)
    for function in functions:
        function()
    assert receiver.found() == (2, [1, -2, -1, 2, -2, -1], ({"calls": 2},), 2)
    assert receiver.found()[1] is seen
    assert sender.found()[0] == 1


def test_a_hook_writes_into_the_receivers_dict_and_reads_its_modules():
    sender, receiver = Net(), Net()
    _remember_outputs(sender)
    _carried(sender, receiver)
    receiver.net(torch.ones(1, 2))
    assert receiver.by_name == {"a": [], "last": [id(receiver.helper)]}
    assert sender.by_name == {"a": []}


def test_local_functions_share_their_variables_with_hooks():
    """A hook of the sender is new in the receiver; the function in the attribute is its own."""
    sender, receiver = Net(), Net()
    for module in (sender, receiver):
        _share_a_count(module)
    sender.advance()
    _carried(sender, receiver)
    advance = receiver.advance
    _carried(sender, receiver)
    assert receiver.advance is advance
    advance()
    receiver.net(torch.ones(1, 2))
    assert receiver.by_name["count"] == [2]
    assert "count" not in sender.by_name


def test_a_function_keeps_its_own_anchor_where_that_has_no_name_yet():
    sender, receiver = Net(), Net()
    loggers = Helper(sender), Helper(receiver)
    for module, logger in zip((sender, receiver), loggers, strict=True):
        module.shown = _returns(logger)
    packed = ObjectGraph({"module": sender}, {"logger": loggers[0]}).pack()
    ObjectGraph({"module": receiver}, {}).update(packed, _CPU)
    assert receiver.shown() is loggers[1]


def _returns(value: Any) -> Any:
    return lambda: value


def _share_a_count(module: Net) -> None:
    count = 0

    def advance() -> None:
        nonlocal count
        count += 1

    def show(*_: Any) -> None:
        module.by_name["count"] = [count]

    module.advance = advance
    module.net.register_forward_hook(show)


def _remember_outputs(module: Net) -> None:
    found, helper, alone = module.by_name, module.helper, nn.Linear(500, 600)
    module.net.register_forward_hook(lambda *_: found.update(last=[id(helper)] if alone.bias is not None else []))


def test_modules_and_buffers_that_were_added_changed_and_removed_are_the_senders():
    sender, receiver = Net(), Net()
    sender.bank = torch.arange(3.0)
    sender.queue = torch.ones(5, dtype=torch.float64)
    sender.net[1] = nn.Linear(3, 4)
    sender.head = nn.Linear(4, 1, bias=False)
    sender.head.weight = sender.net[1].weight  # tied
    del sender.slotted
    receiver.added_by_a_hook = nn.Linear(1, 1)
    _carried(sender, receiver)
    mine, theirs = receiver.state_dict(), sender.state_dict()
    assert list(mine) == list(theirs)
    assert all(torch.equal(mine[name], value) for name, value in theirs.items())
    assert receiver.head.weight is receiver.net[1].weight
    assert isinstance(receiver.head.weight, nn.Parameter)
    assert mine["queue"].dtype is torch.float64
    assert not hasattr(receiver, "slotted")
    receiver.queue.add_(1)
    assert sender.queue.eq(1).all(), "tensors are the receiver's own"


def test_objects_that_were_one_become_two_without_touching_each_other():
    sender, receiver = Net(), Net()
    for net in (sender, receiver):
        net.best = net.queue
        net.also = net.outputs
    sender.best, sender.also = sender.queue + 1, [1]
    _carried(sender, receiver)
    assert receiver.queue.eq(0).all()
    assert receiver.best.eq(1).all()
    assert receiver.outputs == []
    assert receiver.also == [1]


def test_what_replaced_an_original_does_not_arrive_in_that():
    """But in place where the receiver has replaced its own, too; what could not be pickled is left as it was."""
    nets = [Net(), Net()]
    for net in nets:
        net.array, net.nested, net.also = np.zeros(2), {"kept": [1]}, net.outputs
    originals = [Originals(ObjectGraph({"module": net}, {}).values.values()) for net in nets]
    sender, receiver = nets
    olds = receiver.outputs, receiver.by_name, receiver.array, receiver.nested
    kept = receiver.nested["kept"]
    sender.outputs = [*sender.outputs, torch.ones(1)]
    sender.by_name, sender.array = {"a": [2]}, sender.array + 1
    sender.nested = {**sender.nested, "more": 1}
    sender.nested["kept"].append(2)
    sender.also.append(3)
    sender.helper.seen = [threading.Lock()]
    for turn in range(2):
        packed = ObjectGraph({"module": sender}, {}, originals=originals[0]).pack()
        found = receiver.outputs, receiver.by_name, receiver.array, receiver.nested
        ObjectGraph({"module": receiver}, {}, originals=originals[1]).update(packed, _CPU)
        assert olds[0] == [3]
        assert receiver.also is olds[0]
        assert olds[1] == {"a": []}
        assert not olds[2].any()
        assert olds[3] == {"kept": [1, 2]}
        assert len(receiver.outputs) == 1
        assert receiver.by_name == {"a": [2]}
        assert receiver.array.all()
        assert receiver.nested == {"kept": [1, 2], "more": 1}
        assert receiver.nested["kept"] is kept
        assert receiver.helper.seen == [1]
        now = receiver.outputs, receiver.by_name, receiver.array, receiver.nested
        assert [a is b for a, b in zip(found, now, strict=True)] == [turn == 1] * 4


def test_the_senders_objects_are_not_changed():
    sender = Net()
    sender.outputs.append(torch.ones(1))
    state, versions = dict(vars(sender)), [tensor._version for tensor in sender.state_dict().values()]
    _carried(sender, Net())
    assert vars(sender) == state
    assert [tensor._version for tensor in sender.state_dict().values()] == versions


def test_attributes_that_cannot_be_pickled_are_named():
    module = Net()
    module.reader = (line for line in ())
    assert ObjectGraph({"module": module}, {}).unpicklable() == {
        "module.reader": GeneratorType,
        "module.helper.lock": type(threading.Lock()),
    }


@pytest.mark.parametrize("kind", ["tensor", "array"])
def test_large_data_is_sent_only_if_it_has_changed(kind):
    def dataset() -> Any:
        data = torch.zeros(300_000)
        holder = Helper(None)
        holder.data = data if kind == "tensor" else data.numpy()
        return holder

    sender, receiver = dataset(), dataset()
    marks, own = LargeData(ObjectGraph({"dataset": sender}, {}).large), ObjectGraph({"dataset": receiver}, {}).large
    same, kept = ObjectGraph({"dataset": sender}, {}).pack(marks.unchanged()), receiver.data
    assert len(same.data) < 1000
    assert not same.tensors
    ObjectGraph({"dataset": receiver}, {}).update(same, _CPU, own)
    assert receiver.data is kept
    sender.data[5] = 3
    ObjectGraph({"dataset": receiver}, {}).update(
        ObjectGraph({"dataset": sender}, {}).pack(marks.unchanged()), _CPU, own
    )
    assert receiver.data[5] == 3
    assert float(receiver.data.sum()) == 3


def test_weights_that_data_has_changed_are_sent():
    sender, receiver = nn.Linear(600, 600), nn.Linear(600, 600)
    marks = LargeData(ObjectGraph({"module": sender}, {}).large)
    sender.weight.data.mul_(2)  # no version shows it
    ObjectGraph({"module": receiver}, {}).update(ObjectGraph({"module": sender}, {}).pack(marks.unchanged()), _CPU)
    assert torch.equal(receiver.weight, sender.weight)


def test_who_has_received_large_data_sends_it_on():
    first, second, third = (Helper(None) for _ in range(3))
    for helper in (first, second, third):
        helper.data = torch.zeros(300_000)
    marks = LargeData(ObjectGraph({"helper": second}, {}).large)
    first.data += 1
    _carried(first, second, "helper")
    own = ObjectGraph({"helper": third}, {}).large
    ObjectGraph({"helper": third}, {}).update(ObjectGraph({"helper": second}, {}).pack(marks.unchanged()), _CPU, own)
    assert third.data.eq(1).all()


def test_arrays_of_objects_and_sparse_tensors_are_carried_whatever_their_size():
    sender, receiver = Helper(None), Helper(None)
    for helper in (sender, receiver):
        helper.words = np.array(["word"] * 200_000, dtype=object)
        helper.edges = torch.eye(600).to_sparse()
        helper.many = torch.sparse_coo_tensor(torch.zeros(1, 1, dtype=torch.long), torch.ones(1), (10**6,))
    sender.words[3] = "other"
    marks = LargeData(ObjectGraph({"helper": sender}, {}).large)
    ObjectGraph({"helper": receiver}, {}).update(ObjectGraph({"helper": sender}, {}).pack(marks.unchanged()), _CPU)
    assert receiver.words[3] == "other"


def test_what_is_one_object_in_the_sender_is_one_in_the_receiver():
    sender, receiver = Net(), Net()
    sender.queue = torch.ones(7)
    sender.shown = sender.queue
    receiver.shown = torch.zeros(7)
    _carried(sender, receiver)
    assert receiver.shown is receiver.queue


def test_a_metric_that_a_hook_has_added_counts_in_the_receiver():
    sender, receiver = nn.Linear(2, 2), nn.Linear(2, 2)
    sender.error = MeanSquaredError()
    sender.error.update(torch.ones(2), torch.zeros(2))
    _carried(sender, receiver)
    received: Any = receiver.error
    received.update(torch.zeros(2), torch.zeros(2))
    assert received._update_count == 2
    assert float(received.compute()) == 0.5


def test_an_expanded_tensor_arrives():
    sender, receiver = Net(), Net()
    sender.rows, receiver.rows = torch.ones(1, 3).expand(4, 3), torch.zeros(1, 3).expand(4, 3)
    _carried(sender, receiver)
    assert torch.equal(receiver.rows, torch.ones(4, 3))


def test_a_mock_stays_where_it_is():
    """It has any attribute that it is asked for; what it saw is of the process that has it."""
    ours, theirs = Helper(None), Helper(None)
    ours.update, theirs.update = MagicMock(), MagicMock()
    ours.seen.append(2)
    kept = theirs.update
    ObjectGraph({"helper": theirs}, {}).update(ObjectGraph({"helper": ours}, {}).pack(), _CPU)
    assert theirs.seen == [1, 2]
    assert theirs.update is kept


# ---------------------------------------------------------------------- optimizers and schedulers


class Training:
    """What trains a module, with a parameter of its own."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).double()
        self.own = nn.Parameter(torch.zeros(2))
        schedulers = torch.optim.lr_scheduler
        self.optimizers: list[Any] = [torch.optim.NAdam([*self.module.parameters(), self.own], lr=0.1)]
        parts = [schedulers.LinearLR(self.optimizers[0]), schedulers.ExponentialLR(self.optimizers[0], 0.5)]
        self.schedulers = [schedulers.SequentialLR(self.optimizers[0], parts, [2])]

    def step(self) -> None:
        self.module.zero_grad()
        self.own.grad = None
        (self.module(torch.ones(1, 2, dtype=torch.float64)).sum() + self.own.sum()).backward()
        for each in (*self.optimizers, *self.schedulers):
            each.step()

    def graph(self) -> ObjectGraph:
        return ObjectGraph({"module": self.module, "training": self}, {}, optimizers=True)


def test_an_optimizer_arrives_with_its_state_as_it_is_under_the_receivers_own_parameters():
    sender, receiver = Training(), Training()
    for _ in range(3):
        sender.step()
    sender.optimizers[0].state["all"] = {"count": 3}
    optimizer, scheduler, own = receiver.optimizers[0], receiver.schedulers[0], receiver.own
    inner = scheduler._schedulers
    for _ in range(2):  # also into what is there already
        receiver.graph().update(sender.graph().pack(), _CPU)
        assert receiver.optimizers == [optimizer]
        assert receiver.own is own
        assert [*optimizer.state] == [*receiver.module.parameters(), own, "all"]
        assert optimizer.param_groups[0]["params"] == [*receiver.module.parameters(), own]
        for ours, theirs in zip(optimizer.state.values(), sender.optimizers[0].state.values(), strict=True):
            assert ours.keys() == theirs.keys()
            assert all(ours[name] == theirs[name] for name in ours if not torch.is_tensor(ours[name]))
            tensors = [name for name in ours if torch.is_tensor(ours[name])]
            assert all(ours[name].dtype is theirs[name].dtype for name in tensors)
            assert all(torch.equal(ours[name], theirs[name]) for name in tensors)
    assert receiver.schedulers[0] is scheduler
    assert scheduler._schedulers is inner
    assert [each.optimizer for each in inner] == [optimizer] * 2
    for each in (sender, receiver):
        each.step()
    assert receiver.optimizers[0].param_groups[0]["lr"] == sender.optimizers[0].param_groups[0]["lr"]
    assert torch.equal(receiver.module[0].weight, sender.module[0].weight)


def test_an_optimizer_of_another_class_and_its_scheduler_are_made():
    sender, receiver = Training(), Training()
    sender.optimizers[0] = torch.optim.Adagrad(sender.module.parameters(), lr=0.3)
    sender.schedulers[0] = torch.optim.lr_scheduler.StepLR(sender.optimizers[0], 1)
    sender.step()
    receiver.graph().update(sender.graph().pack(), _CPU)
    assert isinstance(receiver.optimizers[0], torch.optim.Adagrad)
    assert receiver.schedulers[0].optimizer is receiver.optimizers[0]
    for each in (sender, receiver):
        each.step()
    assert torch.equal(receiver.module[0].weight, sender.module[0].weight)


def test_elsewhere_optimizers_belong_to_their_process():
    sender, receiver = Training(), Training()
    sender.step()
    packed = ObjectGraph({"training": sender}, {}).pack()
    ObjectGraph({"training": receiver}, {}).update(packed, _CPU)
    assert not receiver.optimizers[0].state


def test_a_parameter_that_is_met_before_its_module_is_the_modules():
    sender, receiver = Net(), Net()
    sender.__dict__ = {"first": [sender.net[0].weight], **sender.__dict__}
    weight = receiver.net[0].weight
    _carried(sender, receiver)
    assert receiver.first[0] is receiver.net[0].weight is weight
