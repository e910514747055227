"""There is one path for every kind of device: one module names kinds."""

import re
from pathlib import Path

import pytest
import torch

import lightning_recycle
from lightning_recycle.devices import ray_resource
from lightning_recycle.launch.ray_workers import needs_of_worker

PACKAGE = Path(lightning_recycle.__file__).parent
KINDS = re.compile(r"cuda|\bhip\b|\bxpu\b|\bnpu\b|\bmps\b")
"""In code; texts for users may speak of CUDA."""


def test_no_module_but_one_and_the_nccl_transport_names_a_kind_of_accelerator():
    sources = {str(path.relative_to(PACKAGE)): path.read_text() for path in PACKAGE.rglob("*.py")}
    names = {path for path, source in sources.items() if KINDS.search(source)}
    assert {name for name in names if not name.startswith("runtime/nccl/")} == {"devices.py"}


@pytest.mark.parametrize(("kind", "given", "needs"), [
    ("cpu", None, {"CPU": 1.0}),
    ("cuda", None, {"CPU": 1.0, "GPU": 1.0}),
    ("xpu", {"CPU": 4.0}, {"CPU": 4.0, "GPU": 1.0}),
    ("hpu", {"HPU": 0.5, "node:a": 0.1}, {"CPU": 1.0, "HPU": 0.5, "node:a": 0.1}),
    ("privateuseone", {"NPU": 1.0, "GPU": 0.0}, {"CPU": 1.0, "NPU": 1.0, "GPU": 0.0}),
])  # fmt: skip
def test_a_worker_reserves_a_device_of_its_kind_on_ray(kind, given, needs):
    assert needs_of_worker(ray_resource(torch.device(kind)), given) == needs
