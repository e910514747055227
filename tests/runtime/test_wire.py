"""What a header says of a value."""

from __future__ import annotations

import torch

from lightning_recycle.runtime.staging import HostMemory
from lightning_recycle.runtime.wire import Layout


def test_a_header_says_which_gradients_are_wanted_back() -> None:
    wanted = torch.ones(2, 3, dtype=torch.bfloat16, requires_grad=True)
    mask, tokens = torch.ones(4, dtype=torch.float64), torch.zeros(1, 0, dtype=torch.int64)
    layout = Layout.of((wanted, None, mask, tokens))
    parsed, packed = Layout.parse(layout.header(packed=False))
    assert (parsed, packed) == (layout, False)
    for _ in range(2):  # buffers are reused
        received = parsed.value(parsed.empty(HostMemory(torch.device("cpu")).empty))
        assert [None if t is None else t.requires_grad for t in received] == [True, None, False, False]
    kept = parsed.empty(HostMemory(torch.device("cpu")).empty)
    parsed.value(kept)
    Layout.of((wanted.detach(), None, mask, tokens)).value(kept)
    assert not any(t.requires_grad for t in kept if t is not None), "a buffer may hold another kind of message next"
