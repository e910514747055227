"""What benchmarks/gpu.py does with NCCL, over its imitation; and the transport that it would make on a device."""

import gpu
import pytest
import torch
from support.imitated_transport import imitated

from lightning_recycle.runtime.nccl.nccl_transport import NcclTransport


def test_the_transport_of_a_device_is_made(monkeypatch):
    monkeypatch.setattr(gpu, "NcclLibrary", lambda: "NCCL")
    monkeypatch.setattr(gpu, "CudaStreams", lambda device: "streams")
    assert isinstance(gpu.transport_of("nccl NCCL_HOSTID")(0, torch.device("cuda", 0)), NcclTransport)


@pytest.mark.long
def test_messages_and_a_failure_are_measured_over_nccl(monkeypatch, capsys):
    torch.set_num_threads(1)
    monkeypatch.setattr(gpu, "transport_of", lambda name: imitated)
    monkeypatch.setattr(gpu, "transports", lambda setting, report: ["imitated"])
    report = gpu.Report()
    gpu.messages(gpu.TINY, report)
    gpu.failure(gpu.TINY, report)
    shown = capsys.readouterr().out
    assert "imitated" in shown
    assert "step done" in shown
