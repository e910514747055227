"""NumPy's global generator with a faster state: everything else stays as it is."""

import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from lightning_recycle import randomness
from lightning_recycle.randomness import MT19937, quicken


@pytest.fixture(autouse=True)
def _own_generator() -> Iterator[None]:
    before, state = np.random.get_bit_generator(), np.random.get_state()
    np.random.set_bit_generator(np.random.MT19937())
    np.random.set_state(state)
    yield
    np.random.set_bit_generator(before)
    np.random.set_state(state)


def draws() -> list[Any]:
    """An odd number of normal ones: one of two that are made together is left for the next call."""
    return [np.random.rand(3).tolist(), np.random.randn(3).tolist(), np.random.permutation(700).tolist()]


def assert_same(a: Any, b: Any) -> None:
    assert a[0] == b[0] == "MT19937"
    assert np.array_equal(a[1], b[1])
    assert a[1].dtype == b[1].dtype
    assert a[2:] == b[2:]


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1])
def test_numbers_and_states_are_those_of_numpy(seed: int) -> None:
    np.random.seed(seed)
    expected = [(draws(), np.random.get_state()) for _ in range(4)]
    quicken()
    assert type(np.random.get_bit_generator()) is MT19937
    np.random.seed(seed)
    for drawn, state in expected:
        assert draws() == drawn
        assert_same(np.random.get_state(), state)
    for _, state in expected:
        np.random.set_state(state)
        assert_same(np.random.get_state(), state)
    np.random.set_state(pickle.loads(pickle.dumps(expected[0][1])))
    assert draws() == expected[1][0]


def test_the_generator_goes_on_where_it_was_with_the_normal_number_that_is_left() -> None:
    np.random.seed(5)
    np.random.randn()
    state = np.random.get_state()
    assert state[3] == 1
    expected = draws()
    np.random.set_state(state)
    quicken()
    assert_same(np.random.get_state(), state)
    assert draws() == expected


def test_a_state_that_was_read_stays_what_it_was() -> None:
    quicken()
    np.random.seed(3)
    state = np.random.get_state()
    key = state[1].copy()
    draws()
    assert np.array_equal(state[1], key)


def test_states_of_other_forms_are_taken_as_by_numpy() -> None:
    quicken()
    np.random.seed(7)
    name, key, position, *_ = np.random.get_state()
    expected = np.random.rand(2).tolist()
    np.random.set_state((name, key.tolist(), position))
    assert np.random.rand(2).tolist() == expected
    with pytest.raises(ValueError, match="MT19937"):
        np.random.set_state(("PCG64", key, position))
    with pytest.raises((ValueError, IndexError, TypeError)):
        np.random.set_state((name, key[:5].tolist(), position))


def test_a_generator_that_the_user_has_chosen_is_left_alone() -> None:
    chosen = np.random.PCG64(1)
    np.random.set_bit_generator(chosen)
    quicken()
    assert np.random.get_bit_generator() is chosen


def test_an_unknown_layout_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    before = np.random.get_bit_generator()
    monkeypatch.setattr(randomness.MT19937, "_memory", lambda _: (randomness._Memory)())
    quicken()
    assert np.random.get_bit_generator() is before
