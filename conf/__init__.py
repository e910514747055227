"""The Hydra configuration that ships with the package, as ``lightning_recycle.conf``.

In an application: ``@hydra.main(config_path="pkg://lightning_recycle.conf", ...)``, or name it as a search path,
``hydra.searchpath=[pkg://lightning_recycle.conf]``, to reuse the groups in a configuration of your own. The classes of
the groups ``model`` and ``data`` are those of ``examples/``; everything else comes with the package.

Faults are placed relative to the grid and to the length of the run, so that the same option fits every job of a sweep.
Importing this package, which Hydra does for ``pkg://``, registers what they are placed with:

- ``${recycle.part:400,0.5}``: the step after that part of the run;
- ``${recycle.pipeline:3,2}`` and ``${recycle.stage:3,2}``: position of rank 3 where pipelines have 2 stages;
- ``${recycle.last_stage:2}``: the last one's index.

And for the commands, that write nothing unless they are asked to, and show the comments of their files in ``--help``:

- ``${recycle.folder:FOLDER,...}``: the folder, or a temporary one while all that follows is null or "auto"; where it is
  one of these, its parent must exist, and it must be no file;
- ``${recycle.settings:FILE,GROUP,...}``: the groups with their options, and the settings with their comments.
"""

import functools
import itertools
import re
import tempfile
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from lightning_recycle.files import check_writable

_HERE = Path(__file__).parent


def _whole(meaning: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(
            f"{meaning} is {value!r}, and the chosen faults are placed by it: give an integer of at least 1, or choose"
            " faults=none"
        )
    return value


def _part(steps: Any, part: Any) -> int:
    return int(_whole("trainer.max_steps", steps) * float(part))


def _pipeline(rank: Any, stages: Any) -> int:
    return int(rank) // _whole("strategy.pipeline_parallel_size", stages)


def _stage(rank: Any, stages: Any) -> int:
    return int(rank) % _whole("strategy.pipeline_parallel_size", stages)


def _last_stage(stages: Any) -> int:
    return _whole("strategy.pipeline_parallel_size", stages) - 1


@functools.cache
def _scratch() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="recycle-")  # removed when this process ends


def _folder(folder: Any, *wanted: Any) -> str:
    if all(value in (None, "auto") for value in wanted):
        return _scratch().name
    if folder in wanted:
        check_writable("output", folder, is_folder=True)
    return str(folder)


def _settings(file: str, *groups: str, _root_: Any) -> str:
    chosen = _root_.hydra.runtime.choices
    lines = ["Groups: GROUP=OPTION (* is chosen)"]
    settings = ["", "Settings: NAME=VALUE", *_body(_HERE / file)]
    for group in groups:
        lines += ["", f"  {group}"]
        for path in sorted((_HERE / file).parent.joinpath(group).glob("*.yaml")):
            comment = _comment(path)
            lines.append(f"  {'*' if path.stem == chosen.get(group) else ' '} {path.stem:<16} {comment}")
            if path.stem == chosen.get(group):
                settings += ["", f"  # {comment}", f"  {group}:", *(f"  {line}" for line in _body(path))]
    return "\n".join([*lines, *settings]).replace("$", "$$")  # Hydra takes it for a template


def _comment(path: Path) -> str:
    """The comment at the top of a file."""
    lines = itertools.takewhile(lambda line: line.startswith("#"), path.read_text(encoding="utf-8").splitlines())
    return " ".join(line.removeprefix("#").strip() for line in lines)


def _body(path: Path) -> list[str]:
    """A file without the comment at its top, classes, and Hydra's own settings; then the settings that it shares."""
    found, skips = [], False
    text = path.read_text(encoding="utf-8")
    for line in itertools.dropwhile(lambda line: line.startswith("#"), text.splitlines()):
        if line and not line.startswith((" ", "-")):
            skips = line.startswith(("defaults:", "hydra:", "_target_:"))
        if not skips and line:
            found.append(f"  {line}")
    for name in re.findall(r"^  - /(\w+)@_here_$", text, re.MULTILINE):
        own = {line.partition(":")[0]: line for line in found if not line.lstrip().startswith("#")}
        shared = _body(path.parent.parent / f"{name}.yaml")
        values = [own.get(line.partition(":")[0], line) for line in shared]
        found = [line for line in found if line not in values] + values
    return found


for _name, _resolver in (
    ("part", _part),
    ("pipeline", _pipeline),
    ("stage", _stage),
    ("last_stage", _last_stage),
    ("folder", _folder),
    ("settings", _settings),
):
    OmegaConf.register_new_resolver(f"recycle.{_name}", _resolver, replace=True)
