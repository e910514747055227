"""Optional dependencies: the package that each extra brings, and the command that installs it.

An option that needs an extra is refused when the option is made (:func:`require`), not when it is first used.

Must not know: what the packages are used for. Standard library only.
"""

from __future__ import annotations

import importlib.util

from lightning_recycle.errors import ConfigurationError

_MODULES = {"metrics": "prometheus_client", "milp": "mip", "ray": "ray"}


def install_command(extra: str) -> str:
    """The command that installs ``extra``."""
    return f"pip install '.[{extra}]' in a clone of the repository"


def require(extra: str, option: str) -> None:
    """Raises ConfigurationError unless what ``option`` needs is installed."""
    module = _MODULES[extra]
    if importlib.util.find_spec(module) is None:
        raise ConfigurationError(f"{option} needs the package {module}: {install_command(extra)}.")
