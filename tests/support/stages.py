"""Steps by hand over the stages of a model, all of them in this process."""

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lightning_recycle.runtime.stage import Stage

CPU = torch.device("cpu")
SEED, STEP = 7, 3


def mse(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target)


def cut(layers: Sequence[nn.Module], cuts: Sequence[int], **options: Any) -> list[Stage]:
    """The stages that begin at 0 and at each of ``cuts``; ``options`` are those of each."""
    bounds = itertools.pairwise([0, *cuts, len(layers)])
    return [Stage(layers[a:b], a, SEED, CPU, loss=mse if b == len(layers) else None, **options) for a, b in bounds]


def copied(value: Any) -> Any:
    """As if sent to another process."""
    if isinstance(value, tuple):
        return tuple(copied(item) for item in value)
    return value.clone() if isinstance(value, Tensor) else value


def train_step(
    stages: Sequence[Stage],
    batches: Sequence[tuple[Any, Any]],
    *,
    split_backward: bool,
    step: int = STEP,
    forwards: Sequence[int] | None = None,
    backwards: Sequence[int] | None = None,
    recomputed: Collection[int] = (),
    kept: Callable[[int], AbstractContextManager[Any]] | None = None,
) -> list[Tensor]:
    """F of all micro-batches, then B of all, then W of all; returns their losses.

    Stages in ``recomputed`` compute their forwards again right before each B; in the context ``kept`` layers have the
    values of a micro-batch.
    """
    losses: dict[int, Tensor] = {}
    order = range(len(batches))
    for m in forwards or order:
        value, target = batches[m]
        for number, stage in enumerate(stages):
            again = number in recomputed
            with nullcontext() if kept is None else kept(m):
                value = stage.forward(step, m, copied(value), target, split_backward=split_backward, recomputed=again)
        losses[m] = stages[-1].loss(step, m, value, target, len(batches))
        torch.manual_seed(100 + m)  # the state of the process must not matter, in what is computed again neither
    for m in backwards or order:
        grads: Any = None
        for number, stage in reversed(list(enumerate(stages))):
            if number in recomputed:
                with nullcontext() if kept is None else kept(m):
                    stage.recompute(m, split_backward=split_backward)
            backward = stage.backward_input if split_backward else stage.backward
            grads = backward(m, copied(grads))
        assert grads is None, "the first stage has nobody to send gradients to"
    if split_backward:
        for m, stage in itertools.product(backwards or order, reversed(stages)):
            stage.backward_weight(m)
    return [losses[m] for m in order]


def gradients(layers: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Of all parameters that have one, by the number of the layer and the name in it."""
    found = {f"{i}.{name}": p.grad for i, layer in enumerate(layers) for name, p in layer.named_parameters()}
    return {name: grad for name, grad in found.items() if grad is not None}


def assert_same_bits(actual: Mapping[str, Tensor | None], expected: Mapping[str, Tensor | None]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert actual[name] is None if value is None else torch.equal(actual[name], value), name


@contextmanager
def generator_left_alone() -> Iterator[None]:
    """Within it, nothing changes the state of torch's generator of this process."""
    before = torch.get_rng_state()
    yield
    assert torch.equal(torch.get_rng_state(), before)
