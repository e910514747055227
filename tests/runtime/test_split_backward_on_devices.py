"""The split backward has the bits of the fused one on a device too; on the processor these tests run everywhere."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from support.stages import assert_same_bits
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from lightning_recycle.planning.grid import OpKind
from lightning_recycle.runtime.stage import Stage
from lightning_recycle.runtime.step_measurements import FirstSteps, Timings

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
WIDTH, HEADS, ROWS = 128, 2, 64


class Block(nn.Module):
    """Attention by SDPA and a feed-forward network."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.packed, self.output = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch = x.shape[0]
        parts = (t.view(batch, ROWS, HEADS, -1).transpose(1, 2) for t in self.packed(self.norm(x)).split(WIDTH, dim=2))
        query, key, value = parts
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.output(mixed.transpose(1, 2).reshape(batch, ROWS, WIDTH))
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


def gradients(
    device: str, dtype: torch.dtype, precision: torch.dtype | None, *, split_backward: bool
) -> tuple[dict[str, Tensor], set[str]]:
    """Gradients of a stage after two micro-batches, and the names of the parameters whose gradients waited."""
    torch.manual_seed(0)
    block = Block().to(device, dtype)
    names = {id(p): name for name, p in block.named_parameters()}

    def context() -> AbstractContextManager[Any]:
        return nullcontext() if precision is None else torch.autocast(device, dtype=precision)

    stage = Stage([block], 1, 0, torch.device(device), forward_context=context)
    found: dict[str, Tensor] = {}
    waited: set[str] = set()
    for number in range(2):
        x = torch.randn(2, ROWS, WIDTH, device=device, dtype=dtype, requires_grad=True)
        output = stage.forward(0, number, x, split_backward=split_backward)
        assert isinstance(output, Tensor)
        grad = torch.randn_like(output)
        if split_backward:
            grads: Any = stage.backward_input(number, (grad,))
            waited |= {names[id(p)] for p in stage.waiting_parameters(number)}
            stage.backward_weight(number)
        else:
            grads = stage.backward(number, (grad,))
        found[f"input {number}"] = grads[0]
    return {**found, **{name: p.grad for name, p in block.named_parameters() if p.grad is not None}}, waited


@pytest.fixture
def matmul_precision() -> Iterator[Callable[[str], None]]:
    """Sets it for a test: "high" is TF32."""
    before = torch.get_float32_matmul_precision()
    yield torch.set_float32_matmul_precision
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(
    ("precision", "matmul"),
    [(None, "highest"), (None, "high"), (torch.bfloat16, "highest"), (torch.float16, "highest")],
)
@pytest.mark.parametrize("device", DEVICES)
def test_split_and_fused_have_the_same_bits(device, precision, matmul, matmul_precision):
    matmul_precision(matmul)
    with sdpa_kernel(SDPBackend.MATH):  # the other kernels add in whatever order their blocks end
        for dtype in (torch.float32, torch.float64) if precision is None else (torch.float32,):
            expected, _ = gradients(device, dtype, precision, split_backward=False)
            actual, waited = gradients(device, dtype, precision, split_backward=True)
            assert_same_bits(actual, expected)
            assert {"packed.weight", "output.weight", "up.weight", "down.weight"} <= waited


@pytest.mark.parametrize("device", DEVICES)
def test_with_the_kernels_that_torch_chooses_the_weights_of_attention_wait(device):
    """Flash attention, on a device that has it."""
    _, waited = gradients(device, torch.float32, torch.bfloat16, split_backward=True)
    assert {"packed.weight", "output.weight", "up.weight", "down.weight"} <= waited


def busy(device: torch.device) -> Tensor:
    """Keeps the device busy for some tens of milliseconds."""
    value = torch.randn(4096, 4096, device=device)
    for _ in range(50):
        value = torch.mm(value, value).clamp_(-1, 1)
    return value


@pytest.mark.gpu
def test_the_host_does_not_wait_for_an_operation_that_it_measures():
    device, timings = torch.device("cuda"), Timings(torch.device("cuda"))
    busy(device)
    torch.cuda.synchronize()
    with timings.of[OpKind.FORWARD]:
        busy(device)
    after = torch.cuda.Event()
    after.record()
    assert not after.query(), "the host has waited"
    timings.await_device(lambda: None)
    assert timings.take_step()["F"] > 1e-3


@pytest.mark.gpu
def test_what_a_microbatch_holds_is_what_the_allocator_gave_out():
    device = torch.device("cuda")
    layers = [nn.Linear(1024, 1024, device=device) for _ in range(4)]
    stage = Stage(layers, 1, 0, device)
    meter = FirstSteps(device, lambda: [p for layer in layers for p in layer.parameters()])
    for step in range(2):
        meter.begin(step, ())
        x = torch.randn(4096, 1024, device=device, requires_grad=True)
        meter.received(x)
        with meter.part(OpKind.FORWARD, 0, stage, x):
            stage.forward(step, 0, x, split_backward=True)
        with meter.part(OpKind.BACKWARD_INPUT, 0, stage):
            stage.backward_input(0, (torch.ones(4096, 1024, device=device),))
        stage.backward_weight(0)
    found = meter.footprint()
    each = 4096 * 1024 * 4
    assert 5 * each <= found.after_forward <= 6 * each, "the input and four outputs"
    assert found.overhead >= 0
