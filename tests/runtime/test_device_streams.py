"""Memory of a device that another stream writes to, and graphs that another thread records."""

import ctypes
import shutil
import subprocess
import threading

import pytest
import torch

from lightning_recycle.runtime.nccl.nccl_library import CudaStreams, ignore_recordings

ROUNDS, NUMBERS, KERNELS = 20, 1_000_000, 50
COMPILER = shutil.which("cc")

DRIVER = """
static __thread int now = 0;
int cuThreadExchangeStreamCaptureMode(int* mode) {
  int before = now;
  if (*mode < 0 || *mode > 2) return 1;
  now = *mode; *mode = before;
  return 0;
}
int mode_of_this_thread(void) { return now; }
"""


@pytest.mark.skipif(COMPILER is None, reason="there is no C compiler (cc)")
def test_a_thread_does_not_mind_what_others_record(tmp_path):
    assert COMPILER is not None
    source, library = tmp_path / "driver.c", tmp_path / "libdriver.so"
    source.write_text(DRIVER)
    subprocess.run([COMPILER, "-shared", "-fPIC", "-o", library, source], check=True, timeout=60)
    assert ignore_recordings(str(library))
    assert ctypes.CDLL(str(library)).mode_of_this_thread() == 1


def test_without_a_driver_nobody_records():
    assert not ignore_recordings("libthere_is_none.so.1")


@pytest.mark.gpu
def test_a_graph_is_recorded_while_another_thread_looks_after_its_streams():
    device = torch.device("cuda", torch.cuda.current_device())
    streams, stopped, failed = CudaStreams(device), threading.Event(), list[Exception]()

    def look() -> None:
        try:
            streams.use()
            stream = streams.create()
            while not stopped.is_set():
                assert stream.record_event().query() in (True, False)
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    value, graphs = torch.zeros(8, device=device), []
    for _ in range(ROUNDS):
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):  # "global", torch's default
            value += 1.0
    for graph in graphs:
        graph.replay()
    stopped.set()
    thread.join(60)
    assert failed == []
    assert value.tolist() == [float(ROUNDS)] * 8


@pytest.mark.gpu
def test_what_is_enqueued_does_not_use_the_memory_that_another_stream_may_write_to():
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
