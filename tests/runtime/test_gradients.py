"""The flat gradients of a stage, their buckets, and copies of them."""

import math

import pytest
import torch
from support.written import written
from torch import nn

from lightning_recycle.errors import UnsupportedFeatureError
from lightning_recycle.runtime.stage.gradients import GradientBuffers
from lightning_recycle.runtime.stage.stage_bundle import Shadow

CPU = torch.device("cpu")


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def test_backward_accumulates_into_the_buffer() -> None:
    module, x = model(), torch.randn(4, 3)
    module(x).square().sum().backward()
    expected = [2 * p.grad for p in module.parameters()]  # type: ignore[operator]
    gradients = GradientBuffers(list(module.parameters()), CPU)
    gradients.begin(0)
    for _ in range(2):
        module(x).square().sum().backward()
    gradients.check(0)
    (buffer,) = gradients.of_step(0)
    for parameter, value in zip(module.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad, value)  # type: ignore[arg-type]
        assert parameter.grad.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()  # type: ignore[union-attr]
    assert buffer.sum().item() == pytest.approx(sum(g.sum().item() for g in expected))


def test_nothing_is_written_before_a_step_needs_it() -> None:
    """Layers that have come from another stage get gradients and a shadow while all wait."""
    parameters = list(model().parameters())
    numbers = sum(-(-p.numel() // 16) * 16 for p in parameters)
    gradients, before = written(lambda: GradientBuffers(parameters, CPU))
    _, begun = written(lambda: gradients.begin(1))
    shadow, copied = written(lambda: Shadow(parameters))
    _, updated = written(shadow.update)
    assert before < numbers <= begun, "offsets alone"
    assert (copied, updated) == (0, sum(p.numel() for p in parameters))


def test_begin_zeroes_every_gradient() -> None:
    module = model()
    gradients = GradientBuffers(list(module.parameters()), CPU)
    gradients.begin(0)
    module(torch.randn(4, 3)).sum().backward()
    gradients.begin(0)
    assert all(not buffer.any() for buffer in gradients.of_step(0))
    assert all(not p.grad.any() for p in module.parameters())  # type: ignore[union-attr]


def test_views_do_not_overlap() -> None:
    parameters = [nn.Parameter(torch.zeros(n)) for n in (1, 16, 17, 3)]
    gradients = GradientBuffers(parameters, CPU)
    gradients.begin(0)
    for number, parameter in enumerate(parameters, 1):
        parameter.grad.fill_(number)  # type: ignore[union-attr]
    for number, parameter in enumerate(parameters, 1):
        assert torch.equal(parameter.grad, torch.full_like(parameter, number))  # type: ignore[arg-type]
    assert gradients.of_step(0)[0].sum().item() == 1 + 2 * 16 + 3 * 17 + 4 * 3


def test_the_reduced_gradient_of_a_step_stays_while_the_next_step_accumulates() -> None:
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
    gradients.attach(4)
    assert gradients.squared_norm(4) == pytest.approx(sum(p.grad.square().sum().item() for p in module.parameters()))  # type: ignore[union-attr]
    gradients.begin(6)
    assert not kept.any(), "two sets of buffers serve all steps"


def test_each_dtype_has_one_buffer() -> None:
    dtypes = [torch.bfloat16, torch.float64, torch.bfloat16]
    gradients = GradientBuffers([nn.Parameter(torch.zeros(3, dtype=dtype)) for dtype in dtypes], CPU)
    assert [buffer.dtype for buffer in gradients.of_step(0)] == [torch.bfloat16, torch.float64]


def test_squared_norm_is_that_of_all_gradients_together() -> None:
    parameters = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2, 2, dtype=torch.float64))]
    gradients = GradientBuffers(parameters, CPU)
    gradients.begin(0)
    for parameter in parameters:
        parameter.grad.fill_(2.0)  # type: ignore[union-attr]
    assert gradients.squared_norm(0) == pytest.approx(7 * 4.0)
    norm = torch.nn.utils.get_total_norm([p.grad.double() for p in parameters])  # type: ignore[union-attr]
    assert math.sqrt(gradients.squared_norm(0)) == pytest.approx(norm.item())


def test_frozen_parameters_are_left_alone() -> None:
    frozen, trained = nn.Parameter(torch.zeros(3), requires_grad=False), nn.Parameter(torch.zeros(2))
    gradients = GradientBuffers([frozen, trained], CPU)
    gradients.begin(0)
    assert frozen.grad is None
    assert trained.grad is not None
    gradients.check(0)


def test_attach_brings_the_reduced_gradients_back_after_zero_grad() -> None:
    module = model()
    gradients = GradientBuffers(list(module.parameters()), CPU)
    gradients.begin(0)
    module(torch.randn(4, 3)).sum().backward()
    before = [p.grad.clone() for p in module.parameters()]  # type: ignore[union-attr]
    module.zero_grad(set_to_none=True)
    gradients.attach(0)
    gradients.check(0)
    assert all(torch.equal(p.grad, b) for p, b in zip(module.parameters(), before, strict=True))  # type: ignore[arg-type]


@pytest.mark.parametrize("replacement", ["None", "a tensor"])
def test_a_gradient_that_left_its_buffer_is_an_error_that_names_the_shape(replacement: str) -> None:
    module = model()
    gradients = GradientBuffers(list(module.parameters()), CPU)
    gradients.begin(0)
    module[0].weight.grad = None if replacement == "None" else torch.zeros(5, 3)
    with pytest.raises(UnsupportedFeatureError, match=r"\(5, 3\)"):
        gradients.check(0)


def test_sparse_gradients_are_accumulated_or_refused_but_never_lost() -> None:
    embedding = nn.Embedding(5, 3, sparse=True)
    gradients = GradientBuffers(list(embedding.parameters()), CPU)
    gradients.begin(0)
    embedding(torch.tensor([1, 1, 4])).sum().backward()
    try:
        gradients.check(0)
    except UnsupportedFeatureError:
        return
    assert embedding.weight.grad.sum(1).tolist() == [0, 6, 0, 0, 3]  # type: ignore[union-attr]
    assert gradients.of_step(0)[0].sum().item() == 9


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64])
def test_what_no_micro_batch_used_has_no_gradient_and_zeros_are_some(dtype: torch.dtype) -> None:
    used, unused, zero = (nn.Parameter(torch.ones(n, dtype=dtype)) for n in (3, 17, 5))
    gradients = GradientBuffers([used, unused, zero], CPU)
    for step in (0, 1):
        gradients.begin(step)
        for _ in range(2):
            ((used * 2).sum() + (zero * 0).sum()).abs().backward()
        for buffer in gradients.of_step(step):
            numbers = torch.view_as_real(buffer) if dtype.is_complex else buffer  # as in an all-reduce
            numbers += torch.full_like(numbers, -0.0)  # of a peer that had no micro-batch
        gradients.check(step)
        gradients.hand_over(step)
        assert unused.grad is None
        assert torch.equal(used.grad, torch.full_like(used, 4))  # type: ignore[arg-type]
        assert torch.equal(zero.grad, torch.zeros_like(zero))  # type: ignore[arg-type]


def test_what_requires_a_gradient_may_change_between_steps() -> None:
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

    gradients.attach(0)
    assert first.grad is None
    assert rest[0].grad is not None
    gradients.check(0)


def test_without_anything_to_train_there_is_nothing_to_reduce() -> None:
    gradients = GradientBuffers([nn.Parameter(torch.zeros(3), requires_grad=False)], CPU)
    gradients.begin(0)
    gradients.check(0)
    assert gradients.of_step(0) == []
    assert gradients.squared_norm(0) == 0.0


def test_buckets_hold_whole_gradients_from_the_last_layer_on() -> None:
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
    assert [int(p.grad.unique()) for p in parameters] == [4, 4, 4, 3, 2, 1]  # type: ignore[union-attr]
    assert sum(bucket.buffer.numel() for bucket in buckets) == sum(buffer.numel() for buffer in gradients.of_step(0))
    parameters[3].grad = torch.zeros(300)
    assert [bucket.is_in_place for bucket in buckets] == [True, True, False, True]


def test_what_several_stages_hold_is_in_buckets_that_are_alike_in_all_of_them() -> None:
    def of_stage(order: str, **tied: tuple[int, ...]) -> list[tuple[tuple[int, ...], list[int]]]:
        """The buckets of a stage whose parameters are named by their sizes, ``a`` for 1, in that order."""
        by_name = {name: nn.Parameter(torch.zeros(ord(name) - ord("a") + 1)) for name in order}
        holders = {by_name[name]: stages for name, stages in tied.items()}
        gradients = GradientBuffers(list(by_name.values()), CPU, 4 * 32, holders=holders)
        gradients.begin(0)
        assert sum(buffer.numel() for buffer in gradients.of_step(0)) == sum(16 if name < "q" else 32 for name in order)
        return [(bucket.stages, [p.numel() for p in bucket.parameters]) for bucket in gradients.buckets(0)]

    first = of_stage("abcdef", b=(0, 1), e=(0, 2), d=(0, 1), f=(0, 1))
    assert first == [((), [1, 3]), ((0, 1), [4, 6]), ((0, 1), [2]), ((0, 2), [5])]
    second = of_stage("fxdb", b=(0, 1), d=(0, 1), f=(0, 1))
    assert second == [((), [24]), ((0, 1), [4, 6]), ((0, 1), [2])]


def test_new_memory_has_the_same_layout() -> None:
    parameters = [nn.Parameter(torch.zeros(3, dtype=d)) for d in (torch.float32, torch.float64, torch.float32)]
    gradients = GradientBuffers(parameters, CPU, bucket_bytes=1)
    gradients.begin(0)
    before = gradients.buckets(0)
    gradients.renew(0)
    after = gradients.buckets(0)
    assert [bucket.parameters for bucket in before] == [bucket.parameters for bucket in after]
    assert not {b.buffer.data_ptr() for b in before} & {b.buffer.data_ptr() for b in after}
    gradients.begin(0)
    assert all(bucket.is_in_place for bucket in after)


def buffers(lends_copies: bool) -> tuple[nn.Linear, GradientBuffers]:
    layer = nn.Linear(3, 2)
    gradients = GradientBuffers([*layer.parameters()], torch.device("cpu"), lends_copies=lends_copies)
    gradients.begin(4)
    layer(torch.ones(1, 3)).sum().backward()
    return layer, gradients


@pytest.mark.parametrize("lends_copies", [False, True])
def test_what_is_lent_may_be_changed(lends_copies: bool) -> None:
    layer, gradients = buffers(lends_copies)
    gradients.hand_over(4)
    assert layer.weight.grad is not None
    assert torch.equal(layer.weight.grad, torch.ones(2, 3))
    layer.weight.grad.mul_(3.0)
    kept = dict(gradients.by_parameter(4))[layer.weight]
    assert torch.equal(kept, torch.full((2, 3), 1.0 if lends_copies else 3.0))
    gradients.hand_over(4, again=True)
    assert torch.equal(layer.weight.grad, torch.full((2, 3), 3.0)), "what was changed stays changed for hooks"


def test_once_somebody_has_changed_them_copies_are_lent() -> None:
    layer, gradients = buffers(lends_copies=False)
    gradients.hand_over(4)
    gradients.look_for_changes()
    assert layer.weight.grad is dict(gradients.by_parameter(4))[layer.weight]
    layer.weight.grad.mul_(3.0)
    gradients.look_for_changes()
    gradients.begin(5)
    layer(torch.ones(1, 3)).sum().backward()
    gradients.hand_over(5)
    layer.weight.grad.zero_()
    assert torch.equal(dict(gradients.by_parameter(5))[layer.weight], torch.ones(2, 3))
    assert len(gradients.tensors()) == 3


def test_a_gradient_that_nothing_wrote_is_none_in_a_copy_too() -> None:
    layer = nn.Linear(3, 2)
    gradients = GradientBuffers([*layer.parameters()], torch.device("cpu"), lends_copies=True)
    gradients.begin(4)
    layer.weight.sum().backward()
    gradients.hand_over(4)
    assert layer.bias.grad is None
    assert layer.weight.grad is not None
    gradients.begin(5)
    assert layer.weight.grad is dict(gradients.by_parameter(5))[layer.weight]
