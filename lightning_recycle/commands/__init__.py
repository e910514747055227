"""Console scripts: Hydra applications around ``planning``, without torch.

Every error with a remedy, ours or Hydra's, is shown as one line without a traceback, and ends with exit code 2;
anything else is a bug and is shown in full.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import (
    HydraException,
    MissingConfigException,
    OverrideParseException,
)
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException
from rich.console import Console, RenderableType

from lightning_recycle.arguments import BOOLEAN, __version__, exit_without_reader
from lightning_recycle.errors import ConfigurationError, ReCycleError, choose_from, suggestion, unknown

_EXIT_BAD_INPUT, _EXIT_INTERRUPTED = 2, 130
_SHOW_ALL = "RECYCLE_FULL_ERROR"
_OWN_PLUGINS = {f"{plugin.__module__}.{plugin.__qualname__}" for plugin in (BasicLauncher, BasicSweeper)}


class Output(Console):
    """Standard output; without a reader the process exits as by SIGPIPE."""

    def on_broken_pipe(self) -> None:
        exit_without_reader()


@contextlib.contextmanager
def bad_input_ends(
    name: str, config: DictConfig | None = None, overrides: Sequence[str] | None = None
) -> Iterator[None]:
    """Within the block, bad input exits with 2 after one line, Ctrl-C with 130.

    Use it inside the job too, with the job's ``config`` and ``overrides`` (None for those of the job that runs): for an
    exception that leaves the job, Hydra prints a line of its own.
    """
    try:
        yield
    except (ReCycleError, HydraException, OmegaConfBaseException) as error:
        if os.environ.get(_SHOW_ALL) == "1":
            raise
        print(f"{name}: {_line(error, config, overrides)}", file=sys.stderr)
        sys.exit(_EXIT_BAD_INPUT)
    except KeyboardInterrupt:
        sys.exit(_EXIT_INTERRUPTED)


def run_application(name: str, application: Callable[[], object]) -> None:
    """Calls a function decorated with ``hydra.main``; exits with 2 after bad input.

    ``RECYCLE_FULL_ERROR=1`` in the environment shows tracebacks instead.
    """
    if "--version" in sys.argv[1:]:  # Hydra's is its own
        print(name, __version__)
        return
    # Otherwise Hydra prints errors itself, over several lines, and exits with 1.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        with bad_input_ends(name):
            _check_arguments(name)
            application()
        sys.stdout.flush()
    except BrokenPipeError:
        exit_without_reader()


def _check_arguments(name: str) -> None:
    """Raises ConfigurationError for options that Hydra's parser does not know."""

    def refuse(message: str) -> NoReturn:
        raise ConfigurationError(f"{message}. Settings are NAME=VALUE, without dashes; see {name} --help.")

    parser = get_args_parser()
    parser.error = refuse  # type: ignore[method-assign]  # its own prints a usage of Hydra's options alone
    parser.parse_args()


def run_command(
    name: str,
    config_path: str,
    config_name: str,
    check: Callable[[DictConfig], object],
    job: Callable[[DictConfig], float],
    summary: Callable[[], RenderableType | None],
) -> None:
    """Runs a command of the package, once or for each job of a sweep.

    ``check`` raises for settings that cannot work, of all jobs of a sweep before the first one; ``job`` returns a value
    that a sweeper can minimize; ``summary`` is printed at the end, even after errors.
    """

    @hydra.main(version_base=None, config_path=config_path, config_name=config_name)
    def application(config: DictConfig) -> float:
        for overrides in _jobs_to_check():
            each = hydra.compose(HydraConfig.get().job.config_name, overrides)
            with bad_input_ends(name, each, overrides):
                check(each)
        with bad_input_ends(name, config):
            return job(config)

    try:
        run_application(name, application)
    finally:
        if (table := summary()) is not None:
            Output().print(table)


def _jobs_to_check() -> Sequence[list[str]]:
    """Settings of all jobs of a sweep, in its first one, or none (by a plugin)."""
    job = HydraConfig.get()
    plugins = {job.launcher._target_, job.sweeper._target_}
    if job.mode is not RunMode.MULTIRUN or job.job.num or plugins != _OWN_PLUGINS:
        return []
    given = [f"{name}={value}" for name, value in (job.sweeper.params or {}).items()]
    given += get_args_parser().parse_args().overrides
    parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
    return BasicSweeper.split_arguments(parser.parse_overrides(given), None)[0]


def switch(name: str, value: Any) -> bool:
    """``value`` of the setting ``name``, which is true or false."""
    return bool(BOOLEAN.checked("", name, value))


def _line(error: BaseException, config: DictConfig | None, overrides: Sequence[str] | None) -> str:
    cause = error.__cause__
    if (own := _own_error(error)) is not None:
        if isinstance(own, ConfigurationError) and config is not None:
            given = HydraConfig.get().overrides.task if overrides is None else overrides
            if typed := _typed(own.option, config, given):
                return _flat(own.as_typed(typed))
        return _flat(str(own))
    if isinstance(error, MissingConfigException) and error.options and "/" in (error.missing_cfg_file or ""):
        group, _, option = str(error.missing_cfg_file).rpartition("/")
        return unknown(group, option, sorted(error.options))
    if isinstance(cause, (ConfigKeyError, ConfigAttributeError)) and isinstance(cause.parent_node, DictConfig):
        return f"unknown setting {cause.full_key!r}: {_instead_of(str(cause.full_key), cause.parent_node)}"
    if isinstance(error, OverrideParseException):
        if "=" not in str(error.override):
            return f"cannot read {error.override!r}: settings are NAME=VALUE; see --help."
        return f"cannot read {error.override!r}: check its brackets and quotes, as in 'failures=[[1,2],[0,1]]'."
    text = _flat(str(error))
    if ambiguous := re.match(r"Ambiguous value for argument '(.*?)' 1\. ", text):
        return f"{ambiguous[1]} has several values: add -m to run a job for each, or put a list in brackets."
    if isinstance(cause, OmegaConfBaseException):
        text += f" ({_flat(str(cause).splitlines()[0])})"
    return text


def _instead_of(setting: str, node: DictConfig) -> str:
    """What to write instead of ``setting``, which ``node`` does not have."""
    settings: Any = OmegaConf.to_container(node)
    place, dot, name = setting.rpartition(".")
    if "_target_" in settings:
        owner = hydra.utils.get_object(settings["_target_"])
        if (remedy := getattr(owner, "other_names", {}).get(name)) is not None:
            return f"{remedy.format('...').replace('Write ', f'write {place}{dot}')}."
        if name in inspect.signature(owner).parameters:
            return f"it is not in the configuration; write +{setting}=... to add it."
    known = sorted(str(each) for each in settings if not str(each).startswith("_") and each != "hydra")
    meant = suggestion(setting, [f"{place}{dot}{each}" for each in known], place + dot)
    for group in known:
        if isinstance(settings[group], dict) and name in settings[group]:
            meant = f" Did you mean '{place}{dot}{group}.{name}'?"
    return f"{choose_from(known)}{_elsewhere(place, name, known)}.{meant}"


def _elsewhere(group: str, name: str, known: list[str]) -> str:
    """The other options of a configuration group that have ``name``, in words.

    ``known``: the settings of the chosen one.
    """
    root = Path(str(resources.files("lightning_recycle.conf")))
    for folder in (root / group, root / "simulation" / group) if group else ():
        options = {path.stem: {*OmegaConf.load(path)} for path in sorted(folder.glob("*.yaml"))}
        chosen = [option for option, settings in options.items() if settings - {"_target_"} == {*known}]
        if having := [option for option, settings in options.items() if name in settings and chosen]:
            *others, last = having
            listed = f"{', '.join(others)} and {last} have" if others else f"{last} has"
            of = f"of {group}={chosen[0]}; " if len(chosen) == 1 else ""
            return f" ({of}{listed} {name})"
    return ""


def _typed(option: str, config: DictConfig, overrides: Sequence[str]) -> str:
    """The setting of ``option`` as typed in ``overrides``, or as in ``config``."""
    given = [f"{name}={value}" for name, value in _settings(OmegaConf.to_container(config))]
    for setting in reversed([*given, *overrides]):
        name = setting.lstrip("+~").partition("=")[0]
        if option and f".{name}".endswith(f".{option}"):
            return setting
    return ""


def _settings(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(node, dict):
        yield path, "null" if node is None else node
        return
    for name, value in node.items():
        yield from _settings(value, f"{path}.{name}" if path else str(name))


def _own_error(error: BaseException | None) -> ReCycleError | None:
    """The error of this package that Hydra or OmegaConf wraps."""
    while error is not None and not isinstance(error, ReCycleError):
        error = error.__cause__ or error.__context__
    return error


def _flat(text: str) -> str:
    return " ".join(text.split())
