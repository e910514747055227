"""Devices that were found wrong stay out until somebody removes the file."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_recycle.control.joining.vacancies import Quarantine

STATE = {"kind": "parameters", "proof": "state", "cause": "they differ", "since": 3}
COMPUTATION = {**STATE, "proof": "computation"}


def test_a_wrong_computation_or_two_wrong_states_put_a_device_into_quarantine(tmp_path: Path) -> None:
    path = tmp_path / "deeper" / "quarantine"
    found = Quarantine(path)
    found.add("a", "cuda:0", 7, STATE)
    assert not found.holds("a", "cuda:0")
    found.add("a", "cuda:0", 9, STATE)
    found.add("b", "cuda:1", 9, COMPUTATION)
    later = Quarantine(path)
    held = [(host, device) for host in "ab" for device in ("cuda:0", "cuda:1") if later.holds(host, device)]
    assert held == [("a", "cuda:0"), ("b", "cuda:1")]
    path.unlink()
    assert not later.holds("b", "cuda:1")


def test_without_a_file_nobody_is_out() -> None:
    found = Quarantine(None)
    found.add("a", "cuda:0", 7, COMPUTATION)
    assert not found.holds("a", "cuda:0")


def test_what_cannot_be_read_or_written_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text('no json\n{"host": "a"}\n[]\n')
    assert not Quarantine(tmp_path / "file").holds("a", "cuda:0")
    assert not Quarantine(tmp_path).holds("a", "cuda:0")
    Quarantine(tmp_path / "file" / "below").add("a", "cuda:0", 7, COMPUTATION)
    assert len(caplog.records) >= 4
