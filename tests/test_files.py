"""What bears a name is whole, at every moment of writing it; and what a killed writer leaves is removed."""

import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lightning_recycle import files
from lightning_recycle.errors import ConfigurationError


def text(path: Path) -> str:
    return path.read_text() if path.is_file() else (path / "content").read_text()


def new(folder: Path, content: str, is_folder: bool) -> Path:
    path = files.temporary_path(folder / "target")
    if is_folder:
        path.mkdir()
        (path / "content").write_text(content)
    else:
        path.write_text(content)
    return path


@pytest.mark.parametrize("new_is_folder", [False, True])
@pytest.mark.parametrize("old_is_folder", [None, False, True])
def test_a_file_or_folder_replaces_a_file_or_folder(new_is_folder, old_is_folder, tmp_path):
    target = tmp_path / "target"
    if old_is_folder is not None:
        files.put_in_place(new(tmp_path, "old", old_is_folder), target)
    files.put_in_place(new(tmp_path, "new", new_is_folder), target)
    assert text(target) == "new"
    assert os.listdir(tmp_path) == ["target"]


def test_a_refused_folder_leaves_the_old_one(tmp_path, monkeypatch):
    target = tmp_path / "target"
    files.put_in_place(new(tmp_path, "old", True), target)
    fresh, rename = new(tmp_path, "new", True), os.rename

    def refuse(source: Path, destination: Path) -> None:
        if source == fresh:
            raise OSError(28, "No space left on device")
        rename(source, destination)

    monkeypatch.setattr(files.os, "rename", refuse)
    with pytest.raises(OSError, match="No space left"):
        files.put_in_place(fresh, target)
    assert text(target) == "old"


def test_a_folder_that_waits_aside_gets_its_name_back(tmp_path):
    target = tmp_path / "target"
    files.put_in_place(new(tmp_path, "old", True), target)
    target.rename(tmp_path / ".target.replaced")  # and here its writer was killed
    assert files.waiting_aside(tmp_path) == [target]
    assert files.restored(target) == target
    assert text(target) == "old"
    assert files.waiting_aside(tmp_path) == []
    assert files.restored(tmp_path / "nothing") is None


def test_what_is_removed_does_not_come_back_from_aside(tmp_path):
    for name in ("target", ".target.replaced"):
        (tmp_path / name).mkdir()
    files.remove(tmp_path / "target")
    assert os.listdir(tmp_path) == []
    files.remove(tmp_path / "target")


def test_a_link_is_replaced_in_one_step_whatever_had_its_name(tmp_path):
    for number in (1, 2):
        (tmp_path / f"step={number}").mkdir()
        (tmp_path / f"step={number}" / "content").write_text(str(number))
    last = tmp_path / "last"
    last.mkdir()
    for number in (1, 2):
        files.link(tmp_path / f"step={number}", last)
        assert text(last) == str(number)
        assert os.readlink(last) == f"step={number}"
    assert sorted(os.listdir(tmp_path)) == ["last", "step=1", "step=2"]


def test_leftovers_of_the_dead_are_removed_and_what_the_living_write_stays(tmp_path):
    dead = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    own = files.temporary_path(tmp_path / "x.ckpt")
    of_dead = own.with_name(own.name.replace(f"-{os.getpid()}-", f"-{int(dead.stdout)}-"))
    machine = own.name.split(".writing.")[1].split("-")[0]
    elsewhere = own.with_name(own.name.replace(machine, "0" * 8))
    long_ago = elsewhere.with_name(elsewhere.name.replace(".x.ckpt.", ".y.ckpt."))
    foreign = tmp_path / ".x.ckpt.writing.0"
    for path in (own, of_dead, elsewhere, long_ago, foreign):
        path.mkdir()
        (path / "part").touch()
    for path in (long_ago / "part", long_ago):
        os.utime(path, (time.time() - 7200, time.time() - 7200))
    files.remove_leftovers(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {own.name, elsewhere.name, foreign.name}
    files.remove_leftovers(tmp_path / "missing")


def test_text_goes_through_a_link_and_to_what_is_no_file(tmp_path):
    (tmp_path / "link").symlink_to("file")
    files.write_atomically(tmp_path / "link", "text")
    assert (tmp_path / "file").read_text() == "text"
    assert (tmp_path / "link").is_symlink()
    files.write_atomically(os.devnull, "text")
    assert not Path(os.devnull).is_file()


def test_the_longest_name_can_be_written(tmp_path):
    files.write_atomically(tmp_path / ("ü" * 100), "text")


def test_a_folder_that_may_not_be_written_is_refused_before_the_work(tmp_path, monkeypatch):
    def refuse(dir: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(files, "TemporaryFile", refuse)  # root may write everywhere
    words = rf"output=.*: nothing can be written in {tmp_path} \(Permission denied\): give another path"
    with pytest.raises(ConfigurationError, match=words):
        files.check_writable("output", tmp_path / "new")
    files.check_writable("output", "/dev/stdout")
