"""Checks of arguments, optional dependencies, and parsers of commands.

Python's ``True`` is an integer and its NaN a number; as an argument, either is a mistake. ``owner`` is the class that
was given the value; "" for a setting or a function. An option that needs an extra is refused when the option is made
(:func:`require`), not when it is first used.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from typing import Any, NoReturn, TypeGuard

from typing_extensions import override

from lightning_recycle.errors import ConfigurationError

__version__ = "0.1.0"
"""The version of the package."""


class _Parser(argparse.ArgumentParser):
    @override
    def print_help(self, file: Any = None) -> None:
        try:
            print(self.format_help(), end="", file=file, flush=True)
        except BrokenPipeError:
            exit_without_reader()


def command_parser(name: str, purpose: str, *examples: str, **options: Any) -> argparse.ArgumentParser:
    """A parser with the purpose and examples in ``--help``, and ``--version``."""
    parser = _Parser(
        name,
        description="\n  ".join([f"{purpose}\n", *examples]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        **options,
    )
    parser.add_argument("--version", action="version", version=f"{name} {__version__}")
    return parser


def exit_without_reader() -> NoReturn:
    """Ends a command whose output's reader has gone, such as head, with the status of SIGPIPE."""
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


def whole(owner: str, name: str, value: object, least: int = 0) -> int:
    """``value``, an integer of at least ``least``."""
    if not is_integer(value, least):
        _refuse(owner, name, value, f"an integer of at least {least}")
    return value


def at_least(owner: str, name: str, value: object, least: float = 0.0, *, above: bool = False) -> float:
    """``value``, a finite number of at least (or above) ``least``."""
    if not is_number(value, least, above=above):
        _refuse(owner, name, value, f"a finite number {'above' if above else 'of at least'} {least:g}")
    return float(value)


def fraction(owner: str, name: str, value: object) -> float:
    """``value``, a number from 0 to 1."""
    if not is_number(value, 0) or value > 1:
        _refuse(owner, name, value, "a number from 0 to 1")
    return float(value)


def _refuse(owner: str, name: str, value: object, wanted: str) -> NoReturn:
    given = f"{name}={value!r}"
    raise ConfigurationError(f"{f'{owner}({given})' if owner else given}: give {wanted}.")


_MODULES = {"metrics": "prometheus_client", "milp": "mip", "ray": "ray"}


def install_command(extra: str) -> str:
    """The command that installs ``extra``."""
    return f"pip install '.[{extra}]' in a clone of the repository"


def require(extra: str, option: str) -> None:
    """Raises ConfigurationError unless what ``option`` needs is installed."""
    module = _MODULES[extra]
    if importlib.util.find_spec(module) is None:
        raise ConfigurationError(f"{option} needs the package {module}: {install_command(extra)}.")
