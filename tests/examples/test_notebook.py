"""The notebooks run from top to bottom: losses with a kill are plotted, and what GPUs do is printed."""

import os
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]


def executed(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> nbformat.NotebookNode:
    monkeypatch.setenv("IPYTHONDIR", str(folder / "ipython"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    notebook = nbformat.read(ROOT / "examples" / name, as_version=4)
    nbformat.validate(notebook)
    NotebookClient(notebook, timeout=280, resources={"metadata": {"path": str(folder)}}).execute()
    return notebook


def printed_by(cell: nbformat.NotebookNode) -> str:
    return "".join(each.text for each in cell.outputs if each.output_type == "stream" and each.name == "stdout")


@pytest.mark.long
def test_what_a_notebook_finds_on_gpus_is_one_block_of_text(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    printed = printed_by(executed("try_on_gpus.ipynb", tmp_path, monkeypatch).cells[-1])
    assert printed.startswith("----- paste from here\nno GPU: the trainings ran on the processor\n")
    assert re.search(r"\ngloo, 4 workers: .* weights differ by \S+: right\n----- to here\n$", printed)


def test_the_notebook_for_gpus_runs_what_make_gpu_does():
    recipe = (ROOT / "Makefile").read_text().partition("\ngpu:")[2].partition("\n\n")[0]
    wanted = re.findall(r"\$\(BIN\)/python (.*?)(?: \$\(ARGS\))? \|\|", recipe)
    cell = nbformat.read(ROOT / "examples" / "try_on_gpus.ipynb", as_version=4).cells[-2].source
    runs = [" ".join(re.findall(r'"([^"]*)"', line)) for line in re.findall(r"^    \[(.*)\],$", cell, re.M)]
    assert len(wanted) == 4
    assert runs[:4] == wanted


@pytest.mark.long
def test_the_notebook_kills_a_worker_and_plots_both_losses(tmp_path, monkeypatch):
    notebook = executed("kill_a_worker.ipynb", tmp_path, monkeypatch)
    printed = printed_by(notebook.cells[-2])
    for kind in ("failure", "redone", "recovered"):
        assert f"{kind} at step 12" in printed
    assert "it was killed by SIGKILL" in printed
    assert any("image/png" in each.get("data", {}) for each in notebook.cells[-1].outputs)
