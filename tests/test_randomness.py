"""Randomness by address."""

import itertools
import random

import numpy as np
import pytest
import torch

from lightning_recycle import randomness

CPU = torch.device("cpu")


def draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), torch.rand(()).item()


def test_a_seed_is_determined_by_its_parts_and_fits_every_generator():
    assert randomness.derive_seed(1, 2, 3) == randomness.derive_seed(1, 2, 3)
    for parts in ((0,), (-1, 5), (2**32 - 1, 0, 7, 99), (2**63 - 1,)):
        seed = randomness.derive_seed(*parts)
        assert 0 <= seed < 2**63
        torch.Generator().manual_seed(seed)


def test_the_seed_of_a_given_address_never_changes():
    """Results of old runs depend on these numbers."""
    assert randomness.derive_seed(0) == 893442142816765029
    assert randomness.derive_seed(42, 3, 1, 7) == 5210560770103061081


def test_different_addresses_have_different_seeds():
    addresses = [*itertools.product(range(6), repeat=3), *itertools.product(range(6), repeat=2), (0,), (1,)]
    assert len({randomness.derive_seed(*address) for address in addresses}) == len(addresses)


def test_neighbouring_addresses_give_unrelated_draws():
    firsts = []
    for index in range(2000):
        with randomness.layer_randomness(CPU) as generator:
            generator.manual_seed(randomness.derive_seed(0, 0, index))
            firsts.append(torch.rand(()).item())
    values = torch.tensor(firsts)
    assert values.mean().item() == pytest.approx(0.5, abs=0.03)
    assert torch.corrcoef(torch.stack([values[:-1], values[1:]]))[0, 1].abs() < 0.08


def test_layer_randomness_leaves_the_surrounding_generator_as_it_was():
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    with randomness.layer_randomness(CPU) as generator:
        generator.manual_seed(99)
        torch.rand(10)
    assert torch.equal(torch.rand(4), expected)


def test_seeded_everything_seeds_all_three_generators_and_restores_them():
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = draws()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    with randomness.seeded_everything() as reseed:
        reseed(randomness.derive_seed(5))
        inside = draws()
        reseed(randomness.derive_seed(6))
        assert all(a != b for a, b in zip(draws(), inside, strict=True))
        reseed(randomness.derive_seed(5))
        assert draws() == inside
    assert draws() == expected


@pytest.mark.parametrize("block", [randomness.seeded_everything, lambda: randomness.layer_randomness(CPU)])
def test_generators_are_restored_after_an_exception(block):
    def fail() -> None:
        with block():
            torch.manual_seed(1)
            raise RuntimeError("inside")

    torch.manual_seed(8)
    expected = torch.rand(())
    torch.manual_seed(8)
    with pytest.raises(RuntimeError, match="inside"):
        fail()
    assert torch.equal(torch.rand(()), expected)


def test_a_users_step_leaves_the_generators_of_hooks_as_they_were():
    """NumPy draws normal numbers in pairs and keeps the second one, which is part of its state."""

    def hooks_draw() -> tuple[float, ...]:
        return (*draws(), random.gauss(0, 1), float(np.random.randn()), torch.randn(()).item())

    def begin() -> None:
        random.seed(1), np.random.seed(1), torch.manual_seed(1)
        random.gauss(0, 1), np.random.randn()

    begin()
    expected = hooks_draw()
    begin()
    with randomness.microbatch_randomness(torch.default_generator, 0, 0, 0), randomness.step_randomness():
        hooks_draw()
    assert hooks_draw() == expected
