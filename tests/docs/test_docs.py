"""What the pages say is so: examples run, links lead somewhere, names and tables are those of the code."""

import argparse
import ast
import importlib
import importlib.util
import inspect
import math
import os
import re
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
from pages import DOCS, PAGES, RECORDS, ROOT, blocks, commands, names_in, table_under, text, without_blocks
from support.scripts import completed

import lightning_recycle
from lightning_recycle import PipelineModule, callbacks
from lightning_recycle.arguments import VARIABLES
from lightning_recycle.callbacks import HeartbeatCallback
from lightning_recycle.callbacks.faults import KINDS, POINTS
from lightning_recycle.control.client import EXIT_LEFT, EXIT_LOST_COORDINATOR, EXIT_RAISED, EXIT_STOPPED
from lightning_recycle.control.coordinator import standalone
from lightning_recycle.control.monitoring.history import History
from lightning_recycle.control.protocol.messages import SavePhase
from lightning_recycle.engines import recycle_run
from lightning_recycle.planning import Costs, Grid, Problem, Worker, plan

PACKAGE = ROOT / "lightning_recycle"
SCRIPTS = set(re.findall(r"^(recycle-[a-z]+) = ", (ROOT / "pyproject.toml").read_text(), re.M))
SOURCE = "\n".join(path.read_text() for path in sorted(PACKAGE.rglob("*.py")))
DECISIONS = [page for page in PAGES if page.startswith("decisions/")]
INTERNAL_PAGES = ["architecture.md", "extending.md", "paper.md", *DECISIONS]

# ---------------------------------------------------------------------- python

NOT_RUN = {"trainer.strategy.move_layers(": "it needs a run; tests/integration/test_moving_layers.py makes it"}
"""Blocks that no test executes, by a line of them, and why; what they import is there."""

FIT = "\ntrainer.fit(model, data)"
"""The end of examples whose model and data are the reader's: they are run up to here."""

OUTPUTS: dict[str, list[str] | None] = {
    "first_run.py": ["loss"],
    "lose_a_worker.py": ["failure 5 (1, 0)", "redone 5", "recovered 5", "rejoined"],
    "same_weights.py": ["largest difference", "e-1"],
    "two_stages.py": ["loss"],
    "before.py": None,
    "after.py": ["'val_accuracy'"],
}
"""What complete scripts print; None for one that is not run by itself, because the next one runs all of it."""

ONE_AFTER_THE_OTHER = """
import runpy, sys
for script in sys.argv[1:]:
    print("=====", script, flush=True)
    sys.argv[1:] = []
    runpy.run_path(script, run_name="__main__")
"""
"""Runs scripts as Python would; in one process, because starting the workers' fork server takes longest."""


@pytest.mark.long
def test_complete_scripts_run(tmp_path):
    for block in blocks("python"):
        if block.title:
            (tmp_path / block.title).write_text(block.code)
    titles = [title for title, words in OUTPUTS.items() if words]
    command = [sys.executable, "-c", ONE_AFTER_THE_OTHER, *titles]
    done = completed(command, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=250)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    printed = re.split(r"^===== \S+$", done.stdout, flags=re.M)[1:]
    for title, output in zip(titles, printed, strict=True):
        assert all(words in output for words in OUTPUTS[title] or ()), f"{title}\n{output}"


@pytest.mark.long
@pytest.mark.parametrize("program", ["python", "recycle-run"])
def test_the_script_of_the_readme_survives_its_fault(program, tmp_path):
    readme = "../README.md"
    (block,) = (block for block in blocks("python", pages=[readme]) if "__main__" in block.code)
    (tmp_path / "train.py").write_text(block.code)
    starter = ["-m", recycle_run.__name__, "--nproc-per-node", "4", "python"] if program == "recycle-run" else []
    done = subprocess.run(
        [sys.executable, *starter, "train.py"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "XDG_STATE_HOME": str(tmp_path / "state")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stdout
    assert "Worker (1, 0) was lost at step 3: " in done.stdout, done.stdout
    assert "1 failure, 1 redone step" in done.stdout, done.stdout


def test_every_complete_script_is_run():
    assert {block.title for block in blocks("python") if block.title} == OUTPUTS.keys()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("block", [b for b in blocks("python") if not b.title], ids=lambda block: block.place)
def test_other_examples_run(block, tmp_path, monkeypatch):
    """Each for itself; they start no training."""
    compiled = compile(block.code.replace(FIT, ""), block.place, "exec")
    if not any(line in block.code for line in NOT_RUN):
        monkeypatch.chdir(tmp_path)
        exec(compiled, {"__name__": block.place})
        return
    for node in ast.walk(ast.parse(block.code)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                assert importlib.util.find_spec(alias.name), f"{block.place}: {alias.name}"
        elif isinstance(node, ast.ImportFrom):
            module = importlib.import_module(node.module)
            for alias in node.names:
                assert hasattr(module, alias.name), f"{block.place}: {node.module}.{alias.name}"


# ---------------------------------------------------------------------- commands


@pytest.mark.parametrize(("place", "words"), commands(), ids=lambda value: value if isinstance(value, str) else "")
def test_commands_exist(place, words):
    program, *arguments = words
    if program == "make":
        assert arguments[0] in re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
    elif program == "python" and arguments[0] == "-m":
        assert importlib.util.find_spec(arguments[1])
    elif program == "python" and "/" in arguments[0]:
        assert (ROOT / arguments[0]).is_file()
    elif program.startswith("recycle-"):
        assert program in SCRIPTS
        if program == "recycle-coordinator":
            standalone._parser().parse_args(arguments)
        elif program == "recycle-run":
            recycle_run._check(recycle_run._parser().parse_args(arguments))


CONFIGURED = {
    "recycle-plan": ("lightning_recycle.conf", "plan"),
    "recycle-simulate": ("lightning_recycle.conf.simulation", "simulate"),
    "examples/train_gpt.py": ("lightning_recycle.conf", "train_gpt"),
    "examples/train_vision.py": ("lightning_recycle.conf", "train_vision"),
}


def configured_commands() -> list[Any]:
    found = []
    for place, words in commands():
        name = words[1] if words[0] == "python" and len(words) > 1 else words[0]
        if name in CONFIGURED:
            settings = [w for w in words[words.index(name) + 1 :] if not w.startswith("-")]
            found.append(pytest.param(name, settings, id=f"{place} {' '.join(settings)}"))
    return found


@pytest.mark.parametrize(("name", "settings"), configured_commands())
def test_settings_of_commands_exist(name, settings):
    from hydra import compose, initialize_config_dir

    importlib.import_module("lightning_recycle.conf")
    folder = ROOT / "conf" / ("simulation" if name == "recycle-simulate" else "")
    first = [re.sub(r"=([^\[{',]*),.*", r"=\1", setting) for setting in settings]  # of a sweep, the first job
    with initialize_config_dir(str(folder), version_base=None):
        compose(CONFIGURED[name][1], overrides=first, return_hydra_config=True)


@pytest.mark.parametrize("page", PAGES)
def test_commands_named_in_a_text_are_installed(page):
    assert set(re.findall(r"(?<![\w/-])recycle-[a-z]+\b", text(page))) <= SCRIPTS


def test_every_installed_command_is_documented():
    everything = "".join(map(text, PAGES))
    assert {name for name in SCRIPTS if name not in everything} == set()


@pytest.mark.parametrize(
    ("page", "table", "command"),
    [("operations.md", "option", standalone), ("machines.md", "option of recycle-run", recycle_run)],
)
def test_the_options_of_the_commands_are_all_there(page, table, command):
    documented = {option.split()[0] for row in table_under(page, table) for option in names_in(row[0])}
    actions = [a for a in command._parser()._actions if a.option_strings and a.help != argparse.SUPPRESS]
    assert documented == {a.option_strings[0] for a in actions} - {"-h", "--version"}


# ---------------------------------------------------------------------- links


def anchors(path: Path) -> set[str]:
    """The ids of the headings of a page, and of the objects of an API page."""
    content = path.read_text(encoding="utf-8")
    found = set(re.findall(r"^::: (\S+)", content, re.M))
    for heading in re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", content, flags=re.M | re.S), re.M):
        plain = re.sub(r"[^\w\s-]", "", re.sub(r"\[(.*?)\]\(.*?\)", r"\1", heading)).strip().lower()
        found.add(re.sub(r"[-\s]+", "-", plain))
    return found


@pytest.mark.parametrize("page", [*PAGES, *RECORDS])
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", without_blocks(page)):
        if re.match(r"https?://", target):
            continue
        name, _, anchor = target.partition("#")
        path = ((DOCS / page).parent / name).resolve() if name else DOCS / page
        assert path.is_file(), f"{page}: {target}"
        if anchor:
            assert anchor in anchors(path), f"{page}: {target}"


# ---------------------------------------------------------------------- names


def test_every_public_name_is_in_the_api():
    documented = set(re.findall(r"^::: (\S+)", text("api.md"), re.M))
    public = {f"lightning_recycle.{name}" for name in lightning_recycle.__all__}
    public |= {f"lightning_recycle.callbacks.{name}" for name in callbacks.__all__}
    assert public - documented == set()


def resolve(path: str) -> Any:
    """The object of a dotted path."""
    parts = path.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for name in parts[count:]:
            found = getattr(found, name)
        return found
    raise AssertionError(path)


@pytest.mark.parametrize("page", [page for page in PAGES if page.startswith("api")])
def test_the_api_pages_name_what_exists(page):
    named = re.findall(r"^::: (\S+)\n((?: .*\n|\n)*)", text(page) + "\n", re.M)
    assert named
    for path, options in named:
        found = resolve(path)
        listed = re.findall(r"^ +- (\w+)$", options, re.M)
        listed += [name for line in re.findall(r"members: \[(.*?)\]", options) for name in line.split(", ")]
        assert [name for name in listed if not hasattr(found, name)] == []


def test_the_page_of_options_is_that_of_the_code():
    assert text("options.md") == module_of("option_tables").page(), "run python docs/option_tables.py"


def test_every_option_is_on_the_page_of_options():
    tables = text("options.md").split("\n## ")[1:]
    by_class = {table.partition(" ")[0].split("\n")[0]: set(names_in(table)) for table in tables}
    for name, shown in by_class.items():
        kind = getattr(lightning_recycle, name, None) or getattr(callbacks, name)
        lightnings = {"accelerator", "checkpoint_io", "precision_plugin"}
        assert set(inspect.signature(kind).parameters) - lightnings <= shown, name
    groups = [name for name in lightning_recycle.__all__ if name.endswith("Options")]
    assert set(groups) <= by_class.keys()


def variables(content: str) -> set[str]:
    return set(re.findall(r"(?<![A-Z_])RECYCLE_[A-Z]+(?:_[A-Z]+)*", content))


def test_the_environment_variables_are_those_of_the_code():
    documented = {name for row in table_under("operations.md", "variable") for name in names_in(row[0])}
    assert documented == variables(SOURCE) == set(VARIABLES)
    assert set().union(*(variables(text(page)) for page in PAGES)) <= documented


def test_the_kinds_of_faults_are_those_of_the_code():
    assert tuple(name for row in table_under("faults.md", "kind") for name in names_in(row[0])) == KINDS
    assert [point for point in POINTS if f"`{point}`" not in text("fault_injection.md")] == []


def test_the_faults_of_the_examples_are_those_of_the_configuration():
    line = re.search(r"`faults=(\w+)`,\n?([^.]*)\.", text("fault_injection.md"))
    named = {line.group(1), *names_in(line.group(2))}
    assert named == {path.stem for path in (ROOT / "conf" / "faults").glob("*.yaml")}


def test_the_events_are_those_of_the_code():
    code = "\n".join(path.read_text() for path in (PACKAGE / "control").rglob("*.py"))
    recorded = set(re.findall(r"(?:\bRecord|\bself\.add|_history\.add|_notes\.append)\((?:\()?\s*\"(\w+)\"", code))
    recorded |= {phase.value for phase in SavePhase}
    recorded |= {"left"} & set(re.findall(r"\"(\w+)\"", code))
    assert {name for row in table_under("events.md", "event") for name in names_in(row[0])} == recorded


def test_the_metrics_are_those_of_the_code():
    counters = {"live_workers", *History(Grid(1, 1, 1)).counters}
    counters |= set(re.findall(r"counters\[\"(\w+)\"\]", SOURCE))
    documented = {name for row in table_under("events.md", "metric") for name in names_in(row[0])}
    assert documented == {f"recycle/{name}" for name in counters}


def test_the_rooms_are_those_of_the_tree_and_begin_where_the_page_says():
    rows = table_under("architecture.md", "package")
    rooms = {room.strip("/"): names_in(row[2]) for row in rows for room in names_in(row[0])}
    packages = {path.parent.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("__init__.py")} - {"."}
    divided = {"control", "runtime"}
    expected = {name for name in packages - divided if "/" not in name or name.partition("/")[0] in divided}
    assert {room for room in rooms if not room.endswith(".py")} == expected
    for row in rows:
        files = [
            path
            for room in names_in(row[0])
            for path in PACKAGE.glob(room.rstrip("/") + ("/**/*.py" * room.endswith("/")))
        ]
        source = "\n".join(path.read_text() for path in files)
        for name in names_in(row[2]):
            assert re.search(rf"^(?:class|def) {name}\b", source, re.M), f"{row[0]}: {name}"


def test_paths_of_modules_on_internal_pages_exist_and_no_two_modules_share_a_name():
    modules = [path.relative_to(PACKAGE).with_suffix("") for path in PACKAGE.rglob("*.py") if path.stem != "__init__"]
    assert len({path.name for path in modules}) == len(modules)
    for page in INTERNAL_PAGES:
        for name in re.findall(r"`((?:[a-z_]+/)+[a-z_]+\.py)`", without_blocks(page)):
            assert (ROOT / name).is_file() or (PACKAGE / name).is_file(), f"{page}: {name}"


@pytest.mark.parametrize("page", INTERNAL_PAGES)
def test_names_of_the_code_on_internal_pages_are_in_the_code(page):
    for name in re.findall(r"`(?:\w+\.)*(\w+)(?:\([^`]*\))?`", without_blocks(page)):
        assert re.search(rf"\b{name}\b", SOURCE), f"{page}: {name}"


def test_names_in_the_picture_of_the_architecture_are_in_the_code():
    shown = " ".join(re.findall(r">([^<]+)<", (DOCS / "images" / "architecture.svg").read_text()))
    names = re.findall(r"\b(?:[A-Z][a-z]+){2,}\b|\b[a-z]+_[a-z_]+\b", shown)
    assert len(names) > 10
    assert [name for name in names if not re.search(rf"\b{name}\b", SOURCE)] == []


def test_every_integration_test_is_in_one_group_of_the_index():
    index = (ROOT / "CONTRIBUTING.md").read_text().partition("| group | files |")[2].partition("\n\n")[0]
    patterns = re.findall(r"`([\w*]+)`", index)
    for file in (ROOT / "tests" / "integration").glob("test_*.py"):
        name = file.stem.removeprefix("test_")
        found = [pattern for pattern in patterns if fnmatch(name, pattern)]
        assert len(found) == 1 or found == ["*checkpoints", "sharded*"], f"{name}: {found}"


def test_the_exit_codes_are_those_of_the_code():
    codes = {int(code) for row in table_under("operations.md", "way to end") for code in re.findall(r"\d+", row[1])}
    assert {0, EXIT_RAISED, EXIT_LOST_COORDINATOR, EXIT_STOPPED, EXIT_LEFT} <= codes
    assert f"exit code {EXIT_LOST_COORDINATOR}" in text("faults.md")


def test_the_hooks_exist():
    for row in table_under("pipeline_modules.md", "in a LightningModule"):
        for name in re.findall(r"`(\w+)(?:\([^`]*\))?`", " ".join(row)):
            assert hasattr(PipelineModule, name) or name in ("train_loss", "val_loss", "test_loss", "batch"), name


def test_defaults_that_are_written_down_are_the_defaults():
    signatures = {
        "HeartbeatCallback": inspect.signature(HeartbeatCallback).parameters,
        "ReCycleStrategy": inspect.signature(lightning_recycle.ReCycleStrategy).parameters,
    }
    said = re.findall(r"`HeartbeatCallback\((interval=[^)]*)\)`", text("faults.md"))
    defaults = signatures["HeartbeatCallback"]
    assert said == [", ".join(f"{name}={defaults[name].default}" for name in defaults)]
    for page in PAGES:
        for arguments in re.findall(r"`ReCycleStrategy\(([^`]*)\)`", text(page)):
            for name in re.findall(r"(\w+)=", arguments):
                assert name in signatures["ReCycleStrategy"], f"{page}: {name}"


# ---------------------------------------------------------------------- numbers


def test_the_table_of_grids_follows_its_formula():
    for grid, *cells in table_under("choosing_a_grid.md", "D x S x M"):
        d, s, m = map(int, grid.split(" x "))
        load, room, *slots = map(int, cells)
        assert (load, room) == (math.ceil(m * d / (d - 1)), m + s - 1)
        lost = [frozenset(), *(frozenset({Worker(0, stage)}) for stage in range(s))]
        whole, *others = (plan(Problem(Grid(d, s, m), Costs.uniform(s), failed)).period for failed in lost)
        assert slots == [3 * (m + s - 1), whole, min(others)] == [3 * (m + s - 1), whole, max(others)]


def test_the_comparison_has_no_figure_of_its_own():
    sources = text("../benchmarks/RESULTS.md") + text("../benchmarks/SIMULATED.md")
    known = {figure.lstrip("0") for figure in re.findall(r"[\d.,]*\d", sources)}
    prose = re.sub(r"\]\([^)]*\)|arXiv [\d.]+|Apache-[\d.]+", "", without_blocks("comparison.md"))
    figures = set(re.findall(r"(?<![\w.])\d*\.\d+|(?<=\| )\d+(?= \|)", prose))
    assert len(figures) > 20
    assert {figure for figure in figures if figure.lstrip("0") not in known} == set()


# ---------------------------------------------------------------------- the site


def module_of(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_docstrings_become_markdown():
    docstring = (
        "See :class:`~lightning_recycle.planning.Grid` and :func:`other`::\n\n"
        "    =====  =======\n    a      b\n    =====  =======\n    ``x``  y | z\n    =====  =======\n\n"
        ">>> f(1)\n2\n\nEnd."
    )
    link = '<autoref identifier="lightning_recycle.planning.Grid" optional><code>Grid</code></autoref>'
    assert module_of("docstrings").as_markdown(docstring) == (
        f"See {link} and `other`:\n\n    | a | b |\n    | --- | --- |\n    | ``x`` | y \\| z |\n\n"
        "```pycon\n>>> f(1)\n2\n```\n\nEnd."
    )


def test_the_site_links_to_the_repository_once_it_has_an_address(tmp_path, monkeypatch):
    hook = module_of("site")
    monkeypatch.setattr(hook, "_ROOT", tmp_path)
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    assert hook.on_config({"extra": {}}) == {"extra": {}}
    (tmp_path / "pyproject.toml").write_text('[project.urls]\nRepository = "https://host/owner/name"\n')
    (link,) = hook.on_config({"extra": {}})["extra"]["social"]
    assert link["link"] == "https://host/owner/name"


def test_a_site_that_loads_something_from_elsewhere_is_refused(tmp_path):
    from mkdocs.exceptions import PluginError

    hook = module_of("site")
    page = tmp_path / "index.html"
    page.write_text('<a href="https://elsewhere.org">link</a><script src="assets/x.js"></script>')
    hook.on_post_build({"site_dir": tmp_path})
    for loading in ('<script src="https://cdn.org/x.js">', '<link rel="stylesheet" href="//fonts.org/a.css">'):
        page.write_text(loading)
        with pytest.raises(PluginError, match=r"index\.html loads .*(cdn|fonts)\.org"):
            hook.on_post_build({"site_dir": tmp_path})


def test_pictures_lead_to_their_files_and_long_names_in_tables_can_be_broken():
    html = module_of("site").on_page_content('<p><img alt="a" src="images/a.svg" /> and text</p>')
    picture = '<img alt="a" src="images/a.svg" />'
    assert html == f'<p><a class="enlarge" href="images/a.svg" title="Enlarge">{picture}</a> and text</p>'
    name, short = "<code>flags::test_something_long</code>", "<code>a_b --of-it</code>"
    html = module_of("site").on_page_content(f"<p>{name}</p><td>{name} {short}</td>")
    broken = "<code>flags::<wbr>test_<wbr>something_<wbr>long</code>"
    whole = '<code>a_b <span class="unbroken">--of</span>-it</code>'
    assert html == f"<p>{name}</p><td>{broken} {whole}</td>"


def test_links_to_files_outside_lead_to_their_pages():
    hook = module_of("site")
    page = type("Page", (), {"file": type("File", (), {"src_uri": "index.md"})})
    assert hook.on_page_markdown("[m](../benchmarks/RESULTS.md#planning)", page) == "[m](results.md#planning)"
    page.file.src_uri = "results.md"
    found = hook.on_page_markdown("[m](METHODS.md#planning) [d](../docs/data.md)", page)
    assert found == "[m](methods.md#planning) [d](data.md)"


# ---------------------------------------------------------------------- works with


def test_every_test_on_the_page_works_with_exists():
    tests = "\n".join(path.read_text() for path in (ROOT / "tests/works_with").glob("test_*.py"))
    pages = text("works_with.md") + text("../tests/works_with/REPORTS.md")
    named = re.findall(r"`((?:tests/\S+\.py)|test_\w+)`", pages)
    assert set(re.findall(r"^def (test_\w+)", tests, re.M)) <= set(named)
    for name in named:
        assert (ROOT / name).is_file() if "/" in name else f"def {name}(" in tests, name


def test_docstrings_of_the_package_begin_with_a_line_of_eighty_characters_at_most():
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                first = (ast.get_docstring(node) or "").partition("\n")[0]
                assert len(first) <= 80, f"{path}: {first}"
