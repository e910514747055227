"""What workers compare before they evaluate the model together."""

import pytest
import torch

from lightning_recycle.runtime.verification import alike, fingerprint

X = torch.linspace(-1, 1, 32).view(4, 8)
TOKENS = torch.arange(32).view(4, 8)


@pytest.mark.parametrize(("mine", "theirs"), [
    ((X,), (X.clone(),)),
    ((X,), (X * (1 + 1e-6),)),  # another machine's library
    ((X.to(torch.complex64),), (X.to(torch.complex64),)),
    ((X * torch.nan,), (X * torch.nan,)),
    ((TOKENS, None, {"scale": 2.0}), (TOKENS.clone(), None, {"scale": 2.0})),
    ((X[:0],), (X[:0],)),
    ((X.bfloat16(),), (X.bfloat16(),)),
])  # fmt: skip
def test_the_same_inputs_pass(mine, theirs):
    assert alike(fingerprint(mine), fingerprint(theirs))


@pytest.mark.parametrize(("mine", "theirs"), [
    ((X,), (X + 1,)),
    ((X,), (X.flip(0),)),
    ((X,), (X.double(),)),
    ((X,), (X.view(8, 4),)),
    ((X,), (torch.cat([X[:3], X[:1]]),)),
    ((TOKENS,), (TOKENS.clone().index_fill_(0, torch.tensor([3]), 9),)),
    ((X, None), (X,)),
    ((X, None), (X, True)),
    (({"a": X},), ({"b": X},)),
])  # fmt: skip
def test_other_inputs_do_not(mine, theirs):
    assert not alike(fingerprint(mine), fingerprint(theirs))
