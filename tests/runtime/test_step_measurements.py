"""What a worker measures in its first steps: memory, and the trial of a split backward."""

import itertools
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_recycle.devices import free_bytes, machine_bytes, peak_bytes, process_bytes, reset_peak, storage_bytes
from lightning_recycle.planning.grid import Microbatch, Op, OpKind
from lightning_recycle.planning.program import Task
from lightning_recycle.planning.split_backward import SplitTrial
from lightning_recycle.runtime.stage import Stage
from lightning_recycle.runtime.step_measurements import FirstSteps, processors_of

CPU = torch.device("cpu")
F, BW, B, W = OpKind.FORWARD, OpKind.BACKWARD, OpKind.BACKWARD_INPUT, OpKind.BACKWARD_WEIGHT
NO_STAGE: Any = SimpleNamespace()
WIDTH, BATCH = 64, 8
VALUE = WIDTH * BATCH * 4  # bytes of a (batch, width) tensor


class Checkpointed(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


def measured(*layers: nn.Module) -> tuple[int, int]:
    """Bytes after F and after B of a stage in the middle of a pipeline."""
    stage = Stage(layers, 1, 0, CPU)
    meter = FirstSteps(CPU, lambda: (p for layer in layers for p in layer.parameters()))
    for step in (4, 5):
        assert meter.footprint() is None
        meter.begin(step, (), split_backward=True)
        meter.begin(step, (), split_backward=True)  # a step that runs again
        value = torch.randn(BATCH, WIDTH).requires_grad_()
        with meter.part(F, 0, stage, value):
            stage.forward(step, 0, value, split_backward=True)
        with meter.part(B, 0, stage):
            stage.backward_input(0, torch.randn(BATCH, WIDTH))
        stage.backward_weight(0)
    footprint = meter.footprint()
    assert footprint.fixed == sum(p.nbytes for layer in layers for p in layer.parameters())
    assert footprint.checkpoint == VALUE
    return footprint.after_forward, footprint.after_backward


@pytest.mark.parametrize(("layers", "forward", "backward"), [
    ((nn.Linear(WIDTH, WIDTH),), 1, 2),  # its input; and the gradient of its output
    ((nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)), 2, 4),
    ((nn.Tanh(),), 1, 0),  # its output; no W
    ((Checkpointed(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)),), 1, 4),
], ids=["linear", "two", "tanh", "checkpointed"])  # fmt: skip
def test_bytes_after_each_operation(layers, forward, backward):
    assert measured(*layers) == (forward * VALUE, backward * VALUE)


def test_a_graph_that_is_dropped_in_the_measured_step_leaves_nothing():
    """A failure ends a step anywhere; a hook that returned the tensor itself kept it forever."""
    meter = FirstSteps(CPU, list)
    meter.begin(0, ())
    meter.begin(1, ())
    before = process_bytes(CPU)
    for _ in range(20):
        with meter.part(F, 0, NO_STAGE):
            torch.tanh(torch.randn(1 << 20, requires_grad=True))  # 4 MB each, dropped without a backward
    assert process_bytes(CPU) - before < 40 << 20


def test_second_derivatives_are_right_in_the_measured_step():
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1), nn.Sigmoid())
    value = torch.randn(BATCH, WIDTH, requires_grad=True)

    def gradients(meter: FirstSteps) -> Iterator[Tensor]:
        layers.zero_grad()
        with meter.part(F, 0, NO_STAGE):
            output = layers(value)
            (slope,) = torch.autograd.grad(output.sum(), value, create_graph=True)
            loss = output.mean() + slope.square().sum()
        loss.backward()
        return (p.grad.clone() for p in layers.parameters() if p.grad is not None)

    idle, active = FirstSteps(CPU, list), FirstSteps(CPU, list)
    active.begin(0, ())
    active.begin(1, ())
    for plain, hooked in zip(list(gradients(idle)), list(gradients(active)), strict=True):
        assert torch.equal(plain, hooked)


def test_storages_count_once_and_without_those_excluded():
    base = torch.zeros(100, dtype=torch.uint8)
    assert storage_bytes([base, base[:10], base.view(10, 10)]) == 100
    assert storage_bytes([base], {base.untyped_storage().data_ptr()}) == 0


@pytest.mark.parametrize(("membership", "files", "limit"), [
    ("0::/job/task\n", {"job/memory.max": "1000000", "job/task/memory.max": "max"}, 1_000_000),
    ("0::/outside\n", {"memory.max": "2000000"}, 2_000_000),  # a container sees its own group as the root
    ("4:cpu:/x\n7:memory:/job\n", {"memory/job/memory.limit_in_bytes": "3000000"}, 3_000_000),
    ("4:cpu:/x\n", {}, None),
    ("0::/job\n", {"job/memory.max": "max"}, None),
])  # fmt: skip
def test_the_limit_of_a_container_or_job_counts(membership, files, limit, tmp_path):
    (tmp_path / "membership").write_text(membership)
    for name, text in files.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    whole = machine_bytes(tmp_path / "nothing", tmp_path / "nothing")
    assert whole > 1 << 28
    found = machine_bytes(tmp_path / "cgroup", tmp_path / "membership")
    assert found == (whole if limit is None else limit)


@pytest.mark.parametrize(("membership", "folder", "names"), [
    ("0::/job\n", "job", ("memory.max", "memory.current", "inactive_file")),
    ("7:memory:/job\n", "memory/job", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")),
])  # fmt: skip
def test_what_a_container_or_job_uses_is_not_free(membership, folder, names, tmp_path):
    limit, used, files = names
    (tmp_path / "membership").write_text(membership)
    (tmp_path / folder).mkdir(parents=True)
    assert free_bytes(0, tmp_path, tmp_path / "membership") > 1_000_000
    for name, text in {limit: "1000000", used: "700000", "memory.stat": f"anon 5\n{files} 200000"}.items():
        (tmp_path / folder / name).write_text(text + "\n")
    assert free_bytes(0, tmp_path, tmp_path / "membership") == 500_000


def test_what_a_process_has_held_before_it_trains_is_free_again():
    cpu = torch.device("cpu")
    reset_peak(cpu)
    held = torch.ones(64 << 20, dtype=torch.uint8)
    peak, free = peak_bytes(cpu), free_bytes(0)
    del held
    assert free_bytes(100) < free - 50 * (64 << 20)
    reset_peak(cpu)
    assert free_bytes(100) > free - 50 * (64 << 20)
    assert peak_bytes(cpu) >= peak


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
def allocator(monkeypatch) -> Allocator:
    found = Allocator()
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda *_: found.allocated)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda *_: found.peak)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", found.reset)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (9_000_000, 10_000_000))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: SimpleNamespace(total_memory=10_000_000))
    return found


def on_device(allocator: Allocator, step: int, meter: FirstSteps) -> None:
    """F, B and W of one micro-batch, as the allocator of a device sees them."""
    stage: Any = Stage([nn.Tanh()], 1, 0, CPU)
    stage.waiting = lambda index: [torch.empty(100)]
    value = torch.randn(250)  # 1,000 bytes
    meter.begin(step, ())
    allocator.take(1_000)
    meter.received(value)
    with meter.part(F, 0, stage, value):
        allocator.take(5_000)
        allocator.take(-2_000)  # 2,000 bytes besides what it holds afterwards
    with meter.part(B, 0, stage):
        allocator.take(700)  # while the activations are there
        allocator.take(-700 - 3_600)
    with meter.part(W, 0, stage):
        allocator.take(2_500)
        allocator.take(-2_500 - 400)


def test_on_a_device_the_allocator_tells_what_is_held_and_what_is_taken_meanwhile(allocator):
    parameters = [torch.zeros(100)]
    meter = FirstSteps(torch.device("cuda", 0), lambda: parameters)
    for step in range(2):
        assert meter.footprint() is None
        allocator.take(50_000)  # in a step before, or in a STEP: none of these
        allocator.take(-50_000)
        on_device(allocator, step, meter)
    found = meter.footprint()
    assert (found.after_forward, found.after_backward, found.checkpoint) == (4_000, 400, 1_000)
    assert found.temporary == 2_500
    assert (found.capacity, found.overhead, found.fixed, found.messages) == (10_000_000, 999_600, 400, 0)
    assert found.place.endswith("/cuda:0")
    assert peak_bytes(torch.device("cuda", 0)) == 50_000, "it has reset the allocator's, and remembers it"


def test_the_peak_of_a_process_on_a_cpu_is_its_resident_memory():
    before = peak_bytes(CPU)
    assert before > 10_000_000
    value = torch.ones(before // 4)  # so much more, in float32
    assert peak_bytes(CPU) > before
    del value


def test_an_operation_that_fails_counts_for_nothing(allocator):
    meter = FirstSteps(torch.device("cuda", 0), list)

    def fail() -> None:
        with meter.part(BW, 0, NO_STAGE):
            allocator.take(10)
            raise KeyError

    for step in range(2):
        meter.begin(step, ())
        with pytest.raises(KeyError):
            fail()
    assert meter.footprint().temporary == 0


# ---------------------------------------------------------------------- the trial of a split backward


def program(count: int, split_backward: bool = False, recomputed: bool = False) -> list[Task]:
    ops = [(Op(F, 0, Microbatch(0, index)), index) for index in range(count)]
    return [Task(op, str(op), index, split_backward=split_backward, recomputed=recomputed) for op, index in ops]


def compute(seconds: float) -> None:
    """Keeps a core busy."""
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass


def run(trials: FirstSteps, step: int, count: int, seconds: float = 0.0, **flags: bool) -> list[bool]:
    """A step, in which a split micro-batch computes twice as long; returns which are split."""
    trials.begin(step, program(count, **flags))
    for index in range(count):
        for kind in (F, B, W) if trials.is_split(index) else (F, BW):
            with trials.part(kind, index, NO_STAGE):
                compute(seconds * (2 if kind in (B, W) else 1))
    return [trials.is_split(index) for index in range(count)]


def until_done(trials: FirstSteps, count: int, seconds: float = 0.0) -> SplitTrial:
    for step in range(10):
        run(trials, step, count, seconds)
        if (result := trials.trial()) is not None:
            return result
    raise AssertionError("the trial does not end")


def test_every_other_micro_batch_is_split_after_two_steps():
    trials = FirstSteps(CPU, None, tries_splitting=True)
    split = [run(trials, step, 3) for step in range(4)]
    assert split == [[False] * 3, [False] * 3, [True, False, True], [False, True, False]]
    assert trials.trial() is None, "it is not over"


def test_a_step_that_runs_again_and_a_part_of_one_count_once():
    trials = FirstSteps(CPU, None, tries_splitting=True)
    for _ in range(3):
        run(trials, 0, 2)
    trials.begin(None, program(2))
    assert not trials.is_split(0)
    run(trials, 1, 2)
    assert run(trials, 2, 2) == [True, False]


@pytest.mark.parametrize("flags", [{"split_backward": True}, {"recomputed": True}])
def test_what_the_plan_splits_or_computes_again_is_not_tried(flags):
    trials = FirstSteps(CPU, None, tries_splitting=True)
    assert not any(any(run(trials, step, 2, **flags)) for step in range(8))
    assert trials.trial() is None


@pytest.mark.parametrize("count", [1, 2, 5])
def test_both_are_measured_however_many_micro_batches_there_are(count):
    result = until_done(FirstSteps(CPU, None, tries_splitting=True), count, seconds=0.002)
    assert result.busy_fused == pytest.approx(0.004, rel=0.5)
    assert result.busy_split == pytest.approx(0.010, rel=0.5)
    assert result.longer > 1.5
    assert result.processors >= 0.1


def test_what_sleeps_takes_time_and_keeps_nobody_busy():
    trials = FirstSteps(CPU, None, tries_splitting=True)
    for step in range(6):
        trials.begin(step, program(2))
        for index in range(2):
            for kind in (F, B, W) if trials.is_split(index) else (F, BW):
                with trials.part(kind, index, NO_STAGE):
                    time.sleep(0.005)
    result = trials.trial()
    assert min(*result.fused, *result.split) > 0.004
    assert result.busy_split < 0.005


def test_waiting_between_two_clocks_is_not_taken_from_an_operation(monkeypatch):
    """The thread may lose its core after one clock was read and before the other, again and again."""
    hours = itertools.count(start=0.0, step=3600.0)
    monkeypatch.setattr("lightning_recycle.runtime.step_measurements._seconds_waited", lambda: next(hours))
    result = until_done(FirstSteps(CPU, None, tries_splitting=True), 2, seconds=0.002)
    assert result.fused + result.split == pytest.approx((0.002, 0.002, 0.002, 0.004, 0.004), rel=0.5)


def test_a_control_group_may_pay_for_less_than_the_cores_there_are(tmp_path):
    quota = tmp_path / "cpu.max"
    place, cores = processors_of(CPU, quota)
    quota.write_text("max 100000\n")
    assert processors_of(CPU, quota) == (place, cores)
    quota.write_text("50000 100000\n")
    assert processors_of(CPU, quota) == (place, 0.5)
