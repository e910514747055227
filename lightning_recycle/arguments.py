"""Arguments: their checks, options of components, and parsers of commands.

Python's ``True`` is an integer and its NaN a number; as an argument, either is a mistake. ``owner`` is the class that
was given the value; "" for a setting or a function. An option that needs an extra is refused when the option is made
(:func:`require`), not when it is first used.

A component's options are one frozen dataclass beside the component. A field made by :func:`option` carries the check of
its value, and whether all workers of a run must have the same one (then it is a flag of ``recycle-coordinator``) or
only a launching process can carry it out.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import functools
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, fields
from typing import Any, NoReturn, TypeGuard, TypeVar

from typing_extensions import override

from lightning_recycle.errors import ConfigurationError, suggestion

__version__ = "0.1.0"
"""The version of the package."""


class _Parser(argparse.ArgumentParser):
    @override
    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._given = list(sys.argv[1:] if args is None else args)
        return super().parse_known_args(self._given, namespace)

    @override
    def error(self, message: str) -> NoReturn:
        flags = {flag: action.option_strings[0] for action in self._actions for flag in action.option_strings}
        if message.startswith("the following") and (
            unknown := [word for word in self._given if word.startswith("--") and word.partition("=")[0] not in flags]
        ):
            message = f"unrecognized arguments: {' '.join(unknown)}"
        words = message.split() if message.startswith("unrecognized") else ()
        unknown = [word.partition("=")[0] for word in words if word.startswith("--")]
        meant = "".join(suggestion(flag, flags.values(), "--") for flag in unknown if flag not in flags)
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help.{meant}\n")

    @override
    def print_help(self, file: Any = None) -> None:
        try:
            print(self.format_help(), end="", file=file, flush=True)
        except BrokenPipeError:
            exit_without_reader()


def _table(title: str, rows: Mapping[Any, str]) -> str:
    width = max(len(str(key)) for key in rows)
    return "\n".join([f"{title}:", *(f"  {key:<{width}}  {meaning}" for key, meaning in rows.items())])


_STATUSES = {2: "bad options", 130: "Ctrl-C", 141: "its output was closed (SIGPIPE)"}


def command_parser(
    name: str,
    purpose: str,
    *examples: str,
    statuses: Mapping[int, str],
    variables: Sequence[str] = (),
    **options: Any,
) -> argparse.ArgumentParser:
    """A parser whose ``--help`` has purpose, examples, variables and exit statuses.

    ``statuses``: besides those of every command. ``variables``: of :data:`VARIABLES`, without their prefix.
    """
    tables: dict[str, Mapping[Any, str]] = {
        "environment variables": {f"RECYCLE_{each}": VARIABLES[f"RECYCLE_{each}"] for each in variables},
        "exit status": dict(sorted({**_STATUSES, **statuses}.items())),
    }
    parser = _Parser(
        name,
        description="\n  ".join([f"{purpose}\n", *examples]),
        epilog="\n\n".join(_table(title, rows) for title, rows in tables.items() if rows),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        **options,
    )
    parser.add_argument("--version", action="version", version=f"{name} {__version__}")
    return parser


def _command(module: str) -> Callable[[], int]:
    """The entry point of the command in ``module``, also while that is imported."""

    def main() -> int:
        try:
            return int(importlib.import_module(module).main() or 0)
        except KeyboardInterrupt:
            return 130

    return main


recycle_coordinator = _command("lightning_recycle.control.coordinator.standalone")
recycle_run = _command("lightning_recycle.engines.recycle_run")
recycle_status = _command("lightning_recycle.control.monitoring.status_command")
recycle_plan = _command("lightning_recycle.commands.plan")
recycle_simulate = _command("lightning_recycle.commands.simulate")
recycle_report = _command("lightning_recycle.commands.report")


def typed_value(text: str) -> bool | int | float | str | None:
    """The value of ``text`` as in YAML: a number, true, false, null, or a text."""
    words = {"true": True, "false": False, "null": None}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


def flag_value(flag: str, typed: str | float, check: Check) -> Any:
    """The number ``typed`` after ``flag``; raises ConfigurationError if it is wrong."""
    try:
        return check.checked("", flag, typed_value(typed) if isinstance(typed, str) else typed)
    except ConfigurationError as error:
        raise ConfigurationError(error.as_typed(f"{flag} {typed}")) from None


def exit_without_reader() -> NoReturn:
    """Ends a command whose output has no reader, with the status of SIGPIPE."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(141)


def is_integer(value: object, least: int | None = None) -> TypeGuard[int]:
    """Whether ``value`` is an integer, of at least ``least`` if given; a bool is none."""
    return isinstance(value, int) and not isinstance(value, bool) and (least is None or value >= least)


def is_number(value: object, least: float | None = None, *, above: bool = False) -> TypeGuard[float]:
    """Whether ``value`` is a finite number, of at least (or above) ``least`` if given."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not abs(value) <= sys.float_info.max:
        return False
    return least is None or value > least or (value == least and not above)


_MODULES = {"metrics": "prometheus_client", "milp": "mip", "ray": "ray"}


def install_command(extra: str) -> str:
    """The command that installs ``extra``."""
    return f"pip install '.[{extra}]' in a clone of the repository"


def require(extra: str, option: str) -> None:
    """Raises ConfigurationError unless what ``option`` needs is installed."""
    module = _MODULES[extra]
    if importlib.util.find_spec(module) is None:
        raise ConfigurationError(f"{option} needs the package {module}: {install_command(extra)}.")


VARIABLES = {
    f"RECYCLE_{name}": meaning
    for name, meaning in {
        "COORDINATOR": "host:port of the coordinator of a run to join",
        "KEY": "secret of the run, at least 16 bytes",
        "KEY_FILE": "instead of it: a file that only its owner may read",
        "LISTEN": "host:port where a launching process lets others join",
        "HTTP": "host:port, or port, of page, status and metrics",
        "LOG": "json for lines of JSON; text by default",
        "VALIDATE": "if not empty, the rules of the protocol are checked",
        "CONNECT_SECONDS": "how long a worker tries to reach its coordinator (60)",
        "HOST": "address of this machine for other workers",
        "PORTS": "ports where workers listen, such as 30000-30100",
        "NODE": "name of this machine; its host name by default",
        "AGENT": "if not empty, nothing replaces workers after SIGTERM",
        "FULL_ERROR": "1 shows tracebacks of bad input",
    }.items()
}
"""The variables of the environment that have a meaning."""


def unknown_variables(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Warnings of variables that begin like those of this package, and are none."""
    unknown = sorted(name for name in environ if name.startswith("RECYCLE_") and name not in VARIABLES)
    return [f"The variable {name} has no meaning here.{suggestion(name, VARIABLES, 'RECYCLE_')}" for name in unknown]


# ---------------------------------------------------------------------- options


_Class = TypeVar("_Class", bound=type[Any])


@dataclass(frozen=True)
class Check:
    """Values that an option may have.

    Args:
        accepts: whether a value is right.
        remedy: the rest of the error for one that is not, such as "give an integer of at least 1".
        choices: all right values, where they can be listed; the error names the nearest.
    """

    accepts: Callable[[Any], bool]
    remedy: str
    choices: tuple[Any, ...] = ()

    def checked(self, owner: str, name: str, value: Any) -> Any:
        """``value``; ConfigurationError for ``owner(name=value)`` if it is not right."""
        if not self.accepts(value):
            raise ConfigurationError.for_option(owner, name, value, self.remedy, self.choices)
        return value


def choice(*values: Any) -> Check:
    """One of ``values``."""
    shown = [repr(value) for value in values]
    listed = f"{', '.join(shown[:-1])} or {shown[-1]}"
    return Check(lambda value: value in values, f"use {listed}", values)


def integer(least: int, *, otherwise: str = "") -> Check:
    """An integer of at least ``least``, or None if ``otherwise`` says what that means."""
    remedy = f"give an integer of at least {least}{f', or None {otherwise}' if otherwise else ''}"
    return Check(lambda value: is_integer(value, least) or (bool(otherwise) and value is None), remedy)


def number(least: float = 0.0, *, above: bool = False) -> Check:
    """A finite number of at least (or above) ``least``."""
    remedy = f"give a finite number {'above' if above else 'of at least'} {least:g}"
    return Check(lambda value: is_number(value, least, above=above), remedy)


SWITCH = choice("auto", True, False)
BOOLEAN = Check(lambda value: isinstance(value, bool), "use True or False", (True, False))
PATH = Check(
    lambda value: value is None or (isinstance(value, (str, os.PathLike)) and os.fspath(value) != ""),
    "give the path of a file or folder, or None",
)
SECONDS = Check(lambda value: is_number(value, 0.0, above=True), "give a number of seconds, more than 0")
SHARE = Check(lambda value: is_number(value, 0.0) and value <= 1, "give a share between 0 and 1")


def whole(owner: str, name: str, value: object, least: int = 0) -> int:
    """``value``, an integer of at least ``least``."""
    return int(integer(least).checked(owner, name, value))


def at_least(owner: str, name: str, value: object, least: float = 0.0, *, above: bool = False) -> float:
    """``value``, a finite number of at least (or above) ``least``."""
    return float(number(least, above=above).checked(owner, name, value))


def fraction(owner: str, name: str, value: object) -> float:
    """``value``, a share."""
    return float(SHARE.checked(owner, name, value))


def option(default: Any, check: Check | None = None, *, shared: str = "", by_launcher: bool = False) -> Any:
    """A field of an :class:`OptionGroup`.

    Args:
        default: its default; ``dataclasses.MISSING`` for none.
        check: the values that it may have.
        shared: for an option that all workers of a run must agree on, its line in ``recycle-coordinator --help``.
        by_launcher: whether only a launching process, which starts all workers itself, can carry it out.
    """
    return dataclasses.field(default=default, metadata={"check": check, "shared": shared, "by_launcher": by_launcher})


@dataclass(frozen=True)
class OptionGroup:
    """Base class of the options of a component.

    Raises:
        ConfigurationError: for values that cannot work.
    """

    def __post_init__(self) -> None:
        for item in fields(self):
            if (check := item.metadata.get("check")) is not None:
                check.checked(self._owner or type(self).__name__, item.name, getattr(self, item.name))

    def needing_launcher(self) -> list[str]:
        """Changed options that only a launching process can carry out."""
        return [
            f"{type(self).__name__}({item.name}={_short(value)})"
            for item in fields(self)
            if item.metadata.get("by_launcher") and (value := getattr(self, item.name)) != item.default
        ]

    _owner = ""  # of the arguments, where it is not the dataclass

    def _refuse(self, name: str, remedy: str) -> None:
        raise ConfigurationError.for_option(self._owner or type(self).__name__, name, getattr(self, name), remedy)


def shared_options(group: type[Any]) -> tuple[Field[Any], ...]:
    """The fields of ``group`` that all workers of a run must agree on."""
    return tuple(item for item in fields(group) if item.metadata.get("shared"))


def suggests_options(cls: _Class) -> _Class:
    """Class decorator: an unknown or missing argument is an error with a remedy.

    An unknown argument is answered with the nearest option, or with the option group among the class's arguments to
    which it belongs. A class whose arguments are the options of another one names it as ``options_type``; remedies for
    names of other libraries are its ``other_names``, with ``{}`` for the value.

    Raises:
        ConfigurationError: by the decorated class, for an argument that does not exist or is missing.
    """
    initialize = cls.__init__

    @functools.wraps(initialize)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        known = list(inspect.signature(initialize).parameters.values())[1:]
        names = [parameter.name for parameter in known]
        for name, value in kwargs.items():
            if name not in names:
                groups = {parameter.name: type(parameter.default) for parameter in known}
                raise ConfigurationError(_answer(cls, name, value, names, groups))
        if missing := [
            each.name for each in known[len(args) :] if each.default is each.empty and each.name not in kwargs
        ]:
            for name, value in {**dict(zip(names, args, strict=False)), **kwargs}.items():
                if (check := _check_of(cls, name)) is not None:
                    check.checked(cls.__name__, name, value)
            given = [*map(_short, args), *(f"{name}={_short(value)}" for name, value in kwargs.items())]
            raise ConfigurationError(f"{cls.__name__}({', '.join(given)}): give {', '.join(missing)} too.")
        initialize(self, *args, **kwargs)

    cls.__init__ = checked
    return cls


def _answer(cls: type[Any], name: str, value: Any, names: Sequence[str], groups: Mapping[str, type[Any]]) -> str:
    """The error for the unknown argument ``name`` of ``cls``."""
    homes = {
        item.name: (argument, group)
        for argument, group in groups.items()
        if issubclass(group, OptionGroup)
        for item in fields(group)
    }
    given = f"{cls.__name__}({name}={_short(value)})"
    if (remedy := getattr(cls, "other_names", {}).get(name)) is not None:
        return f"{given}: there is no such option. {remedy.format(_short(value))}."
    if name in homes:
        return f"{given}: write {_in_group(*homes[name], name, value)}."
    fitting = [each for each in homes if _accepts(homes[each][1], each, value)]
    near = difflib.get_close_matches(name, [*(each for each in names if _accepts(cls, each, value)), *fitting], n=1)
    if not near:
        return f"{given}: there is no such option. There are {', '.join(names)}."
    right = f"{near[0]}={_short(value)}" if near[0] in names else _in_group(*homes[near[0]], near[0], value)
    return f"{given}: there is no such option. Did you mean {right}?"


def _check_of(cls: type[Any], name: str) -> Check | None:
    options = getattr(cls, "options_type", cls)
    known = fields(options) if dataclasses.is_dataclass(options) else ()
    return next((item.metadata.get("check") for item in known if item.name == name), None)


def _accepts(cls: type[Any], name: str, value: Any) -> bool:
    check = _check_of(cls, name)
    return check is None or bool(check.accepts(value))


def _in_group(argument: str, group: type[Any], name: str, value: Any) -> str:
    return f"{argument}={group.__name__}({name}={_short(value)})"


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else "..."


def shown_options(options: Any, name: str) -> str:
    """``options`` as the call of ``name``, with those that differ from their defaults."""
    changed = [
        f"{item.name}={shown_options(value, type(value).__name__) if isinstance(value, OptionGroup) else repr(value)}"
        for item in fields(options)
        if (value := getattr(options, item.name)) is not item.default and value != item.default
    ]
    return f"{name}({', '.join(changed)})"
