"""The mesh of a position: sharded layers over generations of groups, and what ends their collectives."""

import contextlib
import itertools
import os
import pickle
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from communicator_team import HOST, KEY, Meeting
from support.blocks import WIDTH, blocks
from support.waiting import wait_for
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lightning_recycle.errors import UnsupportedFeatureError
from lightning_recycle.runtime.communicator import Communicator
from lightning_recycle.runtime.groups_and_transports import CommunicationError, Device, Group
from lightning_recycle.runtime.position_mesh import PositionMesh, ranks_by_group
from lightning_recycle.session.optimizer_states import stepping_on_shards
from lightning_recycle.tensor_memory import local_part, sharded_like

ROWS = 4
Sizes = tuple[int, int]


def batch() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(ROWS, WIDTH, dtype=torch.double)


def sharded(mesh: PositionMesh) -> nn.Sequential:
    """The blocks as a user's configure_model makes them parallel."""
    model = blocks()
    with mesh.building_alone():
        if mesh.sizes[1] > 1:
            for block in model:
                plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
                parallelize_module(block, mesh.mesh["tensor_parallel"], plan)
        if mesh.sizes[0] > 1:
            for module in (*model, model):
                fully_shard(module, mesh=mesh.mesh["data_parallel"]).set_gradient_divide_factor(1.0)
    return model


def full(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class Position:
    """Links of all members in all generations, made before the members are forked."""

    def __init__(self, sizes: Sizes, generations: int = 3) -> None:
        self.sizes, self.size = sizes, sizes[0] * sizes[1]
        groups = {ranks for member in range(self.size) for ranks in ranks_by_group(sizes, member).values()}
        self._links = [
            {(ranks, pair): socket.socketpair() for ranks in groups for pair in itertools.combinations(ranks, 2)}
            for _ in range(generations)
        ]

    def connect(self, mesh: PositionMesh, generation: int, device: Device) -> list[socket.socket]:
        """Connects a member; returns what is to be shut down to abort the generation."""
        groups, cut = {}, []
        for plan in mesh.plans(range(self.size), 0):
            own = plan.ranks.index(mesh.member)
            peers = {}
            for (ranks, pair), ends in self._links[generation].items():
                if ranks == plan.ranks and mesh.member in pair:
                    side = pair.index(mesh.member)
                    peers[plan.ranks.index(pair[1 - side])] = ends[side]
                    cut.append(ends[side].dup())
            whole = device.create_group(own, len(plan.ranks), peers)[0]
            groups[plan.name] = Group(whole, whole)
        alone = device.create_group(0, 1, {})[0]
        mesh.connect(range(self.size), groups, alone, lambda _, work, __: work.wait())
        return cut

    def run(self, task: Callable[["Position", PositionMesh], Any], patience: float = 60.0) -> list[Any]:
        """What ``task`` returns in each member; raises what it raises there."""
        answers = []
        for member in range(self.size):
            readable, writable = os.pipe()
            pid = os.fork()
            if pid == 0:
                try:
                    torch.set_num_threads(1)
                    answer = (True, task(self, PositionMesh(self.sizes, member)))
                except BaseException as error:
                    answer = (False, f"{type(error).__name__}: {error}")
                os.write(writable, pickle.dumps(answer))
                os._exit(0)
            os.close(writable)
            answers.append((pid, readable))
        for ends in (ends for links in self._links for ends in links.values()):
            for end in ends:
                end.close()
        results = []
        for pid, readable in answers:
            with open(readable, "rb") as file:
                succeeded, result = pickle.loads(file.read())
            os.waitpid(pid, 0)
            assert succeeded, result
            results.append(result)
        return results


def gradients(position: Position, mesh: PositionMesh) -> list[float]:
    """The largest error of a gradient, in three generations of one mesh."""
    reference = blocks()
    reference(batch()).square().sum().backward()
    model, device, errors = sharded(mesh), Device(), []
    for generation in range(3):
        cut = position.connect(mesh, generation, device)
        model.zero_grad()
        part = batch().chunk(position.sizes[0])[mesh.member // position.sizes[1]]
        model(part).square().sum().backward()
        pairs = zip(model.parameters(), reference.parameters(), strict=True)
        errors.append(max(float((full(p.grad) - full(q.grad)).abs().max()) for p, q in pairs))
        for end in cut:
            end.close()
    return errors


@pytest.mark.parametrize("sizes", [(1, 2), (2, 1), (2, 2)], ids=str)
def test_sharded_layers_live_on_over_generations(sizes):
    for errors in Position(sizes).run(gradients):
        assert max(errors) < 1e-12


def shards(position: Position, mesh: PositionMesh) -> list[bytes]:
    local = (p.to_local() if isinstance(p, DTensor) else p for p in sharded(mesh).parameters())
    return [tensor.detach().numpy().tobytes() for tensor in local]


def test_a_member_builds_alone_what_all_build_together():
    found = Position((1, 2)).run(shards)
    names = [name for name, _ in blocks().named_parameters()]
    whole = dict(blocks().named_parameters())
    for member, parts in enumerate(found):
        for name, part in zip(names, parts, strict=True):
            dimension = {"up.weight": 0, "up.bias": 0, "down.weight": 1}.get(name.split(".", 1)[1])
            expected = whole[name] if dimension is None else whole[name].chunk(2, dimension)[member]
            assert part == expected.detach().contiguous().numpy().tobytes()


def refused(position: Position, mesh: PositionMesh) -> tuple[str, str]:
    """What is said of a collective while a member builds alone, and afterwards without a generation."""
    model = sharded(mesh)
    weight = next(p for p in model.parameters() if isinstance(p, DTensor) and p.placements[0].is_shard())
    with mesh.building_alone(), pytest.raises(UnsupportedFeatureError) as alone:
        weight.full_tensor()
    with pytest.raises(CommunicationError) as unconnected:
        model(batch())
    return str(alone.value), str(unconnected.value)


def test_what_needs_the_other_members_is_refused_before_there_is_a_generation():
    for alone, unconnected in Position((1, 2)).run(refused):
        assert "configure_model() runs the collective" in alone
        assert "on_fit_start" in alone
        assert "not connected" in unconnected


SCATTERED: dict[str, Callable[[Any, Tensor, Tensor], Any]] = {
    "one tensor": lambda group, mine, all_parts: group._reduce_scatter_base(mine, all_parts),
    "a list": lambda group, mine, all_parts: group.reduce_scatter([mine], [list(all_parts.chunk(2))]),
    "several": lambda group, mine, all_parts: group.reduce_scatter_tensor_coalesced([mine], [all_parts]),
}


def scattered(position: Position, mesh: PositionMesh) -> tuple[list[list[float]], list[float]]:
    """The parts of sums, and how long member 0 waits for member 1, which does not come, with a timeout."""
    parts, seconds = [], []
    for generation, reduce_scatter in enumerate(SCATTERED.values()):
        position.connect(mesh, generation, Device())
        group = mesh.groups["position"]
        part = torch.zeros(2)
        reduce_scatter(group, part, torch.arange(4.0).reshape(4) + 10 * mesh.member)
        parts.append(part.tolist())
        if mesh.member == 0:
            group.await_work = lambda backend, work, in_hook: work.wait(timedelta(seconds=0.2))
            began = time.monotonic()
            with pytest.raises(RuntimeError):
                reduce_scatter(group, part, torch.zeros(4))
            seconds.append(time.monotonic() - began)
        else:
            time.sleep(1.5)
    return parts, seconds


def test_a_wait_for_the_parts_of_a_sum_heeds_its_timeout():
    (first, seconds), (second, _) = Position((2, 1)).run(scattered)
    assert first == [[10.0, 12.0]] * 3
    assert second == [[14.0, 16.0]] * 3
    assert max(seconds) < 1.4


EXCHANGED = [(0, 0, 0), (3, 0, 7), (3, 2, 1), (5000, 1, 0), (0, 0, 0), (1, 9, 0)]
"""Bytes of each member, in one exchange after the other."""


def exchanged(position: Position, mesh: PositionMesh) -> int:
    """How many collectives the exchanges take."""
    device, collectives = Device(), []
    group: Any = mesh.groups["data_parallel"]
    run = group.run

    def counted(*args: Any) -> Any:
        collectives.append(args)
        return run(*args)

    group.run = counted
    for generation in range(2):
        position.connect(mesh, generation, device)
        for number, sizes in enumerate(EXCHANGED):
            found = mesh.exchange([1.5 * mesh.member, number], bytes([mesh.member]) * sizes[mesh.member])
            assert found == [([1.5 * m, number], bytes([m]) * size) for m, size in enumerate(sizes)]
    return len(collectives)


def test_members_exchange_numbers_and_bytes_in_one_collective_if_there_are_no_more_than_before():
    assert Position((3, 1)).run(exchanged) == [2 * (len(EXCHANGED) + 3)] * 3


OPTIMIZERS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}), (torch.optim.Adam, {"amsgrad": True}),
    (torch.optim.AdamW, {}), (torch.optim.AdamW, {"foreach": True}),
    (torch.optim.RMSprop, {"momentum": 0.5, "centered": True}), (torch.optim.Adagrad, {}), (torch.optim.Adadelta, {}),
    (torch.optim.Adamax, {}), (torch.optim.NAdam, {}), (torch.optim.RAdam, {}), (torch.optim.ASGD, {}),
]  # fmt: skip


def stepped(model: nn.Module, kind: tuple[type[torch.optim.Optimizer], dict[str, Any]], on_shards: bool) -> Any:
    """Shards of parameters and of the optimizer's state after three steps, and what the closure saw."""
    optimizer: Any = kind[0](model.parameters(), **kind[1])
    torch.optim.lr_scheduler.ConstantLR(optimizer)  # which replaces its step
    seen = set()

    def closure() -> None:
        torch.manual_seed(1)
        for group in optimizer.param_groups:
            for p in group["params"]:
                seen.add(type(p.data))
                p.grad = sharded_like(p, torch.randn_like(local_part(p)))

    for _ in range(3):
        with stepping_on_shards(optimizer) if on_shards else contextlib.nullcontext():
            optimizer.step(closure=closure)
    state = optimizer.state_dict()["state"]
    values = [local_part(p).detach() for p in model.parameters()]
    return values, {(n, k): v for n, each in state.items() for k, v in each.items()}, seen, optimizer.step


def steps(position: Position, mesh: PositionMesh) -> list[str]:
    wrong = []
    for kind in OPTIMIZERS:
        if "foreach" in kind[1] and mesh.sizes[1] > 1:
            continue  # torch has none for shards and plain parameters together
        results = [stepped(sharded(mesh), kind, on_shards) for on_shards in (False, True)]
        (values, state, *seen), (others, other_state, *also_seen) = results
        same = all(map(torch.equal, values, others)) and seen[0] == also_seen[0]
        same = same and state.keys() == other_state.keys() and hasattr(also_seen[1], "_wrapped_by_lr_sched")
        for key, value in state.items():
            is_like = type(value) is type(other_state[key])
            same = same and is_like and torch.equal(local_part(value), local_part(other_state[key]))
        wrong += [] if same else [f"{kind}"]
    return wrong


@pytest.mark.parametrize("sizes", [(3, 1), (1, 2)], ids=str)
def test_an_optimizer_steps_on_shards_as_on_what_they_are_shards_of(sizes):
    for wrong in Position(sizes).run(steps):
        assert not wrong


# ---------------------------------------------------------------------- over a worker's own connections


def add_up(mesh: PositionMesh, times: int) -> None:
    for _ in range(times):
        dist.all_reduce(torch.ones(4_000_000), group=mesh.groups["tensor_parallel"])


def in_hook(position: Position, mesh: PositionMesh) -> int:
    """How often a member is told that it cannot go on in a hook."""
    meeting, done = Meeting(os.environ["MEETING"]), Path(os.environ["MEETING"]) / "done"
    communicator = Communicator(mesh.member, HOST, torch.device("cpu"), meeting, KEY, timeout=15.0, mesh=mesh)
    told: list[CommunicationError] = []
    is_in_hook = True
    communicator.lose_sibling = told.append
    mesh.set_hook_detector(lambda: is_in_hook)
    meeting.generation = 0
    communicator.configure(0, (), [mesh.member], position=range(position.size))
    add_up(mesh, 1)
    communicator.abort(0, in_hook=range(4))
    add_up(mesh, 3)
    is_in_hook = False
    with pytest.raises(CommunicationError, match="aborted"):
        add_up(mesh, 1)
    assert not told
    is_in_hook = True
    if mesh.member == 1:
        done.touch()
    else:
        wait_for(done.exists)
        time.sleep(0.2)  # it waits for the sum now; no coordinator tells it of this abort
        communicator.abort(0, in_hook=[0])
    with pytest.raises(CommunicationError):
        add_up(mesh, 100)
    return len(told)


def test_an_abort_leaves_collectives_in_hooks_alone_while_all_members_live(tmp_path, monkeypatch):
    monkeypatch.setenv("MEETING", str(tmp_path))
    assert Position((1, 2), 0).run(in_hook) == [1, 1]


def late(position: Position, mesh: PositionMesh) -> tuple[str, float]:
    """The error in a backward whose sibling is gone, as it leaves autograd."""
    meeting = Meeting(os.environ["MEETING"])
    communicator = Communicator(mesh.member, HOST, torch.device("cpu"), meeting, KEY, timeout=60.0, mesh=mesh)
    model = sharded(mesh)
    meeting.generation = 0
    communicator.configure(0, (), [mesh.member], position=range(position.size))
    x = batch().requires_grad_()
    loss = model(x).square().sum()
    if mesh.member == 1:
        communicator.abort(0)
        return "", 0.0
    began = time.monotonic()
    try:
        loss.backward()
    except Exception as error:
        return type(error).__name__, time.monotonic() - began
    return "none", 0.0


def test_a_sibling_that_is_lost_in_a_backward_is_a_communication_error(tmp_path, monkeypatch):
    monkeypatch.setenv("MEETING", str(tmp_path))
    (name, seconds), _ = Position((1, 2), 0).run(late)
    assert name == "CommunicationError"
    assert seconds < 1.0
