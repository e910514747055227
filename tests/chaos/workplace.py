"""Where scenarios run: a TMPDIR that nobody else uses, and a small disk that may become full.

Small disks are tmpfs mounts in a mount namespace of this process, which vanish with it however it ends. Where the
system allows no such namespace, the families that need them are left out, and the command says so.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.util import get_temp_dir
from pathlib import Path

NEEDS_SMALL_DISKS = ("full-disk", "full-tmpdir")
"""Families."""

_INSIDE = "LIGHTNING_RECYCLE_CHAOS_NAMESPACE"
_SHELTERS = (("unshare", "--mount"), ("unshare", "--map-root-user", "--mount"))
_TMPDIR_MEGABYTES, _DISK_MEGABYTES = 32, 4


@dataclass(frozen=True)
class Workplace:
    """The folders of scenarios.

    Args:
        disk: on a file system of a few megabytes; None if there is none. Then TMPDIR is not small either.
    """

    runs: Path
    tmpdir: Path
    disk: Path | None

    def in_tmpdir(self) -> set[str]:
        """What is in TMPDIR."""
        return {str(path.relative_to(self.tmpdir)) for path in self.tmpdir.rglob("*")}


@contextlib.contextmanager
def workplace() -> Iterator[Workplace]:
    """Makes a workplace, in which this process's TMPDIR is while the block runs."""
    before = os.environ.get("TMPDIR")
    get_temp_dir()  # of multiprocessing's own sockets: it is kept for good, so it must not be inside
    root = Path(tempfile.mkdtemp(prefix="recycle-chaos-"))
    small = has_small_disks()
    place = Workplace(root / "runs", root / "tmp", root / "disk" if small else None)
    for folder, megabytes in ((root / "tmp", _TMPDIR_MEGABYTES), (root / "disk", _DISK_MEGABYTES), (root / "runs", 0)):
        folder.mkdir()
        if small and megabytes:
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", folder], check=True)
    os.environ["TMPDIR"] = str(place.tmpdir)
    tempfile.tempdir = None  # it is asked for again
    _stop_forkserver()  # it has the environment that it was started with
    try:
        yield place
    finally:
        _stop_forkserver()
        os.environ.pop("TMPDIR")
        if before is not None:
            os.environ["TMPDIR"] = before
        tempfile.tempdir = None
        if small:
            subprocess.run(["umount", place.tmpdir, root / "disk"], check=False)
        shutil.rmtree(root, ignore_errors=True)  # what is left in it was reported


def enter_namespace(arguments: Sequence[str]) -> None:
    """Starts this command again in a mount namespace of its own, if the system allows that; else returns."""
    if _INSIDE in os.environ:
        return
    for shelter in _SHELTERS:
        with contextlib.suppress(OSError):  # no such command
            probe = subprocess.run([*shelter, "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True)
            if probe.returncode == 0:
                command = [*shelter, sys.executable, "-m", "chaos", *arguments]
                sys.stdout.flush()
                os.execvpe(command[0], command, {**os.environ, _INSIDE: "1"})


def _stop_forkserver() -> None:
    """The next process to be started starts another one."""
    with contextlib.suppress(OSError):  # it was killed, and somebody has noticed
        forkserver._forkserver._stop()


def has_small_disks() -> bool:
    """Whether this process is in a mount namespace of its own."""
    return _INSIDE in os.environ
