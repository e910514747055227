"""The flat gradients of a stage, their buckets, and copies of them."""

import math

import pytest
import torch
from support.written import written
from torch import nn

from lightning_recycle.errors import UnsupportedFeatureError
from lightning_recycle.runtime.gradients import AccumulationPart, GradientBuffers
from lightning_recycle.runtime.stage_bundle import Shadow

CPU = torch.device("cpu")


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def apply(gradients: GradientBuffers, step: int) -> None:
    """As a worker that is alone, up to the optimizer, without zeroing."""
    gradients.check(step)
    for bucket in gradients.buckets(step):
        bucket.count()
    gradients.give_back()
    gradients.add(step, AccumulationPart())


def test_backward_accumulates_into_the_buffer():
    module, x = model(), torch.randn(4, 3)
    module(x).square().sum().backward()
    expected = [2 * p.grad for p in module.parameters()]
    gradients = GradientBuffers(list(module.parameters()), CPU)
    gradients.begin(0)
    for _ in range(2):
        module(x).square().sum().backward()
    gradients.check(0)
    (buffer,) = gradients.of_step(0)
    for parameter, value in zip(module.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad, value)
        assert parameter.grad.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
    assert buffer.sum().item() == pytest.approx(sum(g.sum().item() for g in expected))


def test_nothing_is_written_before_a_step_needs_it():
    """Layers that have come from another stage get gradients and a shadow while all wait."""
    parameters = list(model().parameters())
    numbers = sum(-(-p.numel() // 16) * 16 for p in parameters)
    gradients, before = written(lambda: GradientBuffers(parameters, CPU))
    _, begun = written(lambda: gradients.begin(1))
    shadow, copied = written(lambda: Shadow(parameters))
    _, updated = written(shadow.update)
    assert before < numbers <= begun, "offsets alone"
    assert (copied, updated) == (0, sum(p.numel() for p in parameters))


def test_the_reduced_gradient_of_a_step_stays_while_the_next_step_accumulates():
    """A peer that lost its part of the all-reduce may still adopt it."""
    module = model()
    gradients = GradientBuffers(list(module.parameters()), CPU)
    gradients.begin(4)
    module(torch.randn(4, 3)).sum().backward()
    (kept,) = gradients.of_step(4)
    before = kept.clone()
    gradients.begin(5)
    module(torch.randn(4, 3)).sum().backward()
    gradients.check(5)
    assert torch.equal(kept, before)
    assert not torch.equal(gradients.of_step(5)[0], before)
    parts = [view.square().sum().item() for _, view in gradients.by_parameter(4)]
    assert gradients.squared_norm(4) == pytest.approx(sum(parts))
    gradients.begin(6)
    assert not kept.any(), "two sets of buffers serve all steps"


def test_what_parameters_held_comes_back_however_often_a_step_is_begun():
    module = model()
    gradients = GradientBuffers(list(module.parameters()), CPU)
    held = [None if number % 2 else torch.full_like(p, 3.0) for number, p in enumerate(module.parameters())]
    for parameter, grad in zip(module.parameters(), held, strict=True):
        parameter.grad = grad
    for _ in range(2):
        gradients.begin(0)
        module(torch.randn(4, 3)).sum().backward()
    assert list(gradients.held().values()) == held[::2]
    gradients.give_back()
    assert all(p.grad is grad for p, grad in zip(module.parameters(), held, strict=True))


def test_what_stays_for_several_steps_without_a_sum_is_not_overwritten():
    """An ``optimizer_step`` may leave out its closure."""
    weight = nn.Parameter(torch.zeros(3))
    gradients = GradientBuffers([weight], CPU)
    gradients.begin(0)
    weight.sum().backward()
    apply(gradients, 0)
    for step in (1, 2, 3):
        gradients.begin(step)
        (weight * 5).sum().backward()
        gradients.give_back()
    assert weight.grad.tolist() == [1.0, 1.0, 1.0]


def test_statistics_are_beside_gradients():
    weight, statistics = nn.Parameter(torch.zeros(3)), [torch.zeros(2, 2), torch.zeros(5, dtype=torch.float64)]
    gradients = GradientBuffers([weight], CPU, statistics=lambda: statistics)
    for step in (0, 1, 2):
        gradients.begin(step)
        found = gradients.statistics(step)
        assert [(view.shape, view.dtype) for view in found] == [(one.shape, one.dtype) for one in statistics]
        assert not any(view.any() for view in found)
        weight.sum().backward()
        for view in found:
            view.add_(math.inf if step == 2 else 7.0)
        for buffer in gradients.of_step(step):
            buffer.mul_(2)  # as a sum over two workers
        assert step == 2 or [int(view.unique()) for view in found] == [14, 14]
        assert gradients.squared_norm(step) == pytest.approx(12.0)
        assert gradients.is_finite(step, AccumulationPart())
        weight.grad = None
        gradients.give_back()
    gradients.begin(3)
    gradients.renew(3)
    assert [view.shape for view in gradients.statistics(3)] == [one.shape for one in statistics]


@pytest.mark.parametrize("replacement", ["None", "a tensor"])
def test_a_gradient_that_left_its_buffer_is_an_error_that_names_the_shape(replacement):
    module = model()
    gradients = GradientBuffers(list(module.parameters()), CPU)
    gradients.begin(0)
    module[0].weight.grad = None if replacement == "None" else torch.zeros(5, 3)
    with pytest.raises(UnsupportedFeatureError, match=r"\(5, 3\)"):
        gradients.check(0)


def test_sparse_gradients_are_accumulated_or_refused_but_never_lost():
    embedding = nn.Embedding(5, 3, sparse=True)
    gradients = GradientBuffers(list(embedding.parameters()), CPU)
    gradients.begin(0)
    embedding(torch.tensor([1, 1, 4])).sum().backward()
    try:
        gradients.check(0)
    except UnsupportedFeatureError:
        return
    assert embedding.weight.grad.sum(1).tolist() == [0, 6, 0, 0, 3]
    assert gradients.of_step(0)[0].sum().item() == 9


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64])
def test_what_no_micro_batch_used_has_no_gradient_and_zeros_are_some(dtype):
    used, unused, zero = (nn.Parameter(torch.ones(n, dtype=dtype)) for n in (3, 17, 5))
    gradients = GradientBuffers([used, unused, zero], CPU)
    for step in (0, 1):
        used.grad = zero.grad = None
        gradients.begin(step)
        for _ in range(2):
            ((used * 2).sum() - (zero * 0).sum()).abs().backward()  # a negative zero
        for buffer in gradients.of_step(step):
            numbers = torch.view_as_real(buffer) if dtype.is_complex else buffer  # as in an all-reduce
            numbers += torch.zeros_like(numbers)  # of a peer that had no micro-batch
        apply(gradients, step)
        assert unused.grad is None
        assert torch.equal(used.grad, torch.full_like(used, 4))
        assert torch.equal(zero.grad, torch.zeros_like(zero))


def test_what_requires_a_gradient_may_change_between_steps():
    """A peer that adopts the gradient of the step before still finds it as it was laid out."""
    module = model()
    first, *rest = module.parameters()
    first.requires_grad = False
    gradients = GradientBuffers(list(module.parameters()), CPU)
    gradients.begin(0)
    module(torch.randn(4, 3)).sum().backward()
    (older,) = gradients.of_step(0)
    before = older.clone()

    first.requires_grad, rest[0].requires_grad = True, False
    gradients.begin(1)
    assert first.grad is not None
    assert rest[0].grad is None
    module(torch.randn(4, 3)).sum().backward()
    gradients.check(1)
    assert torch.equal(older, before)
    assert [id(p) for p, _ in gradients.by_parameter(0)] == [*map(id, rest)]


def test_without_anything_to_train_there_is_nothing_to_reduce():
    gradients = GradientBuffers([nn.Parameter(torch.zeros(3), requires_grad=False)], CPU)
    gradients.begin(0)
    gradients.check(0)
    assert gradients.of_step(0) == []
    assert gradients.squared_norm(0) == 0.0


def test_buckets_hold_whole_gradients_from_the_last_layer_on():
    sizes = [64, 16, 16, 300, 16, 33]
    dtypes = [torch.float32] * 4 + [torch.float64, torch.float32]
    parameters = [nn.Parameter(torch.zeros(n, dtype=d)) for n, d in zip(sizes, dtypes, strict=True)]
    gradients = GradientBuffers(parameters, CPU, bucket_bytes=4 * 96)
    gradients.begin(0)
    buckets = gradients.buckets(0)
    held = [[p.numel() for p in bucket.parameters] for bucket in buckets]
    assert held == [[33], [16], [300], [64, 16, 16]]
    assert all(bucket.is_in_place for bucket in buckets)
    for number, bucket in enumerate(buckets, 1):
        bucket.buffer.fill_(number)
    assert [int(p.grad.unique()) for p in parameters] == [4, 4, 4, 3, 2, 1]
    assert sum(bucket.buffer.numel() for bucket in buckets) == sum(buffer.numel() for buffer in gradients.of_step(0))
    parameters[3].grad = torch.zeros(300)
    assert [bucket.is_in_place for bucket in buckets] == [True, True, False, True]


def test_what_several_stages_hold_is_in_buckets_that_are_alike_in_all_of_them():
    def of_stage(order: str, **tied: tuple[int, ...]) -> list[tuple[tuple[int, ...], list[int]]]:
        """The buckets of a stage whose parameters are named by their sizes, ``a`` for 1, in that order."""
        by_name = {name: nn.Parameter(torch.zeros(ord(name) - ord("a") + 1)) for name in order}
        tie_stages = {by_name[name]: stages for name, stages in tied.items()}
        gradients = GradientBuffers(list(by_name.values()), CPU, 4 * 32, tie_stages=tie_stages)
        gradients.begin(0)
        assert sum(buffer.numel() for buffer in gradients.of_step(0)) == sum(
            16 if name < "q" else 32 for name in order
        ) + 16 * len(gradients.buckets(0))
        return [(bucket.stages, [p.numel() for p in bucket.parameters]) for bucket in gradients.buckets(0)]

    first = of_stage("abcdef", b=(0, 1), e=(0, 2), d=(0, 1), f=(0, 1))
    assert first == [((), [1, 3]), ((0, 1), [4, 6]), ((0, 1), [2]), ((0, 2), [5])]
    second = of_stage("fxdb", b=(0, 1), d=(0, 1), f=(0, 1))
    assert second == [((), [24]), ((0, 1), [4, 6]), ((0, 1), [2])]


def buffers(lends_copies: bool) -> tuple[nn.Linear, GradientBuffers]:
    layer = nn.Linear(3, 2)
    gradients = GradientBuffers([*layer.parameters()], torch.device("cpu"), lends_copies=lends_copies)
    gradients.begin(4)
    layer(torch.ones(1, 3)).sum().backward()
    return layer, gradients


@pytest.mark.parametrize("lends_copies", [False, True])
def test_what_is_lent_may_be_changed(lends_copies):
    layer, gradients = buffers(lends_copies)
    apply(gradients, 4)
    assert torch.equal(layer.weight.grad, torch.ones(2, 3))
    layer.weight.grad.mul_(3.0)
    kept = dict(gradients.by_parameter(4))[layer.weight]
    assert torch.equal(kept, torch.full((2, 3), 1.0 if lends_copies else 3.0))
    gradients.hand_over_again(4)
    assert torch.equal(layer.weight.grad, torch.full((2, 3), 3.0)), "what was changed stays changed for hooks"


def test_once_somebody_has_changed_them_copies_are_lent():
    layer, gradients = buffers(lends_copies=False)
    apply(gradients, 4)
    gradients.protect_lent(4)
    assert layer.weight.grad is dict(gradients.by_parameter(4))[layer.weight]
    layer.weight.grad.mul_(3.0)
    gradients.protect_lent(4)
    layer.zero_grad()
    gradients.begin(5)
    layer(torch.ones(1, 3)).sum().backward()
    apply(gradients, 5)
    layer.weight.grad.zero_()
    assert torch.equal(dict(gradients.by_parameter(5))[layer.weight], torch.ones(2, 3))
    assert len(gradients.tensors()) == 3


def test_a_gradient_that_nothing_wrote_is_none_in_a_copy_too():
    layer = nn.Linear(3, 2)
    gradients = GradientBuffers([*layer.parameters()], torch.device("cpu"), lends_copies=True)
    gradients.begin(4)
    layer.weight.sum().backward()
    apply(gradients, 4)
    assert layer.bias.grad is None
    gradients.begin(5)
    assert layer.weight.grad.data_ptr() == dict(gradients.by_parameter(5))[layer.weight].data_ptr()
