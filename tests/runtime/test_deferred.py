"""A split backward gives the gradients of the fused one, bit by bit, whatever the module."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.stages import assert_same_bits
from torch import Tensor, nn

from lightning_recycle.runtime.deferred import WeightGradQueue, defer_weight_grad, intercept_linear

WIDTH = 12


class Tied(nn.Module):
    """Uses one weight twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.linear(x).tanh())


class TiedEmbedding(nn.Module):
    """Uses one weight as an embedding, which is not deferred, and as a projection, which is."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.embedding(x.abs().argmax(-1)) + x, self.embedding.weight)


class Frozen(nn.Module):
    def __init__(self, *, weight: bool = True, bias: bool = True) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.inner[2].weight.requires_grad_(weight)
        self.inner[2].bias.requires_grad_(bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


class Across(nn.Module):
    """Attention of a decoder: its packed projection is used in parts. With ``three``, query, key and value differ."""

    def __init__(self, *, three: bool = False, width: int = WIDTH) -> None:
        super().__init__()
        self.three = three
        sizes = {} if width == WIDTH else {"kdim": width, "vdim": width}
        self.attention = nn.MultiheadAttention(WIDTH, 3, batch_first=True, **sizes)
        self.memory = nn.Linear(WIDTH, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        memory = self.memory(x.sin())
        value = memory.flip(1) if self.three else memory
        return self.attention(x, memory, value, need_weights=False)[0]


class Conv1D(nn.Module):
    """Hugging Face's: the weight is (in, out), and the bias comes first."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(WIDTH, 3 * WIDTH)), nn.Parameter(torch.randn(3 * WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], -1)


class Halves(nn.Module):
    """Uses one part of its weight twice, the other transposed, and a row of it by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.weight.chunk(2)
        return F.linear(F.linear(x, first).tanh(), first) + F.linear(x, second.t())


class Turned(nn.Module):
    """Gives a layer a tensor that is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.transpose(0, 1)).transpose(0, 1)


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: nn.Parameter) -> Tensor:
        ctx.save_for_backward(x)
        ctx.scale = scale
        return x * scale

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        product = grads[0] * x
        grad_scale = defer_weight_grad(ctx.scale, lambda: product.reshape(-1, WIDTH).sum(0))
        return grads[0] * ctx.scale, grad_scale


class Scale(nn.Module):
    """A layer of a user's that defers its own weight gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return _Scale.apply(x, self.scale)


def hooked(kind: str) -> nn.Module:
    """A layer whose weight has a hook that doubles (or counts) its gradient."""
    layer = nn.Linear(WIDTH, WIDTH)
    layer.calls = []
    if kind == "hook":
        layer.weight.register_hook(lambda grad: grad * 2)
    else:
        layer.weight.register_post_accumulate_grad_hook(lambda p: layer.calls.append(p.grad.clone()))
    return layer


MODULES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "linear without bias": lambda: nn.Linear(WIDTH, 7, bias=False),
    "two layers": lambda: nn.Sequential(nn.Linear(WIDTH, 5), nn.GELU(), nn.Linear(5, WIDTH)),
    "attention": Attention,
    "attention across": Across,
    "attention of three": lambda: Across(three=True),
    "attention with other widths": lambda: Across(width=7),
    "Conv1D": lambda: nn.Sequential(Conv1D(), nn.GELU()),
    "parts of a weight": Halves,
    "transformer block": lambda: nn.TransformerEncoderLayer(WIDTH, 3, 24, dropout=0.0, batch_first=True),
    "shared weight": Tied,
    "shared with an embedding": TiedEmbedding,
    "frozen weight": lambda: Frozen(weight=False),
    "frozen bias": lambda: Frozen(bias=False),
    "frozen layer": lambda: Frozen(weight=False, bias=False),
    "input that is not contiguous": Turned,
    "weight with a hook": lambda: hooked("hook"),
    "parametrized weight": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    "layer that defers by itself": Scale,
}


def fused(module: nn.Module, x: Tensor, grad: Tensor) -> None:
    module(x).backward(grad)


def split(module: nn.Module, x: Tensor, grad: Tensor) -> WeightGradQueue:
    """F and B; the queue is what W will do."""
    with intercept_linear():
        output = module(x)
    queue = WeightGradQueue()
    with queue.collecting():
        output.backward(grad)
    return queue


def results(
    make: Callable[[], nn.Module], dtype: torch.dtype, shapes: Sequence[tuple[int, ...]], *, split_backward: bool
) -> dict[str, Tensor | None]:
    """Gradients of inputs and parameters after one backward for each input shape."""
    torch.manual_seed(1)
    module = make().to(dtype)
    found: dict[str, Tensor | None] = {}
    queues = []
    for index, shape in enumerate(shapes):
        x = torch.randn(shape, dtype=dtype).requires_grad_()
        with torch.no_grad():
            grad = torch.randn_like(module(x))
        if split_backward:
            queues.append(split(module, x, grad))
        else:
            fused(module, x, grad)
        found[f"input {index}"] = x.grad
    for queue in queues:
        queue.flush()
    return {**found, **{name: p.grad for name, p in module.named_parameters()}}


def assert_split_is_fused(name: str, dtype: torch.dtype, shapes: Sequence[tuple[int, ...]]) -> None:
    expected = results(MODULES[name], dtype, shapes, split_backward=False)
    assert_same_bits(results(MODULES[name], dtype, shapes, split_backward=True), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", MODULES)
def test_split_backward_gives_the_bits_of_the_fused_one(name, dtype):
    # The batch equals the width, so that a gradient of the wrong tensor would have the right shape.
    assert_split_is_fused(name, dtype, [(WIDTH, 5, WIDTH)])


@pytest.mark.parametrize(
    "name",
    [n for n in MODULES if not n.startswith(("attention", "transformer")) and n != "input that is not contiguous"],
)
def test_split_backward_gives_the_bits_of_the_fused_one_for_matrices(name):
    assert_split_is_fused(name, torch.float64, [(WIDTH, WIDTH)])


@pytest.mark.parametrize("name", MODULES)
def test_several_microbatches_add_up_to_the_bits_of_the_fused_backward(name):
    shapes = [(2, 3, WIDTH), (4, 5, WIDTH), (3, 3, WIDTH)]
    expected = results(MODULES[name], torch.float32, shapes, split_backward=False)
    actual = results(MODULES[name], torch.float32, shapes, split_backward=True)
    if name == "shared with an embedding":  # a part of its gradient comes in B, another in W: the order of sums changes
        torch.testing.assert_close(actual, expected)
    else:
        assert_same_bits(actual, expected)


def under_autocast(
    name: str, dtype: torch.dtype | None, *, split_backward: bool
) -> tuple[dict[str, Tensor | None], set[str]]:
    """Gradients after two micro-batches, and the names of the parameters whose gradients waited."""
    torch.manual_seed(1)
    module = MODULES[name]()
    names = {id(p): n for n, p in module.named_parameters()}
    found: dict[str, Tensor | None] = {}
    deferred: set[str] = set()
    for index in range(2):
        x, queue = torch.randn(3, 5, WIDTH).requires_grad_(), WeightGradQueue()
        with torch.autocast("cpu", dtype, dtype is not None), intercept_linear() if split_backward else nullcontext():
            output = module(x.sin())
        with queue.collecting() if split_backward else nullcontext():
            output.float().square().sum().backward()
        deferred |= {names[id(p)] for p in queue.parameters()}
        queue.flush()
        found[f"input {index}"] = x.grad
    return {**found, **{name: p.grad for name, p in module.named_parameters()}}, deferred


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", [
    "linear", "two layers", "attention", "attention across", "attention of three", "attention with other widths",
    "Conv1D", "parts of a weight", "shared weight", "frozen bias", "parametrized weight",
])  # fmt: skip
def test_under_autocast_the_split_backward_gives_the_bits_of_the_fused_one(name, dtype):
    expected, _ = under_autocast(name, dtype, split_backward=False)
    actual, deferred = under_autocast(name, dtype, split_backward=True)
    assert_same_bits(actual, expected)
    if name != "parametrized weight":
        trained = {n for n, p in MODULES[name]().named_parameters() if p.requires_grad}
        assert deferred == trained, "their gradients do not wait for W"


def test_without_the_cache_of_autocast_the_bits_are_the_same_too():
    def run(*, split_backward: bool) -> dict[str, Tensor | None]:
        torch.manual_seed(1)
        module, x, queue = Tied(), torch.randn(64, WIDTH), WeightGradQueue()
        autocast = torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False)
        with autocast, intercept_linear() if split_backward else nullcontext():
            output = module(x)
        with queue.collecting() if split_backward else nullcontext():
            output.float().square().sum().backward()
        assert len(queue) == (4 if split_backward else 0)
        queue.flush()
        return {name: p.grad for name, p in module.named_parameters()}

    assert_same_bits(run(split_backward=True), run(split_backward=False))


def test_what_waits_of_a_part_is_known():
    """The memory meter counts it."""
    x, grad = torch.randn(5, WIDTH), torch.randn(5, WIDTH)
    weight, queue = nn.Parameter(torch.randn(2 * WIDTH, WIDTH)), WeightGradQueue()
    with intercept_linear():
        output = F.linear(x, weight.chunk(2)[0])
    with queue.collecting():
        output.backward(grad)
    assert {tensor.data_ptr() for tensor in queue.tensors()} == {x.data_ptr(), grad.data_ptr()}


def test_an_input_that_is_learned_and_used_twice_has_the_same_bits_under_autocast():
    def run(*, split_backward: bool) -> Tensor:
        torch.manual_seed(1)
        first, second, learned = nn.Linear(WIDTH, 64), nn.Linear(WIDTH, 64), nn.Parameter(torch.randn(64, WIDTH))
        with torch.autocast("cpu", dtype=torch.bfloat16), intercept_linear() if split_backward else nullcontext():
            (first(learned) * second(learned)).float().sum().backward()
        assert learned.grad is not None
        return learned.grad

    assert torch.equal(run(split_backward=True), run(split_backward=False))


def test_double_precision_is_left_alone_by_autocast():
    module, x = nn.Linear(WIDTH, WIDTH).double(), torch.randn(4, WIDTH, dtype=torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16), intercept_linear():
        assert module(x).dtype == torch.float64


def test_a_one_dimensional_input_works():
    assert_split_is_fused("two layers", torch.float64, [(WIDTH,)])


@pytest.mark.parametrize("kind", ["hook", "post accumulate hook"])
def test_a_hook_on_a_parameter_sees_its_gradient_in_b(kind):
    module = hooked(kind)
    assert len(split(module, torch.ones(2, WIDTH), torch.ones(2, WIDTH))) == 0
    factor = 2.0 if kind == "hook" else 1.0
    assert torch.equal(module.weight.grad, torch.full((WIDTH, WIDTH), 2.0 * factor))
    assert len(module.calls) == (kind != "hook")


def test_nothing_is_added_to_a_weight_before_flush():
    for name in ("linear", "two layers", "layer that defers by itself"):
        module = MODULES[name]()
        queue = split(module, torch.randn(3, WIDTH), torch.randn(3, WIDTH))
        assert all(p.grad is None for p in module.parameters())
        assert len(queue) == len(list(module.parameters()))
        queue.flush()
        assert all(p.grad is not None for p in module.parameters())
        assert len(queue) == 0


def test_a_frozen_parameter_of_a_layer_that_defers_by_itself_gets_no_gradient():
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), Scale())
    module[1].scale.requires_grad = False
    queue = split(module, torch.ones(2, WIDTH), torch.ones(2, WIDTH))
    assert queue.parameters() == [module[0].weight]
    queue.flush()
    assert module[1].scale.grad is None


def test_an_exception_in_b_does_not_leave_the_queue_active():
    def failing_backward() -> None:
        with WeightGradQueue().collecting():
            raise RuntimeError("in B")

    with pytest.raises(RuntimeError, match="in B"):
        failing_backward()
    module = nn.Linear(WIDTH, WIDTH)
    with intercept_linear():
        output = module(torch.ones(1, WIDTH))
    output.sum().backward()
    assert module.weight.grad is not None


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert"])
def test_the_weights_of_hugging_face_blocks_wait_for_w(kind, attention):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    make = {
        "gpt2": lambda: transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=11),
        "llama": lambda: transformers.LlamaConfig(num_key_value_heads=1, vocab_size=11, **sizes),
        "bert": lambda: transformers.BertConfig(vocab_size=11, **sizes),
    }
    model = transformers.AutoModel.from_config(make[kind](), attn_implementation=attention).eval()
    queue = WeightGradQueue()
    with intercept_linear():
        output = model(torch.arange(10).view(2, 5)).last_hidden_state
    with queue.collecting():
        output.square().sum().backward()
    names = {id(p): n for n, p in model.named_parameters()}
    left = {n for n, p in model.named_parameters() if p.dim() == 2 and p.grad is not None}
    assert all("emb" in name or "wte" in name or "wpe" in name for name in left), "computed in B"
    assert {names[id(p)].split(".")[-2] for p in queue.parameters()} >= {
        "gpt2": {"c_attn", "c_proj", "c_fc"},
        "llama": {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"},
        "bert": {"query", "key", "value", "dense"},
    }[kind]


def test_a_product_that_is_no_layer_is_left_alone():
    a, b, c = (torch.randn(4, 4, requires_grad=True) for _ in range(3))
    with intercept_linear():
        torch.addmm(a, b, c, beta=2.0).sum().backward()
    assert torch.equal(a.grad, torch.full((4, 4), 2.0))
    out = torch.empty(4, 4)
    with intercept_linear(), torch.no_grad():
        assert torch.addmm(a, b, c, out=out) is out


def test_a_layer_may_transform_its_function():
    """``torch.func`` does not take functions like ours, and gets the ordinary product."""
    linear, x = nn.Linear(WIDTH, WIDTH), torch.randn(5, WIDTH)

    def penalized() -> Tensor:
        slope = torch.func.vmap(torch.func.grad(lambda row: F.linear(row, linear.weight, linear.bias).square().sum()))
        batched = torch.func.grad(lambda rows: F.linear(rows, linear.weight, linear.bias).square().sum())
        return linear(x).sum() + slope(x).square().sum() + batched(x).sum()

    expected = torch.autograd.grad(penalized(), [linear.weight, linear.bias])
    queue = WeightGradQueue()
    with intercept_linear():
        loss = penalized()
    with queue.collecting():
        loss.backward()
    assert len(queue) == 2, "the one outside of them waits"
    queue.flush()
    torch.testing.assert_close([parameter.grad for parameter in linear.parameters()], list(expected))
