"""The device of ``device.cpp``, torch's name for it being "simulated": compiled once, and found by torch itself.

A process that has :func:`environment` in its own gets the device with ``import torch``, as one with an NPU gets its: by
an entry point of torch's group "torch.backends". So workers, fork servers and scripts have it, and nobody else does.

``SIMULATED_DEVICES``: how many there are (16). ``SIMULATED_MEMORY``: bytes of each, with commas (4 GiB).
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

KIND = "simulated"
_LIBRARY = "SIMULATED_DEVICE_LIBRARY"
_SOURCE = Path(__file__).with_name("device.cpp")
_ENTRY_POINT = f"[torch.backends]\n{KIND} = {__name__}:register\n"


def is_here() -> bool:
    """Whether this process has the device."""
    return _LIBRARY in os.environ


def why_not() -> str | None:
    """Why it cannot be compiled here; None if it can."""
    import torch

    if shutil.which(os.environ.get("CXX", "g++")) is None:
        return "there is no C++ compiler"
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 9):
        return f"torch {torch.__version__} has no accelerators of one's own with memory; 2.9 has"
    return None


def build() -> Path:
    """The folder of the compiled library, which is made unless there is one of this source and torch."""
    import torch

    made_of = hashlib.blake2b(_SOURCE.read_bytes() + torch.__version__.encode() + sys.version.encode(), digest_size=8)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning_recycle"
    folder = cache / f"simulated_device_{made_of.hexdigest()}"
    if (folder / "device.so").exists():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        made = Path(scratch) / "made"
        info = made / f"{KIND}_device-0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {KIND}_device\nVersion: 0\n")
        (info / "entry_points.txt").write_text(_ENTRY_POINT)
        root = Path(torch.__file__).parent
        abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
        includes = [f"-I{root / 'include'}", f"-I{root / 'include/torch/csrc/api/include'}"]
        libraries = [f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch", f"-Wl,-rpath,{root / 'lib'}"]
        options = ["-O1", "-std=c++20", "-fPIC", "-shared", "-w", abi, *includes]
        command = [os.environ.get("CXX", "g++"), *options, str(_SOURCE), "-o", str(made / "device.so"), *libraries]
        subprocess.run(command, check=True)
        try:
            made.rename(folder)
        except OSError:  # another process was faster
            if not (folder / "device.so").exists():
                raise
    return folder


def environment(**more: str) -> dict[str, str]:
    """This process's environment, and the device for processes that are started with it."""
    folder = build()
    paths = [str(folder), str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), _LIBRARY: str(folder / "device.so"), **more}


def register() -> None:
    """Called by torch at the end of its import."""
    if not is_here():
        return
    import torch

    os.environ.setdefault("SIMULATED_DEVICES", "16")
    torch.utils.rename_privateuse1_backend(KIND)
    torch.ops.load_library(os.environ[_LIBRARY])
    torch._register_device_module(KIND, _device_module(torch))
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    _register_cells(torch)
    # The first shape that Python infers imports torch's compiler, a second: here a fork server does it for its workers.
    torch.relu(torch.empty(1, device="meta"))


def _device_module(torch: Any) -> Any:
    """What torch and its users ask of ``torch.simulated``."""
    from types import ModuleType

    count = int(os.environ["SIMULATED_DEVICES"])
    module: Any = ModuleType(f"torch.{KIND}")
    accelerator, ops = torch.accelerator, torch.ops.simulated

    def index(device: Any = None) -> int:
        if not isinstance(device, int):
            device = None if device is None else torch.device(device).index
        return int(accelerator.current_device_index() if device is None else device)

    class Generator:
        """The default one of a device, as torch's modules of devices have them."""

        def __init__(self, place: int) -> None:
            self.get_state = lambda: ops.get_state(place)
            self.set_state = lambda state: ops.set_state(place, state)
            self.manual_seed = lambda seed: ops.seed(place, seed)

    def manual_seed_all(seed: int) -> None:
        for each in module.default_generators:
            each.manual_seed(seed)

    module.Stream, module.Event = torch.Stream, torch.Event
    module.current_stream, module.synchronize = accelerator.current_stream, accelerator.synchronize
    module.set_stream, module.stream = accelerator.set_stream, lambda stream: stream
    module.is_available = module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module.device_count, module.current_device = lambda: count, accelerator.current_device_index
    module.set_device = accelerator.set_device_index
    module.device = lambda device: accelerator.device_index(index(device))
    module.get_device_name = lambda device=None: "a simulated device"
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    module.default_generators = [Generator(place) for place in range(count)]
    module.get_rng_state = lambda device=None: module.default_generators[index(device)].get_state()
    module.set_rng_state = lambda state, device=None: module.default_generators[index(device)].set_state(state)
    module.manual_seed = lambda seed: module.default_generators[index()].manual_seed(seed)
    module.manual_seed_all, module.seed_all = manual_seed_all, lambda: manual_seed_all(torch.seed())
    return module


_cells: list[Any] = []


def _register_cells(torch: Any) -> None:
    """The cells of LSTM and GRU, which torch expects of every device that is not the processor."""
    library = torch.library.Library("aten", "IMPL")
    _cells.append(library)  # which ends what it registered

    def lstm(inputs: Any, hidden: Any, cell: Any, input_bias: Any = None, hidden_bias: Any = None) -> Any:
        gates = inputs + hidden if input_bias is None else inputs + input_bias + (hidden + hidden_bias)
        i, f, g, o = gates.chunk(4, 1)
        i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
        new = f * cell + i * g
        return o * new.tanh(), new, torch.cat([i, f, g, o], 1)

    def lstm_backward(grad_h: Any, grad_c: Any, cell: Any, new: Any, gates: Any, has_bias: bool) -> Any:
        if grad_h is None and grad_c is None:
            return None, None, None
        i, f, g, o = gates.chunk(4, 1)
        t = new.tanh()
        grad_h = torch.zeros_like(new) if grad_h is None else grad_h
        through = grad_h * o * (1 - t * t) + (0 if grad_c is None else grad_c)
        grads = torch.cat([
            through * g * i * (1 - i),
            through * cell * f * (1 - f),
            through * i * (1 - g * g),
            grad_h * t * o * (1 - o),
        ], 1)  # fmt: skip
        return grads, through * f, grads.sum(0) if has_bias else None

    def gru(inputs: Any, hidden: Any, state: Any, input_bias: Any = None, hidden_bias: Any = None) -> Any:
        if input_bias is not None:
            inputs, hidden = inputs + input_bias, hidden + hidden_bias
        (ir, iz, i_n), (hr, hz, hn) = inputs.chunk(3, 1), hidden.chunk(3, 1)
        r, z = (ir + hr).sigmoid(), (iz + hz).sigmoid()
        n = (i_n + r * hn).tanh()
        return (state - n) * z + n, torch.cat([r, z, n, state, hn], 1)

    def gru_backward(grad: Any, kept: Any, has_bias: bool) -> Any:
        r, z, n, state, hn = kept.chunk(5, 1)
        by_n = grad * (1 - z) * (1 - n * n)
        by_z, by_r = grad * (state - n) * z * (1 - z), by_n * hn * r * (1 - r)
        of_inputs, of_hidden = torch.cat([by_r, by_z, by_n], 1), torch.cat([by_r, by_z, by_n * r], 1)
        sums = (of_inputs.sum(0), of_hidden.sum(0)) if has_bias else (None, None)
        return of_inputs, of_hidden, grad * z, *sums

    library.impl("_thnn_fused_lstm_cell", lstm, "PrivateUse1")
    library.impl("_thnn_fused_lstm_cell_backward_impl", lstm_backward, "PrivateUse1")
    library.impl("_thnn_fused_gru_cell", gru, "PrivateUse1")
    library.impl("_thnn_fused_gru_cell_backward", gru_backward, "PrivateUse1")
