"""What is installed is what the repository holds: packages, configuration files, type marker."""

import re
import sys
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version
from support.scripts import completed

ROOT = Path(__file__).parents[1]


def expected_packages() -> set[str]:
    packages = {
        ".".join(file.parent.relative_to(ROOT).parts) for file in (ROOT / "lightning_recycle").rglob("__init__.py")
    }
    return packages | {"lightning_recycle.conf"}


def expected_configuration() -> set[str]:
    return {file.relative_to(ROOT / "conf").as_posix() for file in (ROOT / "conf").rglob("*.yaml")}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """A wheel built from links to the tree's sources, so that the build leaves nothing in the tree."""
    source = tmp_path_factory.mktemp("source")
    for path in ROOT.iterdir():
        if path.name in {"lightning_recycle", "conf"} or (path.is_file() and not path.name.startswith(".")):
            (source / path.name).symlink_to(path)
    target = tmp_path_factory.mktemp("wheel")
    arguments = ["wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(target), str(source)]
    built = completed([sys.executable, "-m", "pip", *arguments])
    assert built.returncode == 0, built.stdout + built.stderr
    (file,) = target.glob("*.whl")
    return file


def test_wheel_holds_every_package_and_configuration_file(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    packages = {name.removesuffix("/__init__.py").replace("/", ".") for name in names if name.endswith("/__init__.py")}
    assert packages == expected_packages()
    prefix = "lightning_recycle/conf/"
    assert {n.removeprefix(prefix) for n in names if n.startswith(prefix) and n.endswith(".yaml")} == (
        expected_configuration()
    )
    assert "lightning_recycle/py.typed" in names
    assert not any(name.startswith(("conf/", "tests/", "examples/")) for name in names)


def requirements() -> list[Requirement]:
    """All that pyproject.toml names with a bound."""
    lines = (ROOT / "pyproject.toml").read_text(encoding="utf-8").splitlines()
    found = [re.match(r'    "([\w.-]+(?:\[[\w,]+\])?[>=<!~][^"]*)",', line) for line in lines]
    return [Requirement(match[1]) for match in found if match]


def test_withdrawn_versions_of_lightning_are_never_installed():
    """GHSA-w37p-236h-pfx3: both were malicious."""
    names = [each for each in requirements() if each.name in ("lightning", "pytorch-lightning")]
    assert {each.name for each in names} == {"lightning", "pytorch-lightning"}
    for each in names:
        allowed = [
            version for version in ("2.5.6", "2.6.0", "2.6.2", "2.6.3", "2.6.6", "2.7.0") if version in each.specifier
        ]
        assert allowed == ["2.6.0", "2.6.6"]


def test_the_oldest_constraints_are_the_lower_bounds():
    pins = {}
    for line in (ROOT / "constraints-oldest.txt").read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            name, _, version = line.partition("==")
            pins[name] = Version(version)
    bounds = {
        each.name: Version(next(part.version for part in each.specifier if part.operator == ">="))
        for each in requirements()
        if each.name in pins
    }
    assert bounds == pins


USER_SCRIPT = """
from lightning_recycle import LayerSpec, PipelineModule, RecoveryOptions, ReCycleStrategy
from lightning_recycle.callbacks import Fault, FaultInjectionCallback, HeartbeatCallback
from lightning_recycle.planning import Costs, Grid, Problem, Schedule, plan


class Model(PipelineModule):
    def configure_pipeline(self) -> list[LayerSpec]:
        return [LayerSpec(dict, a=1)]


strategy = ReCycleStrategy(pipeline_parallel_size=2, recovery=RecoveryOptions(max_restarts=10))
callbacks = [HeartbeatCallback(timeout=5.0), FaultInjectionCallback([Fault("kill", pipeline=1, stage=0, step=3)])]
schedule: Schedule = plan(Problem(Grid(3, 4, 6), Costs.uniform(4)))
period: float = schedule.period
"""
USER_MISTAKES = {
    'ReCycleStrategy(pipeline_parallel_size="two")': "arg-type",
    "ReCycleStrategy(pipelines=2)": "call-arg",
    "Grid(3, 4, 6).width": "attr-defined",
    "HeartbeatCallback(timeout=None)": "arg-type",
}


@pytest.mark.long
def test_mypy_reads_the_types_of_the_wheel_in_a_users_project(wheel, tmp_path):
    """In an environment that has the wheel beside what this one has, as pip installs it."""
    environment = tmp_path / "environment"
    venv.create(environment, with_pip=False, symlinks=True)
    python = environment / "bin" / "python"
    (packages,) = environment.glob("lib/python*/site-packages")
    zipfile.ZipFile(wheel).extractall(packages)
    (packages / "others.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    project = tmp_path / "project"
    project.mkdir()
    # What torch and Lightning say of types is not judged here, and takes a minute to read.
    skipped = "".join(f"[mypy-{name}.*]\nfollow_imports = skip\n" for name in ("torch", "lightning", "torchmetrics"))
    (project / "mypy.ini").write_text(f"[mypy]\nstrict = true\ndisallow_subclassing_any = false\n{skipped}")
    (project / "right.py").write_text(USER_SCRIPT)
    (project / "wrong.py").write_text("\n".join([*USER_SCRIPT.splitlines()[1:4], *USER_MISTAKES, ""]))
    command = [sys.executable, "-m", "mypy", "--python-executable", str(python), "right.py", "wrong.py"]
    checked = completed(command, cwd=project)
    found = re.findall(r"^(\w+\.py):(\d+): error: .*\[([\w-]+)\]$", checked.stdout, re.M)
    expected = [("wrong.py", str(number), kind) for number, kind in enumerate(USER_MISTAKES.values(), start=4)]
    assert found == expected, checked.stdout + checked.stderr
