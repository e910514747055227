"""Whether a gradient is finite, in every dtype that parameters have."""

from __future__ import annotations

import pytest
import torch

from lightning_recycle.runtime.verification import _is_finite, is_sound

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sum_that_is_large_is_finite_and_one_wrong_number_is_found(dtype: torch.dtype) -> None:
    values = torch.full((100,), 1000.0, dtype=dtype)
    assert _is_finite(values)
    assert is_sound([values])
    for wrong in (float("nan"), float("inf")):
        values[7] = wrong
        assert not _is_finite(values)
        assert not is_sound([values])
