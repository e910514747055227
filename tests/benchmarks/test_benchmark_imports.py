"""Benchmarks are run by hand: what each imports of the package and of its neighbours must exist."""

import ast
import importlib
import importlib.util
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_imported_names_exist(path):
    local = {other.stem for other in FOLDER.glob("*.py")}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ImportFrom) or node.module is None:
            continue
        if node.module.partition(".")[0] != "lightning_recycle" and node.module not in local:
            continue
        module = importlib.import_module(node.module)
        for name in (alias.name for alias in node.names):
            assert hasattr(module, name) or importlib.util.find_spec(f"{node.module}.{name}"), f"{node.module}.{name}"
