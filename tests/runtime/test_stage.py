"""Stages cut from a model compute what the whole model computes."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from support.stages import CPU, SEED, STEP, copied, cut, generator_left_alone, gradients, mse, train_step
from torch import Tensor, nn

from lightning_recycle.errors import ConfigurationError
from lightning_recycle.runtime.stage import Stage

WIDTH = 6
Batches = Sequence[tuple[Any, Tensor]]


class WithLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)


class Residual(WithLinear):
    """Passes a tuple on: the value, a skip connection, and positions (integers) that need no gradient."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.linear(x), x * 2, torch.arange(x.shape[0])


class Ignore(WithLinear):
    """Does not use one of its inputs."""

    def forward(self, x: Tensor, skip: Tensor, positions: Tensor) -> Tensor:
        return self.linear(x)


class Spectrum(WithLinear):
    """Hands on a complex tensor."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.rfft(self.linear(x))


class Magnitude(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH // 2 + 1, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.abs())


def block(*, inplace: bool = False) -> list[nn.Module]:
    return [nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=inplace), nn.Linear(WIDTH, WIDTH), nn.Tanh()]


MODELS: dict[str, Callable[[], list[nn.Module]]] = {
    "linear": block,
    "in-place first layer of a stage": lambda: [
        nn.Linear(WIDTH, WIDTH),
        nn.ReLU(inplace=True),
        nn.Linear(WIDTH, WIDTH),
    ],
    "unused input": lambda: [Residual(), Ignore(), nn.Linear(WIDTH, WIDTH)],
    "first stage without parameters": lambda: [nn.Tanh(), nn.Linear(WIDTH, WIDTH)],
    "complex": lambda: [Spectrum(), Magnitude()],
    "batch norm": lambda: [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)],
    "dropout": lambda: [nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)],
}


def build(name: str) -> list[nn.Module]:
    torch.manual_seed(0)
    return [layer.double() for layer in MODELS[name]()]


def data(count: int) -> Batches:
    generator = torch.Generator().manual_seed(1)

    def draw() -> Tensor:
        return torch.randn(5, WIDTH, dtype=torch.float64, generator=generator)

    return [(draw(), draw()) for _ in range(count)]


def trained(
    layers: list[nn.Module], cuts: Sequence[int], batches: Batches | None = None, **options: Any
) -> tuple[list[float], dict[str, Tensor]]:
    """One step by hand: losses of the micro-batches, and gradients."""
    losses = train_step(cut(layers, cuts), batches or data(2), **options)
    return [loss.item() for loss in losses], gradients(layers)


def whole_model(layers: list[nn.Module], batches: Batches = ()) -> tuple[list[float], dict[str, Tensor]]:
    """The same with plain autograd."""
    losses = []
    batches = batches or data(2)
    for x, y in batches:
        value: Any = x
        for layer in layers:
            value = layer(*value) if isinstance(value, tuple) else layer(value)
        loss = mse(value, y)
        (loss / len(batches)).backward()
        losses.append(loss.item())
    return losses, gradients(layers)


assert_close = functools.partial(torch.testing.assert_close, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("split_backward", [False, True], ids=["fused", "split"])
@pytest.mark.parametrize("name", [n for n in MODELS if n != "dropout"])
def test_stages_cut_anywhere_give_the_gradients_of_the_whole_model(name, split_backward):
    expected = whole_model(build(name))
    for place in range(1, len(build(name))):
        assert_close(trained(build(name), [place], split_backward=split_backward), expected)
    assert_close(trained(build(name), range(1, len(build(name))), split_backward=split_backward), expected)


@pytest.mark.parametrize("split_backward", [False, True], ids=["fused", "split"])
def test_dropout_depends_neither_on_the_cut_nor_on_the_order_of_execution(split_backward):
    expected = trained(build("dropout"), [], split_backward=False)
    for cuts in ([1], [2], [3], [1, 2, 3]):
        for forwards in ([0, 1], [1, 0]):
            torch.manual_seed(cuts[0])  # the state of the process must not matter
            assert_close(trained(build("dropout"), cuts, split_backward=split_backward, forwards=forwards), expected)


def test_dropout_differs_between_microbatches_steps_layers_and_seeds():
    def masks(seed: int, step: int, microbatch: int) -> Tensor:
        first = Stage([nn.Dropout(0.5), nn.Dropout(0.5)], 0, seed, CPU)
        second = Stage([nn.Dropout(0.5)], 1, seed, CPU)
        ones = torch.ones(1, 64)
        return torch.cat([s.forward(step, microbatch, ones, split_backward=False) for s in (first, second)])

    base = masks(1, 2, 3)
    assert torch.equal(masks(1, 2, 3), base)
    assert not torch.equal(base[0] != 0, base[1] != 0)
    for other in (masks(0, 2, 3), masks(1, 3, 3), masks(1, 2, 0)):
        assert not torch.equal(other, base)


def test_forward_leaves_the_generator_of_the_process_alone():
    stage = Stage([nn.Dropout(0.5)], 0, SEED, CPU)
    with generator_left_alone():
        stage.forward(0, 0, torch.ones(4), split_backward=False)


def test_after_clear_a_step_can_run_again_with_the_same_result():
    layers = build("dropout")
    first, last = cut(layers, [2])
    x, y = data(1)[0]
    results = []
    for _ in range(2):
        output = last.forward(STEP, 0, copied(first.forward(STEP, 0, x, split_backward=True)), split_backward=True)
        results.append(last.loss(0, 0, output, y, 1).item())
        first.clear()
        last.clear()
    assert results[0] == results[1]
    with pytest.raises(KeyError):
        first.backward_weight(0)


STEP_LOSS = {"loss_name": "training_step", "loss_is_optional": True}


@pytest.mark.parametrize(("loss", "options", "message"), [
    (lambda output, target: (output - target) ** 2, {}, r"tensor of shape \(5, 6\).* Add \.mean\(\)\.$"),
    (lambda output, target: (output - target).square().mean().item(), {},
     r"a float.*scalar tensor.* instead of \.item\(\)\.$"),
    (lambda output, target: "abc", STEP_LOSS, r"training_step\(\) returned a str; .*, or a dict with it as 'loss'\.$"),
    (lambda output, target: "abc", {}, r"a str; it must return a scalar tensor, the mean over the micro-batch\.$"),
    (lambda output, target: None, {}, "a NoneType"),
    (lambda output, target: (output.detach() - target).square().mean(), {}, "without a gradient"),
], ids=["not a scalar", "a number", "text of a step", "text", "nothing", "detached"])  # fmt: skip
def test_a_loss_that_cannot_be_trained_on_is_an_error_with_a_remedy(loss, options, message):
    stage = Stage([nn.Linear(WIDTH, WIDTH).double()], 0, SEED, CPU, loss=loss, **options)
    x, y = data(1)[0]
    output = stage.forward(STEP, 0, x, split_backward=True)
    with pytest.raises(ConfigurationError, match=message):
        stage.loss(0, 0, output, y, 1)


def test_a_loss_of_shape_1_is_a_scalar_too():
    stage = Stage([nn.Linear(WIDTH, WIDTH).double()], 0, SEED, CPU, loss=lambda o, t: mse(o, t).reshape(1))
    x, y = data(1)[0]
    output = stage.forward(STEP, 0, x, split_backward=False)
    assert stage.loss(0, 0, output, y, 1).shape == ()
    assert stage.backward(0, None) is None


# ---------------------------------------------------------------------- what passes between stages


class Tagged(nn.Module):
    """Passes on values of every kind: one that needs a gradient, none, integers, truth values, one of no dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.linear = nn.Embedding(16, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> tuple[Tensor | None, ...]:
        x = self.embedding(tokens)
        return x, None, tokens, mask, self.linear(x).mean(), torch.linspace(0, 1, tokens.shape[-1], dtype=x.dtype)


class Relay(WithLinear):
    """Uses and changes some of them; its None is in another place when it has run."""

    def forward(
        self, x: Tensor, nothing: None, tokens: Tensor, mask: Tensor | None, mean: Tensor, ramp: Tensor
    ) -> tuple[Tensor | None, ...]:
        assert nothing is None
        assert (tokens.dtype, mean.shape) == (torch.int64, ())
        y = self.linear(x) * ramp[:, None] + mean
        if mask is not None:
            assert mask.dtype == torch.bool
            y = y.masked_fill(~mask[..., None], 0.0)
        return y, tokens + 1, mean, None


class Gather(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(17, WIDTH)

    def forward(self, y: Tensor, tokens: Tensor, mean: Tensor, nothing: None) -> Tensor:
        assert nothing is None
        return y * mean + self.embedding(tokens)


def tagged_batches() -> Batches:
    """Three micro-batches of different lengths, one without a mask."""
    generator = torch.Generator().manual_seed(2)
    found = []
    for samples, length, masked in ((2, 5, True), (1, 3, False), (3, 7, True)):
        tokens = torch.randint(0, 16, (samples, length), generator=generator)
        mask = torch.rand(samples, length, generator=generator) > 0.3 if masked else None
        found.append(((tokens, mask), torch.randn(samples, length, WIDTH, dtype=torch.float64, generator=generator)))
    return found


@pytest.mark.parametrize("split_backward", [False, True], ids=["fused", "split"])
@pytest.mark.parametrize("cuts", [[], [1], [2], [1, 2]], ids=str)
def test_none_integers_truth_values_scalars_and_lengths_that_vary_pass_between_stages(cuts, split_backward):
    def build_tagged() -> list[nn.Module]:
        torch.manual_seed(0)
        return [layer.double() for layer in (Tagged(), Relay(), Gather())]

    expected = whole_model(build_tagged(), tagged_batches())
    assert_close(trained(build_tagged(), cuts, tagged_batches(), split_backward=split_backward), expected)


def test_gradients_go_back_for_what_has_some_and_are_none_for_the_rest():
    stage = Stage([Relay().double()], 1, SEED, CPU)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2, 4, WIDTH, dtype=torch.float64, generator=generator).requires_grad_()
    tokens, mask = torch.zeros(2, 4, dtype=torch.int64), torch.ones(2, 4, dtype=torch.bool)
    mean, ones = x.detach().mean().requires_grad_(), torch.ones(4, dtype=torch.float64, requires_grad=True)
    sent = stage.forward(STEP, 0, (x, None, tokens, mask, mean, ones), split_backward=True)
    assert [None if item is None else item.requires_grad for item in sent] == [True, False, True, None]
    assert all(item is None or item.is_leaf for item in sent)
    grads = stage.backward_input(0, (torch.ones_like(x), None, torch.tensor(2.0, dtype=torch.float64), None))
    assert [grad is None for grad in grads] == [False, True, True, True, False, False]
    assert grads[4].item() == x.numel() + 2.0, "it is used, and passed on"
    assert grads[5].shape == (4,)


def test_what_came_without_a_graph_gets_no_gradient():
    """A mask of floating-point numbers, or the output of a frozen stage."""
    stage = Stage([Relay().double()], 1, SEED, CPU)
    x = torch.ones(2, 4, WIDTH, dtype=torch.float64)
    tokens, mask = torch.zeros(2, 4, dtype=torch.int64), torch.ones(2, 4, dtype=torch.bool)
    sent = stage.forward(
        STEP, 0, (x, None, tokens, mask, x.mean(), torch.ones(4, dtype=torch.float64)), split_backward=True
    )
    grads = stage.backward_input(0, tuple(None if item is None else torch.ones_like(item) for item in sent))
    assert grads == (None,) * 6


def test_a_forgotten_microbatch_holds_nothing():
    layer = nn.Linear(WIDTH, WIDTH).double()
    stage = Stage([layer], 1, SEED, CPU)
    x = torch.ones(2, WIDTH, dtype=torch.float64)
    stage.forward(STEP, 0, x, split_backward=True)
    stage.backward_input(0, (torch.ones_like(x),))
    assert stage.waiting(0)
    stage.forget(0)
    assert not stage._in_flight
    assert all(parameter.grad is None for parameter in layer.parameters())


def test_a_gradient_that_the_next_stage_does_not_have_is_none():
    """The next stage ignores the only differentiable output: there is nothing to compute, and no error."""
    stage = Stage([Residual().double()], 1, SEED, CPU)
    stage.forward(STEP, 0, torch.ones(2, WIDTH, dtype=torch.float64), split_backward=True)
    assert stage.backward_input(0, (None, None, None)) == (None,)
    stage.backward_weight(0)


@pytest.mark.parametrize(
    "output", [None, [torch.ones(1)], {"x": torch.ones(1)}, (torch.ones(1), 3), (torch.ones(1), (None,))], ids=repr
)
def test_only_tensors_and_none_in_tuples_pass_between_stages(output):
    class Returns(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return output

    stage = Stage([nn.Identity(), Returns()], 4, SEED, CPU)
    with pytest.raises(ConfigurationError, match=r"Layer 5 \(Returns\).*tuples of tensors and None"):
        stage.forward(STEP, 0, torch.ones(1), split_backward=False)
