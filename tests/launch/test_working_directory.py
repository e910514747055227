"""Helper processes import the package that this process has, whatever lies in the working directory."""

import sys
from pathlib import Path

import pytest
from support.scripts import completed

import lightning_recycle

PACKAGE = Path(lightning_recycle.__file__).parent

SCRIPT = """
import sys
sys.path.insert(0, {root!r})
from lightning_recycle.launch.worker_group import _ensure_fork_server, process_context
from lightning_recycle.planning.child_process import run_in_child

def package():
    import lightning_recycle
    print("worker", lightning_recycle.__file__, flush=True)

if __name__ == "__main__":
    context = process_context()
    _ensure_fork_server()
    process = context.Process(target=package)
    process.start()
    process.join()
    print("planner", run_in_child("lightning_recycle.planning.child_process:no_such_function", None, print), flush=True)
"""


@pytest.mark.long
@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 puts the working directory first in any case")
def test_a_package_in_the_working_directory_is_not_imported_instead(tmp_path):
    other = tmp_path / "here" / "lightning_recycle"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text("raise RuntimeError('the package of the working directory')")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(root=str(PACKAGE.parent)))
    done = completed([sys.executable, script], cwd=other.parent)
    assert done.returncode == 0, done.stderr
    assert f"worker {PACKAGE / '__init__.py'}" in done.stdout
    assert "planner AttributeError: module 'lightning_recycle.planning.child_process' has no" in done.stdout
    assert "the package of the working directory" not in done.stderr
