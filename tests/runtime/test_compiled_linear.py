"""Compiled layers take part in the split backward, in graphs without breaks."""

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.waiting import PATIENCE
from test_deferred import WIDTH, Conv1D, split
from torch import Tensor, nn

from lightning_recycle.devices import storage_bytes
from lightning_recycle.runtime.deferred import WeightGradQueue, intercept_linear
from lightning_recycle.runtime.stage import Stage

COMPILERS = [
    "aot_eager",
    pytest.param(
        "inductor",
        marks=[pytest.mark.long, pytest.mark.skipif(shutil.which("g++") is None, reason="there is no compiler of C++")],
    ),
]
pytestmark = pytest.mark.skipif(not hasattr(torch.Tag, "cudagraph_unsafe"), reason="torch is too old for it")


@pytest.fixture(autouse=True)
def no_graphs_of_others() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Twice(nn.Module):
    """Two products with the same arguments, which a compiler makes one of, and a second use of the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear((self.linear(x) + self.linear(x)).tanh())


class Frozen(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, 8), nn.GELU(), nn.Linear(8, WIDTH, bias=False))
        self[0].bias.requires_grad_(False)


def deep() -> nn.Module:
    """Enough layers for memory to be used again."""
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())))


MODULES: dict[str, Callable[[], nn.Module]] = {
    "layers": deep,
    "used twice": Twice,
    "frozen bias": Frozen,
    "attention": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True),
    "Conv1D": Conv1D,
}
DEFERRED = {"layers": 8, "used twice": 6, "frozen bias": 2, "attention": 4, "Conv1D": 0}
"""Gradients that wait after one backward; not of ``nn.MultiheadAttention``, into which the compiler does not look."""


def gradients(
    name: str, compiler: str | None, *, split_backward: bool, precision: torch.dtype | None = None
) -> dict[str, Tensor]:
    torch.manual_seed(0)
    module = MODULES[name]()
    layer: Any = module if compiler is None else torch.compile(module, backend=compiler, fullgraph=True)
    found, queues = {}, []
    for number in range(3):
        x = torch.randn(3, 5, WIDTH, requires_grad=True)
        autocast = nullcontext() if precision is None else torch.autocast("cpu", dtype=precision)
        with autocast, intercept_linear() if split_backward else nullcontext():
            output = layer(x)
        queue = WeightGradQueue()
        with queue.collecting() if split_backward else nullcontext():
            output.float().square().sum().backward()
        if split_backward:
            assert len(queue) == DEFERRED[name]
            queues.append(queue)
        found[f"input {number}"] = x.grad.clone()
    for queue in queues:
        queue.flush()
    return {**found, **{n: p.grad for n, p in module.named_parameters() if p.grad is not None}}


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("name", MODULES)
def test_the_gradients_are_those_of_layers_that_are_not_compiled(name, compiler):
    expected = gradients(name, None, split_backward=False)
    actual = gradients(name, compiler, split_backward=True)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("compiler", COMPILERS)
def test_under_autocast_too(compiler):
    expected = gradients("layers", None, split_backward=False, precision=torch.bfloat16)
    actual = gradients("layers", compiler, split_backward=True, precision=torch.bfloat16)
    for key, value in expected.items():
        torch.testing.assert_close(actual[key], value, rtol=0.05, atol=0.05 * float(value.abs().max()))
        assert actual[key].dtype == torch.float32


def test_in_a_fused_backward_nothing_waits():
    """Of a graph that was made for a split one, whose backward a plan fuses."""
    module = deep()
    layer = torch.compile(module, backend="aot_eager", fullgraph=True)
    with intercept_linear():
        output = layer(torch.randn(4, WIDTH))
    output.square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in module.parameters())


def test_zeros_in_the_place_of_a_gradient_leave_negative_zeros_as_they_are():
    """An empty buffer of gradients holds them (runtime/gradients.py)."""
    module = nn.Linear(WIDTH, WIDTH)
    layer = torch.compile(module, backend="aot_eager", fullgraph=True)
    for parameter in module.parameters():
        parameter.grad = torch.full_like(parameter, -0.0)
    buffers = [p.grad for p in module.parameters()]
    split(layer, torch.randn(4, WIDTH), torch.ones(4, WIDTH))
    assert all(p.grad is b for p, b in zip(module.parameters(), buffers, strict=True))
    assert all(torch.signbit(b).all() for b in buffers if b is not None)


def test_a_parameter_with_a_hook_gets_its_gradient_in_b():
    module = nn.Linear(WIDTH, WIDTH)
    seen: list[Tensor] = []
    module.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    layer = torch.compile(module, backend="aot_eager", fullgraph=True)
    assert len(split(layer, torch.ones(4, WIDTH), torch.ones(4, WIDTH))) == 0
    assert torch.equal(seen[0], torch.full((WIDTH, WIDTH), 4.0))


def test_a_stage_knows_what_waits_of_its_compiled_layers():
    layers = [torch.compile(nn.Linear(WIDTH, WIDTH), backend="aot_eager", fullgraph=True) for _ in range(2)]
    stage = Stage(layers, 1, 0, torch.device("cpu"))
    x = torch.randn(4, WIDTH, requires_grad=True)
    output = stage.forward(0, 0, x, split_backward=True)
    stage.backward_input(0, torch.ones_like(output))
    assert len(stage.waiting_parameters(0)) == 4
    assert storage_bytes(stage.waiting(0)) == 2 * 2 * (4 * WIDTH * 4), "of each layer its input and a gradient"
    stage.backward_weight(0)


@pytest.mark.parametrize(
    ("make", "name"), [(lambda: nn.Linear(WIDTH, 4), "linear"), (Conv1D, "addmm")], ids=["linear", "Conv1D"]
)
def test_a_compiler_sees_one_operation_for_a_product(make, name):
    seen: list[str] = []

    def backend(graph: Any, inputs: Any) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    layer = make()
    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    with intercept_linear():
        compiled(torch.randn(2, WIDTH)).sum().backward()
    assert len(seen) == 1
    assert name in seen[0]
    assert layer.weight.grad is not None


def test_without_the_split_a_compiler_sees_what_it_always_does():
    seen: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        seen.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    compiled = torch.compile(nn.Linear(WIDTH, 4), backend=backend, fullgraph=True)
    with intercept_linear():
        compiled(torch.randn(2, WIDTH))
    seen.clear()
    compiled(torch.randn(2, WIDTH))
    assert seen in ([F.linear], [torch._C._nn.linear])


@pytest.mark.long
def test_a_compiler_that_is_loaded_within_the_block_calls_the_functions_by_their_names():
    """The code that it makes is cached for other processes, such as replacements."""
    script = """
from lightning_recycle.runtime.deferred import intercept_linear
with intercept_linear():
    import torch._inductor.kernel.mm
from torch._inductor.select_algorithm import extern_kernels
assert hasattr(extern_kernels, "addmm")
assert not [name for name in vars(extern_kernels) if "defer" in name]
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=PATIENCE)
