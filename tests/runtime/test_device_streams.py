"""Memory of a device that another stream writes to."""

import pytest
import torch

from lightning_recycle.runtime.device_streams import CudaStreams

ROUNDS, NUMBERS, KERNELS = 20, 1_000_000, 50


@pytest.mark.gpu
def test_what_is_enqueued_does_not_use_the_memory_that_another_stream_may_write_to() -> None:
    """Nor does what comes later, before all that reads it has run."""
    device = torch.device("cuda", torch.cuda.current_device())
    streams, other = CudaStreams(device), torch.cuda.Stream(device)
    computed, received = [], []
    for number in range(ROUNDS):
        value = torch.ones(NUMBERS, device=device)
        for _ in range(KERNELS):
            value = value + 1.0  # frees what it had, for which torch has other uses from now on
        computed.append(value[-1:].clone())
        del value
        payload = streams.empty((NUMBERS,), torch.float32)
        with torch.cuda.stream(other):  # at once, as NCCL does
            payload.fill_(float(number))
        while not other.query():
            pass
        received.append(payload.sum() / NUMBERS)
        del payload
    assert torch.cat(computed).tolist() == [1.0 + KERNELS] * ROUNDS
    assert torch.stack(received).tolist() == [float(number) for number in range(ROUNDS)]
