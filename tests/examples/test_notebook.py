"""The notebook that kills a worker runs from top to bottom, and plots two losses that are the same."""

import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "examples" / "kill_a_worker.ipynb"


@pytest.mark.long
def test_the_notebook_kills_a_worker_and_plots_both_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(NOTEBOOK.parents[1]), os.environ.get("PYTHONPATH", "")]))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(notebook, timeout=280, resources={"metadata": {"path": str(tmp_path)}}).execute()
    printed = "".join(each.text for each in notebook.cells[-2].outputs if each.output_type == "stream")
    for kind in ("failure", "redone", "recovered"):
        assert f"{kind} at step 12" in printed
    assert "it was killed by SIGKILL" in printed
    assert any("image/png" in each.get("data", {}) for each in notebook.cells[-1].outputs)
