"""What is installed is what the repository holds: packages, configuration files, type marker."""

import importlib.resources
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[1]


def expected_packages() -> set[str]:
    packages = {
        ".".join(file.parent.relative_to(ROOT).parts) for file in (ROOT / "lightning_recycle").rglob("__init__.py")
    }
    return packages | {"lightning_recycle.conf"}


def expected_configuration() -> set[str]:
    return {file.relative_to(ROOT / "conf").as_posix() for file in (ROOT / "conf").rglob("*.yaml")}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from links to the tree's sources, so that the build leaves nothing in the tree."""
    source = tmp_path_factory.mktemp("source")
    for path in ROOT.iterdir():
        if path.name in {"lightning_recycle", "conf"} or (path.is_file() and not path.name.startswith(".")):
            (source / path.name).symlink_to(path)
    target = tmp_path_factory.mktemp("wheel")
    arguments = ["wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(target), str(source)]
    built = subprocess.run([sys.executable, "-m", "pip", *arguments], capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    (file,) = target.glob("*.whl")
    return file


def test_installed_package_has_every_configuration_file() -> None:
    conf = importlib.resources.files("lightning_recycle.conf")
    assert expected_configuration()
    assert {name for name in expected_configuration() if not (conf / name).is_file()} == set()


def test_installed_package_is_typed() -> None:
    assert (importlib.resources.files("lightning_recycle") / "py.typed").is_file()


def test_wheel_holds_every_package_and_configuration_file(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    packages = {name.removesuffix("/__init__.py").replace("/", ".") for name in names if name.endswith("/__init__.py")}
    assert packages == expected_packages()
    prefix = "lightning_recycle/conf/"
    assert {n.removeprefix(prefix) for n in names if n.startswith(prefix) and n.endswith(".yaml")} == (
        expected_configuration()
    )
    assert "lightning_recycle/py.typed" in names
    assert not any(name.startswith(("conf/", "tests/", "examples/")) for name in names)


def test_configuration_is_importable_from_the_wheel(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import lightning_recycle.conf as c; print(c.__file__)"
    imported = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert Path(imported.stdout.strip()) == tmp_path / "lightning_recycle" / "conf" / "__init__.py"


def requirements() -> list[Requirement]:
    """All that pyproject.toml names with a bound."""
    lines = (ROOT / "pyproject.toml").read_text(encoding="utf-8").splitlines()
    found = [re.match(r'    "([\w.-]+(?:\[[\w,]+\])?[>=<!~][^"]*)",', line) for line in lines]
    return [Requirement(match[1]) for match in found if match]


def test_withdrawn_versions_of_lightning_are_never_installed() -> None:
    """GHSA-w37p-236h-pfx3: both were malicious."""
    names = [each for each in requirements() if each.name in ("lightning", "pytorch-lightning")]
    assert {each.name for each in names} == {"lightning", "pytorch-lightning"}
    for each in names:
        allowed = [
            version for version in ("2.5.6", "2.6.0", "2.6.2", "2.6.3", "2.6.6", "2.7.0") if version in each.specifier
        ]
        assert allowed == ["2.6.0", "2.6.6"]


def test_the_oldest_constraints_are_the_lower_bounds() -> None:
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
