"""``make gpu`` runs tests under compute-sanitizer where it is, and says why not elsewhere."""

import sys
from pathlib import Path

import pytest
import sanitized
import torch


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, status: int) -> Path:
    """A sanitizer that writes down what it is given."""
    tool = folder / "compute-sanitizer"
    tool.write_text(f'#!/bin/sh\necho "$PYTORCH_CUDA_ALLOC_CONF $@" > {folder}/given\nexit {status}\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    return folder / "given"


@pytest.mark.parametrize("status", [0, sanitized.ERRORS_FOUND])
def test_the_tests_run_under_it_and_their_status_is_told(status, tmp_path, monkeypatch, capsys):
    given = install(tmp_path, monkeypatch, status)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert sanitized.main() == status
    asked = given.read_text()
    assert asked.startswith("backend:cudaMallocAsync --tool memcheck")
    assert f"{sys.executable} -m pytest" in asked
    assert ("found errors" in capsys.readouterr().out) is (status == sanitized.ERRORS_FOUND)
    assert all(Path(__file__).parents[1].joinpath(test).exists() for test in sanitized.TESTS)


def test_without_it_or_a_device_that_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert sanitized.main() == 0
    assert "could not run: compute-sanitizer: it is not installed" in capsys.readouterr().out
    install(tmp_path, monkeypatch, 0)
    assert sanitized.main() == 0
    assert "there is no CUDA device" in capsys.readouterr().out
