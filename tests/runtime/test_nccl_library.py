"""The calls of NCCL's C library, against a stub that is compiled with its declarations and notes what it is given."""

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_recycle.errors import ConfigurationError
from lightning_recycle.runtime.machine_errors import is_device_error
from lightning_recycle.runtime.nccl.nccl_library import SUMMED, UNIQUE_ID_BYTES, NcclError, NcclLibrary

COMPILER = shutil.which("cc")
needs_a_compiler = pytest.mark.skipif(COMPILER is None, reason="there is no C compiler (cc)")

STUB = r"""
#include <stddef.h>
#include <stdio.h>
#include <string.h>

typedef struct { char internal[128]; } ncclUniqueId;
typedef struct ncclComm* ncclComm_t;
typedef struct CUstream_st* cudaStream_t;
typedef enum { ncclSuccess = 0, ncclUnhandledCudaError = 1, ncclInvalidUsage = 5, ncclInProgress = 7 } ncclResult_t;
typedef enum {
  ncclInt8 = 0, ncclUint8 = 1, ncclInt32 = 2, ncclUint32 = 3, ncclInt64 = 4, ncclUint64 = 5, ncclFloat16 = 6,
  ncclFloat32 = 7, ncclFloat64 = 8, ncclBfloat16 = 9
} ncclDataType_t;
typedef enum { ncclSum = 0 } ncclRedOp_t;
int stub_type(const char* name) {  /* by its name, so that a wrong number would be seen */
#define IS(type) if (strcmp(name, #type) == 0) return type;
  IS(ncclInt8) IS(ncclUint8) IS(ncclInt32) IS(ncclInt64)
  IS(ncclFloat16) IS(ncclFloat32) IS(ncclFloat64) IS(ncclBfloat16)
  return -1;
}
typedef struct {  /* as of 2.27 */
  size_t size; unsigned int magic; unsigned int version;
  int blocking; int cgaClusterSize; int minCTAs; int maxCTAs; const char *netName; int splitShare;
  int trafficClass; const char *commName; int collnetEnable; int CTAPolicy; int shrinkShare; int nvlsCTAs;
} ncclConfig_t;

static char heard[1 << 16];
static ncclResult_t state = ncclSuccess, result = ncclSuccess;
static int version = 22602;

const char* stub_heard(void) { return heard; }
void stub_set(int the_state, int the_result, int the_version) {
  state = the_state; result = the_result; version = the_version; heard[0] = 0;
}
#define HEAR(...) snprintf(heard + strlen(heard), sizeof heard - strlen(heard), __VA_ARGS__)

const char* ncclGetErrorString(ncclResult_t of) { return of == ncclInvalidUsage ? "invalid usage" : "cuda failure"; }
const char* ncclGetLastError(ncclComm_t comm) { return comm ? "of a communicator" : "the last error"; }
ncclResult_t ncclGetVersion(int* found) { *found = version; return ncclSuccess; }
ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  for (int i = 0; i < 128; i++) id->internal[i] = (char)(2 * i);
  return ncclSuccess;
}
ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int size, ncclUniqueId id, int rank, ncclConfig_t* given) {
  ncclConfig_t config;
  memset(&config, 0, sizeof config);
  memcpy(&config, given, given->size < sizeof config ? given->size : sizeof config);
  int same = 1;
  for (int i = 0; i < 128; i++) same &= id.internal[i] == (char)(2 * i);
  HEAR("init %d %d %d %x %u %d;", size, rank, same, config.magic, config.version, config.blocking);
  *comm = (ncclComm_t)0x123456789abcull;
  return ncclInProgress;
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* found) {
  HEAR("state %p;", (void*)comm);
  *found = state;
  return ncclSuccess;
}
ncclResult_t ncclSend(const void* data, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t s) {
  HEAR("send %zu %d %d %d %p %p;", count, type, ((const char*)data)[0], peer, (void*)comm, (void*)s);
  return result;
}
ncclResult_t ncclRecv(void* data, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t s) {
  ((char*)data)[count - 1] = 77;
  HEAR("receive %zu %d %d %p %p;", count, type, peer, (void*)comm, (void*)s);
  return result;
}
ncclResult_t ncclAllReduce(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t s) {
  HEAR("sum %zu %d %d %d %p %p;", count, type, op, from == to, (void*)comm, (void*)s);
  return result;
}
ncclResult_t ncclBroadcast(const void* from, void* to, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                           cudaStream_t s) {
  HEAR("broadcast %zu %d %d %d %p %p;", count, type, root, from == to, (void*)comm, (void*)s);
  return result;
}
ncclResult_t ncclGroupStart(void) { HEAR("start;"); return ncclSuccess; }
ncclResult_t ncclGroupEnd(void) { HEAR("end;"); return ncclInProgress; }
ncclResult_t ncclCommAbort(ncclComm_t comm) { HEAR("abort %p;", (void*)comm); return ncclSuccess; }
"""
COMM, STREAM = "0x123456789abc", 0xFEDCBA987654


class Stream:
    cuda_stream = STREAM


class Stub:
    """The library over the stub, and what the stub was given."""

    def __init__(self, path: str) -> None:
        self.library = NcclLibrary(path)
        self._stub: Any = self.library._library
        self._stub.stub_heard.restype = ctypes.c_char_p

    def set(self, state: int = 0, result: int = 0, version: int = 22602) -> None:
        self._stub.stub_set(state, result, version)

    @property
    def heard(self) -> list[str]:
        return self._stub.stub_heard().decode().rstrip(";").split(";")


@pytest.fixture(scope="module")
def stub_path(tmp_path_factory) -> str:
    assert COMPILER is not None
    folder = tmp_path_factory.mktemp("nccl")
    (folder / "stub.c").write_text(STUB)
    library = folder / "libnccl_stub.so"
    subprocess.run([COMPILER, "-shared", "-fPIC", "-o", library, folder / "stub.c"], check=True, timeout=60)
    return str(library)


@pytest.fixture
def stub(stub_path) -> Stub:
    stub = Stub(stub_path)
    stub.set()
    return stub


@needs_a_compiler
def test_a_communicator_begins_without_blocking(stub):
    unique_id = stub.library.unique_id()
    assert unique_id == bytes(2 * i % 256 for i in range(UNIQUE_ID_BYTES))
    comm = stub.library.init(unique_id, 2, 1)
    stub.set(state=7)
    assert stub.library.in_progress(comm)
    assert stub.heard == [f"state {COMM}"]
    stub.set()
    assert not stub.library.in_progress(comm)
    stub.library.init(unique_id, 2, 1)
    assert stub.heard[-1] == "init 2 1 1 cafebeef 21400 0"


@needs_a_compiler
def test_tensors_go_as_bytes_with_pointers_of_full_width(stub):
    comm = stub.library.init(stub.library.unique_id(), 2, 0)
    stub.set()
    tensor = torch.tensor([3, 4, 5])
    stub.library.send(comm, tensor, 1, Stream())
    stub.library.receive(comm, tensor, 0, Stream())
    assert stub.heard == [f"send 24 1 3 1 {COMM} {STREAM:#x}", f"receive 24 1 0 {COMM} {STREAM:#x}"]
    assert tensor[2] == (77 << 56) + 5


NAMES = {
    torch.int8: "ncclInt8", torch.uint8: "ncclUint8", torch.int32: "ncclInt32", torch.int64: "ncclInt64",
    torch.float16: "ncclFloat16", torch.float32: "ncclFloat32", torch.float64: "ncclFloat64",
    torch.bfloat16: "ncclBfloat16", torch.complex64: "ncclFloat32", torch.complex128: "ncclFloat64",
}  # fmt: skip


@needs_a_compiler
def test_sums_are_made_in_place_in_their_dtype_and_broadcasts_as_bytes(stub):
    comm = stub.library.init(stub.library.unique_id(), 3, 0)
    assert NAMES.keys() == SUMMED
    for dtype, name in NAMES.items():
        stub.set()
        tensor = torch.zeros(5, dtype=dtype)
        stub.library.all_reduce(comm, tensor, Stream())
        stub.library.broadcast(comm, tensor, 2, Stream())
        count, number = 10 if dtype.is_complex else 5, stub._stub.stub_type(name.encode())
        assert stub.heard == [
            f"sum {count} {number} 0 1 {COMM} {STREAM:#x}",
            f"broadcast {tensor.nbytes} 1 2 1 {COMM} {STREAM:#x}",
        ]


@needs_a_compiler
def test_communicators_are_aborted_in_a_group(stub):
    comm = stub.library.init(stub.library.unique_id(), 2, 0)
    stub.set()
    stub.library.group_start()
    stub.library.abort(comm)
    stub.library.group_end()
    assert stub.heard == ["start", f"abort {COMM}", "end"]


@needs_a_compiler
def test_a_failed_peer_and_a_lost_device_are_told_apart(stub):
    comm = stub.library.init(stub.library.unique_id(), 2, 0)
    stub.set(state=5)
    with pytest.raises(NcclError, match=r"invalid usage\. the last error") as caught:
        stub.library.in_progress(comm)
    assert not is_device_error(caught.value)
    stub.set(result=1)
    with pytest.raises(RuntimeError, match="CUDA error in ncclSend") as lost:
        stub.library.send(comm, torch.zeros(1), 1, Stream())
    assert is_device_error(lost.value)


@needs_a_compiler
def test_a_library_that_cannot_be_aborted_reliably_is_refused(stub, stub_path):
    stub.set(version=22501)
    with pytest.raises(ConfigurationError, match=r'22501.*transport="gloo"'):
        NcclLibrary(stub_path)


def test_no_library_is_an_error_that_names_the_remedy():
    with pytest.raises(ConfigurationError, match='transport="gloo"'):
        NcclLibrary(str(Path("/nowhere/libnccl.so.2")))
