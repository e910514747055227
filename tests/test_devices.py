"""There is one path for every kind of device: one module names kinds."""

import re
from pathlib import Path

import lightning_recycle

PACKAGE = Path(lightning_recycle.__file__).parent
KINDS = re.compile(r"cuda|\bhip\b|\bxpu\b|\bnpu\b|\bmps\b")
"""In code; texts for users may speak of CUDA."""


def test_no_module_but_one_and_the_nccl_transport_names_a_kind_of_accelerator() -> None:
    sources = {str(path.relative_to(PACKAGE)): path.read_text() for path in PACKAGE.rglob("*.py")}
    names = {path for path, source in sources.items() if KINDS.search(source)}
    assert {name for name in names if not name.startswith("runtime/nccl/")} == {"devices.py"}
