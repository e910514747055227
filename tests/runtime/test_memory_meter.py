"""What a worker measures of its memory."""

from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_recycle.runtime.executor.memory_meter import (
    MemoryMeter,
    machine_bytes,
    peak_bytes,
    process_bytes,
    storage_bytes,
)
from lightning_recycle.runtime.stage.stage import Kept, Stage

CPU = torch.device("cpu")
WIDTH, BATCH = 64, 8
VALUE = WIDTH * BATCH * 4  # bytes of a (batch, width) tensor


class Checkpointed(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)  # type: ignore[no-any-return]


def measured(*layers: nn.Module) -> tuple[int, int]:
    """Bytes after F and after B of a stage in the middle of a pipeline."""
    stage = Stage(layers, 1, 0, CPU)
    meter = MemoryMeter(CPU, lambda: (p for layer in layers for p in layer.parameters()))
    for step in (4, 5):
        assert meter.footprint() is None
        meter.begin(step)
        meter.begin(step)  # a step that runs again
        value = torch.randn(BATCH, WIDTH).requires_grad_()
        with meter.forward(partial(stage.kept, value)):
            stage.forward(step, 0, value, decoupled=True)
        with meter.backward(lambda: stage.waiting(0)):
            stage.backward_input(0, torch.randn(BATCH, WIDTH))
        stage.backward_weight(0)
    footprint = meter.footprint()
    assert footprint is not None
    assert footprint.fixed == sum(p.nbytes for layer in layers for p in layer.parameters())
    assert footprint.checkpoint == VALUE
    return footprint.after_forward, footprint.after_backward


@pytest.mark.parametrize(
    ("layers", "forward", "backward"),
    [
        ((nn.Linear(WIDTH, WIDTH),), 1, 2),  # its input; and the gradient of its output
        ((nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)), 2, 4),
        ((nn.Tanh(),), 1, 0),  # its output; no W
        ((Checkpointed(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)),), 1, 4),
    ],
    ids=["linear", "two", "tanh", "checkpointed"],
)
def test_bytes_after_each_operation(layers: tuple[nn.Module, ...], forward: int, backward: int) -> None:
    assert measured(*layers) == (forward * VALUE, backward * VALUE)


def test_a_graph_that_is_dropped_in_the_measured_step_leaves_nothing() -> None:
    """A failure ends a step anywhere; a hook that returned the tensor itself kept it forever."""
    meter = MemoryMeter(CPU, list)
    meter.begin(0)
    meter.begin(1)
    before = process_bytes(CPU)
    for _ in range(20):
        with meter.forward(lambda: Kept((), [])):
            torch.tanh(torch.randn(1 << 20, requires_grad=True))  # 4 MB each, dropped without a backward
    assert process_bytes(CPU) - before < 40 << 20


def test_second_derivatives_are_right_in_the_measured_step() -> None:
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1), nn.Sigmoid())
    value = torch.randn(BATCH, WIDTH, requires_grad=True)

    def gradients(meter: MemoryMeter) -> Iterator[Tensor]:
        layers.zero_grad()
        with meter.forward(lambda: Kept((), [])):
            output = layers(value)
            (slope,) = torch.autograd.grad(output.sum(), value, create_graph=True)
            loss = output.mean() + slope.square().sum()
        loss.backward()
        return (p.grad.clone() for p in layers.parameters() if p.grad is not None)

    idle, active = MemoryMeter(CPU, list), MemoryMeter(CPU, list)
    active.begin(0)
    active.begin(1)
    for plain, hooked in zip(list(gradients(idle)), list(gradients(active)), strict=True):
        assert torch.equal(plain, hooked)


def test_storages_count_once_and_without_those_excluded() -> None:
    base = torch.zeros(100, dtype=torch.uint8)
    assert storage_bytes([base, base[:10], base.view(10, 10)]) == 100
    assert storage_bytes([base], {base.untyped_storage().data_ptr()}) == 0


@pytest.mark.parametrize(
    ("membership", "files", "limit"),
    [
        ("0::/job/task\n", {"job/memory.max": "1000000", "job/task/memory.max": "max"}, 1_000_000),
        ("0::/outside\n", {"memory.max": "2000000"}, 2_000_000),  # a container sees its own group as the root
        ("4:cpu:/x\n7:memory:/job\n", {"memory/job/memory.limit_in_bytes": "3000000"}, 3_000_000),
        ("4:cpu:/x\n", {}, None),
        ("0::/job\n", {"job/memory.max": "max"}, None),
    ],
)
def test_the_limit_of_a_container_or_job_counts(
    membership: str, files: dict[str, str], limit: int | None, tmp_path: Path
) -> None:
    (tmp_path / "membership").write_text(membership)
    for name, text in files.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    whole = machine_bytes(tmp_path / "nothing", tmp_path / "nothing")
    assert whole > 1 << 28
    found = machine_bytes(tmp_path / "cgroup", tmp_path / "membership")
    assert found == (whole if limit is None else limit)


class Allocator:
    """In the place of that of a device."""

    def __init__(self) -> None:
        self.allocated = self.peak = 0

    def take(self, size: int) -> None:
        self.allocated += size
        self.peak = max(self.peak, self.allocated)

    def reset(self, *_: object) -> None:
        self.peak = self.allocated


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    found = Allocator()
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda *_: found.allocated)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda *_: found.peak)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", found.reset)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (9_000_000, 10_000_000))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: SimpleNamespace(total_memory=10_000_000))
    return found


def on_device(allocator: Allocator, step: int, meter: MemoryMeter) -> None:
    """F, B and W of one micro-batch, as the allocator of a device sees them."""
    stage = Stage([nn.Tanh()], 1, 0, CPU)
    value = torch.randn(250)  # 1,000 bytes
    meter.begin(step)
    allocator.take(1_000)
    meter.received(value)
    with meter.operation(nullcontext()), meter.forward(partial(stage.kept, value)):
        allocator.take(5_000)
        allocator.take(-2_000)  # 2,000 bytes besides what it holds afterwards
    with meter.operation(nullcontext()), meter.backward(lambda: [torch.empty(100)]):
        allocator.take(700)  # while the activations are there
        allocator.take(-700 - 3_600)
    with meter.operation(nullcontext()):
        allocator.take(2_500)
        allocator.take(-2_500 - 400)


def test_on_a_device_the_allocator_tells_what_is_held_and_what_is_taken_meanwhile(allocator: Allocator) -> None:
    parameters = [torch.zeros(100)]
    meter = MemoryMeter(torch.device("cuda", 0), lambda: parameters)
    for step in range(2):
        assert meter.footprint() is None
        allocator.take(50_000)  # in a step before, or in a STEP: none of these
        allocator.take(-50_000)
        on_device(allocator, step, meter)
    found = meter.footprint()
    assert found is not None
    assert (found.after_forward, found.after_backward, found.checkpoint) == (4_000, 400, 1_000)
    assert found.temporary == 2_500
    assert (found.capacity, found.overhead, found.fixed, found.messages) == (10_000_000, 999_600, 400, 0)
    assert found.place.endswith("/cuda:0")
    assert peak_bytes(torch.device("cuda", 0)) == 50_000, "it has reset the allocator's, and remembers it"


def test_the_peak_of_a_process_on_a_cpu_is_its_resident_memory() -> None:
    before = peak_bytes(CPU)
    assert before > 10_000_000
    value = torch.ones(before // 4)  # so much more, in float32
    assert peak_bytes(CPU) > before
    del value


def test_an_operation_that_fails_counts_for_nothing(allocator: Allocator) -> None:
    meter = MemoryMeter(torch.device("cuda", 0), list)

    def fail() -> None:
        with meter.operation(nullcontext()):
            allocator.take(10)
            raise KeyError

    for step in range(2):
        meter.begin(step)
        with pytest.raises(KeyError):
            fail()
    found = meter.footprint()
    assert found is not None
    assert found.temporary == 0
